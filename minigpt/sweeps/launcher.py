"""Run the jobs of a sweep: in worker processes of this machine, each with its cores and its GPU, or through submitit.

A job whose process dies does not end the others.
"""

import atexit
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import loky
from hydra.core.utils import env_override, setup_globals
from hydra.plugins import launcher as hydra_launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from minigpt.distributed.process_group import own_ranks
from minigpt.runs.run import train_composed
from minigpt.runs.run_dir import LOG, SUMMARY
from minigpt.sweeps.results import COMPLETED, RUNNING, Point, refresh
from minigpt.utils.checks import POSITIVE_INT, as_integer, or_null
from minigpt.utils.cli import error_text, explain
from minigpt.utils.errors import RunError, UserError, require
from minigpt.utils.ranks import env_number
from minigpt.utils.scripts import ROOT, import_extra
from minigpt.utils.signals import (
    END_SIGNALS,
    HANGUP_SIGNAL,
    REQUEUE_SIGNAL,
    Interrupted,
    handle_signals,
)
from minigpt.utils.terminal import log, replace_dead_output

_busy = threading.Lock()  # held while this worker runs a job
# Workers write log.txt in UTF-8, whatever the encoding of the terminal. On Windows the second variable lets a console
# take the encoding, and be redirected.
UTF8_OUTPUT = {"PYTHONIOENCODING": "utf-8:backslashreplace", "PYTHONLEGACYWINDOWSSTDIO": "1"}


