"""Rank the points of a sweep: average over seeds, in a unit that makes the losses comparable, and compare the rows."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, nan
from statistics import mean, median
from typing import Any

import numpy as np
import numpy.typing as npt

from minigpt.sweeps.comparison import Comparison, compare
from minigpt.sweeps.results import BITS, NATS, SKIPPED, Point, short_names

DIVERGED = 1.2  # times the best loss: a higher one, far above the others too, is of a run that diverged


@dataclass(frozen=True)
class Row:
    """Points that differ only in their seed: one row of the table.

    Args:
        overrides: settings that the points share, without the seed.
        unit: unit of the losses, `NATS` or `BITS`.
        short_names: short name of each setting in which rows differ.
        adjusted: mean loss as if the row had the seeds of all rows; None if the rows are not compared.
        interval: half of the 95 % interval of the mean loss over seeds; None if the noise is unknown.
        difference: from the mean loss of the first row.
        margin: half of the interval of the difference, which holds for all rows together.
    """

    overrides: Mapping[str, str]
    points: Sequence[Point]
    unit: str
    short_names: Mapping[str, str]
    adjusted: float | None = None
    interval: float | None = None
    difference: float | None = None
    margin: float | None = None

    @property
    def losses(self) -> list[float]:
        """Best validation loss of each point that has one."""
        return [loss for point in self.points if (loss := point.loss(self.unit)) is not None]

    @property
    def loss(self) -> float | None:
        """Mean of the best losses over seeds."""
        return self.adjusted if self.adjusted is not None else mean(self.losses) if self.losses else None

    @property
    def tied(self) -> bool:
        """Whether the row is no different from the first row, as far as the noise allows to tell."""
        return self.margin is not None and abs(self.difference or 0.0) <= self.margin

    @property
    def loss_text(self) -> str:
        """The mean and its 95 % interval, such as `1.7000 ± 0.0183`."""
        interval = "" if self.interval is None else f" ± {self.interval:.4f}"
        return "–" if self.loss is None else f"{self.loss:.4f}{interval}"

    @property
    def provisional(self) -> bool:
        """Whether a run has not completed or has no loss, so that the mean is not that of all seeds."""
        return any(point.pending or point.loss(self.unit) is None for point in self.points if point.status != SKIPPED)

    @property
    def status(self) -> str:
        """Status of the points, with counts if they differ."""
        counts = Counter(point.status_text for point in self.points)
        return self.points[0].status_text if len(counts) == 1 else count_text(counts)

    @property
    def reason(self) -> str:
        """Why points failed or were skipped."""
        return "; ".join(dict.fromkeys(point.reason for point in self.points if point.reason))

    def in_unit(self, unit: str) -> "Row":
        """Return the row with losses in a unit; intervals are in that of the ranking only."""
        return self if unit == self.unit else replace(self, unit=unit, adjusted=None, interval=None)

    def mean_of(self, total: str) -> float | None:
        """Return the mean of one of the `TOTALS` over the points that have it."""
        values = [value for point in self.points if (value := point.totals.get(total))]
        return mean(values) if values else None

    def number(self, name: str) -> float | None:
        """Return the value of a setting if it is a finite number."""
        try:
            value = float(self.overrides.get(name, inf))
        except ValueError:
            return None
        return value if isfinite(value) else None

    def value(self, name: str) -> str:
        """Return the value of a setting as it was written."""
        return self.overrides.get(name, "default")

    def label(self, without: str | None = None) -> str:
        """Return the overrides by short name, except `without`; the folder's name if there are none."""
        values = [f"{self.short_names[name]}={value}" for name, value in self.overrides.items() if name != without]
        return ", ".join(values) or ("all" if without or len(self.points) > 1 else self.points[0].folder.name)


