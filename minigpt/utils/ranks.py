"""Which rank this process is, and of how many: by what torchrun, srun and Lightning set."""

import os
import re

RANK_ZERO_PID = "MINIGPT_RANK_ZERO_PID"  # environment variable of the ranks that Lightning starts
# What makes a process a rank: its rank and the number of ranks, up to three more numbers, others.
TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_PORT",
    "MASTER_ADDR",
    "TORCHELASTIC_RUN_ID",
)
SRUN = (
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_NODELIST",
)


def is_rank_zero() -> bool:
    """Return whether this process is rank 0, or a process alone."""
    return not any(env_number(name, 0) for name in rank_variables()[:1])


def rank_variables() -> tuple[str, ...]:
    """Return the variables that make this process a rank of torchrun, Lightning or srun; else none.

    Some of them are set in other processes too: by Kubeflow, by notebooks, in the batch script of a
    SLURM job.
    """
    if all(name in os.environ for name in TORCHRUN):
        return TORCHRUN
    if RANK_ZERO_PID in os.environ and env_number("LOCAL_RANK", 0):
        return ("LOCAL_RANK", "WORLD_SIZE")
    is_step = all(name in os.environ for name in SRUN) and env_number("SLURM_STEP_NUM_TASKS", 1) > 1
    return SRUN if is_step else ()


def env_number(name: str, default: int) -> int:
    """Return the number at the start of an environment variable, 4 of "4,2"; else `default`."""
    found = re.match(r"\s*\d+", os.environ.get(name, ""))
    return int(found[0]) if found else default


def launcher_sizes() -> tuple[int, int] | None:
    """Return (nodes, processes per node) that torchrun started; None for a process alone."""
    if rank_variables() != TORCHRUN:
        return None
    size = int(os.environ["WORLD_SIZE"])
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    return (size // per_node, per_node) if size > 1 else None
