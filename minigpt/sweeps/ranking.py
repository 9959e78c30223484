"""Rank the points of a sweep: average over seeds, in a unit that makes losses comparable.

`ranked` fills in a table of rows, best first, and how they compare; the answer, the plots and the
files of a report read it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from math import isfinite, nan
from statistics import mean

import numpy as np

from minigpt.runs.run_dir import short_path
from minigpt.sweeps.comparison import Array, Comparison, compare
from minigpt.sweeps.point_settings import short_names
from minigpt.sweeps.results import BITS, COMPLETED, DIVERGED, LOSS_NAMES, NATS, SKIPPED, Point

COSTS = ("params", "flops", "tokens_per_second", "seconds")  # of the totals of a point


@dataclass(eq=False)  # comparing thousands of rows by value would be slow
class Row:
    """Points that differ only in their seed.

    Args:
        overrides: the values of the settings in which rows differ, as they were written or by
            default; without groups that were not given.
        labels: each of these overrides by its short name, such as `n_head=4`; or what a row
            without overrides is called.
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
        label: the labels, except that of the setting `without`.
    """

    overrides: Mapping[str, str]
    labels: Mapping[str, str]
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
        labels = (label for name, label in self.labels.items() if name != without)
        return ", ".join(labels) or "defaults"


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of one or several sweeps.

    Args:
        rows: best first; rows with runs that did not complete come after all others, and rows
            without a loss last.
        baseline: the row of the first point.
        unit: of the losses, `NATS` or `BITS`.
        short_names: short name of each setting in which rows differ.
        compared: the rows whose runs all completed, without diverged ones.
        comparison: of these rows, in their order; None if losses are `incomparable`, or if seeds
            allow none.
        incomparable: why the losses do not compare, though their unit is the same; or nothing.
    """

    rows: Sequence[Row]
    baseline: Row
    unit: str
    short_names: Mapping[str, str]
    compared: Sequence[Row]
    comparison: Comparison | None
    incomparable: str


def ranked(points: Sequence[Point], looks: int = 1) -> Table:
    """Group points by their settings without the seed, and compare the groups.

    All rows whose runs completed are compared over the seeds that they share, if their losses are
    of the same text; without rows of diverged runs, if their losses are far above the best.

    Args:
        looks: as in `Comparison`.
    """
    unit = _unit(points)
    short = short_names(_names(points))
    of_points = _rows(points, unit, short)
    rows = sorted(
        of_points,
        key=lambda row: (row.loss is None, row.provisional, row.loss or 0.0),
    )
    # Find the rows that are compared.
    reason = _incomparable(rows, unit)
    complete = [row for row in rows if not row.provisional]
    compared = complete
    comparison = None
    if complete and not reason:
        highest = DIVERGED * min(row.loss or 0.0 for row in complete)
        compared = [row for row in complete if (row.loss or 0.0) <= highest or not row.diverged]
        comparison = compare(_losses(compared, unit), looks)
    # Order them by their adjusted means.
    if comparison is not None:
        order = np.argsort(comparison.means, kind="stable")
        comparison = comparison.of_rows(order)
        compared = [compared[i] for i in order]
        rows = [*compared, *(row for row in rows if row not in compared)]
        _write_comparison(compared, comparison, unit)
    for rank, row in enumerate(rows, 1):
        if row.losses and not reason:
            row.rank = str(rank)
    return Table(
        rows=rows,
        baseline=of_points[0],
        unit=unit,
        short_names=short,
        compared=compared,
        comparison=comparison,
        incomparable=reason,
    )


def _unit(points: Sequence[Point]) -> str:
    # Losses per token do not compare if tokens differ in their mean length, as over tokenizers and
    # corpora. The ratio of the two losses of a point is proportional to its bytes per token.
    pairs = [(point.loss(NATS), point.loss(BITS)) for point in points]
    lengths = [nats / bits for nats, bits in pairs if nats and bits]
    return BITS if lengths and max(lengths) > 1.001 * min(lengths) else NATS


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
    if "code" not in names and _differs(points, "code"):
        names.append("code")
    return names


def _differs(points: Sequence[Point], name: str) -> bool:
    # Of a point that did not compose, the code is not known, and does not matter.
    known = [point for point in points if name != "code" or point.status != SKIPPED]
    return len({repr(point.value(name)) for point in known}) > 1


