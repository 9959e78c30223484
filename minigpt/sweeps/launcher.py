"""Run the jobs of a sweep side by side, in worker processes of this machine, each with its cores and its GPU.

Each job is one run in its own folder, which holds its status, and a job whose process dies does not end the others.
"""

import multiprocessing
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins import launcher as hydra_launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from minigpt.sweeps.job import POLL_SECONDS, Job, init_worker
from minigpt.utils.checks import POSITIVE_INT, or_null, require
from minigpt.utils.cli import error_text
from minigpt.utils.errors import RunError
from minigpt.utils.signals import Interrupted


class Launcher(hydra_launcher.Launcher):
    """Run jobs, a limited number at a time; a signal ends the running ones cleanly and starts no more."""

    on_end: Callable[[int, JobReturn], None] | None = None  # called with the index of each job that ended

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Run all jobs; the result of a failed one holds its error.

        Raises:
            Interrupted: a signal was received, and the running jobs have ended.
        """
        state, script = Singleton.get_state(), Path(sys.argv[0]).absolute()
        jobs = [
            Job(self.context, self.config, self.function, script, overrides, number, state)
            for number, overrides in enumerate(job_overrides, initial_job_idx)
        ]
        signals: list[int] = []

        def handle(signum: int, _: object) -> None:
            signals.append(signum)
            self.stop(kill=len(signals) > 1)

        handlers = {signum: signal.signal(signum, handle) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            returned = self._run(jobs, signals)
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
        if signals:
            raise Interrupted(signals[0])
        return returned

    def _run(self, jobs: Sequence[Job], signals: Sequence[int]) -> list[JobReturn]:
        slots = self.start(len(jobs))
        waiting, running = deque(enumerate(jobs)), dict[int, Any]()
        returned = [JobReturn() for _ in jobs]
        while running or (waiting and not signals):
            count = 0 if signals else min(len(waiting), slots - len(running))
            if batch := [waiting.popleft() for _ in range(count)]:
                futures = self.submit([job for _, job in batch])
                running |= {number: future for (number, _), future in zip(batch, futures, strict=True)}
            for number in [number for number, future in running.items() if future.done()]:
                future = running.pop(number)
                returned[number], died = _job_return(future)
                self.release(future, died)
                if self.on_end:
                    self.on_end(number, returned[number])
            time.sleep(POLL_SECONDS)
        self.close()
        return returned

    def start(self, jobs: int) -> int:
        """Prepare to run so many jobs; return how many run at a time."""
        raise NotImplementedError

    def submit(self, jobs: Sequence[Job]) -> list[Any]:
        """Start jobs; return a future of each."""
        raise NotImplementedError

    def release(self, future: Any, died: bool) -> None:
        """Free what a job used; `died` if its process did not return a result."""

    def close(self) -> None:
        """Free everything after the last job."""

    def stop(self, *, kill: bool) -> None:
        """End the running jobs, with a checkpoint or at once."""
        raise NotImplementedError


class Joblib(Launcher):
    """Worker processes of loky, the backend of joblib.

    A worker imports once and runs one job after the other. A worker that dies is replaced.

    Args:
        n_jobs: jobs at a time; None is one per GPU, or one per core without GPUs.
        threads: of each job; None is OMP_NUM_THREADS, or an equal share of the cores.
    """

    def __init__(self, n_jobs: int | None, threads: int | None) -> None:
        for name, value in (("n_jobs", n_jobs), ("threads", threads)):
            require(f"hydra.launcher.{name}", value, *or_null(POSITIVE_INT))
        self.n_jobs, self.threads = n_jobs, threads

    def worker_envs(self, jobs: int) -> list[dict[str, str]]:
        """Return the environment of each worker process for so many jobs."""
        from loky import cpu_count

        trainer = self.config.trainer
        return worker_envs(
            jobs,
            n_jobs=self.n_jobs,
            threads=self.threads or int(os.environ.get("OMP_NUM_THREADS") or 0),
            cores=cpu_count(),
            gpus=visible_gpus() if trainer.accelerator in ("auto", "gpu", "cuda") else [],
            multi_device=trainer.devices != 1,
        )

    def start(self, jobs: int) -> int:
        self.idle: deque[tuple[dict[str, str], Any]] = deque((env, None) for env in self.worker_envs(jobs))
        self.busy: dict[Any, tuple[dict[str, str], Any]] = {}
        return len(self.idle)

    def submit(self, jobs: Sequence[Job]) -> list[Any]:
        from loky import ProcessPoolExecutor

        futures = []
        for job in jobs:
            env, worker = self.idle.popleft()
            worker = worker or ProcessPoolExecutor(1, initializer=init_worker, initargs=(os.getpid(),), env=env)
            futures.append(worker.submit(job))
            self.busy[futures[-1]] = env, worker
        return futures

    def release(self, future: Any, died: bool) -> None:
        env, worker = self.busy.pop(future)
        if died:
            worker.shutdown(wait=False)
        self.idle.append((env, None if died else worker))

    def close(self) -> None:
        for _, worker in self.idle:
            if worker is not None:
                worker.shutdown()

    def stop(self, *, kill: bool) -> None:
        for process in multiprocessing.active_children():
            with suppress(OSError):
                os.killpg(process.pid or 0, signal.SIGKILL if kill else signal.SIGTERM)


def worker_envs(
    jobs: int, *, n_jobs: int | None, threads: int, cores: int, gpus: Sequence[str], multi_device: bool
) -> list[dict[str, str]]:
    """Return the environment of each worker: its number of threads and its GPU.

    Several small models with one thread each train faster than one after another with all threads. Workers share a
    GPU only if more of them were requested than there are GPUs.

    Args:
        n_jobs: requested number of workers; None is one per GPU, or one per core without GPUs.
        threads: requested threads per worker; 0 is an equal share of the cores.
        multi_device: each job uses all devices.
    """
    workers = min(jobs, n_jobs or (1 if multi_device else len(gpus) or cores))
    envs = []
    for worker in range(workers):
        env = {"OMP_NUM_THREADS": str(threads or max(1, cores // workers))}
        if gpus and not multi_device:
            env["CUDA_VISIBLE_DEVICES"] = gpus[worker % len(gpus)]
        envs.append(env)
    return envs


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return _all_gpus() if visible is None else [name for name in visible.split(",") if name]


@cache
def _all_gpus() -> list[str]:
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return ["0"]  # Apple silicon has one
    try:
        output = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return re.findall(r"^GPU (\d+):", output, flags=re.MULTILINE)


def _job_return(future: Any) -> tuple[JobReturn, bool]:
    """Return the result of a job for Hydra, and whether its process died."""
    returned, died = JobReturn(), False
    try:
        returned.return_value, returned.status = future.result(), JobStatus.COMPLETED
    except Exception as error:
        reason = error_text(error)
        died = isinstance(error, BrokenExecutor) or type(error).__name__ == "UncompletedJobError"  # of submitit
        if died:
            name = re.search(r"SIG[A-Z]+", str(error))
            reason = "its process " + (f"was killed ({name[0]}), possibly out of memory" if name else "crashed")
        returned.return_value, returned.status = RunError(reason), JobStatus.FAILED
    return returned, died
