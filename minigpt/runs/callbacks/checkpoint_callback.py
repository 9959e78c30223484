"""The callback that writes checkpoints, at every validation."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Checkpoint

from minigpt.checkpoints.find import BEST, LAST
from minigpt.checkpoints.format import hardlink_or_copy, read
from minigpt.runs.callbacks.resume_state import resumes_own_run
from minigpt.runs.run_dir import short_path
from minigpt.utils.checks import POSITIVE_INT
from minigpt.utils.errors import UserError, require
from minigpt.utils.terminal import warn


class CheckpointCallback(Checkpoint):
    """Write `last.safetensors` at every validation, and link the one of lowest loss to `best.safetensors`.

    Args:
        save_top_k: number of best checkpoints to keep; with more than one, each is also `step-N.safetensors`.
    """

    def __init__(self, *, save_top_k: int = 1) -> None:
        require("callbacks.checkpoint.save_top_k", save_top_k, *POSITIVE_INT)
        self.save_top_k = save_top_k
        self.best: list[tuple[float, int]] = []  # (loss, step) of all validations, the lowest first

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        self.folder = (Path(trainer.default_root_dir) / BEST).parent

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Continue with the best checkpoints of the run that resumes; ignore those of another run."""
        state = checkpoint["callbacks"].get(self.state_key)
        if state and resumes_own_run(trainer):
            self.best = state["best"]
            if trainer.is_global_zero:
                self._restore_best(Path(str(trainer.ckpt_path)), checkpoint["global_step"])

    def _restore_best(self, file: Path, step: int) -> None:
        """Make `best` the best validation until the resumed step whose file is left.

        The run may have been killed before it linked the resumed file, and `best` may be of a later step, if it resumes
        from `previous`.
        """
        own = {each: self.folder / f"step-{each}.safetensors" for _, each in self.best}
        files = {each: kept for each, kept in own.items() if kept.exists()} | {step: file}
        best, expected = self.folder / Path(BEST).name, self.best[:1]
        if expected and expected[0][1] not in files:
            with suppress(UserError):  # missing or damaged
                files[read(best)["global_step"]] = best
        while self.best and self.best[0][1] not in files:
            self.best.pop(0)
        if not self.best:
            best.unlink(missing_ok=True)
        elif files[self.best[0][1]] != best:
            hardlink_or_copy(files[self.best[0][1]], best)
        if expected != self.best[:1]:
            now = (
                f"using that of step {self.best[0][1]}"
                if self.best
                else "the next validation writes one"
            )
            warn(
                f"the best checkpoint, of step {expected[0][1]}, is not in {short_path(self.folder)}; {now}"
            )
        self._link(file, step)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        step, file = trainer.global_step, self.folder / Path(LAST).name
        self.best = sorted([*self.best, (float(trainer.callback_metrics["val_loss"]), step)])
        trainer.save_checkpoint(file)  # called on all ranks
        if trainer.is_global_zero:
            self._link(file, step)

    def _link(self, file: Path, step: int) -> None:
        """Link a checkpoint that is among the best to `best` and `step-N`; remove those that no longer are."""
        best = {
            step: self.folder / f"step-{step}.safetensors"
            for _, step in self.best[: self.save_top_k]
        }
        if step in list(best)[:1]:
            hardlink_or_copy(file, self.folder / Path(BEST).name)
        if step in best and self.save_top_k > 1:
            hardlink_or_copy(file, best[step])
            for _, old in self.best[self.save_top_k :]:
                (self.folder / f"step-{old}.safetensors").unlink(missing_ok=True)
