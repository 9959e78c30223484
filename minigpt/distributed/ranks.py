"""What torchrun or srun started, by environment variables, before torch is imported."""

import os


def started_together() -> tuple[int, int] | None:
    """Return (nodes, processes per node) that torchrun or srun started; None for a single process."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        size = int(env["WORLD_SIZE"])
        nodes = size // int(env["LOCAL_WORLD_SIZE"])
    else:  # srun sets these for the processes of a step; in the batch script itself they are missing
        size, nodes = int(env.get("SLURM_STEP_NUM_TASKS", 1)), int(env.get("SLURM_STEP_NUM_NODES", 1))
    return (nodes, size // nodes) if size > 1 else None


def restarts() -> bool:
    """Return whether torchrun starts ranks again that fail."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
