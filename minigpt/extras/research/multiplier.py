"""The share of the compute at which one value of a setting reaches the loss of another.

Runs of several lengths or sizes are a ladder, on which the loss of a value is a falling curve over
compute. The share is the distance of two such curves in log compute, averaged over the losses that
both reach. Without a ladder, it is read from the validation curve of runs of one length.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import exp, inf, log

import numpy as np
import scipy  # which imports scipy.stats when it is first used

from minigpt.sweeps.comparison import ROUNDING, Array
from minigpt.sweeps.ranking import Row, Table
from minigpt.sweeps.results import NATS, Point

LENGTHS = ("max_steps", "minutes")
LADDERS = (*LENGTHS, "model.n_layer", "model.n_embd")
COSTS = {"flops": "FLOPs", "seconds": "seconds"}
# Probability that an interval does not hold by its formula, such that of simulated intervals 95 %
# hold: curves are not linear, and slopes are uncertain.
ERROR = 0.04
STEP = 1e-3  # of numerical derivatives
N_LOSSES = 100  # at which ladders are compared
MIN_NODES = 2
TOO_FEW = "too few validations; validate more often by eval_every="
MAX_LOG = 700.0  # of what exp() takes

Share = Sequence[float | None]  # the share and the ends of its interval
Node = tuple[float, float]  # of a curve: log compute and loss


def compute_shares(table: Table, name: str, baseline: str, value: str) -> dict[str, Share | None]:
    """Return the shares of the FLOPs and seconds of `baseline` at which `value` reaches its loss.

    They are read where rows differ in this setting alone, or in it and one of the `LADDERS`.

    Returns:
        the share and the ends of its 95 % interval over the seeds that both have. With one seed the
        ends are None, and so is an end beyond a validation curve. None if nothing can be read.
    """
    found = _read_shares(table, name, baseline, value)
    return {cost: share for cost, (share, _) in found.items()}


def compute_sentence(table: Table, name: str, better: str, worse: str) -> str:
    """Return what follows the effect of a setting in the answer, or nothing.

    Args:
        better: the value that is better than `worse`.
    """
    found = _read_shares(table, name, worse, better)
    text = _share_text({cost: share for cost, (share, _) in found.items()})
    reasons = [reason for _, reason in found.values() if reason]
    if text:
        return f" It reaches {worse}'s loss with {text}{_length_note(table, name)}."
    if reasons:
        return f" The compute at which it reaches {worse}'s loss is unknown: {reasons[0]}."
    return ""


def _share_text(shares: Mapping[str, Share | None]) -> str:
    # A share whose interval is unknown at both ends is left out.
    texts = []
    for cost, share in shares.items():
        if share is not None and any(share[1:]):
            middle, low, high = ["?" if part is None else _number(part) for part in share]
            texts.append(f"{middle} ({low} to {high}) of the {COSTS[cost]}")
    return " and ".join(texts)


def _number(share: float) -> str:
    return f"{share:.2f}" if share >= 0.1 else f"{share:.2g}"


def _length_note(table: Table, name: str) -> str:
    if _other_settings(table, name):
        return ""
    return (
        ", read from its validation curve at this one length: a shorter run with a schedule of "
        "its own may need less or more"
    )


@lru_cache(maxsize=20)  # settings of a table, each of whose values is compared
def _rows_by_value(table: Table, name: str) -> dict[str, list[Row]]:
    rows = defaultdict(list)
    for row in table.compared:
        rows[row.value(name)].append(row)
    return {**rows}


def _other_settings(table: Table, name: str) -> list[str]:
    return [
        each for each in table.short_names if each != name and len(_rows_by_value(table, each)) > 1
    ]


def _read_shares(
    table: Table, name: str, baseline: str, value: str
) -> dict[str, tuple[Share | None, str]]:
    # The share of each cost, or why it is unknown. It is read along no other setting or a ladder;
    # and if the setting itself is the length, there is no other way to train.
    found: dict[str, tuple[Share | None, str]] = dict.fromkeys(COSTS, (None, ""))
    others = _other_settings(table, name)
    rows_by_value = _rows_by_value(table, name)
    if name in LENGTHS or len(rows_by_value) < 2 or len(others) > 1:
        return found
    if not {*others} <= {*LADDERS}:
        return found
    # Read both values over the seeds that they share.
    pair = [rows_by_value[baseline], rows_by_value[value]]
    for cost in COSTS:
        base, other = [_nodes(rows, table.unit, cost, curve=not others) for rows in pair]
        seeds = [seed for seed in base if seed in other]
        if not seeds:
            continue
        found[cost] = _share(
            _frontier([base[seed] for seed in seeds]),
            _frontier([other[seed] for seed in seeds]),
            ladder=table.short_names[others[0]] if others else "",
            baseline=baseline,
            looks=table.comparison.looks if table.comparison else 1,
        )
    return found


def _nodes(rows: Sequence[Row], unit: str, cost: str, *, curve: bool) -> dict[str, list[Node]]:
    # By seed: a node per row, or per validation of the only row.
    found: dict[str, dict[int, Node]] = defaultdict(dict)
    for i, row in enumerate(rows):
        for point in row.points:
            loss = point.loss(unit)
            compute = point.totals.get(cost)
            if loss and compute and compute > 0:
                of_run = _curve(point, loss, compute) if curve else {i: (log(compute), loss)}
                found[point.seed] |= of_run
    # Seeds that have all rows; of their validations those that all have, if all end alike.
    complete = {seed: nodes for seed, nodes in found.items() if len(nodes) >= len(rows)}
    if len({max(nodes) for nodes in complete.values()}) != 1:
        return {}
    shared = set.intersection(*map(set, complete.values()))
    return {seed: [nodes[i] for i in sorted(shared)] for seed, nodes in complete.items()}


def _curve(point: Point, loss: float, compute: float) -> dict[int, Node]:
    # The lowest loss up to each validation, in the unit of the loss, over compute by tokens.
    scale = loss / (point.loss(NATS) or inf)
    trained = [(tokens, nats) for tokens, nats in point.curve if tokens > 0]
    total = max(point.totals.get("tokens", 0), *(tokens for tokens, _ in trained), 1)
    lowest = inf
    nodes = {}
    for i, (tokens, nats) in enumerate(trained):
        lowest = min(lowest, nats * scale)
        nodes[i] = (log(compute) + log(tokens / total), lowest)
    return nodes


def _frontier(of_seeds: Sequence[Sequence[Node]]) -> Array:
    # The nodes whose mean loss is below that of all that need less compute, (S, K, 2): the least
    # compute that reaches a loss, also where losses rise.
    nodes = np.array(of_seeds)
    means = nodes.mean(0)  # (K, 2)
    order = np.argsort(means[:, 0])
    lowest = np.minimum.accumulate(means[order, 1])
    frontier: Array = nodes[:, order[np.diff(lowest, prepend=inf) < 0]]
    return frontier


def _share(
    base: Array, other: Array, *, ladder: str, baseline: str, looks: int
) -> tuple[Share | None, str]:
    # The share, or why it is unknown; of frontiers over the same seeds, (S, K, 2).
    means = [base.mean(0), other.mean(0)]
    if min(map(len, means)) < MIN_NODES:
        return None, f"losses do not fall with {ladder}" if ladder else TOO_FEW
    # The losses of ladders overlap, and a curve passes the lowest loss of the other.
    base_mean, other_mean = means
    if other_mean[0, 1] <= base_mean[-1, 1]:
        advice = f"add smaller values of {ladder}" if ladder else "validate earlier by eval_every="
        return None, f"all its losses are below those of {baseline}; {advice}"
    if base_mean[0 if ladder else -1, 1] < other_mean[-1, 1]:
        return None, ""
    distance = _distance(base_mean, other_mean, ladder)
    n = len(base)
    if n == 1:
        return [_exp(distance), None, None], ""
    # How far each seed moves the distance (infinitesimal jackknife) gives a t interval.
    moves = []
    for i in range(n):
        moved_base = base_mean + STEP * (base[i] - base_mean)
        moved_other = other_mean + STEP * (other[i] - other_mean)
        moves.append((_distance(moved_base, moved_other, ladder) - distance) / STEP)
    margin = scipy.stats.t.ppf(1 - ERROR / looks / 2, n - 1) * np.std(moves, ddof=1) / n**0.5
    low = _exp(distance - margin)
    high = _exp(distance + margin)
    if ladder:
        return [_exp(distance), low, high], ""
    # Beyond the ends of its curve nothing is known.
    first, last = np.exp(other_mean[[0, -1], 0] - base_mean[-1, 0])
    return [
        _exp(distance),
        None if low < first - ROUNDING else low,
        None if high > last + ROUNDING else high,
    ], ""


def _exp(distance: float) -> float:
    return exp(min(distance, MAX_LOG))


def _distance(base: Array, other: Array, ladder: str) -> float:
    # The mean distance in log compute of two curves, each (K, 2), at the losses of both ladders; of
    # validation curves, at the lowest loss of `base`.
    losses = base[-1:, 1]
    if ladder:
        high = min(base[0, 1], other[0, 1])
        low = max(base[-1, 1], other[-1, 1])
        losses = low + (high - low) * (np.arange(N_LOSSES) + 0.5) / N_LOSSES
    return float(np.mean(_compute_at(losses, other) - _compute_at(losses, base)))


def _compute_at(losses: Array, curve: Array) -> Array:
    # Linear between nodes; the first and last segments continue.
    compute, loss = curve.T
    i = np.searchsorted(-loss, -losses).clip(1, len(loss) - 1)
    slopes = np.diff(compute) / np.diff(loss)
    return np.asarray(compute[i] + (losses - loss[i]) * slopes[i - 1])
