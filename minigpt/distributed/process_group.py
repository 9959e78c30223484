"""What the ranks that torchrun or srun starts exchange, in one process group from before the data is prepared.

Hosts need no shared disk: all ranks use the command line of rank 0, each host prepares its own token files, the files
of a run are copied to hosts that lack them, and an error on one host before training ends all ranks with its message.
"""

import atexit
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from minigpt.distributed.ranks import started_together
from minigpt.utils.cli import error_text, explain
from minigpt.utils.errors import RunError, UserError
from minigpt.utils.files import atomic_write
from minigpt.utils.terminal import is_rank_zero, warn

START = timedelta(minutes=2)  # that ranks wait for each other to start
PATIENCE = timedelta(minutes=30)  # the same while they prepare the data, and at most while they save
_CHUNK_BYTES = 1 << 26


def join_ranks() -> None:
    """Initialize the process group of the ranks that torchrun or srun started; Lightning uses it too."""
    set_timeout(PATIENCE)
    if not (started := started_together()) or _group():
        return
    import torch
    from torch import distributed

    env, address = os.environ, dict[str, Any]()  # torchrun sets environment variables
    shares_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shares_store and env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and started[0] > 1:
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
    """Return every rank's object, by rank, with tensors on the CPU; all ranks must call it.

    Raises:
        RunError: a rank ended or lost its network.
    """
    if not (group := _group()):
        return [mine]
    from torch import Tensor
    from torch.utils import _pytree as pytree

    objects: list[Any] = [None] * group.get_world_size()
    mine = pytree.tree_map_only(Tensor, Tensor.cpu, mine)  # else all are unpickled on the GPUs that they come from
    try:
        group.all_gather_object(objects, mine)
    except RuntimeError as error:
        raise RunError("a rank ended or lost the network; see the logs of the others") from error
    return objects


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


def check_same_corpus(name: str, sha256: str) -> None:
    """Raise UserError if the ranks have different texts."""
    (host, text), *others = gather_objects((platform.node(), f"{name} of checksum {sha256}"))
    for other, found in others:
        if found != text:
            texts = f"host {host} has {text} but host {other} has {found}"
            raise UserError(f"all hosts need the same text: {texts}; copy it from one to the other")


def keeps_files(folder: Path) -> bool:
    """Whether this rank is the first of those that share the disk of a run folder; all ranks must call it."""
    return _is_first_on_disk(folder) if _group() else is_rank_zero()


@cache
def _is_first_on_disk(folder: Path) -> bool:
    token, me = gather_objects(uuid4().hex)[0], _group().get_rank()
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f".{token}.{me}.partial"
    mark.touch()
    gather_objects(None)  # all marks are there
    ranks = [int(path.suffixes[-2][1:]) for path in folder.glob(f".{token}.*.partial")]
    gather_objects(None)  # all ranks have looked
    mark.unlink(missing_ok=True)  # locking the folder removes partial files
    return me == min(ranks)


def copy_file(path: Path, source: int, target: Path, *, keep: bool) -> None:
    """Copy a file of the rank `source`, if there is one, to the ranks that `keep` it; all ranks must call it."""
    sends = not (group := _group()) or group.get_rank() == source
    ranks = gather_objects((path.stat().st_size if sends and path.is_file() else None, keep and not sends))
    size = ranks[source][0]
    if size is None or not any(receives for _, receives in ranks):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        original = stack.enter_context(path.open("rb")) if sends else None
        copy = stack.enter_context(stack.enter_context(atomic_write(target)).open("wb")) if keep and not sends else None
        for _ in range(0, size, _CHUNK_BYTES):
            chunk = [original.read(_CHUNK_BYTES) if original else b""]
            group.broadcast_object_list(chunk, source)
            if copy:
                copy.write(chunk[0])
    gather_objects(None)  # all copies are complete


def set_timeout(timeout: timedelta) -> None:
    """Set how long the ranks wait for each other in collectives."""
    if _group():
        from torch.distributed.distributed_c10d import _set_pg_timeout

        _set_pg_timeout(timeout)


def _group() -> Any:
    """Return torch.distributed if this process belongs to a process group; torch may not be imported yet."""
    distributed = sys.modules.get("torch.distributed")
    return distributed if distributed and distributed.is_available() and distributed.is_initialized() else None
