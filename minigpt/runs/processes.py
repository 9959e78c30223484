"""Processes that torchrun or srun started together to train one model, and the command line that they share."""

import os
import time
from pathlib import Path
from typing import Any

from minigpt.utils.overrides import quote_override

_kept: list[Any] = []  # the store of the first process, which the others read from


def started_together() -> tuple[int, int] | None:
    """Nodes, and processes per node, that torchrun or srun started; None for one process, and for Lightning's own."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        size, nodes = int(env["WORLD_SIZE"]), int(env["WORLD_SIZE"]) // int(env["LOCAL_WORLD_SIZE"])
    else:  # srun sets these for the processes of a step; in the batch script itself they are missing
        size, nodes = int(env.get("SLURM_STEP_NUM_TASKS", 1)), int(env.get("SLURM_STEP_NUM_NODES", 1))
    return (nodes, size // nodes) if size > 1 else None


def resolve_links(overrides: list[str]) -> list[str]:
    """Replace a link in `resume=runs/latest` by the run that it points at: it moves when the new run begins."""
    key = "resume="
    paths = {override: Path(override.removeprefix(key)) for override in overrides if override.startswith(key)}
    linked = {override: path.resolve() for override, path in paths.items() if path.resolve() != path.absolute()}
    return [f"{key}{quote_override(linked[override])}" if override in linked else override for override in overrides]


def shared_arguments(arguments: list[str]) -> list[str]:
    """The command line of the first process, with its run folder, for all that were started together.

    Each would otherwise name a folder after the second at which it started.
    """
    arguments = resolve_links(arguments)
    if started_together() is None:
        return arguments
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:  # its agent holds a store
        rank, key = int(env["RANK"]), f"minigpt/{env.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        store = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), timeout=timedelta(minutes=5))
    else:
        from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

        slurm, rank, key = SLURMEnvironment(auto_requeue=False), int(env["SLURM_PROCID"]), "minigpt"
        store = TCPStore(slurm.main_address, slurm.main_port + 1, is_master=rank == 0, wait_for_workers=False)
    _kept.append(store)
    if rank == 0:
        if not any(argument.startswith("hydra.run.dir=") for argument in arguments):
            arguments.append(f"hydra.run.dir={time.strftime('runs/%Y-%m-%d_%H-%M-%S')}")
        store.set(key, "\0".join(arguments))
        return arguments
    return [*store.get(key).decode().split("\0"), "hydra.output_subdir=null"]  # the first writes .hydra
