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

from minigpt.sweeps.results import BITS, COMPLETED, PAUSED, SKIPPED, Point
from minigpt.sweeps.sweeper import Grid
from minigpt.utils.errors import UserError, require
from minigpt.utils.terminal import log

RUNGS = (Fraction(1, 8), Fraction(1, 4), Fraction(1, 2))  # of max_steps
KEPT = Fraction(2, 5)  # of the points that have reached a rung


def rung_steps(cfg: DictConfig) -> list[int]:
    """Return the optimizer steps of the rungs of a run.

    They are the first validations at or after the fractions of max_steps.

    Raises:
        UserError: a setting is incompatible with pruning.
    """
    pruned = "with hydra.sweeper.prune=true"
    for key, expected in (("pause_at", "null"), ("resume", "null or auto"), ("minutes", "null")):
        require(key, cfg[key], lambda value: value is None, f"{expected} {pruned}")
    require(
        "eval_every",
        cfg.eval_every,
        lambda every: 4 * every < cfg.max_steps,  # rungs differ
        f"< {cfg.max_steps / 4:g} (max_steps / 4) {pruned}",
    )
    return [ceil(rung * cfg.max_steps / cfg.eval_every) * cfg.eval_every for rung in RUNGS]


def prune(grid: Grid, batch: Sequence[Point]) -> list[Point]:
    """Run a batch of points to each rung; return those that continue to their end.

    Raises:
        UserError: points validate on different texts, or rungs are at different fractions of
            max_steps.
    """
    # A search that resumes chooses its later points again, after the earlier ones have paused; a
    # grid compares its points with the others of its folder.
    others = [] if grid.compares_batches else grid.other_points()
    check_one_text(grid, [*grid.points, *others])
    _check_fractions([*grid.points, *others])
    kept = [*batch]
    for rung in range(len(RUNGS)):
        steps = {
            point.folder: point.rungs[rung]
            for point in kept
            if point.pending and not has_reached(point, rung)
        }
        grid.launch(kept, steps)
        kept = _continuing_of(kept, grid, others, rung)
    return kept


def check_one_text(grid: Grid, points: Sequence[Point]) -> None:
    """Raise UserError if points are, or will be, validated on different texts."""
    texts = {point.validated or grid.texts.get(point.folder, "") for point in points} - {""}
    if len(texts) > 1:
        raise UserError(
            "pruning and searches need one validation text for all points, "
            f"got {'; '.join(sorted(texts))}"
        )


def _check_fractions(points: Sequence[Point]) -> None:
    fractions = set()
    for point in points:
        fractions.add(tuple(step / point.settings["max_steps"] for step in point.rungs))
    if len(fractions - {()}) > 1:
        raise UserError(
            "eval_every must let all points validate at the same fractions of max_steps "
            "with hydra.sweeper.prune=true; use one that divides max_steps / 8"
        )


def _continuing_of(
    batch: Sequence[Point], grid: Grid, others: Sequence[Point], rung: int
) -> list[Point]:
    folders = {point.folder for point in batch if point.status != SKIPPED}
    reached = [
        point
        for point in grid.points
        if point.folder in folders and loss_at(point, rung) is not None
    ]
    # Rows do not wait for others that are not at the rung.
    compared = [*grid.points, *(other for other in others if loss_at(other, rung) is not None)]
    kept = [point for point in continuing(compared, rung) if point.folder in folders]
    steps = sorted({point.rungs[rung] for point in reached})
    log(f"rung at step {', '.join(map(str, steps))}: {len(kept)} of {len(reached)} continue")
    return kept


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
