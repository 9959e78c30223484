"""SIGINT, SIGTERM, SIGHUP and SIGUSR1 save a checkpoint and end the run."""

import signal
import threading
from pathlib import Path
from types import FrameType

import lightning.pytorch as L
import torch

from minigpt.checkpoints.find import LAST
from minigpt.runs.lightning_workarounds import is_optimizer_step
from minigpt.utils.signals import (
    END_SIGNALS,
    HANGUP_SIGNAL,
    REQUEUE_SIGNAL,
    Interrupted,
    raise_interrupted,
)


class GracefulShutdown(L.Callback):
    """On a signal: finish the step, save `last.safetensors`, raise `Interrupted`.

    A second signal ends at once. Several ranks exchange signals every `sync_every` optimizer steps.
    """

    def __init__(self, *, sync_every: int) -> None:
        self.sync_every = sync_every
        self.received: int | None = None

    def on_train_start(self, trainer: object, pl_module: object) -> None:
        # Lightning restores the handlers from before the training when it ends.
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in END_SIGNALS:
            handler = signal.getsignal(signum)
            ours = handler in (signal.SIG_DFL, raise_interrupted)
            # Not one that is ignored, or that submitit handles
            if handler != signal.SIG_IGN and (ours or signum != REQUEUE_SIGNAL):
                signal.signal(signum, self._receive)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        if not is_optimizer_step(trainer, batch_idx):  # a checkpoint holds no accumulated gradients
            return
        if trainer.world_size == 1:
            self._end(trainer, self.received)
        elif trainer.global_step % self.sync_every == 0:  # ranks must end at the same step
            mine = torch.tensor(float(self.received or 0), device=pl_module.device)
            self._end(trainer, int(trainer.strategy.reduce(mine, reduce_op="max")))

    def on_validation_batch_end(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        if trainer.world_size == 1:
            self._end(trainer, self.received)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None and signum != HANGUP_SIGNAL:
            raise Interrupted(signum)
        self.received = self.received or signum

    def _end(self, trainer: L.Trainer, signum: int | None) -> None:
        if not signum:
            return
        if not trainer.validating:  # what callbacks logged, which Lightning writes after the step
            trainer._logger_connector.update_train_step_metrics()
        # After the last step the validation is still due, and after a non-finite gradient the
        # last good checkpoint must stay.
        nonfinite = trainer.lightning_module.has_nonfinite_gradient
        if trainer.global_step < trainer.max_steps and not nonfinite:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / LAST)
        raise Interrupted(signum)
