"""Prune a sweep by successive halving: points are compared at rungs, and few train past each.

The rule is that of ASHA, for a grid and for a search: a point continues if it is in the best 40 %
of all points that have reached the rung; of a grid, also in earlier commands. It reads validation
curves only, so a resumed sweep makes the same decisions.
Sources: Jamieson & Talwalkar, 2016, https://arxiv.org/abs/1502.07943; Li et al., 2020,
https://arxiv.org/abs/1810.05934
"""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from statistics import mean
from typing import Any

from omegaconf import DictConfig

from minigpt.runs.overrides import is_planned
from minigpt.sweeps.results import BITS, COMPLETED, PAUSED, SKIPPED, Point
from minigpt.utils.errors import require
from minigpt.utils.extras import from_extras

RUNGS = (Fraction(1, 8), Fraction(1, 4), Fraction(1, 2))  # of max_steps
KEPT = Fraction(2, 5)  # of the points that have reached a rung


def rung_steps(cfg: DictConfig) -> list[int]:
    """Return the optimizer steps of the rungs of a run.

    They are the first validations at or after the fractions of max_steps.

    Raises:
        UserError: a setting is incompatible with pruning.
    """
    pruned = "with hydra.sweeper.prune=true"
    for key, expected in (("pause_at", "null"), ("resume", "null or auto")):
        require(key, cfg[key], lambda value: value is None, f"{expected} {pruned}")
    if is_planned(cfg):
        from_extras("refuse_pruning")(cfg)
    require(
        "eval_every",
        cfg.eval_every,
        lambda every: 4 * every < cfg.max_steps,  # rungs differ
        f"< {cfg.max_steps / 4:g} (max_steps / 4) {pruned}",
    )
    return [ceil(rung * cfg.max_steps / cfg.eval_every) * cfg.eval_every for rung in RUNGS]


def has_reached(point: Point, rung: int) -> bool:
    """Return whether a point is at a rung or past it, and its run has ended there."""
    steps = point.totals.get("steps", 0)
    return steps > point.rungs[rung] or (steps == point.rungs[rung] and point.status == PAUSED)


def loss_at(point: Point, rung: int) -> float | None:
    """Return the validation loss at a rung, in bits per byte.

    For a run that stopped early before it, this is the best loss.
    """
    best = point.loss(BITS) if point.status == COMPLETED else None
    return point.bits.get(point.rungs[rung], best)


def continuing(points: Sequence[Point], rung: int) -> list[Point]:
    """Return the points that continue after a rung.

    Points that differ only in their seed are one unit, compared by its mean loss; it has reached a
    rung when all of them have.
    """
    possible = [point for point in points if point.status != SKIPPED]
    losses: dict[str, list[Any]] = {}
    for point in possible:
        losses.setdefault(point.row, []).append(loss_at(point, rung))
    means = {unit: mean(each) for unit, each in losses.items() if None not in each}
    best = sorted(means, key=means.__getitem__)[: ceil(KEPT * len(means))]
    places = {unit: place for place, unit in enumerate(best)}
    kept = [point for point in possible if point.row in places]
    return sorted(kept, key=lambda point: places[point.row])
