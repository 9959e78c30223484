"""Harm done to real runs: `python -m tests.robustness.faults` tries it often, `tests/test_faults.py` a few times.

A fault is a function that makes one trial in an empty folder: it starts `scripts/train.py`, harms it, and
raises an `AssertionError` that says what was lost, if anything was.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

Trial = Callable[[Path, Random], str | float | None]


class Skipped(Exception):
    """This machine cannot do this harm; says why."""


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Args:
        name: what is done, in the words of the table.
        trial: does it once, and may say in a few words what it met, or what share of an unharmed run's time it took.
        times: how often `make faults` tries it.
        quick: how often the test suite does.
        alone: nothing runs beside a trial, for it is timed.
    """

    name: str
    trial: Trial
    times: int
    quick: int = 1
    alone: bool = False

    def __call__(self, place: Path, seed: object) -> str | float | None:
        """One trial, the same for the same seed as far as clocks allow."""
        return self.trial(place, Random(f"{self.name} {seed}"))
