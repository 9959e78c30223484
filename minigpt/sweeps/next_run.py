"""The run that is most worth its time next, and commands that add runs to a sweep."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from math import gcd
from typing import Any

import numpy as np
import yaml  # a dependency of Hydra

from minigpt.config import GPTConfig
from minigpt.runs.overrides import quote_path
from minigpt.runs.run_dir import PLAN, command, short_path
from minigpt.sweeps.prediction import expected_improvement, extrapolate_seconds
from minigpt.sweeps.ranking import Row, numbers
from minigpt.utils.errors import UserError

MAX_ROWS = 150  # the best, to which the losses are fitted
_LOG_RATIO = 1.5  # values that span at least this ratio are compared by their logarithms


def next_run(rows: Sequence[Row], noise: float) -> str:
    """Return a sentence with the run of the highest expected improvement per minute; empty if none can be proposed.

    A candidate differs from the best row in one setting, whose value is beyond all others or between two.

    Args:
        noise: standard deviation of the mean loss of a row.
    """
    best, names = rows[0], rows[0].short_names
    text = [name for name in names if best.number(name) is None]
    alike = [row for row in rows if all(row.value(name) == best.value(name) for name in text)][:MAX_ROWS]
    axes = {name: values for name in names if name not in text and len(values := numbers(alike, name)) > 1}
    known = [[*map(row.number, axes), row.loss, row.mean_of("seconds")] for row in alike]
    known = [values for values in known if None not in values]
    changes = [(name, value) for name in axes for value in _neighbors(best, name, axes[name])]
    if len(known) < 3 or not changes:
        return ""
    table = np.array(known, dtype=float)
    settings, losses, seconds = table[:, :-2], table[:, -2], table[:, -1]
    wanted = np.array([[value if name == each else best.number(each) for each in axes] for name, value in changes])
    logs = [is_log(values) for values in axes.values()]
    for array in (settings, wanted):
        array[:, logs] = np.log(array[:, logs])
    low, span = settings.min(0), np.ptp(settings, axis=0)
    span[span == 0] = 1  # where rows are left out that differ
    settings, wanted = (settings - low) / span, (wanted - low) / span
    gain = expected_improvement(settings, losses, noise, wanted)
    duration = extrapolate_seconds(settings, seconds, wanted)
    useful = gain >= noise / 2
    if not useful.any():
        return "No change of one setting is expected to lower the loss by more than half of the noise."
    pick = int(np.argmax(np.where(useful, gain / duration, 0)))
    name, value = changes[pick][0], f"{changes[pick][1]:.12g}"
    sentence = f"Next run: {best.short_names[name]}={value} is expected to lower the best loss by {gain[pick]:.4f} in "
    changed = {each: best.value(each) for each in best.short_names} | {name: value}
    extended = extend(rows, changed, ",".join(dict.fromkeys(point.seed for point in best.points)))
    return sentence + f"{minutes(duration[pick])} per seed" + (f": {extended}" if extended else ".")


def _neighbors(row: Row, name: str, values: Sequence[float]) -> Iterator[float]:
    """Yield possible values of a setting next to that of a row: between two, or beyond the last."""
    geometric, i = is_log(values), values.index(row.number(name) or 0)
    between: Callable[..., float] = (lambda a, b: (a * b) ** 0.5) if geometric else (lambda a, b: (a + b) / 2)
    beyond: Callable[..., float] = (lambda a, b: b * min(max(b / a, 0.5), 2)) if geometric else (lambda a, b: 2 * b - a)
    found = [between(*values[j : j + 2]) for j in (i - 1, i) if 0 <= j < len(values) - 1]
    found += [beyond(values[-2], values[-1])] if i == len(values) - 1 else []
    found += [beyond(values[1], values[0])] if i == 0 else []
    step = reduce(gcd, map(int, values)) if all(value.is_integer() for value in values) else 0
    model = run_config(row).get("model")
    for value in found:
        value = step * round(value / step) if step else float(f"{value:.3g}")
        if value in values or value < 0 or (value == 0 and geometric) or values[-1] < 1 <= value:  # a fraction
            continue
        key = name.lstrip("+")
        if key.startswith("model.") and model:
            try:
                GPTConfig.from_dict({**model, key.removeprefix("model."): value, "vocab_size": 1})
            except UserError:
                continue
        yield value


def extend(rows: Sequence[Row], values: Mapping[str, str], seeds: str) -> str:
    """Return the command that adds points to the grid of the rows; empty for other runs."""
    folder, *others = {point.folder.parent for row in rows for point in row.points}
    settings = {**rows[0].points[0].overrides, **values, "seed": seeds}
    if others or not (folder / PLAN).exists() or settings.get("+sweep") == "search":
        return ""
    given = [name if name.startswith("~") else f"{name}={value}" for name, value in settings.items()]
    folder_name = quote_path(short_path(folder))
    return command("train", "-m", *given, f"hydra.sweep.dir={folder_name}", "resume=auto")


def run_config(row: Row) -> dict[str, Any]:
    """Return the settings of the optimizer and the model of a run of a row that are single values."""
    try:
        config = yaml.safe_load((row.points[0].folder / ".hydra" / "config.yaml").read_text(encoding="utf-8"))
        parts = {name: config[name].items() for name in ("optimizer", "model")}
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError, yaml.YAMLError):
        return {}
    scalar = (type(None), int, float, str)
    return {name: {key: value for key, value in part if isinstance(value, scalar)} for name, part in parts.items()}


def minutes(seconds: float) -> str:
    """Return a duration such as `14 minutes`."""
    return f"about {seconds:.0f} s" if seconds < 90 else f"about {seconds / 60:.0f} minutes"


def is_log(values: Sequence[float]) -> bool:
    """Return whether ordered values are compared by their logarithms: they span a large ratio."""
    return values[0] > 0 and values[-1] >= _LOG_RATIO * values[0]
