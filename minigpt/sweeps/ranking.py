"""Rank the points of a sweep: average over seeds, in a unit that makes losses comparable.

A row is of the points that differ only in their seed; `compare_rows` tests their differences.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, combinations
from math import inf, isfinite, nan
from statistics import mean, median

import numpy as np

from minigpt.runs.run_dir import short_path
from minigpt.sweeps.comparison import Comparison, compare
from minigpt.sweeps.point_settings import short_names
from minigpt.sweeps.results import BITS, COMPLETED, DIVERGED, NATS, SKIPPED, Point


@dataclass(frozen=True, eq=False)  # of thousands of rows, comparisons by value would take minutes
class Row:
    """Points that differ only in their seed: one row of the table.

    Args:
        overrides: the values of the settings in which rows differ, as they were written or by
            default.
        unit: unit of the losses, `NATS` or `BITS`.
        short_names: short name of each setting in which rows differ.
        rank: from 1; empty without a loss, and for all rows if they are `incomparable`.
        adjusted: mean loss as if the row had the seeds of all rows; None if it is not compared.
        interval: half of the 95 % interval of the mean loss over seeds; None if the noise is
            unknown.
        difference: from the mean loss of the first row.
        margin: half of the interval of the difference, which holds for all rows together.

    Properties:
        losses: best validation loss of each point that has one; of equal runs once.
        n_seeds: number of seeds that have a loss.
        loss: mean of the best losses over seeds.
        tied: whether the row is no different from the first row, as far as the noise allows to
            tell.
        loss_text: the mean and its 95 % interval, such as `1.7000 ± 0.0183`.
        provisional: whether a run has not completed or has no loss, so that the mean is not that of
            all seeds.
        status: of the points, with counts if they differ.
        reason: why points failed or were skipped.

    Methods:
        in_unit: the row with losses in a unit; intervals are in that of the ranking only.
        mean_of: mean of one of the `TOTALS` over the points that have it.
        number: the value of a setting as a float; NaN if it is not a number.
        value: the value of a setting; "default" for a group that was not given.
        label: the overrides by short name, except `without`; the folder of a run without any.
    """

    overrides: Mapping[str, str]
    points: Sequence[Point]
    unit: str
    short_names: Mapping[str, str]
    rank: str = ""
    adjusted: float | None = None
    interval: float | None = None
    difference: float | None = None
    margin: float | None = None

    @property
    def losses(self) -> list[float]:
        found = dict.fromkeys((point.seed, point.loss(self.unit)) for point in self.points)
        return [loss for _, loss in found if loss is not None]

    @property
    def n_seeds(self) -> int:
        return len({point.seed for point in self.points if point.loss(self.unit) is not None})

    @property
    def loss(self) -> float | None:
        return self.adjusted if self.adjusted is not None else _mean(self.losses)

    @property
    def tied(self) -> bool:
        return self.margin is not None and abs(self.difference or 0.0) <= self.margin

    @property
    def loss_text(self) -> str:
        interval = "" if self.interval is None else f" ± {self.interval:.4f}"
        return "–" if self.loss is None else f"{self.loss:.4f}{interval}"

    @property
    def provisional(self) -> bool:
        return any(point.pending or point.loss(self.unit) is None for point in self.points)

    @property
    def status(self) -> str:
        counts = Counter(point.status_text for point in self.points)
        return self.points[0].status_text if len(counts) == 1 else count_text(counts)

    @property
    def reason(self) -> str:
        return "; ".join(dict.fromkeys(point.reason for point in self.points if point.reason))

    def in_unit(self, unit: str) -> "Row":
        if unit == self.unit:
            return self
        row = replace(self, unit=unit, adjusted=None, interval=None)
        raw = _mean(self.losses)
        if self.adjusted is None or row.loss is None or not raw:
            return row
        return replace(row, adjusted=row.loss * self.adjusted / raw)

    def mean_of(self, total: str) -> float | None:
        return _mean([point.totals[total] for point in self.points if point.totals.get(total)])

    def number(self, name: str) -> float:
        try:
            return float(self.overrides.get(name, nan))
        except ValueError:
            return nan

    def value(self, name: str) -> str:
        return self.overrides.get(name, "default")

    def label(self, without: str | None = None) -> str:
        parts = [
            f"{self.short_names[name]}={value}"
            for name, value in self.overrides.items()
            if name != without
        ]
        if parts or self.short_names:
            return ", ".join(parts) or "defaults"
        return "all runs" if len(self.points) > 1 else self.points[0].folder.name


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


def ranked(points: Sequence[Point]) -> list[Row]:
    """Group points by their settings without the seed; return the lowest mean loss first.

    Rows with runs that did not complete come after all others, and rows without a loss last. All
    others are compared over the seeds that they share, if their losses are of the same text.
    """
    # Losses per token do not compare if tokens differ in their mean length, as over tokenizers and
    # corpora. The ratio of the two losses of a point is proportional to its bytes per token.
    pairs = [(point.loss(NATS), point.loss(BITS)) for point in points]
    lengths = [nats / bits for nats, bits in pairs if nats and bits]
    unit = BITS if lengths and max(lengths) > 1.001 * min(lengths) else NATS
    # A row per group of points; a value that was written in two ways has one name.
    groups: dict[tuple[str, bool], list[Point]] = {}
    for point in points:
        groups.setdefault((point.row, point.status == SKIPPED), []).append(point)
    names = _names(points)
    texts: dict[tuple[str, str], str | None] = {}
    rows = []
    for group in groups.values():
        known = {
            name: texts.setdefault((name, repr(group[0].value(name))), group[0].text(name))
            for name in names
        }
        overrides = {name: text for name, text in known.items() if text is not None}
        rows.append(Row(overrides, group, unit, short_names(names)))
    rows.sort(key=lambda row: (row.loss is None, row.provisional, row.loss or 0.0))
    # Of rows that are compared, the ranks are by their adjusted means.
    complete, comparison = compare_rows(rows)
    if comparison is not None:
        differences, margins = comparison.against(int(np.argmin(comparison.means)))
        compared = [
            replace(
                row,
                adjusted=float(comparison.means[i]),
                interval=float(comparison.interval[i]),
                difference=float(differences[i]),
                margin=float(margins[i]),
            )
            for i, row in enumerate(complete)
        ]
        rows = [
            *sorted(compared, key=lambda row: row.loss or 0.0),
            *(row for row in rows if row not in complete),
        ]
    # Rows without a loss have no rank, nor has any if their losses do not compare.
    reason = incomparable(rows)
    return [
        replace(row, rank="" if reason or not row.losses else str(rank))
        for rank, row in enumerate(rows, 1)
    ]


def _names(points: Sequence[Point]) -> list[str]:
    # The settings that tell points apart: those that were given, and others where these are equal.
    given = dict.fromkeys(chain.from_iterable(point.written for point in points))
    names = [
        name for name in given if name != "seed" and (len(points) == 1 or _differs(points, name))
    ]
    alike: dict[str, list[Point]] = {}
    for point in points:
        alike.setdefault(repr([point.value(name) for name in names]), []).append(point)
    for group in alike.values():
        more = dict.fromkeys(chain.from_iterable(point.settings for point in group))
        names += [name for name in more if name not in ("seed", *names) and _differs(group, name)]
    return names


def _differs(points: Sequence[Point], name: str) -> bool:
    return len({repr(point.value(name)) for point in points}) > 1


def points_of(rows: Iterable[Row]) -> list[Point]:
    """Return the points of rows, in order."""
    return list(chain.from_iterable(row.points for row in rows))


def compare_rows(rows: Sequence[Row]) -> tuple[list[Row], Comparison | None]:
    """Return the rows whose runs all completed, and their comparison, without diverged rows.

    The comparison is None if the rows are `incomparable` or their seeds allow none.
    """
    complete = [row for row in rows if not row.provisional]
    if not complete or incomparable(rows):
        return complete, None
    # Rows of diverged runs are left out, if their losses are far above the best.
    highest = DIVERGED * min(row.loss or 0.0 for row in complete)
    for row in complete[:]:
        if (row.loss or 0.0) > highest and any(point.diverged for point in row.points):
            complete.remove(row)
    seeds = list(dict.fromkeys(point.seed for point in points_of(complete)))
    losses = np.full((len(complete), len(seeds)), nan)  # (R, S)
    for i, row in enumerate(complete):
        for point in row.points:
            losses[i, seeds.index(point.seed)] = point.loss(row.unit)
    return complete, compare(losses)


def incomparable(rows: Sequence[Row]) -> str:
    """Return why the losses of rows do not compare, though their unit is the same, or nothing."""
    parts = {
        point.validated: point.folder.name
        for point in points_of(rows)
        if point.validated and point.loss(rows[0].unit) is not None
    }
    if len(parts) > 1:
        which = "; ".join(f"{folder}: {part}" for part, folder in parts.items())
        whole = "; eval_batches=null validates on the whole split"
        return (
            f"The runs were validated on different texts ({which}), so their losses are not "
            f"comparable{whole if ' windows ' in ''.join(parts) else ''}."
        )
    for row in rows:
        completed = [
            point
            for point in row.points
            if point.status == COMPLETED and point.loss(row.unit) is not None
        ]
        for one, other in combinations(completed, 2):
            pair = f"{short_path(one.folder)} and {short_path(other.folder)} have the same settings"
            checksums = {one.provenance_checksum, other.provenance_checksum}
            if len(checksums) > 1 and "" not in checksums:
                return (
                    f"{pair}, but another training text or other weights at the start, so no row "
                    "is compared."
                )
            if one.seed == other.seed and one.loss(row.unit) != other.loss(row.unit):
                return (
                    f"{pair} and seed, but different losses, so no row is compared; remove one of "
                    "the two."
                )
    return ""


def highest_converged(losses: Sequence[float]) -> float:
    """Return the highest loss that is at most 5 times as far from the best as the median.

    Return the highest of all if most of them are equal.
    """
    best = min(losses)
    limit = best + (5 * (median(losses) - best) or inf)
    return max(loss for loss in losses if loss <= limit)


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the (cost, loss) pairs that no other pair dominates, cheapest first."""
    ordered = sorted(points)
    lowest = [inf, *accumulate((loss for _, loss in ordered), min)]  # before each pair
    return [pair for pair, low in zip(ordered, lowest, strict=False) if pair[1] < low]


def numbers(rows: Iterable[Row], name: str) -> list[float]:
    """Return the numbers that a setting takes, in order."""
    return sorted({row.number(name) for row in rows if isfinite(row.number(name))})


def count_text(counts: Mapping[str, int]) -> str:
    """Return counts as text, such as `2 completed, 1 failed`."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
