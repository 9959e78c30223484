"""Run the jobs of a sweep through submitit: as an array job of SLURM, or as processes of this machine."""

import importlib.util
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from minigpt.sweeps.job import Job
from minigpt.sweeps.launcher import Launcher
from minigpt.utils.checks import require
from minigpt.utils.errors import UserError


class Submitit(Launcher):
    """Jobs of submitit.

    Args:
        cluster: slurm or local.
        n_jobs: jobs at a time; None is no limit on SLURM, and one per core on this machine.
        parameters: of submitit's `update_parameters`; null values are left out.
    """

    def __init__(self, cluster: str, n_jobs: int | None, **parameters: Any) -> None:
        self.cluster, self.n_jobs = cluster, n_jobs
        self.parameters = {name: value for name, value in parameters.items() if value is not None}
        self.futures: list[Any] = []

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        name = f"hydra/launcher=submitit_{self.cluster}"
        if importlib.util.find_spec("submitit") is None:
            raise UserError(f'{name} needs: pip install -e ".[submitit]" -c constraints.txt')
        if self.cluster == "slurm":  # its jobs are one process each
            require("trainer.devices", config.trainer.devices, lambda devices: devices == 1, f"1 with {name}")

    def start(self, jobs: int) -> int:
        import submitit

        folder = Path(str(self.config.hydra.sweep.dir), ".submitit")
        slurm = self.cluster == "slurm"
        try:
            self.executor = submitit.AutoExecutor(folder=folder / "%j", cluster=self.cluster)
            if slurm and self.n_jobs is not None:
                self.executor.update_parameters(slurm_array_parallelism=self.n_jobs)
            self.executor.update_parameters(**self.parameters)
        except (RuntimeError, NameError, TypeError) as error:
            raise UserError(f"hydra/launcher=submitit_{self.cluster}: {error}") from error
        return jobs if slurm else self.n_jobs or os.cpu_count() or 1  # SLURM queues what does not fit

    def submit(self, jobs: Sequence[Job]) -> list[Any]:
        with self.executor.batch() if self.cluster == "slurm" else nullcontext():
            futures = [self.executor.submit(job) for job in jobs]
        self.futures += futures
        return futures

    def release(self, future: Any, died: bool) -> None:
        self.futures.remove(future)

    def stop(self, *, kill: bool) -> None:
        for future in self.futures:
            future.cancel()
