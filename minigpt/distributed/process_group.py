"""What the ranks that torchrun or srun starts exchange, in one process group from before the data is prepared.

Hosts share a disk. All ranks use the command line of rank 0, and an error of one before training ends all of them.
"""

import atexit
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from minigpt.utils.cli import error_text, explain
from minigpt.utils.errors import RunError, UserError, require
from minigpt.utils.terminal import warn

START = timedelta(minutes=2)  # that ranks wait for each other to start
PATIENCE = timedelta(minutes=30)  # the same while they prepare the data, and at most while they save
RESTARTS = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"  # torchrun starts ranks again that fail
LOST_RANK = "a rank may have ended or lost the network; see the logs of the others, and resume with resume=auto"
_OWN_ERROR = "minigpt/error"  # key in the store of the process group


def started_together() -> tuple[int, int] | None:
    """Return (nodes, processes per node) that torchrun or srun started; None for a single process."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        size = int(env["WORLD_SIZE"])
        nodes = size // int(env["LOCAL_WORLD_SIZE"])
    else:  # srun sets these for the processes of a step; in the batch script itself they are missing
        size, nodes = int(env.get("SLURM_STEP_NUM_TASKS", 1)), int(env.get("SLURM_STEP_NUM_NODES", 1))
    return (nodes, size // nodes) if size > 1 else None


def join_ranks() -> None:
    """Initialize the process group of the ranks that torchrun or srun started; Lightning uses it too.

    Raises:
        UserError: an environment variable by which ranks are numbered is no integer.
    """
    for name in (  # which Lightning reads as integers, some of them when it is imported
        *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "MASTER_PORT", "JSM_NAMESPACE_RANK", "SLURM_LOCALID"),
        *("SLURM_NTASKS", "SLURM_PROCID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"),
    ):
        require(name, os.environ.get(name, "0"), str.isdecimal, "an integer ≥ 0", "unset this environment variable")
    set_timeout(PATIENCE)
    if not (started := started_together()) or _group():
        return
    import torch
    from torch import distributed

    env, address = os.environ, dict[str, Any]()  # torchrun sets environment variables
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and RESTARTS and started[0] > 1:
        warn("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or torchrun cannot restart without the host of rank 0")
    if "TORCHELASTIC_RUN_ID" not in env:
        from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

        slurm = SLURMEnvironment(auto_requeue=False)
        url = f"tcp://{slurm.main_address}:{slurm.main_port}"
        address = {"init_method": url, "rank": slurm.global_rank(), "world_size": slurm.world_size()}
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        distributed.init_process_group(backend, timeout=START, **address)
    except distributed.DistError as error:
        raise RunError(f"not all ranks started within {START}; see their logs ({error_text(error)})") from error
    atexit.register(distributed.destroy_process_group)  # NCCL warns otherwise
    set_timeout(PATIENCE)


def gather_objects(mine: Any) -> list[Any]:
    """Return every rank's object, by rank; all ranks must call it. Its tensors must be on the CPU.

    Raises:
        RunError: a rank ended or lost its network.
    """
    if not (group := _group()):
        return [mine]
    objects: list[Any] = [None] * group.get_world_size()
    try:
        group.all_gather_object(objects, mine)
    except RuntimeError as error:
        raise first_error(error) from error
    return objects


def first_error(error: Exception) -> Exception:
    """Return the error that a run on ranks reports: on rank 0, if it lost another rank, the own error of that rank.

    A rank that fails by itself leaves its error in the store of the process group before its connections close.
    """
    if not (group := _group()):
        return error
    lost = isinstance(error, group.DistError) or "gloo" in str(error)
    store = group.distributed_c10d._get_default_store()
    with suppress(group.DistError):  # the process that holds the store may have ended
        if not lost:
            store.set(_OWN_ERROR, f"rank {group.get_rank()} on host {platform.node()}: {error_text(error)}")
        elif group.get_rank() == 0 and store.check([_OWN_ERROR]):
            return RunError(store.get(_OWN_ERROR).decode())
    return RunError(f"{error}; {LOST_RANK}") if lost else error


@contextmanager
def shared_errors() -> Iterator[None]:
    """Raise the error of one rank on all of them, with the name of its host."""
    raised: Exception | None = None
    try:
        yield
    except Exception as error:
        raised = error
    ranks = gather_objects(raised and (platform.node(), error_text(raised), explain(raised)[1]))
    errors = [error for error in ranks if error]
    if raised and len({text for _, text, _ in errors}) == 1 and len(errors) == len(ranks):  # the same on all
        raise raised
    for host, text, code in errors:
        shared = (UserError if code == UserError.exit_code else RunError)(f"host {host}: {text}")
        shared.of_all_ranks = True
        raise shared from raised


def set_timeout(timeout: timedelta) -> None:
    """Set how long the ranks wait for each other in collectives."""
    if _group():
        from torch.distributed.distributed_c10d import _set_pg_timeout

        _set_pg_timeout(timeout)


def _group() -> Any:
    """Return torch.distributed if this process belongs to a process group; torch may not be imported yet."""
    distributed = sys.modules.get("torch.distributed")
    return distributed if distributed and distributed.is_available() and distributed.is_initialized() else None
