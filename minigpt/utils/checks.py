"""Checks of values that users set, with one form of message."""

from collections.abc import Callable
from typing import Any

from minigpt.utils.errors import UserError


def require(name: str, value: object, accepts: Callable[[Any], bool], expected: str) -> None:
    """Raise UserError, naming the key, if `accepts(value)` is false."""
    if not accepts(value):
        raise UserError(f"{name} must be {expected}, got {value}")


def is_number(value: object) -> bool:
    """Whether a value is an int or a float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole_number(least: int) -> Callable[[Any], bool]:
    """A check for integers from `least` to 2⁶³ - 1."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 63


def is_fraction(value: Any) -> bool:
    """Whether a value is in [0, 1)."""
    return is_number(value) and 0 <= value < 1


def is_positive(value: Any) -> bool:
    """Whether a value is in (0, ∞)."""
    return is_number(value) and 0 < value < float("inf")


def is_not_negative(value: Any) -> bool:
    """Whether a value is in [0, ∞)."""
    return is_number(value) and 0 <= value < float("inf")
