"""Errors that a user caused or that end a run; `cli` prints them as one line."""

from math import isfinite


class UserError(Exception):
    """The input or the configuration is wrong: says what, what was expected and what to do."""

    exit_code = 2


class RunError(UserError):
    """The input was right and the run failed all the same."""

    exit_code = 1


class Diverged(RunError):
    """The loss of optimizer step `step` is no number any more, or its gradient is none; every process raises it."""

    def __init__(self, loss: float, step: int, learning_rate: float) -> None:
        what = "the gradient is no number" if isfinite(loss) else f"the loss became {loss}"
        self.what, self.step = f"{what} at step {step} (learning rate {learning_rate:.3g})", step
        super().__init__(f"{self.what}; try a lower optimizer.lr or more schedule.warmup_steps")
