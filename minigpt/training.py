"""The training step, and the Trainer that repeats it. What is written down meanwhile is in `callbacks`."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from math import isfinite, log
from typing import Any, TypeVar

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, distributed
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from minigpt.ema import EMA
from minigpt.model import GPT
from minigpt.optim import Muon
from minigpt.utils.errors import Diverged, UserError
from minigpt.utils.terminal import warn

T = TypeVar("T")
FIRST_RANK = "MINIGPTFIRST_RANK_RANK"  # its process, to those that it starts


class LanguageModel(L.LightningModule):
    """Next-token training of a GPT.

    Args:
        optimizer: makes the optimizer of a model.
        schedule: the factor on the peak learning rate at a step, given `step` and `max_steps`.
        max_steps: optimizer steps of the run.
        bytes_per_token: of the validation split, for bits per byte.
        contents: what a checkpoint holds beside weights and progress.
        ema_decay: of a moving average of the weights, which then is what is validated, sampled and kept; None keeps
            none.
        compile: compile the model with torch.compile before training.
    """

    def __init__(
        self,
        model: GPT,
        *,
        optimizer: Callable[[GPT], Optimizer],
        schedule: Callable[..., float],
        max_steps: int,
        bytes_per_token: float,
        contents: Mapping[str, Any],
        ema_decay: float | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.make_optimizer = optimizer
        self.schedule = partial(schedule, max_steps=max_steps)
        self.bytes_per_token, self.contents = bytes_per_token, contents
        self.ema_decay = ema_decay
        self.average: EMA | None = None  # begins with the training
        self.loss = torch.zeros(())  # of the batches of a step, summed
        self.grad_norm: Tensor | None = None  # of the last step, before clipping
        self.resumed: Mapping[str, Any] = {}  # the checkpoint that training goes on from
        self.learning_rate = float("nan")  # of the last step
        self.begun = False
        self.validated = 0  # the step of the last validation that ended
        if compile:
            model.compile()  # in place: the names of the weights stay

    def setup(self, stage: str) -> None:
        os.environ.pop(FIRST_RANK, None)  # what this process starts from here on is no rank of it

    def configure_model(self) -> None:
        """Lightning asks at every fit and validate; weights are sharded once."""
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.model, FSDPModule):
            shard(self.model)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.model)
        if isinstance(self.model, FSDPModule):
            if isinstance(optimizer, Muon):
                raise UserError(
                    "optimizer=muon needs whole matrices on every device; use trainer=ddp, or optimizer=adamw"
                )
            if self.ema_decay is not None:
                raise UserError("ema_decay needs whole weights on every device; use trainer=ddp, or ema_decay=null")
        scheduler = LambdaLR(optimizer, self.schedule)
        self.settings = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Validate after the last step too, where eval_every does not divide max_steps.
        if batch_idx + 1 == self.trainer.num_training_batches:
            self.trainer.val_check_batch = batch_idx + 1

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.resumed = {key: checkpoint.get(key) for key in ("rng", "state_dict", "ema_updates")}
        if "state_dict" in checkpoint:  # else the strategy has loaded them
            weights = checkpoint["state_dict"] = checkpoint.get("unaveraged", checkpoint["state_dict"])
            if {name: w.shape for name, w in weights.items()} != {n: w.shape for n, w in self.state_dict().items()}:
                raise ValueError("its weights are not those of its model")
        elif "unaveraged" in checkpoint:
            raise UserError("a run with ema_decay does not go on with sharded weights; use trainer=ddp")
        # With max_steps raised, the batch that was the last one is not: there is one epoch, as long as the run.
        loops = checkpoint["loops"]["fit_loop"]
        loops["epoch_loop.batch_progress"]["is_last_batch"] = False
        if checkpoint.get("validation_due"):  # Lightning makes it, from its first batch, if it takes it for begun
            for counts in ("total", "current"):
                loops["epoch_loop.val_loop.batch_progress"][counts] |= {
                    "ready": 1,
                    "started": 1,
                    "processed": 0,
                    "completed": 0,
                }

    def on_train_start(self) -> None:
        warmup, max_steps = self.schedule.keywords.get("warmup_steps", 0), self.trainer.max_steps
        if warmup >= max_steps:
            warn(
                f"schedule.warmup_steps={warmup} is not below max_steps={max_steps}: no step has the peak learning rate"
            )
        if self.resumed:
            self._follow_settings()
            rng = self.resumed["rng"] or ()
            if len(rng) == self.trainer.world_size:  # with another number of ranks the draws are others anyway
                mine = rng[self.global_rank]
                torch.set_rng_state(mine["torch"])
                if mine["cuda"] is not None and torch.cuda.is_available():
                    torch.cuda.set_rng_state(mine["cuda"])
        if self.ema_decay is not None:
            self.average = EMA(self.parameters(), self.ema_decay)
            if updates := self.resumed.get("ema_updates"):
                averages = [self.resumed["state_dict"][name] for name, _ in self.named_parameters()]
                self.average.load(averages, updates)
        self.resumed, self.begun = {}, True

    def _follow_settings(self) -> None:
        """Have the settings of this run apply from here on, not those that the checkpoint was made with."""
        (optimizer,), (scheduler,) = self.trainer.optimizers, self.trainer.lr_scheduler_configs
        for group, settings in zip(optimizer.param_groups, self.settings, strict=True):
            steps = group.get("steps")  # of Muon: counted, not set
            lr = settings["initial_lr"] * self.schedule(scheduler.scheduler.last_epoch)
            group.update(settings | {"lr": lr} | ({} if steps is None else {"steps": steps}))
        scheduler.scheduler.base_lrs = [settings["initial_lr"] for settings in self.settings]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(*batch)
        first = batch_idx % self.trainer.accumulate_grad_batches == 0
        self.loss = loss.detach() if first else self.loss + loss.detach()
        return loss

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the norm of the whole gradient, and keep the norm: it is worth a look.

        A loss that is no number shows in it before it reaches the weights, and on every rank at once. A CPU may look at
        each step; a GPU would have to wait for the answer, and what went wrong there is seen when losses are logged.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        self.grad_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        on_cpu = norm.device.type == "cpu"
        if on_cpu and not isfinite(self.grad_norm):
            raise self.diverged(float(self.loss), self.global_step + 1)
        if gradient_clip_val is not None and not (on_cpu and self.grad_norm <= gradient_clip_val):
            clip_grads_with_norm_(parameters, gradient_clip_val, norm)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Free the gradients before the next forward pass, so that they never lie beside its activations."""
        self.learning_rate = float(optimizer.param_groups[0]["lr"])
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()
        if self.average is not None:
            self.average.update()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Nothing: Lightning would ask between the forward and the backward pass."""

    def on_validation_start(self) -> None:
        if self.average is not None:
            self.average.swap()

    def on_validation_end(self) -> None:
        """Lightning asks after all callbacks: samples and checkpoints are of the average too."""
        if self.average is not None:
            self.average.swap()

    def on_train_end(self) -> None:
        """What is left is the average, too."""
        if self.average is not None:
            self.average.swap()

    def on_validation_epoch_start(self) -> None:
        self.val_nats = torch.zeros((), device=self.device)
        self.val_tokens = torch.zeros((), device=self.device)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        tokens, targets = batch
        self.val_nats += self.model(tokens, targets, reduction="sum")
        self.val_tokens += (targets >= 0).sum()  # all but padding

    def on_validation_epoch_end(self) -> None:
        """The mean over every token of the split, whatever the number of ranks."""
        total = torch.stack((self.val_nats, self.val_tokens))
        nats, tokens = self.trainer.strategy.reduce(total, reduce_op="sum").tolist()
        loss = nats / tokens
        if not isfinite(loss):
            raise self.diverged(loss, self.global_step)
        self.validated = self.global_step
        self.log("val_loss", loss, logger=False)
        self.log("val_bits_per_byte", loss / log(2) / self.bytes_per_token, logger=False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.update(self.contents)
        if self.average is not None:
            weights, averages = self.average.state_dicts(self.state_dict)
            checkpoint.update(state_dict=averages, unaveraged=weights, ema_updates=self.average.updates)
        cuda = torch.cuda.get_rng_state() if self.device.type == "cuda" else None
        batches = self.global_step * self.trainer.accumulate_grad_batches
        every = self.trainer.val_check_batch or float("inf")
        checkpoint["validation_due"] = batches % every == 0 and self.validated != self.global_step
        checkpoint["rng"] = of_all_ranks({"torch": torch.get_rng_state(), "cuda": cuda})

    def diverged(self, loss: float, step: int) -> Diverged:
        """The error of a loss that is no number any more, or whose gradient is none."""
        return Diverged(loss, step, self.learning_rate)


def of_all_ranks(mine: T) -> list[T]:
    """What every process that trains this model has, by rank; all must ask."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return [mine]
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, mine)
    return found


def shard(model: GPT) -> None:
    """Spread the weights over all ranks (FSDP2), block by block; the model does not know."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
