"""Callbacks that make a resumed run equal an uninterrupted one bit for bit.

They restore random state, a validation that is due, and the EMA. On a CPU this is for one number of
threads, which `minigpt.training.cpu_threads` may change; else they equal within rounding. Settings
come from the command line, also where Lightning restores those of the checkpoint.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, Timer

from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.format import Saved
from minigpt.checkpoints.load import COMPILED, saved_config
from minigpt.distributed.process_group import gather_objects
from minigpt.model.gpt import GPT
from minigpt.runs.lightning_workarounds import is_optimizer_step
from minigpt.training.ema import EMA
from minigpt.utils.errors import UserError, require


class ResumeState(L.Callback):
    """Save and restore random state and a due validation.

    Args:
        contents: of `checkpoints.format`, which identify the run; they are saved too.
    """

    def __init__(self, contents: Saved) -> None:
        self.contents = contents
        self.rng: list[dict[str, torch.Tensor]] | None = None  # per rank, from a checkpoint
        self.training_began = False
        self.validated_step = 0

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: Saved) -> None:
        check_saved(pl_module.model)
        checkpoint.update(self.contents)
        step = trainer.global_step
        # The interval is in batches.
        validates = (
            step * trainer.accumulate_grad_batches % trainer.val_check_interval == 0
            or step == pl_module.max_steps
        )
        checkpoint["validation_due"] = validates and self.validated_step != step
        states = {"torch": torch.get_rng_state()}
        if pl_module.device.type != "cpu":  # torch.cuda, torch.mps
            states[pl_module.device.type] = torch.get_device_module(
                pl_module.device
            ).get_rng_state()
        checkpoint["rng"] = gather_objects(states)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: object, checkpoint: Saved) -> None:
        self.rng = checkpoint["rng"]
        # A run is one epoch of max_steps: with a larger max_steps the last batch is not the last.
        loops = checkpoint["loops"]["fit_loop"]
        loops["epoch_loop.batch_progress"]["is_last_batch"] = False
        # Lightning restarts a validation that was due at its first batch if its counters are those
        # of a start.
        if checkpoint.get("validation_due"):
            for counters in ("total", "current"):
                loops["epoch_loop.val_loop.batch_progress"][counters] |= {
                    "ready": 1,
                    "started": 1,
                    "processed": 0,
                    "completed": 0,
                }
        # What ends a run counts from its own start.
        states = checkpoint["callbacks"]
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EarlyStopping | Timer) and not resumes_own_run(trainer):
                states.pop(callback.state_key, None)
            elif isinstance(callback, EarlyStopping) and callback.state_key in states:
                states[callback.state_key]["patience"] = callback.patience

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        check_saved(pl_module.model)
        if self.rng is not None:
            apply_config(trainer, pl_module)
            # On another number of ranks the random numbers differ anyway.
            if len(self.rng) == trainer.world_size:
                states = self.rng[trainer.global_rank]
                torch.set_rng_state(states["torch"])
                device = pl_module.device
                if device.type in states:
                    torch.get_device_module(device).set_rng_state(states[device.type])
        self.training_began = True

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: object) -> None:
        self.validated_step = trainer.global_step


class EMACallback(L.Callback):
    """Validate, sample and save a moving average of the weights (config key `ema_decay`)."""

    restored: dict[str, torch.Tensor] | None = None  # averages of a checkpoint

    def __init__(self, decay: float) -> None:
        self.decay = decay

    def on_load_checkpoint(self, trainer: object, pl_module: object, checkpoint: Saved) -> None:
        self.restored = checkpoint.get("ema")
        self.restored_updates = checkpoint.get("ema_updates", 0)

    def on_train_start(self, trainer: object, pl_module: L.LightningModule) -> None:
        self.ema = EMA(pl_module.parameters(), self.decay)
        if self.restored:
            self.ema.load(
                [self.restored[name] for name, _ in pl_module.named_parameters()],
                self.restored_updates,
            )
            self.restored = None

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: object,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        if is_optimizer_step(trainer, batch_idx):
            self.ema.update()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: object, checkpoint: Saved) -> None:
        present = checkpoint["state_dict"]
        self.ema.swap()
        other = trainer.strategy.lightning_module_state_dict()
        self.ema.swap()
        checkpoint.update(
            state_dict=present if self.ema.swapped else other,  # swapped during a validation
            unaveraged=other if self.ema.swapped else present,
            ema_updates=self.ema.updates,
        )

    def on_validation_start(self, *_: object, **__: object) -> None:
        self.ema.swap()

    # The final sample is from the averages too.
    on_validation_end = on_train_end = on_validation_start


def check_saved(model: GPT) -> None:
    """Raise UserError if a callback changed the model, so that a checkpoint could not be loaded."""
    saved = saved_config(model).tie_embeddings
    require(
        "model.tie_embeddings",
        model.config.tie_embeddings,
        lambda tied: tied == saved,
        f"{saved}, as a callback set it".lower(),
    )
    if any(COMPILED in name for name, _ in model.named_parameters()):
        raise UserError(
            "torch.compile renames the weights of a part of the model; compile it in place: "
            "block.compile()"
        )


def apply_config(trainer: L.Trainer, module: Any) -> None:
    """Apply the optimizer and schedule settings of this run, in place of the checkpoint's."""
    fresh = module.configure_optimizers()
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    factor = module.schedule(module.planned_step(scheduler.last_epoch))
    for group, new in zip(
        trainer.optimizers[0].param_groups,
        fresh["optimizer"].param_groups,
        strict=True,
    ):
        group.update(new | {"params": group["params"], "lr": new["initial_lr"] * factor})
    scheduler.base_lrs = fresh["lr_scheduler"]["scheduler"].base_lrs


def resumes_own_run(trainer: L.Trainer) -> bool:
    """Whether the checkpoint that a Trainer resumes from is in its own run folder."""
    return (
        Path(str(trainer.ckpt_path)).resolve().parent
        == Path(trainer.default_root_dir, LAST).resolve().parent
    )
