"""Fault injection into real runs: `python -m tests.robustness.faults` runs many trials, `test_faults.py` a few.

A fault is a function that runs one trial in an empty folder: start `scripts/train.py`, inject the fault, and raise
`AssertionError` if the run does not recover.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

Trial = Callable[[Path, Random], str | float | None]


class Skipped(Exception):
    """This machine cannot inject the fault."""


@dataclass(frozen=True)
class Fault:
    """One row of the table.

    Args:
        name: of the row.
        trial: runs one trial in a folder. Returns a short note, or the training time relative to a run without the
            fault, or None.
        trials: number of trials of `make faults`.
        quick_trials: number of trials of the test suite.
        exclusive: run one trial at a time, because the trial measures time.
    """

    name: str
    trial: Trial
    trials: int
    quick_trials: int = 1
    exclusive: bool = False

    def __call__(self, workdir: Path, seed: object) -> str | float | None:
        """Run one trial; its random choices depend on name and seed alone."""
        return self.trial(workdir, Random(f"{self.name} {seed}"))
