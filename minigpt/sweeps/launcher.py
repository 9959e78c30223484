"""Run the jobs of a sweep in worker processes of this machine.

A worker has its cores and its GPU. A job whose process dies does not end the others.
"""

import atexit
import multiprocessing.connection
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import loky
from hydra.core.utils import JobReturn, env_override, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig
from tqdm import tqdm

from minigpt.distributed.process_group import own_ranks
from minigpt.runs.code_version import is_other_code
from minigpt.runs.run import train_composed
from minigpt.runs.run_dir import LOG, SUMMARY
from minigpt.sweeps.results import COMPLETED, RUNNING, Point, refresh
from minigpt.utils.checks import POSITIVE_INT, as_integer, or_null
from minigpt.utils.cli import error_text, explain
from minigpt.utils.errors import RunError, require
from minigpt.utils.ranks import env_number
from minigpt.utils.scripts import ROOT
from minigpt.utils.signals import (
    END_SIGNALS,
    HANGUP_SIGNAL,
    REQUEUE_SIGNAL,
    Interrupted,
    handle_signals,
)
from minigpt.utils.terminal import log, replace_dead_output

_busy = threading.Lock()  # held while this worker runs a job


@dataclass(frozen=True)
class Job:
    """A picklable call that trains one run, with its output in `log.txt`.

    Raises:
        RunError: the run failed.
    """

    point: Point
    cfg: DictConfig  # composed when the point was checked, with the node `hydra`

    def __call__(self) -> None:
        # Remove the summary of an earlier attempt, but not that of another command, meanwhile.
        folder = self.point.folder
        folder.mkdir(parents=True, exist_ok=True)
        if refresh(self.point).status not in (COMPLETED, RUNNING):
            (folder / SUMMARY).unlink(missing_ok=True)
        # Train. The resolvers of Hydra are set up here, because it composes nothing here.
        setup_globals()
        one_process = self.cfg.trainer.devices == 1 or is_other_code(self.cfg.get("code"))
        train = train_composed if one_process else _train_in_process
        with (
            _busy,
            _output_to(folder / LOG),
            own_ranks(),
            env_override(self.cfg.hydra.job.env_set),
        ):
            try:
                train(self.cfg.copy())  # a preempted job starts again with the original
            except (Exception, Interrupted) as error:
                print(explain(error)[0], file=sys.stderr)
                raise RunError(error_text(error)) from None


def _train_in_process(cfg: DictConfig) -> None:
    # A run on several devices starts processes of its own. The SIGTERM that ends a sweep goes to
    # the process group: here, wait for the process to end.
    with handle_signals([signal.SIGTERM], lambda *_: None), TemporaryDirectory() as folder:
        file = Path(folder, "config.pickle")
        file.write_bytes(pickle.dumps(cfg))
        ended = subprocess.run(
            [sys.executable, ROOT / "scripts" / "train.py", "--experimental-rerun", file]
        )
    if ended.returncode:
        raise RunError(
            f"its process ended with exit code {ended.returncode}; see {LOG} in its folder"
        )


@contextmanager
def _output_to(file: Path) -> Iterator[None]:
    # Append the output of this process, and of those that it starts.
    with open(file, "ab") as log_file, open(os.dup(1), "wb") as out, open(os.dup(2), "wb") as err:
        try:
            _redirect(log_file.fileno(), log_file.fileno())
            yield
        finally:
            _redirect(out.fileno(), err.fileno())


def _redirect(stdout: int, stderr: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)


