"""The end of a training that lost a rank, because its process was killed or its host lost its network.

Collectives then raise an error on some ranks, with an address or after a timeout. The ranks that are left answer each
other through the store of the process group, so that the error names the others. torchrun ends all processes, and
starts them again with `--max-restarts`.
"""

import os
import platform
import signal
import time
from contextlib import suppress
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback
from torch.distributed import DistError
from torch.distributed.distributed_c10d import _get_default_store

from minigpt.distributed.process_group import PATIENCE, gather_objects, set_timeout
from minigpt.utils.errors import RunError, UserError

ANSWER_SECONDS = 4
SAVED_BYTES_PER_SECOND = 1e6  # of a slow disk or network, while the other ranks wait
_FAILED = f"minigpt failed {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"  # keys of the store
_ALIVE = f"{_FAILED}, alive "


class LostRanks(Callback):
    """Name the ranks that a training lost.

    Args:
        timeout: seconds that ranks wait for each other in a training step; longer while they save.
    """

    store: Any = None
    answer = 0, [0]  # the first rank that failed, and the lost ranks: those of a store that is lost with rank 0

    def __init__(self, timeout: float) -> None:
        self.timeout = timedelta(seconds=timeout)
        self.saving, self.failed, self.ended = True, False, Event()

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if trainer.world_size > 1:
            self.rank, self.hosts = trainer.global_rank, gather_objects(platform.node())
            store: Any = _get_default_store()
            self.store = store.clone()  # a connection of its own
            self.answering = Thread(target=self._answer, args=(store.clone(),), daemon=True)
            self.answering.start()

    def close(self) -> None:
        """End the thread: one that is in the store when Python ends aborts the process.

        The store of a busy host answers late, and after a failure it may not answer at all.
        """
        self.ended.set()
        if self.store is not None:
            self.answering.join(ANSWER_SECONDS if self.failed else self.timeout.total_seconds())

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.saving = True
        n_bytes = 4 * 4 * sum(p.numel() for p in pl_module.parameters())  # weights, their averages, two moments
        set_timeout(min(PATIENCE, self.timeout + timedelta(seconds=n_bytes / SAVED_BYTES_PER_SECOND)))

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.saving:
            self.saving = False
            set_timeout(self.timeout)

    def explain(self, error: Exception, where: str) -> Exception:
        """Return the error to raise for one that ended the training: that of lost ranks, if there are any."""
        of_group = not isinstance(error, UserError) or isinstance(error.__cause__, RuntimeError)  # of `gather_objects`
        if self.store is None or not of_group:
            return error
        self.failed = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the ranks of a host after the first
        asking = Thread(target=self._ask, daemon=True)
        asking.start()
        asking.join(3 * ANSWER_SECONDS)  # the store does not answer if rank 0 lost its network
        first, lost = self.answer
        if not lost and first == self.rank:
            return error
        ranks = ", ".join(f"rank {rank} (host {self.hosts[rank]})" for rank in lost or [first])
        explained = RunError(f"{ranks} {'ended or lost the network' if lost else 'failed'} {where}")
        left = [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank] and rank not in lost]
        explained.of_all_ranks = left[:1] != [self.rank]  # one rank of each host prints it
        return explained

    def _ask(self) -> None:
        """Ask all ranks for an answer, in a thread; keep which rank failed first, and which do not answer."""
        with suppress(DistError):  # rank 0 ended
            first = int(self.store.compare_set(_FAILED, "", str(self.rank)))
            time.sleep(ANSWER_SECONDS * (1 if self.rank else 1.5))  # the store ends with rank 0
            self.answer = first, [rank for rank in range(len(self.hosts)) if not self.store.check([f"{_ALIVE}{rank}"])]

    def _answer(self, store: Any) -> None:
        """Answer, in a thread, when a rank has failed; the main thread may be in a collective."""
        with suppress(DistError):
            while not self.ended.wait(1):
                if store.check([_FAILED]):
                    store.set(f"{_ALIVE}{self.rank}", "")
                    return
