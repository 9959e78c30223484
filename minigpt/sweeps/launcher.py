"""Where the jobs of a sweep run: in worker processes of this machine, or through submitit on a cluster.

Each job is one run in its own folder, which tells what came of it, and a job that dies takes no other with it.
"""

import importlib.util
import multiprocessing
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins import launcher as hydra_launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict
from tqdm import tqdm

from minigpt.runs.run_dir import LOG, read_summary, write_failure
from minigpt.utils.cli import explain
from minigpt.utils.errors import RunError, UserError
from minigpt.utils.overrides import quote_override
from minigpt.utils.signals import Interrupted

_POLL = 0.05  # seconds
_at_work = threading.Event()  # in a worker, while it has a job


@dataclass(frozen=True)
class Job:
    """One run of a sweep: called in the process that is to do it, it trains and returns the best validation loss.

    What it prints goes to `log.txt` of its folder. A run on several devices is a process of its own, which starts
    the others.

    Raises:
        RunError: the run failed; its folder says why.
    """

    context: HydraContext
    config: DictConfig  # of the sweep
    function: TaskFunction
    script: Path
    overrides: Sequence[str]
    number: int
    state: Any  # Hydra's, of the process that sweeps

    def __call__(self) -> float | None:
        _at_work.set()
        try:
            return self._run()
        finally:
            _at_work.clear()

    def checkpoint(self) -> Any:
        """What submitit queues in its place when the machine is taken away: the same, going on."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(replace(self, overrides=[*self.overrides, "resume=auto"]))

    def _run(self) -> float | None:
        setup_globals()
        Singleton.set_state(self.state)
        config = self.context.config_loader.load_sweep_config(self.config, list(self.overrides))
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = self.number
        folder = Path(str(config.hydra.sweep.dir), str(config.hydra.sweep.subdir))
        folder.mkdir(parents=True, exist_ok=True)
        before = read_summary(folder)  # of an attempt before this one
        with _printing_to(folder / LOG):
            try:
                if config.trainer.devices != 1:
                    return self._process(folder, config)
                done = run_job(self.function, config, "hydra.sweep.dir", "hydra.sweep.subdir", self.context)
                if done.status == JobStatus.FAILED:
                    raise done._return_value  # of itself it would first print all overrides
                return done.return_value
            except (Exception, Interrupted) as error:
                line = explain(error)[0]
                print(line, file=sys.stderr)
                reason = line.removeprefix("error: ")
                if read_summary(folder) == before:  # it did not come as far as to say so itself
                    write_failure(folder, reason)
                raise RunError(reason) from None

    def _process(self, folder: Path, config: DictConfig) -> float | None:
        overrides = [str(override) for override in config.hydra.overrides.task]
        command = [sys.executable, str(self.script), *overrides, f"hydra.run.dir={quote_override(folder.absolute())}"]
        process = subprocess.Popen(command)
        # The signal that ends a sweep comes to the whole group of processes: here it is waited for.
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            code = process.wait()
        finally:
            signal.signal(signal.SIGTERM, before)
        if code:
            raise RunError(f"its process ended with exit code {code}; see {folder / LOG}")
        return read_summary(folder)["best_val_loss"]


class _Launcher(hydra_launcher.Launcher):
    """What all have in common: jobs, as many at a time as there is room for, and a signal that ends them in order."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Run all jobs; of one that failed, the result says why.

        Raises:
            Interrupted: a signal asked for the end, and what was running has ended.
        """
        state, script = Singleton.get_state(), Path(sys.argv[0]).absolute()
        jobs = [
            Job(self.context, self.config, self.function, script, overrides, number, state)
            for number, overrides in enumerate(job_overrides, initial_job_idx)
        ]
        received: list[int] = []

        def stop(signum: int, _: object) -> None:
            received.append(signum)
            self.stop(at_once=len(received) > 1)

        before = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            returned = self.run(jobs, received)
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
        if received:
            raise Interrupted(received[0])
        return returned

    def run(self, jobs: Sequence[Job], received: Sequence[int]) -> list[JobReturn]:
        """Run jobs until all have ended, or what was running when a signal came has."""
        raise NotImplementedError

    def stop(self, *, at_once: bool) -> None:
        """End what is running: in order, or at once."""
        raise NotImplementedError


class Joblib(_Launcher):
    """Worker processes of loky, joblib's engine, each with its share of the cores and at most one GPU.

    Each runs one job after the other and pays for its imports once. If one dies, another takes its place.

    Args:
        n_jobs: at a time; None is one for each GPU, or for each core.
        threads: of each job; None is what OMP_NUM_THREADS says, and else shares the cores out.
    """

    def __init__(self, n_jobs: int | None, threads: int | None) -> None:
        for name, value in (("n_jobs", n_jobs), ("threads", threads)):
            if not (value is None or (isinstance(value, int) and value >= 1)):
                raise UserError(
                    f"hydra.launcher.{name}={value} is not possible; it takes a whole number of at least 1, or null"
                )
        self.n_jobs, self.threads = n_jobs, threads

    def workers(self, jobs: int) -> list[dict[str, str]]:
        """The environment of every worker process for so many jobs."""
        from loky import cpu_count

        trainer = self.config.trainer
        return worker_envs(
            jobs,
            n_jobs=self.n_jobs,
            threads=self.threads or int(os.environ.get("OMP_NUM_THREADS") or 0),
            cores=cpu_count(),
            gpus=visible_gpus() if trainer.accelerator in ("auto", "gpu", "cuda") else [],
            alone=trainer.devices != 1,
        )

    def run(self, jobs: Sequence[Job], received: Sequence[int]) -> list[JobReturn]:
        from loky import ProcessPoolExecutor

        start = partial(ProcessPoolExecutor, 1, initializer=_begin, initargs=(os.getpid(),))
        waiting, idle = deque(enumerate(jobs)), deque((environment, None) for environment in self.workers(len(jobs)))
        returned, running = [JobReturn() for _ in jobs], dict[int, tuple[Any, Any, Any]]()
        while running or (waiting and not received):
            while waiting and idle and not received:
                (number, job), (environment, worker) = waiting.popleft(), idle.popleft()
                worker = worker or start(env=environment)
                running[number] = environment, worker, worker.submit(job)
            for number, (environment, worker, future) in list(running.items()):
                if future.done():
                    del running[number]
                    returned[number], died = _ended(future)
                    if died:
                        worker.shutdown(wait=False)
                    idle.append((environment, None if died else worker))
            time.sleep(_POLL)
        for _, worker in idle:
            if worker is not None:
                worker.shutdown()
        return returned

    def stop(self, *, at_once: bool) -> None:
        for worker in multiprocessing.active_children():
            with suppress(OSError):
                os.killpg(worker.pid or 0, signal.SIGKILL if at_once else signal.SIGTERM)


class Submitit(_Launcher):
    """Jobs of submitit: each a job of SLURM's, all in one array, or a process of this machine.

    Args:
        cluster: slurm or local. n_jobs: at a time; None is as many as SLURM starts, or one for each core.
        parameters: of submitit's `update_parameters`, where they are not null.
    """

    def __init__(self, cluster: str, n_jobs: int | None, **parameters: Any) -> None:
        self.cluster, self.n_jobs = cluster, n_jobs
        self.parameters = {name: value for name, value in parameters.items() if value is not None}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        if importlib.util.find_spec("submitit") is None:
            raise UserError(
                f'hydra/launcher=submitit_{self.cluster} needs: pip install -e ".[submitit]" -c constraints.txt'
            )
        if self.cluster == "slurm" and config.trainer.devices != 1:
            raise UserError(
                f"trainer.devices={config.trainer.devices} is not possible with hydra/launcher=submitit_slurm, whose "
                f"jobs are one process each; use trainer.devices=1"
            )

    def run(self, jobs: Sequence[Job], received: Sequence[int]) -> list[JobReturn]:
        import submitit

        folder = Path(str(self.config.hydra.sweep.dir), ".submitit")
        try:
            executor = submitit.AutoExecutor(folder=folder / "%j", cluster=self.cluster)
            if self.cluster == "slurm" and self.n_jobs is not None:
                executor.update_parameters(slurm_array_parallelism=self.n_jobs)
            executor.update_parameters(**self.parameters)
        except (RuntimeError, NameError, TypeError) as error:
            raise UserError(f"hydra/launcher=submitit_{self.cluster}: {error}") from error
        returned, self.running = [JobReturn() for _ in jobs], dict[int, Any]()
        waiting, room = deque(enumerate(jobs)), self.n_jobs or os.cpu_count() or 1
        if self.cluster == "slurm":
            with executor.batch():
                self.running = {number: executor.submit(job) for number, job in waiting}
            waiting.clear()
        while self.running or (waiting and not received):
            while waiting and len(self.running) < room and not received:
                number, job = waiting.popleft()
                self.running[number] = executor.submit(job)
            for number in [number for number, job in self.running.items() if job.done()]:
                returned[number], _ = _ended(self.running.pop(number))
            time.sleep(_POLL)
        return returned

    def stop(self, *, at_once: bool) -> None:
        for job in self.running.values():
            job.cancel()


def worker_envs(
    jobs: int, *, n_jobs: int | None, threads: int, cores: int, gpus: Sequence[str], alone: bool
) -> list[dict[str, str]]:
    """The environment of each worker: its threads and its GPU.

    Small models learn faster side by side with a thread each than one after another with all. Two workers get the
    same GPU only where more were asked for than there are GPUs.

    Args:
        n_jobs: workers that were asked for; None is one for each GPU, or for each core.
        threads: that were asked for; 0 shares the cores out.
        alone: a job takes every device.
    """
    workers = min(jobs, n_jobs or (1 if alone else len(gpus) or cores))
    environments = []
    for worker in range(workers):
        environment = {"OMP_NUM_THREADS": str(threads or max(1, cores // workers))}
        if gpus and not alone:
            environment["CUDA_VISIBLE_DEVICES"] = gpus[worker % len(gpus)]
        environments.append(environment)
    return environments


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them, found without torch."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return _gpus() if given is None else [name for name in given.split(",") if name]


@cache
def _gpus() -> list[str]:
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return ["0"]  # Apple's, of which there is one
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return re.findall(r"^GPU (\d+):", listed, flags=re.MULTILINE)


def _ended(future: Any) -> tuple[JobReturn, bool]:
    """What Hydra wants to know of a job, and whether its process died of it."""
    returned, died = JobReturn(), False
    try:
        returned.return_value, returned.status = future.result(), JobStatus.COMPLETED
    except Exception as error:
        reason = explain(error)[0].removeprefix("error: ")
        died = isinstance(error, BrokenExecutor) or type(error).__name__ == "UncompletedJobError"  # submitit's
        if died:
            named = re.search(r"SIG[A-Z]+", str(error))
            how = f"was killed ({named[0]}), perhaps for want of memory" if named else "ended without a word"
            reason = f"its process {how}"
        returned.return_value, returned.status = RunError(reason), JobStatus.FAILED
    return returned, died


def _begin(parent: int) -> None:
    """A worker's first act: to hear of a signal from its parent alone, and to end when that is gone."""
    os.setpgid(0, 0)
    # Between processes, which is tqdm's own choice, it would be a semaphore that a killed worker leaves behind.
    tqdm.set_lock(threading.RLock())

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(0, signal.SIGTERM)  # a run ends in order, an import at once
        while _at_work.is_set():
            time.sleep(_POLL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _printing_to(file: Path) -> Iterator[None]:
    """Have this process, and those that it starts, print to the end of a file."""
    sys.stdout.flush(), sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    try:
        with open(file, "ab") as opened:
            os.dup2(opened.fileno(), 1)
            os.dup2(opened.fileno(), 2)
        yield
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        for number, descriptor in enumerate(kept, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)
