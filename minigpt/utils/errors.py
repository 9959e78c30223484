"""Errors that `cli` prints as one line without a traceback, and the template of their messages."""

from collections.abc import Callable
from math import isfinite
from typing import Any


class UserError(Exception):
    """An input or a setting is wrong: exit code 2.

    The message names it, the accepted values and the next step.
    """

    exit_code = 2
    of_all_ranks = True  # every rank raises it, and rank 0 prints it

    def _render_traceback_(self) -> list[str]:  # what a notebook shows, without 40 frames
        return [f"error: {self}"]


class RunError(UserError):
    """A run with valid input failed. Exit code 1."""

    exit_code = 1
    of_all_ranks = False


class NonFiniteLoss(RunError):
    """The loss or the gradient of an optimizer step is NaN or infinite."""

    of_all_ranks = True

    def __init__(self, loss: float, step: int, learning_rate: float) -> None:
        what = "the gradient is not finite" if isfinite(loss) else f"the loss is {loss}"
        super().__init__(
            f"{what} at step {step} (learning rate {learning_rate:.3g}); try a lower optimizer.lr "
            "or more schedule.warmup_steps; the last checkpoint is from before"
        )


def require(
    key: str, value: object, accepts: Callable[[Any], bool], expected: str, advice: str = ""
) -> None:
    """Raise UserError unless `accepts(value)`: KEY must be EXPECTED, got VALUE; ADVICE.

    Args:
        key: full configuration key or flag.
        expected: the phrase that follows "must be", such as "in [0, 1)".
        advice: the next step, if there is one.
    """
    if not accepts(value):
        if isinstance(value, int | float) and value >= 1 << 63 and "integer ≥" in expected:
            advice = f"the largest is {(1 << 63) - 1}"
        raise UserError(
            f"{key} must be {expected}, got {value}" + (f"; {advice}" if advice else "")
        )
