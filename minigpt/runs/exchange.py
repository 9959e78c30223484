"""What the ranks that torchrun or srun starts exchange before training, through a store on the host of rank 0.

Hosts need no shared disk: all ranks use the command line and the checkpoint of rank 0, each host prepares its own token
files, and an error on one host ends all ranks with its message.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any, TypeVar

from minigpt.utils.cli import error_text, explain
from minigpt.utils.errors import RunError, UserError
from minigpt.utils.ranks import global_rank, started_together

T = TypeVar("T")
START_MINUTES = 30  # that ranks wait for each other
_numbers = count()  # of the calls of `gather`


def gather(value: Any) -> list[tuple[str, Any]]:
    """Return the host and the JSON value of every rank, by rank; all ranks must call it.

    Without torchrun and srun, a process is the only rank. For use during training, see `collectives.gather_objects`.

    Raises:
        RunError: a rank does not call it within `START_MINUTES`, or the host of rank 0 does not answer.
    """
    started = started_together()
    if started is None:
        return [(platform.node(), value)]
    from torch.distributed import DistError

    rank, ranks = global_rank(), range(started[0] * started[1])
    number = next(_numbers)
    try:
        store = _open_store()
        keys = {each: f"{number}/{each}" for each in ranks}
        store.set(keys[rank], json.dumps([platform.node(), value]))
        _wait(store, keys)
        values = [json.loads(store.get(key)) for key in keys.values()]
        store.set(f"{keys[rank]}/read", "")
        if rank == 0:  # it may raise an error now and end, and the store with it
            _wait(store, {each: f"{key}/read" for each, key in keys.items()})
    except DistError as error:
        raise RunError("rank 0 ended or lost its network before the first step") from error
    return [(host, each) for host, each in values]


def call_on_rank_zero(function: Callable[[], T]) -> T:
    """Call a function on rank 0 alone; return its JSON value, or raise its error, on every rank."""
    value: Any = None
    with shared_errors():
        if global_rank() == 0:
            value = function()
    return gather(value)[0][1]


@contextmanager
def shared_errors() -> Iterator[None]:
    """Raise the error of one rank on all of them, with the name of its host."""
    raised: Exception | None = None
    try:
        yield
    except Exception as error:
        raised = error
    ranks = gather(raised and (error_text(raised), explain(raised)[1]))
    errors = [(host, *error) for host, error in ranks if error]
    if raised and len({text for _, text, _ in errors}) == 1 and len(errors) == len(ranks):  # the same on all
        raise raised
    for host, text, code in errors:
        shared = (UserError if code == UserError.exit_code else RunError)(f"host {host}: {text}")
        shared.of_all_ranks = True
        raise shared from raised


def check_same_corpus(name: str, sha256: str) -> None:
    """Raise UserError if the ranks have different texts."""
    (host, text), *others = gather(f"{name} of checksum {sha256}")
    for other, found in others:
        if found != text:
            texts = f"host {host} has {text} but host {other} has {found}"
            raise UserError(f"all hosts need the same text: {texts}; copy it from one to the other")


@cache  # the store ends with the process of rank 0
def _open_store() -> Any:
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    else:
        from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

        slurm = SLURMEnvironment(auto_requeue=False)
        host, port = slurm.main_address, slurm.main_port
    serves = global_rank() == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun does
    # multi_tenant: torch.distributed serves its own store at this port later.
    store = TCPStore(host, port, is_master=serves, wait_for_workers=False, multi_tenant=True)
    return PrefixStore(f"minigpt/{env.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _wait(store: Any, keys: Mapping[int, str]) -> None:
    """Wait for the key of every rank, in short steps, so that signals end it."""
    deadline = time.monotonic() + 60 * START_MINUTES
    while missing := [rank for rank, key in keys.items() if not store.check([key])]:
        if time.monotonic() > deadline:
            raise RunError(
                f"rank {missing[0]} did not start in {START_MINUTES} minutes; see its log, and run scripts/prepare.py "
                "on its host first if its text takes longer"
            )
        time.sleep(0.05)
