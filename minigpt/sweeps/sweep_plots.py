"""Plot a sweep: the loss over what was swept, learning curves, and the loss over its costs.

Text from files goes through `_escape` on its way into a plot.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf, isfinite, nan, prod

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from minigpt.sweeps.ranking import Row, Table, count_text, loss_text, numbers, points_of
from minigpt.sweeps.results import COMPLETED, NATS
from minigpt.utils.terminal import sanitize_line

MAX_LABELED = 10  # lines with a color and an entry in a legend


def sweep_figure(table: Table, *, title: str, along: str | None = None) -> Figure:
    """Plot a sweep.

    Args:
        along: a numeric setting to plot the loss over, one line per combination of the others.
    """
    figure = Figure(figsize=(15, 10.5), layout="constrained")
    swept, curves, params, flops = figure.subplots(2, 2).flat
    measured = [row for row in table.rows if row.losses]
    if measured:
        _plot_swept(swept, table, along)
        _plot_curves(curves, measured, table.unit)
        _plot_cost(params, measured, table.unit, "params", "parameters N")
        _plot_cost(flops, measured, table.unit, "flops", "training FLOPs C")
    counts = count_text(Counter(point.status for point in points_of(table.rows)))
    warning = "; losses not comparable" if table.incomparable else ""
    figure.suptitle(_escape(f"{title}: {counts}{warning}", 120), fontsize=14)
    return figure


def _plot_swept(panel: Axes, table: Table, along: str | None) -> None:
    # A heat map of two numeric settings, lines over one, or else the best 20 rows by name.
    rows = table.rows
    values = {name: numbers(rows, name) for name in table.short_names}
    numeric = [name for name in values if len(values[name]) > 1 and _is_numeric(rows, name)]
    few_lines = len(numeric) == 1 and len({row.label(numeric[0]) for row in rows}) <= MAX_LABELED
    if along or few_lines:
        _plot_lines(panel, table, along or numeric[0])
    elif len(values) == len(numeric) == 2 and len(rows) > prod(map(len, values.values())) / 2:
        _plot_heat_map(panel, table, *sorted(values, key=lambda name: -len(values[name])))
    else:
        _plot_names(panel, [row for row in rows if row.losses][:20], table.unit)
    seeds = "" if rows[0].interval is None else ", mean and 95 % interval over seeds"
    panel.set_title(f"best validation loss{seeds}")


def _is_numeric(rows: Sequence[Row], name: str) -> bool:
    return all(isfinite(row.number(name)) for row in rows)


def _plot_heat_map(panel: Axes, table: Table, x: str, y: str) -> None:
    # One cell per pair of values; of two rows in a cell, the better is shown.
    rows = table.rows
    columns = numbers(rows, x)
    lines = numbers(rows, y)
    cells = {
        (lines.index(float(row.value(y))), columns.index(float(row.value(x)))): row
        for row in reversed(rows)
    }
    losses = np.full((len(lines), len(columns)), nan)
    # The mean loss and the status in each cell, the best in bold, those tied with it hatched.
    for (i, j), row in cells.items():
        losses[i, j] = row.loss  # NumPy stores None as nan
        text = loss_text(row.loss, row.interval).replace(" ", "\n", 1) if row.losses else ""
        if row.status != COMPLETED:
            text += "\n" + _escape(row.status).replace(", ", "\n")
        if row.tied and row is not rows[0]:
            panel.bar(j, 1, 1, i - 0.5, fill=False, hatch="//", edgecolor="0.5", linewidth=0)
        if len(cells) <= 64:  # more texts would overlap
            panel.text(
                j,
                i,
                text.lstrip("\n"),
                ha="center",
                va="center",
                weight="bold" if row is rows[0] else "normal",
            )
    # The colors below the texts, and the axes.
    image = panel.imshow(
        losses,
        cmap="viridis_r",
        alpha=0.5,
        origin="lower",
        aspect="auto",
        vmax=highest_converged(losses[np.isfinite(losses)].tolist()),
    )
    tied = "  (hatched: tied with the best)" if any(row.tied for row in rows[1:]) else ""
    panel.set(
        xlabel=_escape(x) + tied,
        ylabel=_escape(y),
        xticks=range(len(columns)),
        yticks=range(len(lines)),
        xticklabels=map("{:g}".format, columns),
        yticklabels=map("{:g}".format, lines),
    )
    panel.figure.colorbar(image, ax=panel, label=table.unit)


def _plot_lines(panel: Axes, table: Table, along: str) -> None:
    # One line per combination of the other settings, that of the best run first.
    lines: dict[str, list[tuple[float, float, float]]] = {}  # (value, loss, half of its interval)
    shown = [row for row in table.rows if row.losses and isfinite(row.number(along))]
    for row in shown:
        lines.setdefault(row.label(along), []).append(
            (row.number(along), row.loss or 0.0, row.interval or nan)
        )
    for rank, (name, line) in enumerate(lines.items()):
        xs, losses, intervals = zip(*sorted(line), strict=True)
        panel.errorbar(
            xs,
            losses,
            intervals,
            label=_escape(name) if rank < MAX_LABELED and len(lines) > 1 else None,
            color=_rank_color(rank),
            marker="o",
            capsize=3,
        )
    values = numbers(table.rows, along)
    is_wide = values[0] > 0 and values[-1] >= 10 * values[0]
    panel.set(
        xlabel=_escape(along),
        ylabel=f"best validation loss ({table.unit})",
        xscale="log" if is_wide else "linear",
    )
    _finish(panel, [row.loss or 0.0 for row in shown])


def _plot_names(panel: Axes, rows: Sequence[Row], unit: str) -> None:
    for rank, row in enumerate(rows):
        panel.errorbar(
            row.loss or 0.0, rank, xerr=row.interval, marker="o", capsize=3, color=_rank_color(rank)
        )
        panel.text(
            0.01,
            rank - 0.2,
            _escape(row.label(), 80),
            fontsize=8,
            transform=panel.get_yaxis_transform(),
        )
    panel.set(
        xlabel=f"best validation loss ({unit})",
        yticks=range(len(rows)),
        yticklabels=[f"{row.loss:.4f}" for row in rows],
        ylim=(len(rows) - 0.5, -0.8),
    )


def _plot_curves(panel: Axes, rows: Sequence[Row], unit: str) -> None:
    # Every run, the best rows in color.
    ends: list[float] = []
    for rank, row in enumerate(rows):
        label = f"{rank + 1}  {_escape(row.label(), 40)}" if rank < MAX_LABELED else None
        for point in row.points:
            # Curves are in nats per token; a loss of 0 does not tell how many bits these are.
            scale = 1.0 if unit == NATS else (point.loss(unit) or nan) / (point.loss(NATS) or nan)
            losses = [scale * loss for _, loss in point.curve]
            panel.plot(
                [at for at, _ in point.curve],
                losses,
                marker="." if len(losses) == 1 else None,
                label=label if point is row.points[0] else None,  # one entry for all seeds
                color=_rank_color(rank),
                linewidth=2.5 if rank == 0 else 1.2,
                linestyle="-" if row.status == COMPLETED else ":",
                zorder=3 - rank / len(rows),
            )
            ends += filter(isfinite, losses[1:] or losses)
    panel.xaxis.set_major_formatter(EngFormatter())
    panel.set(
        xlabel="tokens",
        ylabel=f"validation loss ({unit})",
        title="learning curves by rank (dotted: not completed)",
    )
    _finish(panel, ends)


def _plot_cost(panel: Axes, rows: Sequence[Row], unit: str, cost: str, label: str) -> None:
    panel.set(xlabel=label, ylabel=f"best validation loss ({unit})")
    known = [
        (row.costs[cost], row.loss, row.interval or nan)
        for row in rows
        if row.costs[cost] and row.loss is not None
    ]
    if not known:
        return
    costs, losses, intervals = zip(*known, strict=True)
    panel.errorbar(costs, losses, intervals, fmt="o", alpha=0.6, capsize=3)
    front = pareto_front(zip(costs, losses, strict=True))
    if len(front) > 1:
        panel.plot(*zip(*front, strict=True), color="0.2", label="Pareto front")
    panel.plot(costs[0], losses[0], "*", markersize=15, color="C3", label=f"best {losses[0]:.4f}")
    panel.set_xscale("log")  # after the points, which set the limits
    panel.xaxis.set(
        major_locator=LogLocator(subs=(1, 2, 5)),
        major_formatter=EngFormatter(),
        minor_formatter=NullFormatter(),
    )
    _finish(panel, losses, legend_beside=False)


def _finish(panel: Axes, losses: Sequence[float], legend_beside: bool = True) -> None:
    # The y axis is that of the losses of runs that did not diverge.
    highest = highest_converged(losses) if losses else inf
    above = sum(loss > highest for loss in losses)
    if above:
        margin = 0.05 * (highest - min(losses))
        panel.set_ylim(min(losses) - margin, highest + margin)
        panel.text(0.01, 0.01, f"{above} above this range", transform=panel.transAxes)
    panel.grid(alpha=0.3)
    if panel.get_legend_handles_labels()[1]:
        panel.legend(
            fontsize=8,
            loc="upper left" if legend_beside else "upper right",
            bbox_to_anchor=(1, 1),
        )


def _rank_color(rank: int) -> str:
    return f"C{rank}" if rank < MAX_LABELED else "0.8"


def _escape(text: str, max_chars: int = 60) -> str:
    # Text from a file, without control characters and formulas, shortened.
    text = sanitize_line(text)
    if len(text) > max_chars:
        text = f"{text[: max_chars // 2]}…{text[-max_chars // 2 + 1 :]}"
    return text.replace("$", r"\$")


def highest_converged(losses: Sequence[float]) -> float:
    """Return the highest loss that is at most 5 times as far from the best as the median.

    Return the highest of all if most of them are equal.
    """
    best = min(losses)
    limit = best + (5 * (np.median(losses) - best) or inf)
    return max(loss for loss in losses if loss <= limit)


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the (cost, loss) pairs that no other pair dominates, cheapest first."""
    ordered = sorted(points)
    lowest = [inf, *accumulate((loss for _, loss in ordered), min)]  # before each pair
    return [pair for pair, low in zip(ordered, lowest, strict=False) if pair[1] < low]
