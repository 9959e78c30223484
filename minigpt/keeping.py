"""What outlasts a training: checkpoints at every validation, and one more when a signal ends it."""

import signal
from math import isfinite
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint

from minigpt.checkpoint import BEST, LAST, name_again
from minigpt.errors import ENDING, REQUEUE, Interrupted, UserError, explain, interrupt, warn


class Checkpoints(Checkpoint):
    """Writes `last.ckpt` at every validation. Of those, `best.ckpt` is a second name of the one of lowest loss.

    So a checkpoint is written once, and costs what it costs once.

    Args:
        keep: the best so many are kept; more than one are `step-N.ckpt` each as well.
    """

    def __init__(self, *, keep: int = 1) -> None:
        if keep < 1:
            raise UserError(f"callbacks.checkpoint.keep={keep} is not possible; it takes a whole number of at least 1")
        self.keep = keep
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
        self.best = sorted([*self.best, (float(trainer.callback_metrics["val_loss"]), step)])[: self.keep]
        trainer.save_checkpoint(self.folder / LAST)  # by all ranks
        if trainer.is_global_zero:
            self._name(self.folder / LAST, step)

    def _name(self, file: Path, step: int) -> None:
        """Give the checkpoint of a step the names that it has earned, and take them from those that lost theirs."""
        if not self.best or step not in (steps := [step for _, step in self.best]):
            return
        if step == steps[0]:
            name_again(file, self.folder / BEST)
        if self.keep > 1:
            name_again(file, self._of(step))
            for old in (self.folder / BEST).parent.glob("step-*.ckpt"):
                if old not in map(self._of, steps):
                    old.unlink()

    def _of(self, step: int) -> Path:
        return (self.folder / BEST).with_name(f"step-{step}.ckpt")


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


class EndInOrder(Callback):
    """On a signal: finish the step, save `last.ckpt`, raise `Interrupted`. A second one ends at once.

    SIGINT and SIGTERM ask for it, and SIGUSR1, which a scheduler sends before it takes the machine away.
    """

    def __init__(self, folder: Path, *, agree_every: int) -> None:
        self.file, self.agree_every = folder / LAST, agree_every
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        for signum in ENDING:
            if signum == REQUEUE and signal.getsignal(signum) not in (signal.SIG_DFL, interrupt):
                continue  # somebody else queues this run again
            self._before[signum] = signal.signal(signum, self._receive)

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:  # the gradients of half a step are in no checkpoint
            return
        if trainer.world_size == 1:
            self._end(trainer, self.received)
        # Ranks must leave at the same step. Asking costs a round trip, so it is not asked every step.
        elif trainer.global_step % self.agree_every == 0:
            mine = torch.tensor(float(self.received or 0), device=pl_module.device)
            self._end(trainer, int(trainer.strategy.reduce(mine, reduce_op="max")))

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.world_size == 1 and trainer.state.fn == "fit":
            self._end(trainer, self.received)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise Interrupted(signum)
        self.received = signum

    def _end(self, trainer: L.Trainer, signum: int | None) -> None:
        if not signum:
            return
        module: Any = trainer.lightning_module
        lost = module.grad_norm is not None and not isfinite(module.grad_norm)  # of which a GPU has not told yet
        if trainer.global_step < trainer.max_steps and not lost:  # after the last step nothing would validate it
            trainer.save_checkpoint(self.file)
        raise Interrupted(signum)