def ranked(points: Sequence[Point]) -> list[Row]:
    """Group points by their settings without the seed; return the lowest mean loss first.

    Rows with runs that did not complete come after all others, and rows without a loss last. All others are compared
    over the seeds that they share, if their losses are of the same text.
    """
    keys = dict.fromkeys(key for point in points for key in point.overrides)
    axes = [key for key in keys if len({point.overrides.get(key) for point in points}) > 1]
    names = [name for name in axes or keys if name != "seed"]  # all settings if the points are equal
    losses = [(nats, bits) for point in points if (nats := point.loss(NATS)) and (bits := point.loss(BITS))]
    lengths = [nats / bits for nats, bits in losses]  # proportional to the bytes per token
    # Losses per token do not compare if tokens differ in their mean length, as over tokenizers and corpora.
    unit = BITS if lengths and max(lengths) > 1.001 * min(lengths) else NATS
    short = short_names(names)
    groups: dict[tuple[tuple[str, str], ...], list[Point]] = {}
    for point in points:
        values = tuple((name, point.overrides[name]) for name in names if name in point.overrides)
        groups.setdefault(values, []).append(point)
    rows = [Row(dict(values), group, unit, short) for values, group in groups.items()]
    rows.sort(key=lambda row: (row.loss is None, row.provisional, row.loss or 0.0))
    complete, comparison = compare_rows(rows)
    if comparison is not None:
        of: dict[str, Any] = {"adjusted": comparison.means, "interval": comparison.interval}
        of["difference"], of["margin"] = comparison.against(int(np.argmin(comparison.means)))
        compared = [replace(row, **{name: of[name][i].item() for name in of}) for i, row in enumerate(complete)]
        rows[: len(compared)] = sorted(compared, key=lambda row: row.loss or 0.0)
    return rows


def compare_rows(rows: Sequence[Row]) -> tuple[list[Row], Comparison | None]:
    """Return the rows whose runs all completed and did not diverge, and their comparison if their seeds allow one."""
    complete = [row for row in rows if row.losses and not row.provisional]
    if complete:
        losses = [inf if row.loss is None else row.loss for row in complete]
        highest = max(highest_converged(losses), DIVERGED * min(losses))
        complete = [row for row, loss in zip(complete, losses, strict=True) if loss <= highest]
    known = complete and not incomparable(rows)
    return complete, compare(seed_losses(complete)) if known else None


def incomparable(rows: Sequence[Row]) -> str:
    """Return why the losses of rows do not compare, though their unit is the same; empty if they do."""
    points = [point for row in rows for point in row.points if point.loss(row.unit) is not None]
    if len({point.corpus for point in points if point.corpus}) > 1:
        return "The runs were trained on different corpora, so their losses are not comparable."
    parts = {point.validated: point.folder.name for point in points if point.validated}
    if len(parts) < 2:
        return ""
    advice = "; eval_batches=null validates on the whole split" if any(" windows " in part for part in parts) else ""
    which = "; ".join(f"{folder}: {part}" for part, folder in parts.items())
    return f"The runs were validated on different texts ({which}), so their losses are not comparable{advice}."


def highest_converged(losses: Sequence[float]) -> float:
    """Return the highest loss that is at most 5 times as far from the best as the median."""
    best = min(losses)
    return max(loss for loss in losses if loss <= best + 5 * (median(losses) - best))


def seed_losses(rows: Sequence[Row]) -> npt.NDArray[np.float64]:
    """Return the loss of each row and seed; NaN where there is none.  (R, S)"""
    runs = [{point.seed: loss for point in row.points if (loss := point.loss(row.unit)) is not None} for row in rows]
    seeds = dict.fromkeys(seed for losses in runs for seed in losses)
    return np.array([[losses.get(seed, nan) for seed in seeds] for losses in runs])


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the (cost, loss) pairs that no other pair dominates, cheapest first."""
    front: list[tuple[float, float]] = []
    for cost, loss in sorted(points):
        if not front or loss < front[-1][1]:
            front.append((cost, loss))
    return front


def numbers(rows: Iterable[Row], name: str) -> list[float]:
    """Return the numbers that a setting takes, in order."""
    return sorted({value for row in rows if (value := row.number(name)) is not None})


def count_text(counts: Mapping[str, int]) -> str:
    """Return counts as text, such as `2 completed, 1 failed`."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
