"""Summarize a sweep in sentences: the effects of settings, and the noise."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from minigpt.runs.overrides import quote_path
from minigpt.runs.run_dir import PLAN, command, short_path
from minigpt.sweeps.comparison import FAMILY_ERROR, LEAST_SEEDS, Comparison
from minigpt.sweeps.ranking import Row, compare_rows, count_text, incomparable, numbers, points_of
from minigpt.sweeps.results import COMPLETED, NATS, PAUSED, Point

MAX_EXCEPTIONS = 2  # to a sentence about a setting
_SEEDS = 3
_MAX_REPEATED = 4  # combinations of settings that the command with more seeds repeats


def answer(rows: Sequence[Row]) -> list[str]:
    """Return what the rows of `ranked` show, the most important first."""
    complete, comparison = compare_rows(rows)
    notes = _notes(points_of(rows))
    if not complete:
        return ["No run has completed with a loss, so nothing can be compared.", *notes]
    if reason := incomparable(rows):
        return [reason, *notes]
    diverged = sum(not row.provisional for row in rows) - len(complete)
    if diverged:
        notes.append(f"{diverged} {'row' if diverged == 1 else 'rows'} diverged: not compared.")
    lowest = _lowest(complete[0], rows)
    if comparison is None or len(complete) == 1:
        reason, *advice = _unknown_noise(complete)
        return [f"{lowest} {reason}", *advice, *notes]
    return [
        f"{lowest} {_others(complete)}",
        *_settings(complete, comparison, rows),
        *_noise(complete),
        *notes,
    ]


def _lowest(best: Row, rows: Sequence[Row]) -> str:
    unfinished = any(row.provisional and row.losses for row in rows)
    of = "Of the rows whose runs all completed, the" if unfinished else "The"
    seeds = f"{best.n_seeds} {'seed' if best.n_seeds == 1 else 'seeds'}"
    return f"{of} lowest mean loss is {best.loss:.4f} {best.unit}: {best.label()} ({seeds})."


def _others(rows: Sequence[Row]) -> str:
    # How many of them are worse than the best, and how many may be as good.
    n = len(rows) - 1
    tied = [row for row in rows[1:] if row.tied]
    if not tied:
        return "All other rows are worse." if n > 1 else "The other row is worse."
    # A tied row that costs less.
    flops, label = min((row.mean_of("flops") or np.inf, row.label()) for row in tied)
    most = rows[0].mean_of("flops") or 0.0
    cheaper = ""
    if flops < 0.9 * most:
        cheaper = f"; {label} is one with {100 * flops / most:.0f} % of the FLOPs"
    worse = n - len(tied)
    if worse == 0:
        others = "differences of the other rows are" if n > 1 else "difference of the other row is"
        return f"The {others} within the noise{cheaper}."
    return (
        f"{worse} of the {n} other rows {'is' if worse == 1 else 'are'} worse; "
        f"the differences of the rest are within the noise{cheaper}."
    )


def _settings(complete: Sequence[Row], comparison: Comparison, rows: Sequence[Row]) -> list[str]:
    # The values of each setting; effects are estimated if all their combinations are compared.
    levels = {}
    for name in complete[0].short_names:
        values = _values(complete, name)
        if len(numbers(complete, name)) == len(values):
            values.sort(key=float)
        if len(values) > 1:
            levels[name] = values
    if len(complete) != prod(map(len, levels.values())):
        return ["The grid is incomplete, so the effects of single settings are not estimated."]
    effects = [_effect(name, levels, complete, comparison, rows) for name in levels]
    return [text for _, text in sorted(effects, reverse=True)]


def _values(rows: Sequence[Row], name: str) -> list[str]:
    return list(dict.fromkeys(row.value(name) for row in rows))


def _effect(
    name: str,
    levels: Mapping[str, Sequence[str]],
    complete: Sequence[Row],
    comparison: Comparison,
    rows: Sequence[Row],
) -> tuple[float, str]:
    short = complete[0].short_names[name]
    values = levels[name]
    # Compare the mean losses of the values, each over the rows that have it, with the lowest.
    value_of_row = [values.index(row.value(name)) for row in complete]
    member = np.equal.outer(np.arange(len(values)), value_of_row)  # (V, R)
    weights = member / member.sum(1, keepdims=True)
    best = int(np.argmin(weights @ comparison.means))
    contrasts = weights - weights[best]  # (V, R)
    worse_by = contrasts @ comparison.means  # (V,)
    margin = comparison.margin(contrasts, len(values), FAMILY_ERROR / len(levels))  # (V,)
    worse = [i for i in np.argsort(worse_by) if worse_by[i] > margin[i]]
    # Where there are other settings, the effect is an average over theirs, with exceptions.
    on_average = " on average" if len(levels) > 1 else ""
    usual = values[best] if worse else None
    places = _exceptions(name, usual, complete, comparison) if len(levels) > 1 else []
    # Describe the nearest value that is worse, or the exceptions alone, or the lack of an effect.
    if worse:
        near = worse[0]
        text = (
            f"{short} matters: {values[best]} is better than {values[near]} "
            f"by {worse_by[near]:.4f} ± {margin[near]:.4f}{on_average}"
        )
        if len(worse) == len(values) - 1 and len(numbers(complete, name)) == len(values):
            # What was tried includes runs that are not compared.
            text += _edge(float(values[best]), numbers(rows, name))
        if places:
            text += f"; but {_some(places)}"
    elif places:
        text = f"{short} matters, but no effect on average is found: {_some(places)}"
    else:
        text = (
            f"No effect of {short} is found: {_listed(values)} differ by less than "
            f"{worse_by.max() + margin.max():.4f}{on_average}; "
            "more seeds would show smaller differences"
        )
    return float(worse_by.max()), f"{text}."


def _edge(best: float, tried: Sequence[float]) -> str:
    smallest = None if best in (0, 1) else tried[0]  # below 0 and 1 there is often nothing to try
    ends = {smallest: "smallest", tried[-1]: "largest"}
    return f"; it is the {ends[best]} value, so the best may lie beyond" if best in ends else ""


def _exceptions(
    name: str, best: str | None, rows: Sequence[Row], comparison: Comparison
) -> list[str]:
    # The values of the other settings at which one has an effect or, given its best value, another
    # value is better.
    places: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        places.setdefault(row.label(name), []).append(i)
    means = comparison.means
    unit = np.eye(len(rows))
    found = []
    for where, members in places.items():
        low = min(members, key=means.__getitem__)
        high = max(members, key=means.__getitem__)
        usual = next((i for i in members if rows[i].value(name) == best), high)
        worse_by = means[usual] - means[low]
        margin = comparison.margin(unit[[usual]] - unit[[low]], len(rows))[0]
        if worse_by > margin:
            pair = f"{rows[usual].value(name)} is worse than {rows[low].value(name)}"
            found.append((worse_by, f"at {where}, {pair} by {worse_by:.4f} ± {margin:.4f}"))
    return [text for _, text in sorted(found, reverse=True)]


def _noise(rows: Sequence[Row]) -> list[str]:
    least = min((row.margin for row in rows[1:] if row.margin), default=0.0)
    fewest = min(row.n_seeds for row in rows)
    # The row that would be the best if all continued to fall as in the last third of training.
    ends = [_later_loss(row) for row in rows]
    row = rows[int(np.argmin(ends))]
    wins_later = ends[0] < np.inf and row is not rows[0] and not row.tied
    sentences = [
        (least > 0, f"Differences from the best row below {least:.4f} are within the noise."),
        (
            fewest < LEAST_SEEDS,
            f"With fewer than {LEAST_SEEDS} seeds of a row, its noise is taken to be that of the "
            "others.",
        ),
        (
            wins_later,
            f"If losses fell on as in the last third of the training, {row.label()} would be at "
            f"{min(ends):.4f} after another third, and the best row at {ends[0]:.4f}: longer runs "
            "may rank it first.",
        ),
    ]
    return [sentence for holds, sentence in sentences if holds]


def _later_loss(row: Row) -> float:
    # The best loss after another third of the training, if it fell on as in the last; or inf.
    losses = []
    for point in row.points:
        loss = point.loss(row.unit)
        if loss is not None and len(point.curve) > 2:
            tokens, curve = np.array(point.curve).T
            scale = loss / (point.loss(NATS) or np.inf)
            fall = np.interp(tokens[-1] * 2 / 3, tokens, curve) - curve[-1]
            losses.append(scale * min(curve.min(), curve[-1] - fall))
    return float(np.mean(losses)) if losses else np.inf


def _notes(points: Sequence[Point]) -> list[str]:
    n = len(points)
    # Runs that have not completed.
    counts = Counter(point.status for point in points if point.pending)
    paused = counts.pop(PAUSED, 0)
    # Runs that have, but without a loss or with other numbers of steps.
    completed = [point for point in points if point.status == COMPLETED]
    stopped = sum(point.reason != "" for point in completed)
    missing = sum(point.loss(NATS) is None for point in completed)
    steps = sorted(
        point.totals["steps"]
        for point in completed
        if point.settings.get("minutes") and "steps" in point.totals
    )
    planned = dict.fromkeys(f"{step:,.0f}" for step in steps[:1] + steps[-1:])
    sentences = [
        (paused, f"{paused} of {n} runs are paused; their rows are not compared."),
        (
            counts,
            f"Of {n} runs, {count_text(counts)}: rows without all their runs are not compared.",
        ),
        (
            stopped,
            f"{stopped} of {n} runs stopped early: rows may differ in their numbers of steps.",
        ),
        (
            missing,
            f"{missing} completed {'run has' if missing == 1 else 'runs have'} no finite loss.",
        ),
        (
            planned,
            f"minutes= planned {' to '.join(planned)} steps: rows are compared at equal time.",
        ),
    ]
    return [sentence for holds, sentence in sentences if holds]


def _unknown_noise(rows: Sequence[Row]) -> list[str]:
    # Why noise and effects cannot be told apart, and the command that adds two seeds.
    if len(rows) == 1:
        return ["There is no other row to compare it with."]
    if any(len(row.losses) > 1 for row in rows):
        return [
            "Too few rows share seeds to separate effects from noise; run all rows with seed=1,2,3."
        ]
    # Repeat the best rows, as long as the product of their values holds few others.
    for n in (3, 2, 1):
        values = {name: _values(rows[:n], name) for name in rows[0].short_names}
        runs = _SEEDS * prod(map(len, values.values()))
        if runs <= _SEEDS * _MAX_REPEATED:
            break
    # Rows of the product have one of the seeds already.
    for row in rows:
        runs -= all(row.value(name) in each for name, each in values.items())
    text = _extend(rows, values)
    advice = [f"Add two seeds to the best rows ({runs} runs): {text}"] if text else []
    return ["Every row has one seed, so noise and effects cannot be told apart.", *advice]


def _extend(rows: Sequence[Row], values: Mapping[str, Sequence[str]]) -> str:
    # The command that adds points to the grid of the rows; empty for other runs.
    first = rows[0].points[0]
    settings = {
        name: ",".join(values.get(name.lstrip("+"), [value]))
        for name, value in first.overrides.items()
    }
    start = int(first.seed) if first.seed.isdecimal() else 1
    settings["seed"] = ",".join(str(start + i) for i in range(_SEEDS))
    # Only of dicts, and of settings that act again, the order has an effect.
    ordered = any("#" in name or "{" in value for name, value in settings.items())
    folder, *others = {point.folder.parent for point in points_of(rows)}
    is_grid = (folder / PLAN).exists() and settings.get("+sweep") != "search"
    if ordered or others or not is_grid:
        return ""
    line = [name if name.startswith("~") else f"{name}={value}" for name, value in settings.items()]
    return command(
        "train", "-m", *line, f"hydra.sweep.dir={quote_path(short_path(folder))}", "resume=auto"
    )


def _some(parts: Sequence[str]) -> str:
    more = len(parts) - MAX_EXCEPTIONS
    if more > 0:
        parts = [*parts[:MAX_EXCEPTIONS], f"in {more} more places"]
    return _listed(parts)


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
