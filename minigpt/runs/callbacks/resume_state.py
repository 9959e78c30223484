"""Callbacks that make a resumed run equal an uninterrupted one bit for bit: RNG, a due validation, the EMA.

On a CPU this is for one number of threads, which `minigpt.training.cpu_threads` may change; else they equal within rounding.
Settings come from the command line, also where Lightning restores those of the checkpoint.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, Timer

from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.load import COMPILED, saved_config
from minigpt.distributed.process_group import gather_objects
from minigpt.model.gpt import GPT
from minigpt.runs.lightning_workarounds import fix_loop_state
from minigpt.training.ema import EMA
from minigpt.utils.errors import UserError, require


class ResumeState(Callback):
    """Save and restore random state, a due validation, and `contents` (of `checkpoints.load`), which identify it."""

    def __init__(self, contents: Mapping[str, Any]) -> None:
        self.contents = contents
        self.rng: list[dict[str, Any]] | None = None  # per rank, from a checkpoint
        self.training_began = False
        self.validated_step = 0

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        check_saved(pl_module.model)
        checkpoint.update(self.contents)
        step, every = (
            trainer.global_step,
            trainer.val_check_interval // trainer.accumulate_grad_batches,
        )
        validates = step % every == 0 or step == pl_module.max_steps
        checkpoint["validation_due"] = validates and self.validated_step != step
        states = {"torch": torch.get_rng_state()}
        if pl_module.device.type != "cpu":  # torch.cuda, torch.mps
            states[pl_module.device.type] = torch.get_device_module(
                pl_module.device
            ).get_rng_state()
        checkpoint["rng"] = gather_objects(states)

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        self.rng, states = checkpoint["rng"], checkpoint["callbacks"]
        fix_loop_state(checkpoint)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EarlyStopping | Timer) and not resumes_own_run(trainer):
                states.pop(callback.state_key, None)  # what ends a run counts from its own start
            elif isinstance(callback, EarlyStopping) and callback.state_key in states:
                states[callback.state_key]["patience"] = callback.patience

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        check_saved(pl_module.model)
        if self.rng is not None:
            apply_config(trainer, pl_module)
            if (
                len(self.rng) == trainer.world_size
            ):  # on another number of ranks the random numbers differ anyway
                states = self.rng[trainer.global_rank]
                torch.set_rng_state(states["torch"])
                if (state := states.get(pl_module.device.type)) is not None:
                    torch.get_device_module(pl_module.device).set_rng_state(state)
        self.training_began = True

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.validated_step = trainer.global_step


class EMACallback(Callback):
    """Validate, sample and save an exponential moving average of the weights (config key `ema_decay`)."""

    restored: tuple[dict[str, Any], int] | None = None  # averages and updates, from a checkpoint

    def __init__(self, decay: float) -> None:
        self.decay = decay

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        if "ema" in checkpoint:
            self.restored = checkpoint["ema"], checkpoint["ema_updates"]

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.ema = EMA(pl_module.parameters(), self.decay)
        if self.restored:
            averages, updates = self.restored
            self.ema.load((averages[name] for name, _ in pl_module.named_parameters()), updates)
            self.restored = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.ema.update()

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        self.ema.swap()
        pair = [checkpoint["state_dict"], trainer.strategy.lightning_module_state_dict()]
        self.ema.swap()
        weights, averages = (
            reversed(pair) if self.ema.swapped else pair
        )  # swapped during a validation
        checkpoint.update(state_dict=averages, unaveraged=weights, ema_updates=self.ema.updates)

    def _swap(self, *args: Any, **kwargs: Any) -> None:
        self.ema.swap()

    on_validation_start = on_validation_end = on_train_end = (
        _swap  # the final sample is from the averages too
    )


def check_saved(model: GPT) -> None:
    """Raise UserError if a callback changed the model, so that a checkpoint could not be loaded."""
    tied, saved = model.config.tie_embeddings, saved_config(model).tie_embeddings
    require(
        "model.tie_embeddings",
        tied,
        lambda value: value == saved,
        f"{saved}, as a callback set it".lower(),
    )
    if any(COMPILED in name for name, _ in model.named_parameters()):
        raise UserError(
            "torch.compile renames the weights of a part of the model; compile it in place: block.compile()"
        )


def apply_config(trainer: L.Trainer, pl_module: Any) -> None:
    """Apply the optimizer and schedule settings of this run from here on, in place of the checkpoint's."""
    fresh = pl_module.configure_optimizers()
    (optimizer,), (config,) = trainer.optimizers, trainer.lr_scheduler_configs
    scheduler = config.scheduler
    for group, new in zip(optimizer.param_groups, fresh["optimizer"].param_groups, strict=True):
        lr = new["initial_lr"] * pl_module.schedule(scheduler.last_epoch)
        group.update(new | {"params": group["params"], "lr": lr})
    scheduler.base_lrs = fresh["lr_scheduler"]["scheduler"].base_lrs


def resumes_own_run(trainer: L.Trainer) -> bool:
    """Whether the checkpoint that a Trainer resumes from is in its own run folder."""
    return (
        Path(str(trainer.ckpt_path)).resolve().parent
        == Path(trainer.default_root_dir, LAST).resolve().parent
    )
