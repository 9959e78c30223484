"""Summarize a sweep in sentences: the effects of settings, and the noise."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from minigpt.runs.overrides import quote_path
from minigpt.runs.run_dir import PLAN, command, short_path
from minigpt.sweeps.comparison import FAMILY_ERROR, Array, Comparison, shares
from minigpt.sweeps.ranking import Row, compare_rows, count_text, incomparable, numbers, seed_losses
from minigpt.sweeps.results import COMPLETED, NATS, PAUSED, SKIPPED, Point

MAX_EXCEPTIONS = 2  # to a sentence about a setting
_SEEDS = 3
_MAX_REPEATED = 4  # combinations of settings that the command with more seeds repeats


def answer(rows: Sequence[Row]) -> list[str]:
    """Return what the rows of `ranked` show, the most important first."""
    points = [point for row in rows for point in row.points]
    complete, comparison = compare_rows(rows)
    told = list(_incomplete(points))
    if not complete:
        return ["No run has completed with a loss, so nothing can be compared.", *told]
    if reason := incomparable(rows):
        return [reason, *told]
    if diverged := sum(bool(row.losses) and not row.provisional for row in rows) - len(complete):
        told.append(f"{diverged} {'row' if diverged == 1 else 'rows'} diverged; the comparison leaves them out.")
    if comparison is None or len(complete) == 1:
        return [*_unknown_noise(complete), *told]
    grid, incomplete = Grid.of(complete), "The grid is incomplete, so the effects of single settings are not estimated."
    described = _settings(grid, comparison) if grid else [incomplete]
    return [_best(complete), *described, *_late(complete), *told]


@dataclass(frozen=True)
class Grid:
    """Rows that are all combinations of the values of K settings.

    Args:
        levels: the values of each setting, in order.
        places: index of the value of each setting in each row.  (R, K)
    """

    rows: Sequence[Row]
    levels: dict[str, list[str]]
    places: Array

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Grid | None":
        """Return the grid of rows; None if combinations are missing."""
        levels = {}
        for name in rows[0].short_names:
            values = list(dict.fromkeys(row.value(name) for row in rows))
            levels[name] = sorted(values, key=float) if len(numbers(rows, name)) == len(values) else values
        levels = {name: values for name, values in levels.items() if len(values) > 1}
        places = np.array([[values.index(row.value(name)) for name, values in levels.items()] for row in rows])
        full = len(rows) > 1 and len(rows) == prod(map(len, levels.values()))
        return cls(rows, levels, places) if full else None

    def losses(self) -> Array:
        """Return the losses of all runs; NaN where a row lacks a seed.  (*levels, S)"""
        by_row = seed_losses(self.rows)
        cells = np.empty((*map(len, self.levels.values()), by_row.shape[1]))
        cells[tuple(self.places.T)] = by_row
        return cells


def _best(rows: Sequence[Row]) -> str:
    best, tied = rows[0], [row for row in rows[1:] if row.tied]
    n = len({point.seed for point in best.points})
    text = f"The lowest loss is {best.loss_text} {best.unit}: {best.label()} ({n} {'seed' if n == 1 else 'seeds'})."
    if not tied:
        return f"{text} All other rows are worse by more than the noise."
    flops = [(row.mean_of("flops") or np.inf, row.label()) for row in tied]
    part, label = min(flops)[0] / (best.mean_of("flops") or 1), min(flops)[1]
    cheaper = f"; with {100 * part:.0f} % of the FLOPs: {label}" if 0 < part < 0.9 and best.mean_of("flops") else ""
    return f"{text} {len(tied)} of the {len(rows) - 1} other rows {'is' if len(tied) == 1 else 'are'} tied{cheaper}."


def _settings(grid: Grid, comparison: Comparison) -> Iterator[str]:
    """Describe each setting of a grid, those with the largest share of the variance first, and what is left."""
    losses, names = grid.losses(), list(grid.levels)
    share: Any = shares(losses) if np.isfinite(losses).all() and np.ptp(losses) > 0 else None
    order = range(len(names)) if share is None else np.argsort(-share[: len(names), 0])
    for k in order:
        yield _setting(grid, comparison, int(k), "" if share is None else f", {_percent(share[k])}")
    if share is not None:
        interaction = f", and the interaction of settings is {_percent(share[-2])}" if len(names) > 1 else ""
        least = comparison.against(0)[1].max()
        text = f"The noise between seeds is {_percent(share[-1])}{interaction}"
        yield f"{text}; differences of rows below {least:.4f} are within the noise."


def _setting(grid: Grid, comparison: Comparison, k: int, share: str) -> str:
    """Describe a setting by the mean losses of its values, and list the exceptions."""
    name, values = list(grid.levels.items())[k]
    short, n = grid.rows[0].short_names[name], len(values)
    member = (grid.places[:, k] == np.arange(n)[:, None]).astype(float)  # (values, R)
    weights = member / member.sum(1, keepdims=True)
    best = int(np.argmin(weights @ comparison.means))
    contrasts = weights - weights[best]
    worse_by, margin = contrasts @ comparison.means, comparison.margin(contrasts, n, FAMILY_ERROR / len(grid.levels))
    worse = [i for i in np.argsort(worse_by) if worse_by[i] > margin[i]]
    tied = [values[i] for i in range(n) if i not in worse]
    places, n_places = _exceptions(grid, comparison, k, None), len(grid.rows) // n
    if 0 < len(places) < n_places / 2:
        return f"{short} matters in places{share}: {_some(places)}; elsewhere its values are tied."
    if not worse and places:
        return f"{short} matters{share}, but not on average: {_some(places)}."
    if not worse:
        text = f"{short} does not matter beyond the noise{share}: {_listed(values)} are tied (± {margin.max():.4f})"
    else:
        near, places = worse[0], _exceptions(grid, comparison, k, best)
        text = f"{short} matters{share}: {values[best]} is better than {values[near]} by "
        text += f"{worse_by[near]:.4f} ± {margin[near]:.4f}"
        text += f"; {_listed(tied)} are tied" if len(tied) > 1 else ""
        ends = {0: "smallest", n - 1: "largest"} if len(numbers(grid.rows, name)) == n and len(tied) == 1 else {}
        beyond = best in ends and float(values[best]) != 0
        text += f"; it is the {ends[best]} value, so the best may lie beyond" if beyond else ""
    return f"{text}; but {_some(places)}." if places else f"{text}."


def _exceptions(grid: Grid, comparison: Comparison, k: int, best: int | None) -> list[str]:
    """List the values of the other settings at which one has an effect or, given its best, another value is better."""
    (name, values), others = list(grid.levels.items())[k], np.delete(grid.places, k, 1)
    found, unit = [], np.eye(len(grid.rows))
    for place in np.unique(others, axis=0) if others.shape[1] else ():
        rows = np.flatnonzero((others == place).all(1))
        low = rows[np.argmin(comparison.means[rows])]
        usual = rows[np.argmax(comparison.means[rows])] if best is None else rows[grid.places[rows, k] == best][0]
        worse_by = comparison.means[usual] - comparison.means[low]
        margin = comparison.margin(unit[[usual]] - unit[[low]], len(grid.rows))[0]
        if worse_by > margin:
            where = grid.rows[low].label(name)
            pair = f"{values[int(grid.places[usual, k])]} is worse than {values[int(grid.places[low, k])]}"
            found.append((worse_by, f"at {where}, {pair} by {worse_by:.4f} ± {margin:.4f}"))
    return [text for _, text in sorted(found, reverse=True)]


def _late(rows: Sequence[Row]) -> Iterator[str]:
    """Yield which row would be the best if all continued to fall as in the last third of their training."""
    falls = [(row, fall) for row in rows if (fall := _last_fall(row)) is not None]
    if len(falls) > 1 and falls[0][0] is rows[0]:
        fastest, fall = min(falls, key=lambda pair: (pair[0].loss or np.inf) - pair[1])
        if fastest is not rows[0] and not fastest.tied:
            yield (
                f"{fastest.label()} was still falling faster: by {fall:.4f} in the last third of its training, the "
                f"best row by {falls[0][1]:.4f}; longer runs may rank it first."
            )


def _last_fall(row: Row) -> float | None:
    """Return by how much the loss fell in the last third of the training, in the unit of the row, mean over seeds."""
    falls = []
    for point in row.points:
        if len(point.curve) > 2:
            tokens, losses = np.array(point.curve).T
            scale = (point.loss(row.unit) or 0) / (point.loss(NATS) or np.inf)
            falls.append(scale * (np.interp(tokens[-1] * 2 / 3, tokens, losses) - losses[-1]))
    return float(np.mean(falls)) if falls else None


def _incomplete(points: Sequence[Point]) -> Iterator[str]:
    counts = Counter(point.status for point in points if point.status not in (COMPLETED, SKIPPED))
    if paused := counts.pop(PAUSED, 0):
        yield f"{paused} of {len(points)} runs are paused; their rows are not compared."
    if counts:
        yield f"Of {len(points)} runs, {count_text(counts)}: rows without all their runs are not compared."
    if missing := sum(point.status == COMPLETED and not point.totals.get("best_val_loss") for point in points):
        yield f"{missing} completed {'run has' if missing == 1 else 'runs have'} no finite loss."


def _unknown_noise(rows: Sequence[Row]) -> Iterator[str]:
    """Yield why noise and effects cannot be told apart, and the command that adds two seeds to the best rows."""
    best = f"The lowest loss is {rows[0].loss_text} {rows[0].unit}: {rows[0].label()}."
    if len(rows) == 1:
        yield f"{best} There is no other row to compare it with."
        return
    if any(len(row.losses) > 1 for row in rows):
        yield f"{best} Too few rows share seeds to separate effects from noise; run all rows with seed=1,2,3."
        return
    yield f"{best} Every row has one seed, so noise and effects cannot be told apart."
    for n in (3, 2, 1):  # the best rows, as long as the product of their values holds few others
        values = {name: {row.value(name): None for row in rows[:n]} for name in rows[0].short_names}
        if prod(map(len, values.values())) <= _MAX_REPEATED:
            break
    first = rows[0].points[0].seed
    seeds = ",".join(str(int(first) + i) for i in range(_SEEDS)) if first.isdecimal() else "1,2,3"
    if text := _extend(rows, {name: ",".join(each) for name, each in values.items()}, seeds):
        existing = sum(all(row.value(name) in each for name, each in values.items()) for row in rows)
        runs = _SEEDS * prod(map(len, values.values())) - existing
        yield f"Add two seeds to the best rows ({runs} runs): {text}"


def _extend(rows: Sequence[Row], values: Mapping[str, str], seeds: str) -> str:
    """Return the command that adds points to the grid of the rows; empty for other runs."""
    folder, *others = {point.folder.parent for row in rows for point in row.points}
    settings = {**rows[0].points[0].overrides, **values, "seed": seeds}
    ordered = any("#" in name or "{" in value for name, value in settings.items())  # else their order has no effect
    if others or ordered or not (folder / PLAN).exists() or settings.get("+sweep") == "search":
        return ""
    given = [name if name.startswith("~") else f"{name}={value}" for name, value in settings.items()]
    return command("train", "-m", *given, f"hydra.sweep.dir={quote_path(short_path(folder))}", "resume=auto")


def _percent(share: Array) -> str:
    return "{:.0f} % of the variance ({:.0f} to {:.0f} %)".format(*100 * share)


def _some(parts: Sequence[str]) -> str:
    more = [f"in {len(parts) - MAX_EXCEPTIONS} more places"] if len(parts) > MAX_EXCEPTIONS else []
    return _listed([*parts[:MAX_EXCEPTIONS], *more])


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
