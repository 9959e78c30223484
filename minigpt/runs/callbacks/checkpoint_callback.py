"""The callback that writes checkpoints, at every validation."""

from contextlib import suppress
from pathlib import Path

import lightning.pytorch as L

from minigpt.checkpoints.find import BEST, LAST
from minigpt.checkpoints.format import Saved, hardlink_or_copy, read
from minigpt.runs.callbacks.resume_state import resumes_own_run
from minigpt.runs.run_dir import short_path
from minigpt.utils.errors import UserError, require
from minigpt.utils.terminal import warn


class CheckpointCallback(L.callbacks.Checkpoint):
    """Write `last.safetensors` at every validation; link the best one to `best.safetensors`.

    The best has the lowest validation loss.

    Args:
        save_top_k: number of best checkpoints to keep; with more than one, each is also
            `step-N.safetensors`.
    """

    def __init__(self, *, save_top_k: int = 1) -> None:
        require(
            "callbacks.checkpoint.save_top_k",
            save_top_k,
            lambda count: type(count) is int and count > 0,
            "an integer ≥ 1",
        )
        self.save_top_k = save_top_k
        self.best: list[tuple[float, int]] = []  # (loss, step) of validations, the lowest first

    def setup(self, trainer: L.Trainer, pl_module: object, stage: str) -> None:
        self.run_folder = Path(trainer.default_root_dir)

    def state_dict(self) -> dict[str, list[tuple[float, int]]]:
        return {"best": self.best}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: object, checkpoint: Saved) -> None:
        state = checkpoint["callbacks"].get(self.state_key)
        if state and resumes_own_run(trainer):  # not the best checkpoints of another run
            self.best = state["best"]
            if trainer.is_global_zero:
                self._restore_best(Path(str(trainer.ckpt_path)), checkpoint["global_step"])

    def _restore_best(self, resumed: Path, step: int) -> None:
        # Make `best` the best validation until the resumed step whose file is left. The run may
        # have been killed before it linked the resumed file, and `best` may be of a later step, if
        # it resumes from `previous`.
        best = self.run_folder / BEST
        expected = self.best[:1]
        # Find the files of the validations by step.
        kept = [each for _, each in self.best if self._step_file(each).exists()]
        files = {each: self._step_file(each) for each in kept} | {step: resumed}
        if expected and expected[0][1] not in files:
            with suppress(UserError):  # missing or damaged
                files[read(best)["global_step"]] = best
        # Link the best that is left.
        while self.best and self.best[0][1] not in files:
            self.best.pop(0)
        now = "the next validation writes one"
        if self.best:
            now = f"using that of step {self.best[0][1]}"
            if files[self.best[0][1]] != best:
                hardlink_or_copy(files[self.best[0][1]], best)
        else:
            best.unlink(missing_ok=True)
        if expected != self.best[:1]:
            warn(
                f"the best checkpoint, of step {expected[0][1]}, is not in "
                f"{short_path(best.parent)}; {now}"
            )
        self._link(resumed, step)

    def on_validation_end(self, trainer: L.Trainer, pl_module: object) -> None:
        self.best = sorted(
            [*self.best, (float(trainer.callback_metrics["val_loss"]), trainer.global_step)]
        )
        trainer.save_checkpoint(self.run_folder / LAST)  # called on all ranks
        if trainer.is_global_zero:
            self._link(self.run_folder / LAST, trainer.global_step)

    def _link(self, file: Path, step: int) -> None:
        # Link a checkpoint that is among the best to `best` and `step-N`; remove the others.
        kept = [each for _, each in self.best[: self.save_top_k]]
        if kept[:1] == [step]:
            hardlink_or_copy(file, self.run_folder / BEST)
        if step in kept and self.save_top_k > 1:
            hardlink_or_copy(file, self._step_file(step))
            for _, dropped in self.best[self.save_top_k :]:
                self._step_file(dropped).unlink(missing_ok=True)

    def _step_file(self, step: int) -> Path:
        return (self.run_folder / BEST).with_name(f"step-{step}.safetensors")