class Joblib(Launcher):
    """Run jobs in worker processes of loky, the backend of joblib, a limited number at a time.

    Each imports once and runs one job after the other. Several small models with one thread each
    train faster than one after another with all threads. A signal ends the running jobs cleanly and
    starts no more.

    Args:
        n_jobs: jobs at a time; None is one per GPU, or one per core without GPUs.
        threads: threads per job; None is OMP_NUM_THREADS, or an equal share of the cores.
    """

    points: Sequence[Point]  # one per job
    most_jobs: int  # of any launch of the sweep
    # Returns the configuration of a job, for its point and its overrides.
    configure: Callable[[Point, Sequence[str]], DictConfig]
    # Called for each job that ended, with the reason if it failed.
    on_end: Callable[[Point, str], None]
    job = Job  # what is submitted

    def __init__(self, n_jobs: int | None, threads: int | None) -> None:
        self.n_jobs, self.threads = map(as_integer, (n_jobs, threads))
        require("hydra.launcher.threads", self.threads, *or_null(POSITIVE_INT))

    def setup(
        self,
        *,
        hydra_context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
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
        self.cfg = config
        # Reused by later launches: workers import once, and keep their threads.
        self.executors: list[_Worker] = []  # each runs one job at a time

    # Workers write log.txt in UTF-8, whatever the encoding of the terminal. On Windows the second
    # variable lets a console take the encoding, and be redirected.
    @env_override({"PYTHONIOENCODING": "utf-8:backslashreplace", "PYTHONLEGACYWINDOWSSTDIO": "1"})
    def launch(
        self,
        job_overrides: Sequence[Sequence[str]],
        initial_job_idx: int,
    ) -> list[JobReturn]:
        """Run all jobs, one per point; they write their results into their folders.

        Raises:
            Interrupted: a signal was received, and the running jobs have ended.
        """
        # All jobs wait, and no signal was received.
        self.waiting = list(zip(self.points, job_overrides, strict=True))
        self.running: dict[Future[None], tuple[Point, _Worker]] = {}
        self.signals: list[int] = []
        stops = 0
        with handle_signals(set(END_SIGNALS) - {REQUEUE_SIGNAL}, self._receive):
            # Start the workers, unless an earlier launch did, and run the jobs on them.
            self.executors = self.executors or self.start(self.most_jobs)
            while self.running or (self.waiting and not self.signals):
                # Stop the running jobs once for each signal: with a checkpoint, then at once.
                if len(self.signals) > stops:
                    stops += 1
                    self.stop(self.running, kill=stops > 1)
                # Start those that wait.
                if not self.signals:
                    self.submit_waiting()
                # Report those that have ended. A job that was stopped has not failed.
                for future in [future for future in self.running if future.done()]:
                    point, executor = self.running.pop(future)
                    self.executors.append(executor)
                    self.on_end(point, "" if self.signals else _failure(future))
                time.sleep(0.05)
        if self.signals:
            raise Interrupted(self.signals[0])
        return []

    def _receive(self, signum: int, _: object) -> None:
        # `launch` acts on it, when no job is being started.
        if signum != HANGUP_SIGNAL or not self.signals:
            self.signals.append(signum)

    def submit_waiting(self) -> None:
        while self.waiting and self.executors:
            executor = self.executors.pop()
            point, overrides = self.waiting.pop(0)
            future = executor.submit(self.job(point, self.configure(point, overrides)))
            self.running[future] = (point, executor)

    def start(self, jobs: int) -> "list[_Worker]":
        # Run a job per GPU or core at a time, but jobs that have several devices one by one.
        cores = loky.cpu_count()
        one_device = self.cfg.trainer.devices == 1
        takes_gpu = one_device and self.cfg.trainer.accelerator in ("auto", "gpu", "cuda")
        gpus = visible_gpus() if takes_gpu else []
        at_a_time = (len(gpus) or cores) if one_device else 1
        workers = min(jobs, self.n_jobs or at_a_time)
        # Share the cores and the GPUs.
        threads = self.threads or env_number("OMP_NUM_THREADS", 0) or max(1, cores // workers)
        log(f"{workers} at a time with OMP_NUM_THREADS={threads}")
        env = {"OMP_NUM_THREADS": str(threads)}
        envs = [env | {"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus] or [env]
        return [_Worker(envs[index % len(envs)]) for index in range(workers)]

    def stop(self, running: "Mapping[Future[None], tuple[Point, _Worker]]", *, kill: bool) -> None:
        for _, worker in running.values():
            worker.pipe.close()
        for process in multiprocessing.active_children() if kill else ():
            if sys.platform == "win32":
                process.kill()
            else:
                with suppress(OSError):
                    os.killpg(process.pid or 0, signal.SIGKILL)


def _failure(future: Future[None]) -> str:
    try:
        future.result()
    except Exception as error:
        # An error of submitit, which may not be installed, is known by its name.
        if not isinstance(error, BrokenExecutor) and type(error).__name__ != "UncompletedJobError":
            return error_text(error)
        name = re.search(r"SIG[A-Z]+", str(error))
        killed = f"was killed ({name[0]}), possibly out of memory" if name else ""
        return f"its process {killed or 'crashed'}"
    return ""


class _Worker:
    """A worker process, which is replaced after it died; `env` is added to its environment.

    The process ends once `pipe` is closed, also by the end of this one.
    """

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env
        self.executor = self.start()
        # Later, loky prints ignored errors of its own.
        atexit.register(lambda: self.executor.shutdown())

    def start(self) -> loky.ProcessPoolExecutor:
        parent, self.pipe = multiprocessing.Pipe(duplex=False)
        return loky.ProcessPoolExecutor(
            1,
            initializer=_init_worker,
            initargs=(parent,),
            env=self.env,
        )

    def submit(self, job: Job) -> Future[None]:
        try:
            return self.executor.submit(job)
        except BrokenExecutor:
            self.executor = self.start()
            return self.executor.submit(job)


def _init_worker(parent: "multiprocessing.connection.Connection[None, None]") -> None:
    # Keep Ctrl-C from a worker process, and end it when its parent closes a pipe or is gone. It has
    # no streams if its parent was started without.
    replace_dead_output(ends_script=False)
    # On Windows, Ctrl-C and Ctrl-Break go to all processes of the console; elsewhere they go to
    # the process group of the parent.
    if sys.platform == "win32":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGBREAK, signal.SIG_IGN)
    else:
        os.setpgid(0, 0)
    # tqdm's default lock is a semaphore that a killed worker would leave behind.
    tqdm.set_lock(threading.RLock())
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: "multiprocessing.connection.Connection[None, None]") -> None:
    with suppress(EOFError, OSError):
        parent.recv()
    # The signal ends a run with a checkpoint, and an import at once.
    if sys.platform == "win32":
        signal.raise_signal(signal.SIGTERM)
    else:
        os.killpg(0, signal.SIGTERM)
    with _busy:
        os._exit(1)


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in visible.split(",") if name not in ("", "-1")]
    import torch

    return [str(index) for index in range(torch.accelerator.device_count())]
