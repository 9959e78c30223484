"""Stop a run whose loss or gradient is NaN or infinite."""

from math import isfinite
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback

from minigpt.utils.errors import Diverged


class StopOnDivergence(Callback):
    """Raise `Diverged`, on every rank, at the step whose gradient is not finite; the last good checkpoint stays.

    A NaN loss shows in the norm of the gradient, which all ranks share. A CPU checks it at every step. A GPU would
    have to wait for it: there losses are checked when they are logged.
    """

    loss: torch.Tensor  # of the step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        first = batch_idx % trainer.accumulate_grad_batches == 0
        self.loss = outputs["loss"] if first else self.loss + outputs["loss"]
        last = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if last and pl_module.device.type == "cpu" and not isfinite(pl_module.grad_norm):
            raise Diverged(float(self.loss), trainer.global_step, pl_module.learning_rate)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        check_losses([float(trainer.callback_metrics["val_loss"])], trainer.global_step, pl_module.learning_rate)


def check_losses(losses: list[float], first_step: int, learning_rate: float) -> None:
    """Raise `Diverged` at the first loss that is not finite.

    Args:
        losses: of consecutive steps, the first of which is `first_step`.
    """
    for step, loss in enumerate(losses, first_step):
        if not isfinite(loss):
            raise Diverged(loss, step, learning_rate)


def grad_norm_is_finite(norm: torch.Tensor | None) -> bool:
    """Whether the last step's gradient was finite; waits for a GPU."""
    return norm is None or bool(norm.isfinite())
