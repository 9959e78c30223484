"""Errors that `cli` prints as one line without a traceback."""

from math import isfinite


class UserError(Exception):
    """An input or a setting is wrong; the message names it, the accepted values and the next step. Exit code 2."""

    exit_code = 2


class RunError(UserError):
    """A run with valid input failed. Exit code 1."""

    exit_code = 1


class Diverged(RunError):
    """The loss or the gradient of an optimizer step is NaN or infinite; every rank raises it."""

    def __init__(self, loss: float, step: int, learning_rate: float) -> None:
        what = "the gradient is not finite" if isfinite(loss) else f"the loss is {loss}"
        advice = "try a lower optimizer.lr or more schedule.warmup_steps; the last checkpoint is from before"
        super().__init__(f"{what} at step {step} (learning rate {learning_rate:.3g}); {advice}")
