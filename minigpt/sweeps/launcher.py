"""Run the jobs of a sweep: in worker processes of this machine, each with its cores and its GPU, or through submitit.

A job whose process dies does not end the others.
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
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins import launcher as hydra_launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from minigpt.sweeps.job import Job, init_worker
from minigpt.utils.checks import POSITIVE_INT, or_null
from minigpt.utils.cli import error_text
from minigpt.utils.errors import RunError, UserError, require
from minigpt.utils.scripts import import_extra
from minigpt.utils.signals import Interrupted, handle_signals
from minigpt.utils.terminal import log

POLL_SECONDS = 0.05


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
        waiting = deque(
            (index, Job(self.context, self.config, self.function, script, overrides, initial_job_idx + index, state))
            for index, overrides in enumerate(job_overrides)
        )
        returned = [JobReturn() for _ in waiting]
        running: dict[Any, tuple[int, Any]] = {}  # future → index of its job, and the executor
        signals: list[int] = []

        def handle(signum: int, _: object) -> None:
            signals.append(signum)
            waiting.clear()
            self.stop(list(running), kill=len(signals) > 1)

        with handle_signals((signal.SIGINT, signal.SIGTERM), handle):
            executors = self.start(len(waiting))
            while running or waiting:
                if waiting and executors:
                    with self.batch():
                        while waiting and executors:
                            executor, (index, job) = executors.pop(), waiting.popleft()
                            running[executor.submit(job)] = index, executor
                for future in [future for future in running if future.done()]:
                    index, executor = running.pop(future)
                    executors.append(executor)
                    returned[index] = _job_return(future)
                    if self.on_end:
                        self.on_end(index, returned[index])
                time.sleep(POLL_SECONDS)
        if signals:
            raise Interrupted(signals[0])
        return returned

    def start(self, jobs: int) -> list[Any]:
        """Return the executors for so many jobs; one runs one job at a time."""
        raise NotImplementedError

    def batch(self) -> AbstractContextManager[None]:
        """Return the context in which several jobs are submitted."""
        return nullcontext()

    def stop(self, futures: Sequence[Any], *, kill: bool) -> None:
        """End the running jobs, with a checkpoint or at once."""
        raise NotImplementedError


class Joblib(Launcher):
    """Worker processes of loky, the backend of joblib; each imports once and runs one job after the other.

    Args:
        n_jobs: jobs at a time; None is one per GPU, or one per core without GPUs.
        threads: threads per job; None is OMP_NUM_THREADS, or an equal share of the cores.
    """

    def __init__(self, n_jobs: int | None, threads: int | None) -> None:
        for name, value in (("n_jobs", n_jobs), ("threads", threads)):
            require(f"hydra.launcher.{name}", value, *or_null(POSITIVE_INT))
        self.n_jobs, self.threads = n_jobs, threads

    def worker_envs(self, jobs: int) -> list[dict[str, str]]:
        """Return the environment of each worker process for so many jobs: its number of threads and its GPU.

        Several small models with one thread each train faster than one after another with all threads.
        """
        from loky import cpu_count

        cores, trainer = cpu_count(), self.config.trainer
        one_device = trainer.devices == 1
        gpus = visible_gpus() if one_device and trainer.accelerator in ("auto", "gpu", "cuda") else []
        workers = min(jobs, self.n_jobs or (len(gpus) or cores if one_device else 1))
        threads = self.threads or int(os.environ.get("OMP_NUM_THREADS") or 0) or max(1, cores // workers)
        envs = [{"OMP_NUM_THREADS": str(threads)} for _ in range(workers)]
        for env, gpu in zip(envs, cycle(gpus), strict=False):
            env["CUDA_VISIBLE_DEVICES"] = gpu
        return envs

    def start(self, jobs: int) -> list[Any]:
        envs = self.worker_envs(jobs)
        log(f"{len(envs)} at a time with OMP_NUM_THREADS={envs[0]['OMP_NUM_THREADS']}")
        return [_Worker(env) for env in envs]

    def stop(self, futures: Sequence[Any], *, kill: bool) -> None:
        for process in multiprocessing.active_children():
            with suppress(OSError):
                os.killpg(process.pid or 0, signal.SIGKILL if kill else signal.SIGTERM)


class _Worker:
    """A worker process, which is replaced after it died."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env
        self.start()

    def start(self) -> None:
        from loky import ProcessPoolExecutor

        self.executor = ProcessPoolExecutor(1, initializer=init_worker, initargs=(os.getpid(),), env=self.env)

    def submit(self, job: Job) -> Any:
        try:
            return self.executor.submit(job)
        except BrokenExecutor:
            self.start()
            return self.executor.submit(job)


class Submitit(Launcher):
    """Jobs of submitit.

    Args:
        cluster: slurm or local.
        n_jobs: jobs at a time; None is no limit on SLURM, and one per core on this machine.
        parameters: arguments of submitit's `update_parameters`, which ignores null values and those of another cluster.
    """

    def __init__(self, cluster: str, n_jobs: int | None, **parameters: Any) -> None:
        self.cluster, self.n_jobs = cluster, n_jobs
        self.parameters = {"slurm_array_parallelism": n_jobs, **parameters}
        self.name = f"hydra/launcher=submitit_{cluster}"
        self.submitit = import_extra("submitit", self.name, "submitit")

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        if self.cluster == "slurm":  # its jobs are one process each
            require("trainer.devices", config.trainer.devices, lambda devices: devices == 1, f"1 with {self.name}")

    def start(self, jobs: int) -> list[Any]:
        folder = Path(str(self.config.hydra.sweep.dir), ".submitit", "%j")
        try:
            self.executor = self.submitit.AutoExecutor(folder=folder, cluster=self.cluster)
            self.executor.update_parameters(**self.parameters)
        except (RuntimeError, NameError, TypeError) as error:
            raise UserError(f"{self.name}: {error}") from error
        # SLURM queues what does not fit.
        return [self.executor] * (jobs if self.cluster == "slurm" else self.n_jobs or os.cpu_count() or 1)

    def batch(self) -> AbstractContextManager[None]:
        return self.executor.batch() if self.cluster == "slurm" else nullcontext()

    def stop(self, futures: Sequence[Any], *, kill: bool) -> None:
        for future in futures:
            future.cancel()


@cache
def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES, without importing torch."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in visible.split(",") if name not in ("", "-1")]
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return ["0"]  # Apple silicon has one
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []


def _job_return(future: Any) -> JobReturn:
    try:
        return JobReturn(status=JobStatus.COMPLETED, _return_value=future.result())
    except Exception as error:
        reason = error_text(error)
        if isinstance(error, BrokenExecutor) or type(error).__name__ == "UncompletedJobError":  # of submitit
            name = re.search(r"SIG[A-Z]+", str(error))
            reason = "its process " + (f"was killed ({name[0]}), possibly out of memory" if name else "crashed")
        return JobReturn(status=JobStatus.FAILED, _return_value=RunError(reason))
