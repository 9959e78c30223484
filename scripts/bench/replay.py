"""Replay finished sweeps: would pruning find a best row, at which cost, and does the fit predict the largest size?

    python scripts/bench/replay.py runs/sweeps/lr runs/sweeps/heads

A pruned run is bit for bit the beginning of the whole run, so pruning is replayed on the learning curves. Every seed is
replayed as a sweep of its own, and all seeds together; a winner counts if it is tied with the best row over all seeds.
For sweeps of at least five sizes, the largest is left out of the fit and predicted.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from minigpt.sweeps.pruning import RUNGS, continuing
from minigpt.sweeps.ranking import Row, compare_rows, loss_law, ranked
from minigpt.sweeps.results import Point, read_sweep


def prune(rows: Sequence[Row], seeds: Sequence[str]) -> tuple[bool, float]:
    """Return whether the winner among runs with `seeds` is tied with the best row, and the share of the FLOPs."""
    points, places = [], {}
    for i, row in enumerate(rows):
        for point in row.points:
            if point.seed in seeds:
                steps = sorted(point.bits)
                rungs = [next(step for step in steps if step >= part * steps[-1]) for part in RUNGS]
                points.append(replace(point, rungs=rungs))
                places[point.folder] = i
    active, cost, before = points, 0.0, {point.folder: 0.0 for point in points}
    for rung in [*range(len(RUNGS)), None]:
        for point in active:
            until = 1.0 if rung is None else point.rungs[rung] / max(point.bits)
            cost += (until - before[point.folder]) * point.totals["flops"]
            before[point.folder] = until
        if rung is not None:
            active = continuing(active, rung)
    winner = min({places[point.folder] for point in active}, key=lambda i: _mean(rows[i], seeds))
    return winner == 0 or rows[winner].tied, cost / sum(point.totals["flops"] for point in points)


def _mean(row: Row, seeds: Sequence[str]) -> float:
    return float(np.mean([point.totals["best_val_loss"] for point in row.points if point.seed in seeds]))


def leave_out_largest(points: Sequence[Point]) -> str:
    """Return whether the best loss of the largest size is in the interval that the other sizes predict."""
    largest = max(point.totals["params"] for point in points)
    rest = [point for point in points if point.totals["params"] < largest]
    complete, comparison = compare_rows(ranked(rest))
    law = loss_law(complete, "params", comparison.noise_of_means if comparison else 0.0)
    if law is None:
        return "no fit"
    row = next(row for row in ranked(points) if row.mean_of("params") == largest)
    low, middle, high = law.predict(np.array([largest]))[:, 0]
    inside = "inside" if low <= (row.loss or np.inf) <= high else "OUTSIDE"
    return f"predicted {middle:.4f} ({low:.4f} to {high:.4f}), measured {row.loss:.4f}: {inside}"


def main() -> None:
    """Replay the sweeps of the command line and print a line for each."""
    results = []
    for folder in map(Path, sys.argv[1:]):
        points = read_sweep(folder)
        rows = [row for row in ranked(points) if row.losses and not row.provisional]
        seeds = list(dict.fromkeys(point.seed for point in points))
        found = [prune(rows, [seed]) for seed in seeds] + ([prune(rows, seeds)] if len(seeds) > 1 else [])
        results += found
        text = f"winner tied {sum(tied for tied, _ in found)} of {len(found)}, "
        text += f"FLOPs {np.mean([share for _, share in found]):.2f} of the grid"
        sizes = {point.totals["params"] for point in points}
        print(f"{folder.name}: {text}" + (f"; {leave_out_largest(points)}" if len(sizes) > 4 else ""))
    tied, share = np.mean(results, axis=0)
    print(f"all: winner tied {tied:.3f} of {len(results)}, FLOPs {share:.3f} of the grids")


if __name__ == "__main__":
    main()
