"""Which of several processes this is, before torch is imported."""

import os


def is_rank_zero() -> bool:
    """Whether this is the first of the processes that train one model, as who started them says; before torch knows."""
    environment = os.environ
    if "RANK" in environment:  # torchrun
        return environment["RANK"] == "0"
    if "LOCAL_RANK" in environment:  # Lightning
        return environment["LOCAL_RANK"] == environment.get("NODE_RANK", "0") == "0"
    return environment.get("SLURM_PROCID", "0") == "0"  # srun