@dataclass(frozen=True)
class Job:
    """A picklable call that trains one run, with its output in `log.txt`; it raises RunError if the run failed."""

    point: Point
    config: Any  # a DictConfig, composed when the point was checked, with the node `hydra`

    def __call__(self) -> None:
        folder = self.point.folder
        folder.mkdir(parents=True, exist_ok=True)
        if refresh(self.point).status not in (COMPLETED, RUNNING):  # meanwhile, by another command
            (folder / SUMMARY).unlink(missing_ok=True)  # of an earlier attempt
        setup_globals()  # the resolvers of Hydra, which composes nothing here
        with (
            _busy,
            _output_to(folder / LOG),
            own_ranks(),
            env_override(self.config.hydra.job.env_set),
        ):
            try:
                one_device = self.point.settings["trainer.devices"] == 1
                # A copy, because a preempted job starts again with the original.
                (train_composed if one_device else _train_in_process)(self.config.copy())
            except (Exception, Interrupted) as error:
                print(explain(error)[0], file=sys.stderr)
                raise RunError(error_text(error)) from None

    def checkpoint(self) -> Any:
        """Return the job that submitit queues when this one is preempted: the same, resumed."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(
            replace(self, config=OmegaConf.merge(self.config, {"resume": "auto"}))
        )


def _train_in_process(config: DictConfig) -> None:
    """Train a run on several devices, which starts processes of its own."""
    # The SIGTERM that ends a sweep goes to the process group: here, wait for the process to end.
    with handle_signals([signal.SIGTERM], lambda *_: None), TemporaryDirectory() as folder:
        file = Path(folder, "config.pickle")
        file.write_bytes(pickle.dumps(config))
        code = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "train.py"), "--experimental-rerun", str(file)]
        ).returncode
    if code:
        raise RunError(f"its process ended with exit code {code}; see {LOG} in its folder")


@contextmanager
def _output_to(file: Path) -> Iterator[None]:
    """Append the output of this process, and of those that it starts, to a file."""
    sys.stdout.flush(), sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    try:
        with open(file, "ab") as opened:
            os.dup2(opened.fileno(), 1)
            os.dup2(opened.fileno(), 2)
        yield
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        for number, descriptor in enumerate(saved, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)


class Launcher(hydra_launcher.Launcher):
    """Run jobs, a limited number at a time; a signal ends the running ones cleanly and starts no more."""

    points: Sequence[Point]  # one per job
    most_jobs: int  # of any launch of the sweep
    n_jobs: int | None  # at a time
    configure: Callable[
        [Point, Sequence[str]], DictConfig
    ]  # returns the configuration of a job, for its overrides
    on_end: Callable[
        [Point, str], None
    ]  # called for each job that ended, with the reason if it failed
    batch: Callable[[], AbstractContextManager[None]] = (
        nullcontext  # the context in which jobs are submitted
    )

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        require(
            "hydra/sweeper",
            config.hydra.sweeper["_target_"],
            lambda name: name.startswith("hydra_plugins.minigpt_sweeps."),
            "grid or optuna",
            "or set hydra/launcher=basic",
        )
        require("hydra.launcher.n_jobs", self.n_jobs, *or_null(POSITIVE_INT))
        os.environ.pop("MASTER_PORT", None)  # jobs at the same time need one each
        self.config = config
        self.executors: list[
            Any
        ] = []  # reused by later launches: workers import once, and keep their threads

    @env_override(UTF8_OUTPUT)
    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[Any]:
        """Run all jobs, one per point; they write their results into their folders.

        Raises:
            Interrupted: a signal was received, and the running jobs have ended.
        """
        waiting = list(zip(self.points, job_overrides, strict=True))
        running: dict[Any, tuple[Point, Any]] = {}  # future → its point and executor
        signals: list[int] = []
        stops = 0  # for each signal, the running jobs are stopped once

        def receive(
            signum: int, _: object
        ) -> None:  # the loop below acts on it, when no job is being started
            if signum != HANGUP_SIGNAL or not signals:
                signals.append(signum)

        with handle_signals(set(END_SIGNALS) - {REQUEUE_SIGNAL}, receive):
            executors = self.executors = self.executors or self.start(self.most_jobs)
            while running or (waiting and not signals):
                if len(signals) > stops:
                    stops += 1
                    self.stop(running, kill=stops > 1)
                if waiting and executors and not signals:
                    with self.batch():
                        while waiting and executors:
                            executor = executors.pop()
                            point, overrides = waiting.pop(0)
                            running[
                                executor.submit(Job(point, self.configure(point, overrides)))
                            ] = point, executor
                for future in [future for future in running if future.done()]:
                    point, executor = running.pop(future)
                    executors.append(executor)
                    self.on_end(
                        point, "" if signals else _failure(future)
                    )  # not of a job that was stopped
                time.sleep(0.05)
        if signals:
            raise Interrupted(signals[0])
        return []

    def start(self, jobs: int) -> list[Any]:
        """Return the executors for so many jobs; one runs one job at a time."""
        raise NotImplementedError

    def stop(self, running: Mapping[Any, tuple[Point, Any]], *, kill: bool) -> None:
        """End the running jobs, with a checkpoint or at once."""
        raise NotImplementedError


def _failure(future: Any) -> str:
    """Return why a job failed; empty if it completed."""
    try:
        future.result()
    except Exception as error:
        if (
            isinstance(error, BrokenExecutor) or type(error).__name__ == "UncompletedJobError"
        ):  # of submitit
            name = re.search(r"SIG[A-Z]+", str(error))
            return (
                f"its process was killed ({name[0]}), possibly out of memory"
                if name
                else "its process crashed"
            )
        return error_text(error)
    return ""


class Joblib(Launcher):
    """Worker processes of loky, the backend of joblib; each imports once and runs one job after the other.

    Several small models with one thread each train faster than one after another with all threads.

    Args:
        n_jobs: jobs at a time; None is one per GPU, or one per core without GPUs.
        threads: threads per job; None is OMP_NUM_THREADS, or an equal share of the cores.
    """

    def __init__(self, n_jobs: int | None, threads: int | None) -> None:
        self.n_jobs, self.threads = map(as_integer, (n_jobs, threads))
        require("hydra.launcher.threads", self.threads, *or_null(POSITIVE_INT))

    def start(self, jobs: int) -> list[Any]:
        cores, trainer = loky.cpu_count(), self.config.trainer
        one_device = trainer.devices == 1
        gpus = (
            visible_gpus() if one_device and trainer.accelerator in ("auto", "gpu", "cuda") else []
        )
        workers = min(jobs, self.n_jobs or (len(gpus) or cores if one_device else 1))
        threads = self.threads or env_number("OMP_NUM_THREADS", 0) or max(1, cores // workers)
        log(f"{workers} at a time with OMP_NUM_THREADS={threads}")
        env = {"OMP_NUM_THREADS": str(threads)}
        envs = [env | {"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus] or [env]
        return [_Worker(env) for env in islice(cycle(envs), workers)]

    def stop(self, running: Mapping[Any, tuple[Point, Any]], *, kill: bool) -> None:
        for _, worker in running.values():
            worker.pipe.close()
        for process in multiprocessing.active_children() if kill else ():
            if sys.platform == "win32":
                process.kill()
            else:
                with suppress(OSError):
                    os.killpg(process.pid or 0, signal.SIGKILL)


class _Worker:
    """A worker process, which is replaced after it died; `env` is added to its environment."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env
        self.executor = self.start()
        atexit.register(
            lambda: self.executor.shutdown()
        )  # later, loky prints ignored errors of its own

    def start(self) -> Any:
        """Return an executor whose process ends once `pipe` is closed, also by the end of this process."""
        parent, self.pipe = multiprocessing.Pipe(duplex=False)
        return loky.ProcessPoolExecutor(
            1, initializer=_init_worker, initargs=(parent,), env=self.env
        )

    def submit(self, job: Job) -> Any:
        try:
            return self.executor.submit(job)
        except BrokenExecutor:
            self.executor = self.start()
            return self.executor.submit(job)


