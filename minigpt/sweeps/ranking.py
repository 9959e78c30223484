"""Rank the points of a sweep: average over seeds, in a unit that makes the losses comparable, and compare the rows."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf, isfinite, nan
from statistics import mean, median
from typing import Any

import numpy as np

from minigpt.runs.run_dir import short_path
from minigpt.sweeps.comparison import Comparison, compare
from minigpt.sweeps.point_settings import short_names
from minigpt.sweeps.results import BITS, COMPLETED, DIVERGED, NATS, SKIPPED, Point


@dataclass(frozen=True, eq=False)  # of thousands of rows, comparisons by value would take minutes
class Row:
    """Points that differ only in their seed: one row of the table.

    Args:
        overrides: the values of the settings in which rows differ, as they were written or by default.
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
        """Best validation loss of each point that has one; of equal runs once."""
        losses = {
            (point.seed, loss): loss
            for point in self.points
            if (loss := point.loss(self.unit)) is not None
        }
        return [*losses.values()]

    @property
    def n_seeds(self) -> int:
        """Number of seeds that have a loss."""
        return len({point.seed for point in self.points if point.loss(self.unit) is not None})

    @property
    def loss(self) -> float | None:
        """Mean of the best losses over seeds."""
        return (
            self.adjusted
            if self.adjusted is not None
            else mean(self.losses)
            if self.losses
            else None
        )

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
        return any(point.pending or point.loss(self.unit) is None for point in self.points)

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
        if unit == self.unit:
            return self
        row = replace(self, unit=unit, adjusted=None, interval=None)
        if self.adjusted is None or row.loss is None or not (raw := mean(self.losses)):
            return row
        return replace(row, adjusted=row.loss * self.adjusted / raw)

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
        """Return the value of a setting; "default" for a group that was not given."""
        return self.overrides.get(name, "default")

    def label(self, without: str | None = None) -> str:
        """Return the overrides by short name, except `without`; the folder's name of a single run without any."""
        values = [
            f"{self.short_names[name]}={value}"
            for name, value in self.overrides.items()
            if name != without
        ]
        none = (
            "defaults"
            if self.short_names
            else "all runs"
            if len(self.points) > 1
            else self.points[0].folder.name
        )
        return ", ".join(values) or none


def ranked(points: Sequence[Point]) -> list[Row]:
    """Group points by their settings without the seed; return the lowest mean loss first.

    Rows with runs that did not complete come after all others, and rows without a loss last. All others are compared
    over the seeds that they share, if their losses are of the same text.
    """
    # Proportional to the bytes per token.
    lengths = [
        nats / bits for point in points if (nats := point.loss(NATS)) and (bits := point.loss(BITS))
    ]
    # Losses per token do not compare if tokens differ in their mean length, as over tokenizers and corpora.
    unit = BITS if lengths and max(lengths) > 1.001 * min(lengths) else NATS
    groups: dict[Any, list[Point]] = {}
    for point in points:
        groups.setdefault((point.row, point.status == SKIPPED), []).append(point)
    names = _names(points)
    rows: list[Row] = []
    texts: dict[Any, Any] = {}  # a value that was written in two ways has one name
    for first, *others in groups.values():
        known = {
            name: texts.setdefault((name, repr(first.value(name))), first.text(name))
            for name in names
        }
        rows.append(
            Row(
                {k: v for k, v in known.items() if v is not None},
                [first, *others],
                unit,
                short_names(names),
            )
        )
    rows.sort(key=lambda row: (row.loss is None, row.provisional, row.loss or 0.0))
    complete, comparison = compare_rows(rows)
    if comparison is not None:
        best = int(np.argmin(comparison.means))
        of = np.array([comparison.means, comparison.interval, *comparison.against(best)]).T.tolist()
        compared = [
            replace(row, adjusted=adjusted, interval=interval, difference=difference, margin=margin)
            for row, (adjusted, interval, difference, margin) in zip(complete, of, strict=True)
        ]
        rows = [
            *sorted(compared, key=lambda row: row.loss or 0.0),
            *(row for row in rows if row not in complete),
        ]
    return rows


def _names(points: Sequence[Point]) -> list[str]:
    """Return the settings that tell points apart: those that were given, and others where these are equal."""
    given = [
        name
        for name in dict.fromkeys(name for point in points for name in point.written)
        if name != "seed"
    ]
    names = [name for name in given if _differs(points, name)] if len(points) > 1 else given
    alike: dict[Any, list[Point]] = {}
    for point in points:
        alike.setdefault(repr([point.value(name) for name in names]), []).append(point)
    for group in alike.values():
        more = dict.fromkeys(
            name for point in group for name in point.settings if name not in ("seed", *names)
        )
        names += [name for name in more if _differs(group, name)]
    return names


def _differs(points: Sequence[Point], name: str) -> bool:
    return len({repr(point.value(name)) for point in points}) > 1


def compare_rows(rows: Sequence[Row]) -> tuple[list[Row], Comparison | None]:
    """Return the rows whose runs all completed and did not diverge, and their comparison if their seeds allow one."""
    complete = [row for row in rows if not row.provisional]
    highest = DIVERGED * min((row.loss or 0.0 for row in complete), default=0.0)
    diverged = [
        row
        for row in complete
        if (row.loss or 0.0) > highest and any(point.diverged for point in row.points)
    ]
    complete = [row for row in complete if row not in diverged]
    if not complete or incomparable(rows):
        return complete, None
    runs = [{point.seed: point.loss(row.unit) for point in row.points} for row in complete]
    seeds = dict.fromkeys(seed for losses in runs for seed in losses)
    # Not of objects, which an integer beyond 64 bits in a damaged summary would make it.
    table = np.array([[losses.get(seed, nan) for seed in seeds] for losses in runs], dtype=float)
    return complete, compare(table)


def incomparable(rows: Sequence[Row]) -> str:
    """Return why the losses of rows do not compare, though their unit is the same; empty if they do."""
    parts = {
        point.validated: point.folder.name
        for row in rows
        for point in row.points
        if point.validated and point.loss(row.unit) is not None
    }
    if len(parts) > 1:
        advice = (
            "; eval_batches=null validates on the whole split"
            if " windows " in "".join(parts)
            else ""
        )
        which = "; ".join(f"{folder}: {part}" for part, folder in parts.items())
        return f"The runs were validated on different texts ({which}), so their losses are not comparable{advice}."
    for row in rows:
        known = [
            each
            for each in row.points
            if each.status == COMPLETED and each.loss(row.unit) is not None
        ]
        for one, other in combinations(known, 2):
            pair = f"{short_path(one.folder)} and {short_path(other.folder)} have the same settings"
            if "" not in (one.origin, other.origin) and one.origin != other.origin:
                return f"{pair}, but another training text or other weights at the start, so no row is compared."
            if one.seed == other.seed and one.loss(row.unit) != other.loss(row.unit):
                return f"{pair} and seed, but different losses, so no row is compared; remove one of the two."
    return ""


def highest_converged(losses: Sequence[float]) -> float:
    """Return the highest loss that is at most 5 times as far from the best as the median.

    Return the highest of all if most of them are equal.
    """
    best = min(losses)
    return max(loss for loss in losses if loss <= best + (5 * (median(losses) - best) or inf))


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
