"""The table of a sweep: its rows, best first, and how they compare.

`ranked` fills it in once; the answer, the plots and the files of a report read it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan

from minigpt.sweeps.comparison import Comparison
from minigpt.sweeps.results import Point

COSTS = ("params", "flops", "tokens_per_second", "seconds")  # of the totals of a point


@dataclass(eq=False)  # comparing thousands of rows by value would be slow
class Row:
    """Points that differ only in their seed.

    Args:
        overrides: the values of the settings in which rows differ, as they were written or by
            default; without groups that were not given.
        labels: each of these overrides by its short name, such as `n_head=4`.
        name: what a row without overrides is called.
        losses: best validation loss of each point that has one, in the unit of the table; of equal
            runs once.
        n_seeds: number of seeds that have a loss.
        means: mean of the best losses over seeds in each unit; as if the row had the seeds of all
            rows, if it is compared.
        loss: the mean in the unit of the table.
        costs: mean of each of the `COSTS` over the points that have it.
        provisional: whether a run has not completed or has no loss, so that the mean is not that of
            all seeds.
        status: of the points, with counts if they differ.
        diverged: whether a run diverged.
        reason: why points failed or were skipped.
        rank: from 1; empty without a loss, and for all rows of an `incomparable` table.
        interval: half of the 95 % interval of the mean loss over seeds; None if the row is not
            compared.
        difference: from the mean loss of the first row.
        margin: half of the interval of the difference, which holds for all rows together.
        tied: whether the row is no different from the first row, as far as the noise allows to
            tell.

    Methods:
        number: the value of a setting as a float; NaN if it is not a number.
        value: the value of a setting; "default" for a group that was not given.
        label: the overrides by short name, except `without`; else the name.
    """

    overrides: Mapping[str, str]
    labels: Mapping[str, str]
    name: str
    points: Sequence[Point]
    losses: Sequence[float]
    n_seeds: int
    means: dict[str, float | None]
    loss: float | None
    costs: Mapping[str, float | None]
    provisional: bool
    status: str
    diverged: bool
    reason: str
    rank: str = ""
    interval: float | None = None
    difference: float | None = None
    margin: float | None = None
    tied: bool = False

    def number(self, name: str) -> float:
        try:
            return float(self.overrides.get(name, nan))
        except ValueError:
            return nan

    def value(self, name: str) -> str:
        return self.overrides.get(name, "default")

    def label(self, without: str | None = None) -> str:
        labels = [label for name, label in self.labels.items() if name != without]
        return ", ".join(labels) or self.name


@dataclass(frozen=True)
class Table:
    """The rows of one or several sweeps.

    Args:
        rows: best first; rows with runs that did not complete come after all others, and rows
            without a loss last.
        unit: of the losses, `NATS` or `BITS`.
        short_names: short name of each setting in which rows differ.
        compared: the rows whose runs all completed, without diverged ones.
        comparison: of these rows, in their order; None if losses are `incomparable`, or if seeds
            allow none.
        n_diverged: number of rows that are not compared because their runs diverged.
        incomparable: why the losses do not compare, though their unit is the same; or nothing.
        best: the row with rank 1, if any.
    """

    rows: Sequence[Row]
    unit: str
    short_names: Mapping[str, str]
    compared: Sequence[Row]
    comparison: Comparison | None
    n_diverged: int
    incomparable: str
    best: Row | None


def points_of(rows: Iterable[Row]) -> list[Point]:
    """Return the points of rows, in order."""
    return [point for row in rows for point in row.points]


def numbers(rows: Iterable[Row], name: str) -> list[float]:
    """Return the numbers that a setting takes, in order."""
    return sorted({row.number(name) for row in rows if isfinite(row.number(name))})


def loss_text(loss: float | None, interval: float | None) -> str:
    """Return a loss and its interval, such as `1.7000 ± 0.0183`."""
    half = "" if interval is None else f" ± {interval:.4f}"
    return "–" if loss is None else f"{loss:.4f}{half}"


def count_text(counts: Mapping[str, int]) -> str:
    """Return counts as text, such as `2 completed, 1 failed`."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
