"""Summarize a sweep in sentences: the effects of settings, and the noise."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from minigpt.runs.overrides import is_planned, quote_path
from minigpt.runs.run_dir import PLAN, command, short_path
from minigpt.sweeps.comparison import FAMILY_ERROR, LEAST_SEEDS, Comparison
from minigpt.sweeps.ranking import Row, Table, count_text, numbers, points_of
from minigpt.sweeps.results import COMPLETED, NATS, PAUSED, Point
from minigpt.sweeps.verdicts import values_of_grid, weights_of_values
from minigpt.utils.extras import from_extras
from minigpt.utils.terminal import sanitize_line

MAX_EXCEPTIONS = 2  # to a sentence about a setting
LEAST_DIFFERENCE = 5e-5  # below it, losses have the same four digits


def answer(table: Table) -> list[str]:
    """Return what a table shows, the most important first, sanitized for a terminal."""
    notes = [sentence for holds, sentence in _notes(table) if holds]
    return [sanitize_line(sentence) for sentence in [*_comparisons(table), *notes]]


def _comparisons(table: Table) -> list[str]:
    rows = table.compared
    if not rows:
        return ["No run has completed with a loss, so nothing can be compared."]
    if table.incomparable:
        return [table.incomparable]
    best = rows[0]
    unfinished = any(row.provisional and row.losses for row in table.rows)
    of = "Of the rows whose runs all completed, the" if unfinished else "The"
    lowest = (
        f"{of} lowest mean loss is {best.loss:.4f} {table.unit}: {best.label()} "
        f"({best.n_seeds} {'seed' if best.n_seeds == 1 else 'seeds'})."
    )
    if table.comparison is None or len(rows) == 1:
        reason, *advice = _unknown_noise(table)
        return [f"{lowest} {reason}", *advice]
    return [
        f"{lowest} {_others(rows)}",
        *_settings(table, table.comparison),
        *(sentence for holds, sentence in _noise(table) if holds),
    ]


def _others(rows: Sequence[Row]) -> str:
    # How many of them are worse than the best, and how many may be as good.
    n = len(rows) - 1
    tied = [row for row in rows[1:] if row.tied]
    if not tied:
        return "All other rows are worse." if n > 1 else "The other row is worse."
    # A tied row that costs less.
    cost, label = min((row.costs["flops"] or np.inf, row.label()) for row in tied)
    most = rows[0].costs["flops"] or 0.0
    cheaper = (
        f"; {label} is one with {100 * cost / most:.0f} % of the FLOPs" if cost < 0.9 * most else ""
    )
    worse = n - len(tied)
    if worse == 0:
        others = "differences of the other rows are" if n > 1 else "difference of the other row is"
        return f"The {others} within the noise{cheaper}."
    return (
        f"{worse} of the {n} other rows {'is' if worse == 1 else 'are'} worse; "
        f"the differences of the rest are within the noise{cheaper}."
    )


def _settings(table: Table, comparison: Comparison) -> list[str]:
    levels = values_of_grid(table)
    if not levels:
        return ["The grid is incomplete, so the effects of single settings are not estimated."]
    effects = [_effect(name, levels, table, comparison) for name in levels]
    return [text for _, text in sorted(effects, reverse=True)]


def _values(rows: Sequence[Row], name: str) -> list[str]:
    return list(dict.fromkeys(row.value(name) for row in rows))


def _effect(
    name: str, levels: Mapping[str, Sequence[str]], table: Table, comparison: Comparison
) -> tuple[float, str]:
    short = table.short_names[name]
    rows = table.compared
    values = levels[name]
    # Compare the mean losses of the values, each over the rows that have it, with the lowest.
    weights = weights_of_values(rows, name, values)  # (V, R)
    best = int(np.argmin(weights @ comparison.means))
    contrasts = weights - weights[best]  # (V, R)
    worse_by = contrasts @ comparison.means  # (V,)
    margin = comparison.margin(contrasts, len(values), FAMILY_ERROR / len(levels))  # (V,)
    worse = [i for i in np.argsort(worse_by) if worse_by[i] > margin[i]]
    # Where there are other settings, the effect is an average over theirs, with exceptions.
    on_average = " on average" if len(levels) > 1 else ""
    usual = values[best] if worse else None
    places = _exceptions(name, usual, rows, comparison) if len(levels) > 1 else ""
    # Describe the nearest value that is worse, or the exceptions alone, or the lack of an effect.
    if worse:
        near = worse[0]
        text = (
            f"{short} matters: {values[best]} is better than {values[near]} "
            f"by {worse_by[near]:.4f} ± {margin[near]:.4f}{on_average}"
        )
        if len(worse) == len(values) - 1 and len(numbers(rows, name)) == len(values):
            # What was tried includes runs that are not compared.
            text += _edge(float(values[best]), numbers(table.rows, name))
        if places:
            text += f"; but {places}"
    elif places:
        text = f"{short} matters, but no effect on average is found: {places}"
    elif worse_by.max() + margin.max() < LEAST_DIFFERENCE:
        text = f"No effect of {short} is found: {_listed(values)} have equal losses{on_average}"
    else:
        text = (
            f"No effect of {short} is found: {_listed(values)} differ by less than "
            f"{worse_by.max() + margin.max():.4f}{on_average}; "
            "more seeds would show smaller differences"
        )
    if worse:
        multiplier = from_extras("compute_sentence")(table, name, values[best], values[worse[0]])
        return float(worse_by.max()), f"{text}.{multiplier}"
    return float(worse_by.max()), f"{text}."


def _edge(best: float, tried: Sequence[float]) -> str:
    smallest = None if best in (0, 1) else tried[0]  # below 0 and 1 there is often nothing to try
    ends = {smallest: "smallest", tried[-1]: "largest"}
    return f"; it is the {ends[best]} value, so the best may lie beyond" if best in ends else ""


def _exceptions(name: str, best: str | None, rows: Sequence[Row], comparison: Comparison) -> str:
    # The values of the other settings at which one has an effect or, given its best value, another
    # value is better.
    places: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        places.setdefault(row.label(name), []).append(i)
    unit = np.eye(len(rows))
    found = []
    for where, members in places.items():
        low = min(members, key=comparison.means.__getitem__)
        high = max(members, key=comparison.means.__getitem__)
        usual = next((i for i in members if rows[i].value(name) == best), high)
        worse_by = comparison.means[usual] - comparison.means[low]
        margin = comparison.margin(unit[[usual]] - unit[[low]], len(rows))[0]
        if worse_by > margin:
            text = (
                f"at {where}, {rows[usual].value(name)} is worse than {rows[low].value(name)} "
                f"by {worse_by:.4f} ± {margin:.4f}"
            )
            found.append((worse_by, text))
    texts = [text for _, text in sorted(found, reverse=True)]
    if len(texts) > MAX_EXCEPTIONS:
        texts[MAX_EXCEPTIONS:] = [f"in {len(texts) - MAX_EXCEPTIONS} more places"]
    return _listed(texts)


def _noise(table: Table) -> list[tuple[object, str]]:
    # Sentences, each with whether it holds.
    rows = table.compared
    least = min((row.margin for row in rows[1:] if row.margin), default=0.0)
    # The row that would be the best if all continued to fall as in the last third of training.
    ends = [_later_loss(row, table.unit) for row in rows]
    row = rows[int(np.argmin(ends))]
    return [
        (
            least >= LEAST_DIFFERENCE,
            f"Differences from the best row below {least:.4f} are within the noise.",
        ),
        (
            min(row.n_seeds for row in rows) < LEAST_SEEDS,
            f"With fewer than {LEAST_SEEDS} seeds of a row, its noise is taken to be that of the "
            "others.",
        ),
        (
            ends[0] < np.inf and row is not rows[0] and not row.tied,
            f"If losses fell on as in the last third of the training, {row.label()} would be at "
            f"{min(ends):.4f} after another third, and the best row at {ends[0]:.4f}: longer runs "
            "may rank it first.",
        ),
    ]


def _later_loss(row: Row, unit: str) -> float:
    # The best loss after another third of the training, if it fell on as in the last; or inf.
    losses = []
    for point in row.points:
        if len(point.curve) > 2:
            tokens, curve = np.array(point.curve).T
            fall = np.interp(tokens[-1] * 2 / 3, tokens, curve) - curve[-1]
            scale = (point.loss(unit) or 0.0) / (point.loss(NATS) or np.inf)
            losses.append(scale * min(curve.min(), curve[-1] - fall))
    return float(np.mean(losses)) if losses else np.inf


def _notes(table: Table) -> list[tuple[object, str]]:
    # Sentences, each with whether it holds.
    points = points_of(table.rows)
    n = len(points)
    # Runs that have not completed.
    counts = Counter(point.status for point in points if point.pending)
    paused = counts.pop(PAUSED, 0)
    # Runs that have, but without a loss or with other numbers of steps.
    completed = [point for point in points if point.status == COMPLETED]
    stopped = sum(point.reason != "" for point in completed)
    missing = sum(point.loss(NATS) is None for point in completed)
    planned = [point for point in completed if is_planned(point.settings)]
    planned_steps = from_extras("steps_note")(planned) if planned else ""
    diverged = sum(not row.provisional for row in table.rows) - len(table.compared)
    return [
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
        (planned_steps, planned_steps),
        (diverged, f"{diverged} {'row' if diverged == 1 else 'rows'} diverged: not compared."),
    ]


def _unknown_noise(table: Table) -> list[str]:
    # Why noise and effects cannot be told apart, and the command that adds two seeds.
    rows = table.compared
    if len(rows) == 1:
        return ["There is no other row to compare it with."]
    if any(len(row.losses) > 1 for row in rows):
        return [
            "Too few rows share seeds to separate effects from noise; run all rows with seed=1,2,3."
        ]
    # Repeat the best rows, as long as the product of their values has at most 4 combinations.
    for n in (3, 2, 1):
        values = {name: _values(rows[:n], name) for name in table.short_names}
        runs = LEAST_SEEDS * prod(map(len, values.values()))
        if runs <= 4 * LEAST_SEEDS:
            break
    # Rows of the product have one of the seeds already.
    for row in rows:
        runs -= all(row.value(name) in each for name, each in values.items())
    return [
        "Every row has one seed, so noise and effects cannot be told apart.",
        *_extension(points_of(rows), values, runs),
    ]


def _extension(
    points: Sequence[Point], values: Mapping[str, Sequence[str]], runs: int
) -> list[str]:
    # The command that adds points to their grid; none for other runs.
    first = points[0]
    settings = {
        name: ",".join(values.get(name.lstrip("+"), [value]))
        for name, value in first.overrides.items()
    }
    start = int(first.seed) if first.seed.isdecimal() else 1
    settings["seed"] = ",".join(map(str, range(start, start + LEAST_SEEDS)))
    # Only of dicts, and of settings that act again, the order has an effect.
    ordered = any("#" in name or "{" in value for name, value in settings.items())
    folder, *others = {point.folder.parent for point in points}
    if ordered or others or settings.get("+sweep") == "search" or not (folder / PLAN).exists():
        return []
    line = command(
        "train",
        "-m",
        *(name if name.startswith("~") else f"{name}={value}" for name, value in settings.items()),
        f"hydra.sweep.dir={quote_path(short_path(folder))}",
        "resume=auto",
    )
    return [f"Add two seeds to the best rows ({runs} runs): {line}"]


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
