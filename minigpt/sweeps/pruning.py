"""Prune a sweep by successive halving: which points train past a rung, a step at which points are compared.

The rule is that of ASHA, for a grid and for a search: a point continues if it is in the best 40 % of all points that
have reached the rung; of a grid, also in earlier commands. It reads validation curves only, so a resumed sweep makes
the same decisions.
Sources: Jamieson & Talwalkar, 2016, https://arxiv.org/abs/1502.07943; Li et al., 2020, https://arxiv.org/abs/1810.05934
"""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from statistics import mean
from typing import Any

from minigpt.sweeps.results import BITS, COMPLETED, PAUSED, SKIPPED, Point
from minigpt.utils.errors import require

RUNGS = (Fraction(1, 8), Fraction(1, 4), Fraction(1, 2))  # of max_steps
KEPT = Fraction(2, 5)  # of the points that have reached a rung


def rung_steps(cfg: Any) -> list[int]:
    """Return the optimizer steps of the rungs of a run: the first validations at or after the fractions of max_steps.

    Raises:
        UserError: a setting is incompatible with pruning.
    """
    given, steps, every = "with hydra.sweeper.prune=true", cfg.max_steps, cfg.eval_every
    for key, expected in (("pause_at", "null"), ("resume", "null or auto"), ("minutes", "null")):
        require(key, cfg[key], lambda value: value is None, f"{expected} {given}")
    require(
        "eval_every", every, lambda n: 4 * n < steps, f"< {steps / 4:g} (max_steps / 4) {given}"
    )  # distinct rungs
    return [ceil(rung * steps / every) * every for rung in RUNGS]


def has_reached(point: Point, rung: int) -> bool:
    """Return whether a point is at a rung or past it, and its run has ended there."""
    return (point.totals.get("steps", 0), point.status == PAUSED) >= (point.rungs[rung], True)


def loss_at(point: Point, rung: int) -> float | None:
    """Return the validation loss at a rung, in bits per byte; the best loss of a run that stopped early before it."""
    return point.bits.get(
        point.rungs[rung], point.loss(BITS) if point.status == COMPLETED else None
    )


def continuing(points: Sequence[Point], rung: int) -> list[Point]:
    """Return the points that continue after a rung.

    Points that differ only in their seed are one unit, compared by its mean loss; it has reached a rung when all of
    them have.
    """
    units: dict[str, list[Point]] = {}
    for point in points:
        if point.status != SKIPPED:
            units.setdefault(point.row, []).append(point)
    losses: dict[Any, Any] = {
        unit: [loss_at(point, rung) for point in group] for unit, group in units.items()
    }
    means = {unit: mean(values) for unit, values in losses.items() if None not in values}
    best = sorted(means, key=means.__getitem__)[: ceil(KEPT * len(means))]
    return [point for unit in best for point in units[unit]]


def paused_at(point: Point, points: Sequence[Point]) -> int | None:
    """Return the rung that a point has reached and after which it does not continue."""
    first = next(
        (rung for rung in range(len(point.rungs)) if point not in continuing(points, rung)),
        None,
    )
    return None if first is None or loss_at(point, first) is None else first
