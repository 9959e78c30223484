"""Compare a sweep with its first point: what is better than it, worse or unclear, as plain data.

In a full grid, each value of a setting is compared by its mean loss over the other settings, as in
the answer; otherwise, each row.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from minigpt.sweeps.comparison import FAMILY_ERROR, Array
from minigpt.sweeps.ranking import Row, Table, numbers
from minigpt.utils.extras import from_extras


@lru_cache(maxsize=1)  # the last line, the ledger and sweep.json need them
def verdicts(table: Table) -> list[dict[str, Any]]:
    """Return a dict per comparison with the baseline, which is the row of the first point.

    Losses that do not compare, and a baseline that is not compared, give none. The keys of a dict:

    - `setting`, `baseline`, `value`: a setting and two of its values; of an incomplete grid "" and
      the labels of two rows.
    - `difference`: loss of the value minus that of the baseline, in `unit`. Negative is better.
    - `interval`: half of the simultaneous interval of the difference; None if the noise is unknown.
    - `verdict`: "better" or "worse" if the difference exceeds the interval; else "unclear".
    - `seeds`: the least number of seeds of the rows that are compared.
    - `flops`, `seconds`: the share of the compute of the baseline at which the value reaches the
      loss of the baseline, and its 95 % interval; None where it is unknown.
    """
    if table.incomparable:
        return []
    grid = values_of_grid(table)
    found = []
    for name, values in grid.items():
        if table.baseline.value(name) in values:
            base = values.index(table.baseline.value(name))
            weights = weights_of_values(table.compared, name, values)
            found += _verdicts(table, name, values, base, weights, FAMILY_ERROR / len(grid))
    if not grid and table.baseline in table.compared:
        labels = [row.label() for row in table.compared]
        base = table.compared.index(table.baseline)
        found = _verdicts(table, "", labels, base, np.eye(len(labels)), FAMILY_ERROR)
    return found


def values_of_grid(table: Table) -> dict[str, list[str]]:
    """Return the values of each setting, or nothing if not all their combinations are compared."""
    grid = {}
    for name in table.short_names:
        values = list(dict.fromkeys(row.value(name) for row in table.compared))
        if len(numbers(table.compared, name)) == len(values):
            values.sort(key=float)
        if len(values) > 1:
            grid[name] = values
    return grid if len(table.compared) == prod(map(len, grid.values())) else {}


def weights_of_values(rows: Sequence[Row], name: str, values: Sequence[str]) -> Array:
    """Return the weights of rows in the mean loss of each value of a setting, (V, R)."""
    member = np.equal.outer(values, [row.value(name) for row in rows])
    weights: Array = member / member.sum(1, keepdims=True)
    return weights


def _verdicts(
    table: Table, name: str, values: Sequence[str], base: int, weights: Array, error: float
) -> list[dict[str, Any]]:
    # The difference of each value from the baseline, and its interval.
    contrasts = weights - weights[base]  # (V, R)
    losses = [row.loss or 0.0 for row in table.compared]
    differences = (contrasts @ losses).round(9) + 0.0  # (V,); 0 of equal losses
    margins = np.full(len(values), np.inf)
    if table.comparison is not None:
        margins = table.comparison.margin(contrasts, len(values), error)
    # What they show.
    found = []
    for i, value in enumerate(values):
        if i == base:
            continue
        seeds = [table.compared[int(j)].n_seeds for j in np.flatnonzero(contrasts[i])]
        clear = "better" if differences[i] < 0 else "worse"
        shares = from_extras("compute_shares")(table, name, values[base], value)
        found.append(
            {
                "setting": name,
                "baseline": values[base],
                "value": value,
                "difference": float(differences[i]),
                "interval": float(margins[i]) if np.isfinite(margins[i]) else None,
                "unit": table.unit,
                "seeds": min(seeds),
                "verdict": clear if abs(differences[i]) > margins[i] else "unclear",
                **shares,
            }
        )
    return found