def _init_worker(parent: Any) -> None:
    """Keep Ctrl-C from a worker process, and end it when its parent closes the other end of a pipe or is gone."""
    replace_dead_output(ends_script=False)  # it has no streams if its parent was started without
    if sys.platform == "win32":  # Ctrl-C and Ctrl-Break go to all processes of the console
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGBREAK, signal.SIG_IGN)
    else:  # they go to the group of the parent
        os.setpgid(0, 0)
    # tqdm's default lock is a semaphore that a killed worker would leave behind.
    tqdm.set_lock(threading.RLock())

    def watch() -> None:
        with suppress(EOFError, OSError):
            parent.recv()
        # Ends a run with a checkpoint, and an import at once
        if sys.platform == "win32":
            signal.raise_signal(signal.SIGTERM)
        else:
            os.killpg(0, signal.SIGTERM)
        with _busy:
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in visible.split(",") if name not in ("", "-1")]
    import torch

    return [str(index) for index in range(torch.accelerator.device_count())]


class Submitit(Launcher):
    """Jobs of submitit.

    Args:
        cluster: slurm or local.
        n_jobs: jobs at a time; None is no limit on SLURM, and one per core on this machine.
        parameters: arguments of submitit's `update_parameters`, which ignores null values and those of another cluster.
    """

    def __init__(self, cluster: str, n_jobs: int | None, **parameters: Any) -> None:
        self.cluster, self.n_jobs = cluster, as_integer(n_jobs)
        self.parameters = {
            name: as_integer(value)
            for name, value in {"slurm_array_parallelism": n_jobs, **parameters}.items()
        }
        self.name = f"hydra/launcher=submitit_{cluster}"
        self.submitit = import_extra("submitit", self.name, "submitit")

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        if self.cluster == "slurm":  # its jobs are one process each
            require(
                "trainer.devices",
                config.trainer.devices,
                lambda devices: devices == 1,
                f"1 with {self.name}",
            )

    def start(self, jobs: int) -> list[Any]:
        folder = Path(str(self.config.hydra.sweep.dir), ".submitit", "%j")
        try:
            executor = self.submitit.AutoExecutor(folder=folder, cluster=self.cluster)
            executor.update_parameters(**self.parameters)
        except (RuntimeError, NameError, TypeError) as error:
            raise UserError(f"{self.name}: {error}") from error
        if self.cluster == "slurm":  # one array job, which SLURM queues
            self.batch = executor.batch
            return [executor] * jobs
        return [executor] * (self.n_jobs or os.cpu_count() or 1)

    def stop(self, running: Mapping[Any, tuple[Point, Any]], *, kill: bool) -> None:
        for future in running:
            future.cancel()
