"""What outlasts a training: checkpoints at every validation, and one more when a signal ends it."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback, Checkpoint

from minigpt.checkpoints.find import BEST, LAST
from minigpt.checkpoints.format import hardlink_or_copy
from minigpt.utils.cli import explain
from minigpt.utils.errors import UserError
from minigpt.utils.terminal import warn


class CheckpointCallback(Checkpoint):
    """Writes `last.safetensors` at every validation. Of those, `best.safetensors` is a second name of the one of lowest loss.

    So a checkpoint is written once, and costs what it costs once.

    Args:
        save_top_k: the best so many are kept; more than one are `step-N.safetensors` each as well.
    """

    def __init__(self, *, save_top_k: int = 1) -> None:
        if save_top_k < 1:
            raise UserError(
                f"callbacks.checkpoint.save_top_k={save_top_k} is not possible; it takes a whole number of at least 1"
            )
        self.save_top_k = save_top_k
        self.best: list[tuple[float, int]] = []  # loss and step, the lowest loss first

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        self.folder = Path(trainer.default_root_dir)

    def state_dict(self) -> dict[str, Any]:
        """The losses and steps of the best."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = [(loss, step) for loss, step in state_dict["best"]]

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.resumed_step = int(checkpoint["global_step"])

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """A run that was killed between a checkpoint and its names, names it now; another run's best is not ours."""
        resumed = trainer.ckpt_path
        if resumed is None or Path(resumed).resolve().parent != (self.folder / LAST).resolve().parent:
            self.best = []
        elif trainer.is_global_zero:
            self._name(Path(resumed), self.resumed_step)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.state.fn != "fit":
            return
        step = trainer.global_step
        self.best = sorted([*self.best, (float(trainer.callback_metrics["val_loss"]), step)])[: self.save_top_k]
        trainer.save_checkpoint(self.folder / LAST)  # by all ranks
        if trainer.is_global_zero:
            self._name(self.folder / LAST, step)

    def _name(self, file: Path, step: int) -> None:
        """Give the checkpoint of a step the names that it has earned, and take them from those that lost theirs."""
        if not self.best or step not in (steps := [step for _, step in self.best]):
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
    """Shows something of the model at every validation, after its checkpoint is written; to fail costs a warning."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.state.fn != "fit":
            return
        try:
            self.show(trainer, pl_module)
        except Exception as error:
            reason = explain(error)[0].removeprefix("error: ")
            warn(f"{type(self).__name__} failed at step {trainer.global_step}: {reason}")

    def show(self, trainer: L.Trainer, pl_module: Any) -> None:
        """What is shown, on all ranks; pl_module holds the averaged weights where there are any."""
        raise NotImplementedError
