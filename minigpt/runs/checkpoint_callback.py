"""The callback that writes checkpoints, at every validation."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Checkpoint

from minigpt.checkpoints.find import BEST, LAST
from minigpt.checkpoints.format import hardlink_or_copy
from minigpt.utils.checks import POSITIVE_INT
from minigpt.utils.errors import require


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
        """Link the resumed checkpoint: the run may have been killed before it did. Drop the best of another run."""
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
        """Link a checkpoint that is among the best to `best` and `step-N`; remove those that no longer are."""
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
