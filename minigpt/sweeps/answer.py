"""Summarize a sweep in sentences: the effects of settings, and the noise."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import numpy as np

from minigpt.runs.overrides import quote_path
from minigpt.runs.run_dir import PLAN, command, short_path
from minigpt.sweeps.comparison import FAMILY_ERROR, LEAST_SEEDS, Comparison
from minigpt.sweeps.ranking import Row, compare_rows, count_text, incomparable, numbers
from minigpt.sweeps.results import COMPLETED, NATS, PAUSED, SKIPPED, Point

MAX_EXCEPTIONS = 2  # to a sentence about a setting
_SEEDS = 3
_MAX_REPEATED = 4  # combinations of settings that the command with more seeds repeats


def answer(rows: Sequence[Row]) -> list[str]:
    """Return what the rows of `ranked` show, the most important first."""
    points = [point for row in rows for point in row.points]
    complete, comparison = compare_rows(rows)
    told = [*_incomplete(points), *_equal_time(points)]
    if not complete:
        return ["No run has completed with a loss, so nothing can be compared.", *told]
    if reason := incomparable(rows):
        return [reason, *told]
    if diverged := sum(not row.provisional for row in rows) - len(complete):
        told.append(f"{diverged} {'row' if diverged == 1 else 'rows'} diverged: not compared.")
    lowest = _lowest(complete, rows)
    if comparison is None or len(complete) == 1:
        reason, *advice = _unknown_noise(complete)
        return [f"{lowest} {reason}", *advice, *told]
    return [
        f"{lowest} {_others(complete)}",
        *_settings(complete, comparison, rows),
        *_noise(complete),
        *_late(complete),
        *told,
    ]


def _lowest(complete: Sequence[Row], rows: Sequence[Row]) -> str:
    best = complete[0]
    of = (
        "Of the rows whose runs all completed, the"
        if any(row.provisional and row.losses for row in rows)
        else "The"
    )
    seeds = f"{best.n_seeds} {'seed' if best.n_seeds == 1 else 'seeds'}"
    return f"{of} lowest mean loss is {best.loss:.4f} {best.unit}: {best.label()} ({seeds})."


def _others(rows: Sequence[Row]) -> str:
    """Return how many rows are worse than the best, and how many may be as good."""
    best, tied, n = rows[0], [row for row in rows[1:] if row.tied], len(rows) - 1
    if not tied:
        return "All other rows are worse." if n > 1 else "The other row is worse."
    flops, label = min((row.mean_of("flops") or np.inf, row.label()) for row in tied)
    most = best.mean_of("flops") or 0.0
    cheaper = (
        f"; {label} is one with {100 * flops / most:.0f} % of the FLOPs"
        if flops < 0.9 * most
        else ""
    )
    if len(tied) == n:
        others = "differences of the other rows are" if n > 1 else "difference of the other row is"
        return f"The {others} within the noise{cheaper}."
    worse = f"{n - len(tied)} of the {n} other rows {'is' if n - len(tied) == 1 else 'are'} worse"
    return f"{worse}; the differences of the rest are within the noise{cheaper}."


def _settings(complete: Sequence[Row], comparison: Comparison, rows: Sequence[Row]) -> list[str]:
    """Describe each setting, that with the largest effect first, if all combinations of their values are compared."""
    levels = {}
    for name in complete[0].short_names:
        values = list(dict.fromkeys(row.value(name) for row in complete))
        if len(values) > 1:
            levels[name] = (
                sorted(values, key=float) if len(numbers(complete, name)) == len(values) else values
            )
    if len(complete) != prod(map(len, levels.values())):
        return ["The grid is incomplete, so the effects of single settings are not estimated."]
    effects = [_effect(name, levels, complete, comparison, rows) for name in levels]
    return [text for _, text in sorted(effects, reverse=True)]


def _effect(
    name: str,
    levels: Mapping[str, Sequence[str]],
    complete: Sequence[Row],
    comparison: Comparison,
    rows: Sequence[Row],
) -> tuple[float, str]:
    """Describe a setting by the mean losses of its values, and list the exceptions; return its effect, too."""
    short, values, n = complete[0].short_names[name], levels[name], len(levels[name])
    on_average = " on average" if len(levels) > 1 else ""
    member = np.array(
        [[row.value(name) == value for row in complete] for value in values], dtype=float
    )  # (values, R)
    weights = member / member.sum(1, keepdims=True)
    best = int(np.argmin(weights @ comparison.means))
    contrasts = weights - weights[best]
    worse_by, margin = (
        contrasts @ comparison.means,
        comparison.margin(contrasts, n, FAMILY_ERROR / len(levels)),
    )
    worse = [i for i in np.argsort(worse_by) if worse_by[i] > margin[i]]
    usual = values[best] if worse else None
    places = _exceptions(name, usual, complete, comparison) if len(levels) > 1 else []
    if worse:
        near = worse[0]
        text = (
            f"{short} matters: {values[best]} is better than {values[near]} "
            f"by {worse_by[near]:.4f} ± {margin[near]:.4f}{on_average}"
        )
        if len(worse) == n - 1 and len(numbers(complete, name)) == n:
            tried, value = (
                numbers(rows, name),
                float(values[best]),
            )  # tried: also by runs that are not compared
            ends = {tried[-1]: "largest"} | ({} if value in (0, 1) else {tried[0]: "smallest"})
            text += (
                f"; it is the {ends[value]} value, so the best may lie beyond"
                if value in ends
                else ""
            )
        text += f"; but {_some(places)}" if places else ""
    elif places:
        text = f"{short} matters, but no effect on average is found: {_some(places)}"
    else:
        text = (
            f"No effect of {short} is found: {_listed(values)} differ by less than "
            f"{worse_by.max() + margin.max():.4f}{on_average}; "
            "more seeds would show smaller differences"
        )
    return float(worse_by.max()), f"{text}."


def _exceptions(
    name: str, best: str | None, rows: Sequence[Row], comparison: Comparison
) -> list[str]:
    """List the values of the other settings at which one has an effect or, given its best, another value is better."""
    places: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        places.setdefault(row.label(name), []).append(i)
    found, means, unit = [], comparison.means, np.eye(len(rows))
    for where, of in places.items():
        low = min(of, key=means.__getitem__)
        usual = next((i for i in of if rows[i].value(name) == best), max(of, key=means.__getitem__))
        worse_by, margin = (
            means[usual] - means[low],
            comparison.margin(unit[[usual]] - unit[[low]], len(rows))[0],
        )
        if worse_by > margin:
            pair = f"{rows[usual].value(name)} is worse than {rows[low].value(name)}"
            found.append((worse_by, f"at {where}, {pair} by {worse_by:.4f} ± {margin:.4f}"))
    return [text for _, text in sorted(found, reverse=True)]


def _noise(rows: Sequence[Row]) -> Iterator[str]:
    if least := min((row.margin for row in rows[1:] if row.margin), default=0.0):
        yield f"Differences from the best row below {least:.4f} are within the noise."
    if min(row.n_seeds for row in rows) < LEAST_SEEDS:
        yield f"With fewer than {LEAST_SEEDS} seeds of a row, its noise is taken to be that of the others."


def _late(rows: Sequence[Row]) -> Iterator[str]:
    """Yield which row would be the best if all continued to fall as in the last third of their training."""
    ends = [_later_loss(row) for row in rows]
    row = rows[int(np.argmin(ends))]
    if ends[0] < np.inf and row is not rows[0] and not row.tied:
        yield (
            f"If losses fell on as in the last third of the training, {row.label()} would be at {min(ends):.4f} after "
            f"another third, and the best row at {ends[0]:.4f}: longer runs may rank it first."
        )


def _later_loss(row: Row) -> float:
    """Return the best loss of a row after another third of its training, if it fell on as in the last third; or inf."""
    losses = []
    for point in row.points:
        if len(point.curve) > 2 and (loss := point.loss(row.unit)) is not None:
            tokens, curve = np.array(point.curve).T
            scale = loss / (point.loss(NATS) or np.inf)
            fall = np.interp(tokens[-1] * 2 / 3, tokens, curve) - curve[-1]
            losses.append(scale * min(curve.min(), curve[-1] - fall))
    return float(np.mean(losses)) if losses else np.inf


def _equal_time(points: Sequence[Point]) -> Iterator[str]:
    """Yield how many steps the rows have that `minutes=` planned."""
    steps = [
        point.totals["steps"]
        for point in points
        if point.status == COMPLETED and point.settings.get("minutes")
    ]
    if steps:
        n = " to ".join(dict.fromkeys(f"{step:,.0f}" for step in (min(steps), max(steps))))
        yield f"minutes= planned {n} steps: rows are compared at equal time."


def _incomplete(points: Sequence[Point]) -> Iterator[str]:
    counts = Counter(point.status for point in points if point.status not in (COMPLETED, SKIPPED))
    if paused := counts.pop(PAUSED, 0):
        yield f"{paused} of {len(points)} runs are paused; their rows are not compared."
    if counts:
        yield f"Of {len(points)} runs, {count_text(counts)}: rows without all their runs are not compared."
    if stopped := sum(point.status == COMPLETED and point.reason != "" for point in points):
        yield f"{stopped} of {len(points)} runs stopped early: rows may differ in their numbers of steps."
    if missing := sum(point.status == COMPLETED and point.loss(NATS) is None for point in points):
        yield f"{missing} completed {'run has' if missing == 1 else 'runs have'} no finite loss."


def _unknown_noise(rows: Sequence[Row]) -> Iterator[str]:
    """Yield why noise and effects cannot be told apart, and the command that adds two seeds to the best rows."""
    if len(rows) == 1:
        yield "There is no other row to compare it with."
        return
    if any(len(row.losses) > 1 for row in rows):
        yield "Too few rows share seeds to separate effects from noise; run all rows with seed=1,2,3."
        return
    yield "Every row has one seed, so noise and effects cannot be told apart."
    for n in (3, 2, 1):  # the best rows, as long as the product of their values holds few others
        values = {name: {row.value(name): None for row in rows[:n]} for name in rows[0].short_names}
        if prod(map(len, values.values())) <= _MAX_REPEATED:
            break
    first = rows[0].points[0].seed
    seeds = ",".join(str(int(first) + i) for i in range(_SEEDS)) if first.isdecimal() else "1,2,3"
    if text := _extend(rows, {name: ",".join(each) for name, each in values.items()}, seeds):
        existing = sum(
            all(row.value(name) in each for name, each in values.items()) for row in rows
        )
        runs = _SEEDS * prod(map(len, values.values())) - existing
        yield f"Add two seeds to the best rows ({runs} runs): {text}"


def _extend(rows: Sequence[Row], values: Mapping[str, str], seeds: str) -> str:
    """Return the command that adds points to the grid of the rows; empty for other runs."""
    folder, *others = {point.folder.parent for row in rows for point in row.points}
    given = rows[0].points[0].overrides
    settings = {name: values.get(name.lstrip("+"), value) for name, value in given.items()} | {
        "seed": seeds
    }
    ordered = any(
        "#" in name or "{" in value for name, value in settings.items()
    )  # else their order has no effect
    if others or ordered or not (folder / PLAN).exists() or settings.get("+sweep") == "search":
        return ""
    line = [name if name.startswith("~") else f"{name}={value}" for name, value in settings.items()]
    return command(
        "train", "-m", *line, f"hydra.sweep.dir={quote_path(short_path(folder))}", "resume=auto"
    )


def _some(parts: Sequence[str]) -> str:
    more = [f"in {len(parts) - MAX_EXCEPTIONS} more places"] if len(parts) > MAX_EXCEPTIONS else []
    return _listed([*parts[:MAX_EXCEPTIONS], *more])


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
