"""A signal saves a checkpoint and ends the run."""

import signal
from math import isfinite
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback

from minigpt.checkpoints.find import LAST
from minigpt.utils.signals import END_SIGNALS, REQUEUE_SIGNAL, Interrupted, interrupt


class GracefulShutdown(Callback):
    """On a signal: finish the step, save `last.safetensors`, raise `Interrupted`. A second one ends at once.

    SIGINT and SIGTERM ask for it, and SIGUSR1, which a scheduler sends before it takes the machine away.
    """

    def __init__(self, folder: Path, *, agree_every: int) -> None:
        self.file, self.agree_every = folder / LAST, agree_every
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        for signum in END_SIGNALS:
            if signum == REQUEUE_SIGNAL and signal.getsignal(signum) not in (signal.SIG_DFL, interrupt):
                continue  # somebody else queues this run again
            self._before[signum] = signal.signal(signum, self._receive)

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:  # the gradients of half a step are in no checkpoint
            return
        if trainer.world_size == 1:
            self._end(trainer, self.received)
        # Ranks must leave at the same step. Asking costs a round trip, so it is not asked every step.
        elif trainer.global_step % self.agree_every == 0:
            mine = torch.tensor(float(self.received or 0), device=pl_module.device)
            self._end(trainer, int(trainer.strategy.reduce(mine, reduce_op="max")))

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.world_size == 1 and trainer.state.fn == "fit":
            self._end(trainer, self.received)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise Interrupted(signum)
        self.received = signum

    def _end(self, trainer: L.Trainer, signum: int | None) -> None:
        if not signum:
            return
        module: Any = trainer.lightning_module
        lost = module.grad_norm is not None and not isfinite(module.grad_norm)  # of which a GPU has not told yet
        if trainer.global_step < trainer.max_steps and not lost:  # after the last step nothing would validate it
            trainer.save_checkpoint(self.file)
        raise Interrupted(signum)
