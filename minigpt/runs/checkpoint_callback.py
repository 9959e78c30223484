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
        self.folder = (Path(trainer.default_root_dir) / BEST).parent

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Link the resumed checkpoint: the run may have been killed before it did. Ignore the best of another run."""
        file, state = Path(str(trainer.ckpt_path)), checkpoint["callbacks"].get(self.state_key)
        if state and file.resolve().parent == self.folder.resolve():
            self.best = state["best"]
            if trainer.is_global_zero:
                self._link(file, checkpoint["global_step"])

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        step, file = trainer.global_step, self.folder / Path(LAST).name
        self.best = sorted([*self.best, (float(trainer.callback_metrics["val_loss"]), step)])[: self.save_top_k]
        trainer.save_checkpoint(file)  # called on all ranks
        if trainer.is_global_zero:
            self._link(file, step)

    def _link(self, file: Path, step: int) -> None:
        """Link a checkpoint that is among the best to `best` and `step-N`; remove those that no longer are."""
        best = {step: self.folder / f"step-{step}.safetensors" for _, step in self.best}
        if step in list(best)[:1]:
            hardlink_or_copy(file, self.folder / Path(BEST).name)
        if step in best and self.save_top_k > 1:
            hardlink_or_copy(file, best[step])
            for old in {*self.folder.glob("step-*.safetensors")} - {*best.values()}:
                old.unlink()
