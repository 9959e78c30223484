"""What the ranks that torchrun or srun starts exchange, before the data is prepared and later.

Hosts share a disk. All ranks use the command line of rank 0, and an error of one before training
ends all of them.
"""

import atexit
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from minigpt.utils.cli import error_text, explain
from minigpt.utils.errors import RunError, UserError, require
from minigpt.utils.ranks import SRUN, TORCHRUN, launcher_sizes, rank_variables
from minigpt.utils.terminal import warn

START = timedelta(seconds=120)  # that ranks wait for each other to start
# The same while they prepare the data, and at most while they save
PATIENCE = timedelta(seconds=1800)
# Whether torchrun starts ranks again that fail
RESTARTS = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
# Lightning acts on each of them, some of them when it is imported.
_OF_RANKS = (
    *TORCHRUN,
    "NODE_RANK",
    "GROUP_RANK",
    "JSM_NAMESPACE_RANK",
    "TORCHELASTIC_USE_AGENT_STORE",
)
LOST_RANK = (
    "a rank may have ended or lost the network; see the logs of the others, and resume with "
    "resume=auto"
)
_OWN_ERROR = "minigpt/error"  # key in the store of the process group


def join_ranks() -> None:
    """Initialize the process group of the ranks that torchrun or srun started.

    Lightning uses it too. In a process alone, variables that some other program has set for ranks
    are removed.

    Raises:
        UserError: an environment variable by which ranks are numbered is no integer, or their port
            is taken.
    """
    # Remove what another program has left; of it the port alone is a choice for Lightning's ranks.
    names = rank_variables()
    left = [name for name in _OF_RANKS if name in os.environ]
    if not names and left not in ([], ["MASTER_PORT"]):
        missing = ", ".join(name for name in TORCHRUN if name not in os.environ)
        warn(
            f"{', '.join(left)} ignored: without {missing} this is a process alone; "
            "start ranks with torchrun or srun"
        )
        for name in left:
            del os.environ[name]
    # Check the numbers; Lightning reads that of SLURM too.
    for name in (*names[:5], "MASTER_PORT", "SLURM_PROCID"):
        require(
            name,
            os.environ.get(name, "0"),
            str.isdecimal,
            "an integer ≥ 0",
            "unset this environment variable",
        )
    # Wait for the other ranks.
    if names == SRUN:
        _set_as_torchrun()
    started = launcher_sizes()
    if started and not _group():
        from torch import cuda, distributed

        if RESTARTS and started[0] > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            warn(
                "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or torchrun cannot restart without the "
                "host of rank 0"
            )
        try:
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda.is_available() else "gloo",
                timeout=START,
            )
        except distributed.DistError as error:
            raise first_error(
                RunError(
                    f"not all ranks started within {START}; see their logs ({error_text(error)})"
                )
            ) from error
        atexit.register(distributed.destroy_process_group)  # NCCL warns otherwise
    set_timeout(PATIENCE)


def _set_as_torchrun() -> None:
    env = os.environ
    number = int(env.get("SLURM_JOB_ID", 0)) + 1000 * int(env.get("SLURM_STEP_ID", 0))
    hosts = re.sub(r"\[(\d+).*?\]", r"\1", env["SLURM_STEP_NODELIST"])  # a7,b of a[7-9],b
    env |= {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(
            int(env["SLURM_STEP_NUM_TASKS"]) // int(env["SLURM_STEP_NUM_NODES"])
        ),
        "GROUP_RANK": env["SLURM_NODEID"],
        "TORCHELASTIC_RUN_ID": "srun",
        # Not that of another step
        "MASTER_PORT": env.get("MASTER_PORT", str(15_000 + number % 10_000)),
        "MASTER_ADDR": env.get("MASTER_ADDR", hosts.partition(",")[0]),
    }


@contextmanager
def own_ranks() -> Iterator[None]:
    """Restore the variables that a run and Lightning change; leave Lightning's process group."""
    names = (*_OF_RANKS, "OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_ORDER")
    before = {name: os.environ[name] for name in names if name in os.environ}
    given = _group()
    try:
        yield
    finally:
        group = _group()
        if group and not given and not launcher_sizes():
            group.destroy_process_group()
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)


def gather_objects(mine: object) -> list[Any]:
    """Return every rank's object, by rank; all ranks must call it. Its tensors must be on the CPU.

    Raises:
        RunError: a rank ended or lost its network.
    """
    group = _group()
    if not group:
        return [mine]
    objects = [None] * group.get_world_size()
    try:
        group.all_gather_object(objects, mine)
    except RuntimeError as error:
        raise first_error(error) from error
    return objects


def first_error(error: Exception) -> Exception:
    """Return the error that a run on ranks reports.

    On rank 0, if it lost another rank, that is the own error of that rank. A rank that fails by
    itself leaves its error in the store of the process group before its connections close. A port
    of the ranks that rank 0 cannot open is named.
    """
    if "EADDRINUSE" in str(error) and "MASTER_PORT" in os.environ:
        return UserError(
            f"MASTER_PORT must be a free port, got {os.environ['MASTER_PORT']}; "
            "set this environment variable to another one, or unset it"
        )
    group = _group()
    if not group or isinstance(error, RunError):
        return error
    lost = isinstance(error, group.DistError) or re.search("gloo|pair closure", str(error))
    store = group.distributed_c10d._get_default_store()
    with suppress(group.DistError):  # the process that holds the store may have ended
        if not lost:
            store.set(
                _OWN_ERROR,
                f"rank {group.get_rank()} on host {platform.node()}: {error_text(error)}",
            )
        elif group.get_rank() == 0 and store.check([_OWN_ERROR]):
            return RunError(store.get(_OWN_ERROR).decode())
    return RunError(f"{error}; {LOST_RANK}") if lost else error


@contextmanager
def shared_errors() -> Iterator[None]:
    """Raise the error of one rank on all of them, with the name of its host."""
    raised = mine = None
    try:
        yield
    except Exception as error:
        raised = error
        mine = (platform.node(), error_text(error), explain(error)[1])
    ranks = gather_objects(mine)
    if raised and all(each and each[1] == error_text(raised) for each in ranks):
        raise raised
    for host, text, code in filter(None, ranks):
        kind = UserError if code == UserError.exit_code else RunError
        shared = kind(f"host {host}: {text}")
        shared.of_all_ranks = True
        raise shared from raised


def set_timeout(timeout: timedelta) -> None:
    """Set how long the ranks wait for each other in collectives."""
    if group := _group():
        group.distributed_c10d._set_pg_timeout(timeout)


def _group() -> Any:
    # torch.distributed if this process belongs to a process group; torch may not be imported yet.
    distributed: Any = sys.modules.get("torch.distributed")
    if not distributed or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed
