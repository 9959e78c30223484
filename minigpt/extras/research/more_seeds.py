"""Add seeds to a sweep until the difference of each row from the baseline is clear.

The baseline is the row of the first values of all settings. A difference is clear if its interval
excludes 0 or if half of it is below a number. The sweep looks at its losses a few times, so its
intervals hold at all these looks together (Bonferroni): whichever look ends it, no more sweeps
have a false claim than without it. Each look widens the intervals, so there are few.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from math import ceil

from minigpt.sweeps.comparison import LEAST_SEEDS
from minigpt.sweeps.ranking import Row, Table, ranked
from minigpt.sweeps.results import SKIPPED, WAITING, Point
from minigpt.sweeps.sweeper import Grid
from minigpt.utils.errors import UserError, require
from minigpt.utils.terminal import log

SETTING = "hydra.sweeper.seeds_until"
MAX_LABELS = 3  # of rows that are printed


def seed_batches(grid: Grid, width: float) -> Iterator[list[Point]]:
    """Yield the checked points of a grid that run before each look at its losses.

    `grid.points` holds the points of a seed only once their batch is yielded. A resumed sweep
    starts at the first look that covers all seeds begun in its folder, so it makes the same
    decisions.

    Args:
        width: the half of an interval that is narrow enough.

    Raises:
        UserError: there are too few seeds, or no differences from the first row.
    """
    points = [*grid.points]
    seeds = _seeds(grid)
    place = {seed: i for i, seed in enumerate(seeds)}
    # Find the seeds that the folder has begun; points that never ran are removed.
    begun = 0
    folders = {point.folder for point in points}
    grid.existing = {
        identity: point for identity, point in grid.existing.items() if point.folder not in folders
    }
    for point in points:
        if point.status not in (SKIPPED, WAITING):
            begun = max(begun, place[point.seed] + 1)
    rows_of_grid = {point.row for point in points}
    for point in grid.other_points():
        if point.status == WAITING and point.row in rows_of_grid:
            del grid.existing[point.identity]
    # Divide the points by the looks before which they run.
    schedule = looks(len(seeds))
    grid.looks = max(grid.looks, len(schedule))
    schedule = [look for look in schedule if look >= begun]
    batches: list[list[Point]] = [[] for _ in schedule]
    for point in points:
        batches[bisect_right(schedule, place.get(point.seed, 0))].append(point)
    grid.most_jobs = max(map(len, batches))
    grid.points.clear()
    for look, batch in zip(schedule, batches, strict=True):
        grid.points += batch
        yield batch
        # Look at the losses.
        table = ranked([*grid.points, *grid.other_points()], grid.looks)
        rows = unclear(table, width, rows_of_grid)
        log(_look_text(table, rows, seeds[:look], len(seeds)))
        if not rows:
            break


def _seeds(grid: Grid) -> list[str]:
    # The values of seed, after refusing what the looks cannot compare.
    require("pause_at", grid.cfg.pause_at, lambda step: step is None, f"null with {SETTING}")
    possible = [point for point in grid.points if point.status != SKIPPED]
    seeds = [*dict.fromkeys(point.seed for point in possible)]
    require(
        "seed",
        ",".join(seeds),
        lambda _: len(seeds) > LEAST_SEEDS,
        f"at least {LEAST_SEEDS + 1} values with {SETTING}, such as 'seed=range(1,21)'",
    )
    if len({point.row for point in possible}) == 1:
        raise UserError(
            f"{SETTING} compares rows; give another setting several values, or leave it out"
        )
    baseline = grid.points[0]
    if baseline.status == SKIPPED:
        raise UserError(
            f"{SETTING} compares with the first values of all settings, which are impossible: "
            f"{baseline.reason}"
        )
    return seeds


def _look_text(table: Table, rows: Sequence[Row], seeds: Sequence[str], most: int) -> str:
    of_all = f"{len(seeds)} of {most} seeds"
    if rows:
        labels = [row.label() for row in rows[:MAX_LABELS]]
        more = f" and {len(rows) - MAX_LABELS} more" if len(rows) > MAX_LABELS else ""
        return f"{of_all}: differences from the first row are not clear: {'; '.join(labels)}{more}"
    if table.baseline not in table.compared or len(table.compared) == 1 or table.incomparable:
        return f"{of_all}: no row is compared with the first, so more seeds would not help"
    return f"{of_all} were enough: {', '.join(seeds)}"


def looks(most: int) -> list[int]:
    """Return after how many seeds a sweep looks: 3, 5, 8, 12, 18 …, each by half more, and all."""
    counts = [LEAST_SEEDS]
    while (further := ceil(1.5 * counts[-1])) < most:
        counts.append(further)
    return [*counts, most]


def unclear(table: Table, width: float, rows: Collection[str]) -> list[Row]:
    """Return the rows whose differences from the baseline are not clear.

    Rows that are not compared, because runs failed or diverged, are none of them: more seeds would
    not help.

    Args:
        rows: `Point.row` of those that may have more seeds.
    """
    compared = list(table.compared)
    baseline = table.baseline
    if baseline not in compared or table.incomparable:
        return []
    if table.comparison is None:  # the noise is unknown, or rows share no seeds yet
        return [row for row in compared if row is not baseline and row.points[0].row in rows]
    differences, margins = table.comparison.against(compared.index(baseline))
    return [
        row
        for row, difference, margin in zip(compared, differences, margins, strict=True)
        if row is not baseline
        and row.points[0].row in rows
        and margin >= max(abs(difference), width)
    ]
