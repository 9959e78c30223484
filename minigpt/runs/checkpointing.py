"""When checkpoints are written: at every validation."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback, Checkpoint

from minigpt.checkpoints.find import BEST, LAST
from minigpt.checkpoints.format import hardlink_or_copy
from minigpt.utils.checks import POSITIVE_INT, require
from minigpt.utils.cli import error_text
from minigpt.utils.terminal import warn


class CheckpointCallback(Checkpoint):
    """Write `last.safetensors` at every validation, and link the one of lowest loss to `best.safetensors`.

    Args:
        save_top_k: number of best checkpoints to keep; with more than one, each is also `step-N.safetensors`.
    """

    def __init__(self, *, save_top_k: int = 1) -> None:
        require("callbacks.checkpoint.save_top_k", save_top_k, *POSITIVE_INT)
        self.save_top_k = save_top_k
        self.best: list[tuple[float, int]] = []  # (loss, step), the lowest loss first

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        self.folder = Path(trainer.default_root_dir)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = [(loss, step) for loss, step in state_dict["best"]]

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.resumed_step = int(checkpoint["global_step"])

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Link the resumed checkpoint again: its run may have been killed before. Forget the best of another run."""
        resumed = trainer.ckpt_path
        if resumed is None or Path(resumed).resolve().parent != (self.folder / LAST).resolve().parent:
            self.best = []
        elif trainer.is_global_zero:
            self._link(Path(resumed), self.resumed_step)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        step = trainer.global_step
        self.best = sorted([*self.best, (float(trainer.callback_metrics["val_loss"]), step)])[: self.save_top_k]
        trainer.save_checkpoint(self.folder / LAST)  # called on all ranks
        if trainer.is_global_zero:
            self._link(self.folder / LAST, step)

    def _link(self, file: Path, step: int) -> None:
        """Link the checkpoint of a step to the names that it has earned, and remove those that dropped out."""
        steps = [step for _, step in self.best]
        if step not in steps:
            return
        if step == steps[0]:
            hardlink_or_copy(file, self.folder / BEST)
        if self.save_top_k > 1:
            hardlink_or_copy(file, self._of(step))
            for old in (self.folder / BEST).parent.glob("step-*.safetensors"):
                if old not in map(self._of, steps):
                    old.unlink()

    def _of(self, step: int) -> Path:
        return (self.folder / BEST).with_name(f"step-{step}.safetensors")


class AfterCheckpoint(Callback):
    """Base of callbacks that show something of the model after each checkpoint; their failure is a warning."""

    order = 1  # after CheckpointCallback

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.guarded(trainer.global_step, self.show, trainer, pl_module)

    def guarded(self, step: int, function: Any, *args: Any) -> None:
        """Call a function; print a warning if it fails."""
        try:
            function(*args)
        except Exception as error:
            warn(f"{type(self).__name__} failed at step {step}: {error_text(error)}")

    def show(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Show it; called on all ranks, with the averaged weights in place if there are any."""
        raise NotImplementedError
