"""Next-token training of a GPT: loss, clipping, optimizer step, schedule and validation.

Lightning calls `training_step` and backward for each of the accumulated batches, and then
`configure_gradient_clipping` and `optimizer_step` once. What is measured, saved or restored around
a step are callbacks in `runs/`.

Shapes: B batch, T time.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from minigpt.model.evaluation import uncompiled
from minigpt.model.gpt import GPT


class LanguageModel(L.LightningModule):
    """Train a GPT to predict the next token.

    Args:
        optimizer: returns the optimizer of a model.
        schedule: factor on the peak learning rate, a function of `step` and `max_steps`.
    """

    def __init__(
        self,
        model: GPT,
        *,
        optimizer: Callable[[GPT], Optimizer],
        schedule: Callable[..., float],
        max_steps: int,
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.make_optimizer = optimizer
        self.schedule = partial(schedule, max_steps=max_steps)
        self.max_steps = max_steps
        # The step of the schedule: a run whose length changes takes fewer or more steps for it.
        self.planned_step: Callable[[int], float] = float
        self.grad_norm: Tensor | None = None  # of the last step, before clipping
        self.learning_rate = float("nan")  # of the last step
        self.weight = 1.0  # of the loss of this rank
        self.expected: Tensor | None = None  # (B, T, V) instead of the targets of the next batch
        if compile:
            model.compile()  # in place: parameter names stay

    def configure_model(self) -> None:
        """Shard parameters over all ranks with trainer=fsdp."""
        shard = getattr(self.trainer.strategy, "shard", None)
        if shard and not hasattr(self.model, "reshard"):
            shard(self.model)

    def configure_optimizers(self) -> Any:
        optimizer: Any = self.make_optimizer(self.model)
        # Lightning removes the loss scale of 16-mixed before clipping; a fused step does it after.
        optimizer._step_supports_amp_scaling = False
        rate = LambdaLR(optimizer, lambda step: self.schedule(self.planned_step(step)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}

    def on_train_start(self) -> None:
        """Weight the loss by the share of this rank in a batch: gradients are means over ranks."""
        self.weight = getattr(self.trainer.train_dataloader, "weight", 1.0)

    def training_step(self, batch: tuple[Any, ...], batch_idx: int) -> Tensor:
        # (B, T) each; of conversations also documents, and a weight if a step has several batches
        tokens, targets, *packed = batch
        if self.expected is not None:
            targets = self.expected
        loss: Tensor = self.model(tokens, targets, *packed[:1])  # mean, nats per target
        weight = packed[1] if packed[1:] else self.weight
        return loss if weight == 1 else loss * weight

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the norm of the whole gradient, and keep that norm for metrics.csv."""
        parameters = list(chain.from_iterable(g["params"] for g in optimizer.param_groups))
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        self.grad_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if gradient_clip_val is None:
            return
        # A CPU can skip the pass over the gradients, but not if the norm is NaN; reading the norm
        # on a GPU would wait for it.
        if norm.device.type != "cpu" or not self.grad_norm <= gradient_clip_val:
            clip_grads_with_norm_(parameters, gradient_clip_val, norm)

    @property
    def has_nonfinite_gradient(self) -> bool:
        """Whether the last step made weights NaN or infinite; 16-mixed skips such a step."""
        skips = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        return not skips and self.grad_norm is not None and not self.grad_norm.isfinite()

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Take a step, then free the gradients: the next activations need their memory."""
        self.learning_rate = float(optimizer.param_groups[0]["lr"])
        optimizer.step(closure=optimizer_closure)
        optimizer.zero_grad()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Do nothing: Lightning calls this between the forward and the backward pass."""

    def on_train_batch_end(self, *args: object) -> None:
        """Stop after the last step, so that Lightning validates there too."""
        if self.trainer.global_step == self.max_steps:
            self.trainer.should_stop = True

    def on_validation_epoch_start(self) -> None:
        # Nats, whose relative error in float32 is 2e-6 after 20,000 batches, and tokens.
        self.val_sums = torch.zeros(2, device=self.device)

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        with uncompiled():  # a compilation without gradients would take longer than it saves
            self.val_sums[0] += self.model(*batch, reduction="sum")
        self.val_sums[1] += (batch[1] >= 0).sum()  # targets (B, T)

    def on_validation_epoch_end(self) -> None:
        """Log the mean over every token of the split, the same on any number of ranks."""
        nats, tokens = self.trainer.strategy.reduce(self.val_sums, reduce_op="sum").tolist()
        self.log("val_loss", nats / tokens, logger=False)
        for module in self.modules():  # drop gathered weights, which may be those of the EMA
            if hasattr(module, "reshard"):  # of FSDP2, whose classes are slow to import
                module.reshard()  # type: ignore[operator]
