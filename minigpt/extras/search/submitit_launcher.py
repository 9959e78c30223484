"""Launch the jobs of a sweep through submitit: on SLURM, or in processes of this machine."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from os import cpu_count
from pathlib import Path
from typing import Any

from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from minigpt.extras.packages import import_extra
from minigpt.sweeps.launcher import Job, Joblib
from minigpt.utils.checks import as_integer
from minigpt.utils.errors import UserError, require


class RequeuedJob(Job):
    """A job that SLURM may preempt."""

    def checkpoint(self) -> object:
        """Return the job that submitit queues when this one is preempted: the same, resumed."""
        from submitit.helpers import DelayedSubmission

        cfg = self.cfg.copy()
        cfg.resume = "auto"
        return DelayedSubmission(replace(self, cfg=cfg))


class Submitit(Joblib):
    """Run jobs of submitit instead of worker processes.

    Args:
        cluster: slurm or local.
        n_jobs: jobs at a time; None is no limit on SLURM, and one per core on this machine.
        parameters: arguments of submitit's `update_parameters`, which ignores null values and those
            of another cluster.
    """

    # The context in which jobs are submitted.
    batch: Callable[[], AbstractContextManager[None]] = nullcontext
    job = RequeuedJob

    def __init__(self, cluster: str, n_jobs: int | None, **parameters: object) -> None:
        self.cluster = cluster
        self.n_jobs = as_integer(n_jobs)
        self.parameters = {name: as_integer(value) for name, value in parameters.items()}
        self.name = f"hydra/launcher=submitit_{cluster}"
        self.submitit = import_extra("submitit", self.name, "submitit")

    def setup(
        self,
        *,
        hydra_context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
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
        folder = Path(str(self.cfg.hydra.sweep.dir), ".submitit", "%j")
        try:
            executor = self.submitit.AutoExecutor(folder=folder, cluster=self.cluster)
            executor.update_parameters(
                **{"slurm_array_parallelism": self.n_jobs, **self.parameters}
            )
        except (RuntimeError, NameError, TypeError) as error:
            raise UserError(f"{self.name}: {error}") from error
        if self.cluster == "slurm":  # one array job, which SLURM queues
            self.batch = executor.batch
            return [executor] * jobs
        return [executor] * (self.n_jobs or cpu_count() or 1)

    def submit_waiting(self) -> None:
        if self.waiting and self.executors:
            with self.batch():
                super().submit_waiting()

    def stop(self, running: Mapping[Future[None], object], *, kill: bool) -> None:
        for future in running:
            future.cancel()
