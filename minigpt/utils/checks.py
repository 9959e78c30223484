"""Rules for values that users set.

A rule is a predicate and the phrase that follows "must be", so that a table of rules has one line
per key: `require("model.dropout", 1.5, *FRACTION)` raises `model.dropout must be in [0, 1), got
1.5`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Rule = tuple[Callable[[Any], bool], str]
Settings = Mapping[str, Any]  # a group of the configuration, as plain values


def integer(least: int, most: int | None = None) -> Rule:
    """Return the rule for integers from `least` to `most`, by default 2⁶³ - 1."""
    end = (1 << 63) - 1 if most is None else most
    expected = f"an integer ≥ {least}" if most is None else f"an integer in [{least}, {most}]"
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and least <= v <= end, expected


def one_of(values: Iterable[str]) -> Rule:
    """Return the rule for one of some names."""
    return lambda v: v in list(values), f"one of {', '.join(values)}"


def or_null(rule: Rule) -> Rule:
    """Return a rule that accepts None too."""
    accepts, expected = rule
    return lambda v: v is None or accepts(v), f"{expected}, or null"


def is_number(value: object) -> bool:
    """Return whether a value is an int or a float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_integer(value: Any) -> Any:
    """Return a whole number written as a float, such as 1e4, as an int; else the value."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


BOOLEAN: Rule = (lambda v: isinstance(v, bool), "true or false")
POSITIVE_INT = integer(1)
NON_NEGATIVE_INT = integer(0)
POSITIVE: Rule = (lambda v: is_number(v) and 0 < v < float("inf"), "a finite number > 0")
NON_NEGATIVE: Rule = (lambda v: is_number(v) and 0 <= v < float("inf"), "a finite number ≥ 0")
FRACTION: Rule = (lambda v: is_number(v) and 0 <= v < 1, "in [0, 1)")
OPEN_FRACTION: Rule = (lambda v: is_number(v) and 0 < v < 1, "in (0, 1)")
CLOSED_FRACTION: Rule = (lambda v: is_number(v) and 0 <= v <= 1, "in [0, 1]")