def _rows(points: Sequence[Point], unit: str, short: Mapping[str, str]) -> list[Row]:
    # A row per group of points; a value that was written in two ways has one name.
    groups: dict[tuple[str, bool], list[Point]] = {}
    for point in points:
        groups.setdefault((point.row, point.status == SKIPPED), []).append(point)
    texts: dict[tuple[str, str], str | None] = {}
    if "code" in short:
        texts = {("code", repr(value)): text for value, text in _code_labels(points).items()}
    rows = []
    for group in groups.values():
        # What it is called: its settings, but for a group that was not given.
        known = {
            name: texts.setdefault((name, repr(group[0].value(name))), group[0].text(name))
            for name in short
        }
        overrides = {name: text for name, text in known.items() if text is not None}
        labels = {key: f"{short[key]}={value}" for key, value in overrides.items()}
        without_settings = "all runs" if len(group) > 1 else group[0].folder.name
        # What its runs reached.
        losses = {each: _distinct_losses(group, each) for each in LOSS_NAMES}
        means = {each: _mean(of_seeds) for each, of_seeds in losses.items()}
        statuses = Counter(point.status_text for point in group)
        rows.append(
            Row(
                overrides=overrides,
                labels=labels if short else {"": without_settings},
                points=group,
                losses=losses[unit],
                n_seeds=len({point.seed for point in group if point.loss(unit) is not None}),
                means=means,
                loss=means[unit],
                costs={cost: _mean_cost(group, cost) for cost in COSTS},
                provisional=any(point.pending or point.loss(unit) is None for point in group),
                status=group[0].status_text if len(statuses) == 1 else count_text(statuses),
                diverged=any(point.diverged for point in group),
                reason="; ".join(dict.fromkeys(point.reason for point in group if point.reason)),
            )
        )
    return rows


def _code_labels(points: Sequence[Point]) -> dict[object, str | None]:
    # Revisions as they were typed, with a checksum where one name is that of several versions.
    labels = {point.value("code"): point.text("code") for point in points}
    names = Counter(labels.values())
    for point in points:
        if names[point.text("code")] > 1:
            checksum = str(point.code.get("code_sha256", "unknown"))
            labels[point.value("code")] = f"{point.text('code')} ({checksum[:8]})"
    return labels


def _distinct_losses(points: Sequence[Point], unit: str) -> list[float]:
    found = dict.fromkeys((point.seed, point.loss(unit)) for point in points)
    return [loss for _, loss in found if loss is not None]


def _mean_cost(points: Sequence[Point], cost: str) -> float | None:
    return _mean([point.totals[cost] for point in points if point.totals.get(cost)])


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


def _incomparable(rows: Sequence[Row], unit: str) -> str:
    validated = [
        point for point in points_of(rows) if point.validated and point.loss(unit) is not None
    ]
    parts = {point.validated: point.folder.name for point in validated}
    if len(parts) > 1:
        which = "; ".join(f"{folder}: {part}" for part, folder in parts.items())
        in_part = any(point.validated_in_part for point in validated)
        advice = "; eval_batches=null validates on the whole split" if in_part else ""
        return (
            f"The runs were validated on different texts ({which}), so their losses are not "
            f"comparable{advice}."
        )
    for row in rows:
        completed = [
            point
            for point in row.points
            if point.status == COMPLETED and point.loss(unit) is not None
        ]
        for one, other in combinations(completed, 2):
            pair = f"{short_path(one.folder)} and {short_path(other.folder)} have the same settings"
            checksums = {one.provenance_checksum, other.provenance_checksum}
            if len(checksums) > 1 and "" not in checksums:
                return (
                    f"{pair}, but another training text or other weights at the start, so no row "
                    "is compared."
                )
            if one.seed == other.seed and one.loss(unit) != other.loss(unit):
                return (
                    f"{pair} and seed, but different losses, so no row is compared; remove one of "
                    "the two."
                )
    return ""


def _losses(rows: Sequence[Row], unit: str) -> Array:
    seeds = list(dict.fromkeys(point.seed for point in points_of(rows)))
    losses = np.full((len(rows), len(seeds)), nan)  # (R, S)
    for i, row in enumerate(rows):
        for point in row.points:
            losses[i, seeds.index(point.seed)] = point.loss(unit)
    return losses


def _write_comparison(rows: Sequence[Row], comparison: Comparison, unit: str) -> None:
    # The rows are in the order of the comparison, the best first.
    differences, margins = comparison.against(0)
    for i, row in enumerate(rows):
        row.loss = float(comparison.means[i])
        row.interval = float(comparison.interval[i])
        row.difference = float(differences[i])
        row.margin = float(margins[i])
        row.tied = abs(row.difference) <= row.margin
        # The means in both units are adjusted by one factor.
        raw = row.means[unit]
        for other, unadjusted in row.means.items():
            if unadjusted is not None and raw:
                row.means[other] = unadjusted * row.loss / raw
        row.means[unit] = row.loss


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
