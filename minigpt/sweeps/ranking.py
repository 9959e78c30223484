"""Rank the points of a sweep: average over seeds, in a unit that makes losses comparable."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from math import nan
from statistics import mean

import numpy as np

from minigpt.runs.run_dir import short_path
from minigpt.sweeps.comparison import Array, Comparison, compare
from minigpt.sweeps.point_settings import short_names
from minigpt.sweeps.results import BITS, COMPLETED, DIVERGED, LOSS_NAMES, NATS, SKIPPED, Point
from minigpt.sweeps.table import COSTS, Row, Table, count_text, points_of


def ranked(points: Sequence[Point]) -> Table:
    """Group points by their settings without the seed, and compare the groups.

    All rows whose runs completed are compared over the seeds that they share, if their losses are
    of the same text; without rows of diverged runs, if their losses are far above the best.
    """
    unit = _unit(points)
    short = short_names(_names(points))
    rows = _rows(points, unit, short)
    rows.sort(key=lambda row: (row.loss is None, row.provisional, row.loss or 0.0))
    # Find the rows that are compared.
    reason = _incomparable(rows, unit)
    complete = [row for row in rows if not row.provisional]
    compared = complete
    comparison = None
    if complete and not reason:
        compared = _without_diverged(complete)
        comparison = compare(_losses(compared, unit))
    # Order them by their adjusted means.
    if comparison is not None:
        order = np.argsort(comparison.means, kind="stable")
        comparison = comparison.of_rows(order)
        others = [row for row in rows if row not in compared]
        compared = [compared[i] for i in order]
        rows = [*compared, *others]
        _write_comparison(compared, comparison, unit)
    for rank, row in enumerate(rows, 1):
        if row.losses and not reason:
            row.rank = str(rank)
    return Table(
        rows=rows,
        unit=unit,
        short_names=short,
        compared=compared,
        comparison=comparison,
        n_diverged=len(complete) - len(compared),
        incomparable=reason,
        best=rows[0] if rows[0].rank else None,
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
    return names


def _differs(points: Sequence[Point], name: str) -> bool:
    return len({repr(point.value(name)) for point in points}) > 1


def _rows(points: Sequence[Point], unit: str, short: Mapping[str, str]) -> list[Row]:
    # A row per group of points; a value that was written in two ways has one name.
    groups: dict[tuple[str, bool], list[Point]] = {}
    for point in points:
        groups.setdefault((point.row, point.status == SKIPPED), []).append(point)
    texts: dict[tuple[str, str], str | None] = {}
    rows = []
    for group in groups.values():
        known = {
            name: texts.setdefault((name, repr(group[0].value(name))), group[0].text(name))
            for name in short
        }
        overrides = {name: text for name, text in known.items() if text is not None}
        rows.append(_row(group, unit, overrides, short))
    return rows


def _row(
    points: Sequence[Point], unit: str, overrides: Mapping[str, str], short: Mapping[str, str]
) -> Row:
    name = "all runs" if len(points) > 1 else points[0].folder.name
    losses = {each: _distinct_losses(points, each) for each in LOSS_NAMES}
    means = {each: _mean(losses[each]) for each in LOSS_NAMES}
    statuses = Counter(point.status_text for point in points)
    return Row(
        overrides=overrides,
        labels={key: f"{short[key]}={value}" for key, value in overrides.items()},
        name="defaults" if short else name,
        points=points,
        losses=losses[unit],
        n_seeds=len({point.seed for point in points if point.loss(unit) is not None}),
        means=means,
        loss=means[unit],
        costs={cost: _mean_cost(points, cost) for cost in COSTS},
        provisional=any(point.pending or point.loss(unit) is None for point in points),
        status=points[0].status_text if len(statuses) == 1 else count_text(statuses),
        diverged=any(point.diverged for point in points),
        reason="; ".join(dict.fromkeys(point.reason for point in points if point.reason)),
    )


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
        whole = "; eval_batches=null validates on the whole split"
        in_part = any(point.validated_in_part for point in validated)
        return (
            f"The runs were validated on different texts ({which}), so their losses are not "
            f"comparable{whole if in_part else ''}."
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


def _without_diverged(rows: Sequence[Row]) -> list[Row]:
    highest = DIVERGED * min(row.loss or 0.0 for row in rows)
    return [row for row in rows if (row.loss or 0.0) <= highest or not row.diverged]


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
