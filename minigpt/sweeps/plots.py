"""The picture of a sweep: the answer, loss over parameters and over compute, and the learning curves.

Matplotlib is imported where something is drawn. Text of files goes through `_plain` on its way into it.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil, exp, floor, inf, log, log10
from pathlib import Path
from statistics import mean, median, pstdev
from typing import TYPE_CHECKING, Any

from minigpt.sweeps.results import COMPLETED, Point, Row, as_number, name_of, ranked, short_names
from minigpt.sweeps.scaling import pareto_front, power_law
from minigpt.utils.files import atomic_write
from minigpt.utils.terminal import sanitize_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito (2008): colors that the color-blind tell apart; ranks and axes take viridis, which they order.
_BEST, _POINT, _FIT, _GRAY = "#d55e00", "#0072b2", "#aa4499", "0.75"
_MOST = 10  # lines that a legend names


def plot_sweep(file: Path, points: Sequence[Point], *, title: str, along: str | None = None) -> None:
    """Draw `sweep.png`: the answer, loss over parameters and over compute, and the curves.

    Args:
        file: the picture; its end is its format.
        along: a setting with numbers, to draw the loss over, a line for each combination of the others.
    """
    with warnings.catch_warnings(), atomic_write(file) as partial:
        warnings.simplefilter("ignore", UserWarning)  # of characters that the font does not have
        sweep_figure(points, title=title, along=along).savefig(partial, dpi=120, format=file.suffix[1:].lower())


def sweep_figure(points: Sequence[Point], *, title: str, along: str | None = None) -> "Figure":
    """The figure of `draw_sweep`."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = ranked(points)
    figure = Figure(figsize=(14, 10.5), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    (answer, curves), (params, flops) = figure.subplots(2, 2)
    _draw_answer(answer, rows, along)
    _draw_curves(curves, rows)
    _draw_scaling(params, rows, "params", "N", "parameters")
    _draw_scaling(flops, rows, "flops", "C", "training FLOPs")
    states = [point.status for point in points]
    told = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
    figure.suptitle(_plain(f"{title}: {told}", 120), fontsize=14)
    for panel in (answer, curves, params, flops):
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_answer(panel: "Axes", rows: Sequence[Row], along: str | None) -> None:
    """The loss over what was swept: a map or a scatter of two axes, lines over one, or else the best rows by name."""
    names = list(dict.fromkeys(name for row in rows for name in row.overrides))
    numeric = [name for name in names if all(as_number(row.overrides.get(name)) is not None for row in rows)]
    numeric = [name for name in numeric if len({as_number(row.overrides[name]) for row in rows}) > 1]
    if not any(row.losses for row in rows):
        _say_nothing(panel, "best validation loss")
    elif along is not None or len(numeric) == 1:
        lines = {name_of(row, short_names(names), along or numeric[0]) for row in rows}
        if along is not None or len(lines) <= _MOST:
            _draw_lines(panel, rows, along or numeric[0], names)
        else:
            _draw_names(panel, rows, names)
    elif len(names) == len(numeric) == 2:
        cells = len(_ticks(rows, names[0])) * len(_ticks(rows, names[1]))
        plot = _draw_map if len(rows) > cells / 2 else _plot_scatter  # most of a grid, or points of a search
        plot(panel, rows, names)
    else:
        _draw_names(panel, rows, names)


def _draw_map(panel: "Axes", rows: Sequence[Row], names: Sequence[str]) -> None:
    """Two axes with numbers: the mean loss in every cell, and of a cell without one what became of it."""
    import numpy as np
    from matplotlib.patches import Rectangle

    # The axis of more values lies along the panel's longer side.
    across, up = sorted(names, key=lambda name: -len({row.overrides[name] for row in rows}))
    columns, lines = _ticks(rows, across), _ticks(rows, up)
    cells = {(as_number(row.overrides[across]), as_number(row.overrides[up])): row for row in reversed(rows)}
    losses = np.full((len(lines), len(columns)), np.nan)
    for x, column in enumerate(columns):
        for y, line in enumerate(lines):
            row = cells.get((column, line))
            if row is not None and row.loss is not None:
                losses[y, x] = row.loss
    known = losses[np.isfinite(losses)].tolist()
    ceiling = max(_ceiling(known), min(known) + 1e-9)
    image = panel.imshow(losses, cmap="viridis_r", origin="lower", aspect="auto", vmin=min(known), vmax=ceiling)
    widest = max(len(columns), len(lines) * 0.7)
    size = 10.0 if widest <= 5 else 8.5 if widest <= 8 else 6.5
    best = rows[0]
    for x, column in enumerate(columns):
        for y, line in enumerate(lines):
            row = cells.get((column, line))
            style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": size}
            if row is None or row.loss is None:
                corner = (x - 0.5, y - 0.5)
                panel.add_patch(
                    Rectangle(corner, 1, 1, facecolor="0.94", edgecolor="0.8", hatch="//", linewidth=0, gid="missing")
                )
                if widest <= 16:
                    state = "not run" if row is None else row.status.replace(", ", "\n")
                    panel.text(x, y, _plain(state), color="0.3", **style)
            elif widest <= 16:
                text = f"{row.loss:.4f}" if widest <= 8 else f"{row.loss:.3f}"
                if widest <= 8:
                    text += "" if row.spread is None else f"\n± {row.spread:.4f}"
                    text += "" if row.status == COMPLETED else "\n" + row.status.replace(", ", "\n")
                dark = row.loss > min(known) + 0.45 * (ceiling - min(known))
                weight = "bold" if row is best else "normal"
                panel.text(x, y, _plain(text), color="white" if dark else "black", weight=weight, **style)
            if row is best:
                edge = Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, fill=False, edgecolor=_BEST, linewidth=3, gid="best")
                panel.add_patch(edge)
    for axis, ticks, name in ((panel.xaxis, columns, across), (panel.yaxis, lines, up)):
        every = max(1, -(-len(ticks) // 16))
        axis.set_ticks(range(0, len(ticks), every), [_plain(text, 12) for text in list(ticks.values())[::every]])
        axis.set_label_text(_plain(name))
    panel.tick_params(length=0)
    panel.set_title("best validation loss" + (", mean over seeds" if _seeded(rows) else ""), loc="left")
    bar = panel.figure.colorbar(image, ax=panel, extend="max" if max(known) > ceiling else "neither", pad=0.02)
    bar.set_label(rows[0].unit)
    bar.outline.set_visible(False)


def _plot_scatter(panel: "Axes", rows: Sequence[Row], names: Sequence[str]) -> None:
    """Two axes with numbers of which few combinations ran: a point for each, its color the mean loss."""
    across, up = sorted(names, key=lambda name: -len(_ticks(rows, name)))

    def at(chosen: Sequence[Row]) -> tuple[list[float], list[float]]:
        x, y = ([as_number(row.overrides[name]) or 0.0 for row in chosen] for name in (across, up))
        return x, y

    known, lost = ([row for row in rows if bool(row.losses) == has] for has in (True, False))
    losses = [row.loss or inf for row in known]
    ceiling = max(_ceiling(losses), min(losses) + 1e-9)
    # The best on top, where points lie close together.
    colors: dict[str, Any] = {"c": losses[::-1], "cmap": "viridis_r", "vmin": min(losses), "vmax": ceiling}
    points = panel.scatter(*at(known[::-1]), s=60, edgecolor="0.3", linewidth=0.5, zorder=2, gid="points", **colors)
    if lost:
        panel.scatter(*at(lost), marker="x", s=30, color="0.6", zorder=1, label="without a loss", gid="missing")
    (x,), (y,) = at(rows[:1])
    style: dict[str, Any] = {"markersize": 17, "markeredgecolor": "white", "linestyle": "none", "zorder": 3}
    panel.plot(x, y, marker="*", color=_BEST, label=f"best {rows[0].loss:.4f}", gid="best", **style)
    _scale(panel, "x", _ticks(rows, across))
    _scale(panel, "y", _ticks(rows, up))
    panel.set(xlabel=_plain(across), ylabel=_plain(up))
    panel.margins(0.06)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8, framealpha=0.85, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)
    panel.set_title("best validation loss" + (", mean over seeds" if _seeded(rows) else ""), loc="left")
    bar = panel.figure.colorbar(points, ax=panel, extend="max" if max(losses) > ceiling else "neither", pad=0.02)
    bar.set_label(rows[0].unit)
    bar.outline.set_visible(False)


def _scale(panel: "Axes", which: str, ticks: Mapping[float, str]) -> None:
    """Set a logarithmic scale where numbers are less skewed on it, and the numbers as ticks where there is room."""
    from matplotlib.ticker import FixedLocator, NullLocator

    numbers, axis = list(ticks), panel.xaxis if which == "x" else panel.yaxis
    places = [log(x) for x in numbers] if numbers[-1] >= 8 * numbers[0] > 0 else numbers
    logarithmic = _skewness(places) < _skewness(numbers)
    if logarithmic:
        panel.set(**{f"{which}scale": "log"})
        axis.set_minor_locator(NullLocator())
    else:
        places = numbers
    if min(b - a for a, b in pairwise(places)) > (places[-1] - places[0]) / 16:
        axis.set_ticks(numbers, [_plain(text, 12) for text in ticks.values()])
    elif logarithmic:
        axis.set_major_locator(FixedLocator(_round_numbers(numbers)))
        axis.set_major_formatter(lambda value, _: f"{value:g}")


def _skewness(numbers: Sequence[float]) -> float:
    """How far their distribution is from a symmetric one, either way."""
    middle, deviation = mean(numbers), pstdev(numbers)
    return abs(mean(((x - middle) / deviation) ** 3 for x in numbers))


def _draw_lines(panel: "Axes", rows: Sequence[Row], along: str, names: Sequence[str]) -> None:
    """The loss over one axis, a line for each combination of the others, its minimum marked."""
    short = short_names(names)
    lines: dict[str, list[tuple[float, Row]]] = {}  # the one with the best row first
    for row in rows:
        if row.loss is not None and (x := as_number(row.overrides.get(along))) is not None:
            lines.setdefault(name_of(row, short, along), []).append((x, row))
    if not lines:
        _say_nothing(panel, "best validation loss")
        return
    named = sorted(list(lines)[:_MOST], key=_natural)
    order = [*[line for line in lines if line not in named], *named]
    for name in order:
        found = sorted(lines[name], key=lambda pair: pair[0])
        xs, losses = [x for x, _ in found], [row.loss or inf for _, row in found]
        spreads = [row.spread or 0.0 for _, row in found]
        place = named.index(name) if name in named else None
        color: Any = _GRAY if place is None else _POINT if len(lines) == 1 else _ramp(place, len(named))
        panel.errorbar(
            xs,
            losses,
            yerr=spreads if any(spreads) else None,
            color=color,
            marker="o" if place is None else "os^Dv<>Pp*"[place],
            markersize=5,
            linewidth=1 if place is None else 1.8,
            capsize=3,
            label=_label(found[0][1], short, along) if place is not None and len(lines) > 1 else "_",
            zorder=1 if place is None else 2,
        )
        low = min(range(len(xs)), key=losses.__getitem__)
        panel.plot(
            xs[low],
            losses[low],
            marker="o",
            markersize=12,
            fillstyle="none",
            color=color,
            markeredgewidth=1.5,
            gid="minimum",
            linestyle="none",
        )
    best = next(row for row in rows if as_number(row.overrides.get(along)) is not None)
    _mark_best(panel, as_number(best.overrides[along]) or 0.0, best)
    _scale(panel, "x", _ticks(rows, along))
    columns = 1 if len(named) < 4 else 2
    style: dict[str, Any] = {"fontsize": 8, "framealpha": 0.85, "loc": "upper center", "ncols": columns}
    handles, labels = panel.get_legend_handles_labels()
    panel.legend(handles[1:] + handles[:1], labels[1:] + labels[:1], **style)  # the best row's star last
    _limit(panel, [row for line in lines.values() for _, row in line], -(-(len(named) + 1) // columns))
    panel.set(xlabel=_plain(along), ylabel=f"best validation loss ({rows[0].unit})")
    panel.grid(alpha=0.3)
    seeds = ", mean ± standard deviation over seeds" if _seeded(rows) else ""
    panel.set_title(f"best validation loss{seeds}", loc="left")


def _draw_names(panel: "Axes", rows: Sequence[Row], names: Sequence[str]) -> None:
    """The best rows by name."""
    short = short_names(names)
    shown = [row for row in rows if row.losses][:20]
    for place, row in enumerate(shown):
        spread = row.spread or 0.0
        color = _BEST if place == 0 else _POINT
        done = row.status == COMPLETED
        panel.errorbar(
            row.loss or inf,
            place,
            xerr=spread or None,
            marker="o",
            color=color,
            markerfacecolor=color if done else "white",
            capsize=3,
            gid="best" if place == 0 else None,
        )
        panel.annotate(
            f"{row.loss:.4f}",
            ((row.loss or inf) + spread, place),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=color,
            annotation_clip=True,
        )
    panel.set_yticks(range(len(shown)), [_label(row, short) for row in shown], fontsize=8)
    panel.set_ylim(max(len(shown), 3) - 0.4, -0.6)
    panel.margins(x=0.15)
    panel.set(xlabel=f"best validation loss ({rows[0].unit})")
    panel.grid(alpha=0.3)
    total = sum(bool(row.losses) for row in rows)
    which = f"the best {len(shown)} of {total}" if total > len(shown) else "all that have a loss"
    panel.set_title(f"best validation loss, {which}", loc="left")


def _draw_scaling(panel: "Axes", rows: Sequence[Row], figure: str, symbol: str, label: str) -> None:
    """The loss over a cost: what cannot be had for less, and how it falls."""
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, ScalarFormatter

    known = [(x, row.loss, row) for row in rows if row.loss and (x := row.over_seeds(figure))]
    if not known:
        _say_nothing(panel, f"loss over {label}")
        return
    for done in (True, False):
        there = [(x, loss) for x, loss, row in known if (row.status == COMPLETED) == done]
        if there:
            panel.scatter(
                [x for x, _ in there],
                [loss for _, loss in there],
                s=28,
                facecolor=_POINT if done else "none",
                edgecolor=_POINT,
                alpha=0.55 if done else 0.9,
                label=None if done else "not completed",
                zorder=2,
            )
    front = pareto_front([(x, loss) for x, loss, _ in known])
    if len(front) > 1:
        panel.plot(*zip(*front, strict=True), color="0.2", linewidth=1, label="Pareto front", gid="front", zorder=3)
    fitted = front if len(front) >= 5 else [(x, loss) for x, loss, row in known if row.status == COMPLETED]
    if len({round(log(x), 2) for x, _ in fitted}) >= 5:  # to a percent: a cost that was measured differs a little
        law = power_law(*zip(*fitted, strict=True))
        ends = [min(x for x, _ in fitted), max(x for x, _ in fitted)]
        said = f"$L = {_mantissa(law.scale, 3)}\\,{symbol}^{{{-law.exponent:.4f}}}$"
        said += f", 95 %: {-law.high:.4f} to {-law.low:.4f}".replace("-", "−")
        over = "front" if fitted is front else "completed runs"
        losses = [law.scale * x**-law.exponent for x in ends]
        panel.plot(
            ends, losses, color=_FIT, linestyle="--", linewidth=1.8, zorder=4, label=f"{said} ({over})", gid="fit"
        )
    best = known[0]
    _mark_best(panel, best[0], best[2])
    panel.set(xscale="log", yscale="log", xlabel=f"{label} {symbol}", ylabel=f"best validation loss ({rows[0].unit})")
    xs = [x for x, _, _ in known]
    for axis, locator in ((panel.xaxis, FixedLocator(_round_numbers(xs))), (panel.yaxis, MaxNLocator(6))):
        axis.set_major_locator(locator)
        axis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(ScalarFormatter(useOffset=False))
    panel.xaxis.set_major_formatter(_abbreviated if figure == "params" else lambda value, _: f"${_mantissa(value, 2)}$")
    reach = 1.6 if min(xs) == max(xs) else (max(xs) / min(xs)) ** 0.08
    panel.set_xlim(min(xs) / reach, max(xs) * reach)
    legend = panel.legend(fontsize=8, framealpha=0.85, loc="upper right")
    _limit(panel, [row for _, _, row in known], len(legend.get_texts()))
    panel.grid(alpha=0.3)
    panel.set_title(f"loss over {label}", loc="left")


def _draw_curves(panel: "Axes", rows: Sequence[Row]) -> None:
    """The validation loss of every run as it trained, the best rows in color."""
    from matplotlib.collections import LineCollection

    short = short_names(list(dict.fromkeys(name for row in rows for name in row.overrides)))
    rows = [replace(row, points=[replace(p, curve=p.curve_in(row.unit)) for p in row.points]) for row in rows]
    there = [row for row in rows if any(point.curve for point in row.points)]
    if not there:
        _say_nothing(panel, "learning curves")
        return
    rest = [point.curve for row in there[_MOST:] for point in row.points if point.curve]
    if rest:  # one collection, as a line each of hundreds would take seconds
        faint = max(0.15, min(0.8, 50 / len(rest)))
        panel.add_collection(LineCollection(rest, colors="0.6", alpha=faint, linewidths=0.7, zorder=1))
        panel.plot([], [], color="0.7", linewidth=0.7, label=f"{len(rest)} other runs")
    for rank, row in enumerate(there[:_MOST]):
        label = f"{rank + 1}  {_label(row, short)}"
        for point in row.points:
            if not point.curve:
                continue
            panel.plot(
                *zip(*point.curve, strict=True),
                color=_BEST if rank == 0 else _ramp(rank - 1, _MOST - 1),
                linewidth=2.6 if rank == 0 else 1.2,
                linestyle="-" if point.status == COMPLETED else ":",
                marker="o" if len(point.curve) == 1 else None,
                label=label,
                zorder=4 if rank == 0 else 3 - rank / _MOST,
                gid="best" if rank == 0 else None,
            )
            label = "_"  # one entry of the legend for all seeds
    # What matters is at the end: the first losses, and those of runs that diverged, may lie above.
    ceiling = _ceiling([row.loss or inf for row in there])
    losses = sorted(loss for row in there if (row.loss or inf) <= ceiling for p in row.points for _, loss in p.curve)
    low, high = losses[0], losses[-1 if len(losses) < 30 else int(0.95 * len(losses))]
    panel.set_ylim(low - 0.04 * (high - low or 1), high + 0.04 * (high - low or 1))
    panel.set_xlim(0, 1.03 * max(at for row in there for point in row.points for at, _ in point.curve))
    panel.xaxis.set_major_formatter(_abbreviated)
    panel.set(xlabel="tokens", ylabel=f"validation loss ({rows[0].unit})")
    panel.grid(alpha=0.3)
    dotted = any(point.status != COMPLETED for row in there[:_MOST] for point in row.points if point.curve)
    panel.set_title("learning curves, by rank" + ("; dotted: not completed" if dotted else ""), loc="left")
    panel.legend(fontsize=8, framealpha=0.85, loc="upper right")


def _seeded(rows: Iterable[Row]) -> bool:
    return any(row.spread is not None for row in rows)


def _mark_best(panel: "Axes", x: float, row: Row) -> None:
    style: dict[str, Any] = {"markersize": 15, "markeredgecolor": "white", "linestyle": "none", "zorder": 5}
    panel.plot(x, row.loss or inf, marker="*", color=_BEST, label=f"best {row.loss:.4f}", gid="best", **style)


def _say_nothing(panel: "Axes", title: str) -> None:
    panel.text(0.5, 0.5, "nothing measured yet", ha="center", va="center", transform=panel.transAxes, color="0.5")
    panel.set(xticks=[], yticks=[])
    panel.set_title(title, loc="left")


def _limit(panel: "Axes", rows: Iterable[Row], entries: int) -> None:
    """Have the losses fill a panel, whatever a few that diverged came to, below a legend of some entries."""
    found = [(row.loss, row.spread or 0.0) for row in rows if row.loss is not None]
    best, ceiling = min(loss for loss, _ in found), _ceiling([loss for loss, _ in found])
    low = max(min(loss - spread for loss, spread in found), 0.5 * best, 1e-9)
    high = max(max(loss + spread for loss, spread in found if loss <= ceiling), low)
    room = log(high / low) or 0.05  # in logarithms, as two of the panels; on a narrow linear scale it is the same
    top = high * exp((0.08 + 0.075 * entries) * room)
    panel.set_ylim(low * exp(-0.08 * room), top)
    if above := sum(loss > top for loss, _ in found):
        style: dict[str, Any] = {"fontsize": 8, "color": "0.35", "va": "top"}
        panel.text(0.01, 0.99, f"↑ {above} above this", transform=panel.transAxes, **style)


def _ceiling(losses: Sequence[float]) -> float:
    """The highest loss but for those far from the better half."""
    best, middle = min(losses), median(losses)
    return (
        max((loss for loss in losses if loss <= best + 5 * (middle - best)), default=best)
        if middle > best
        else max(losses)
    )


def _ramp(place: int, of: int) -> Any:
    """A color of viridis, without the yellow that white swallows."""
    from matplotlib import colormaps

    return colormaps["viridis"](0.88 * place / max(of - 1, 1))


def _plain(text: str, longest: int = 60) -> str:
    """Text of a file for a picture: nothing that cannot be seen, no formulas, its middle left out where it is long."""
    text = sanitize_line(text) if "\n" not in text else text
    return _middle(text, longest).replace("$", r"\$")


def _abbreviated(value: float, _: Any = None) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g} {letter}"
    return f"{value:.4g}"


def _round_numbers(xs: Sequence[float]) -> list[float]:
    """Some three to seven round numbers in the range of numbers on a logarithmic scale."""
    low, high = min(xs), max(xs)
    if low == high:
        return [low]
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    for steps in (
        (1,),
        (1, 3),
        (1, 2, 5),
        (1, 1.5, 2, 3, 4, 5, 7),
        (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9),
    ):
        found = [step * 10.0**decade for decade in decades for step in steps]
        found = [x for x in found if 0.95 * low <= x <= 1.05 * high]
        if len(found) >= 3:
            return found[:: -(-len(found) // 8)]
    return [low, high] if high > 1.1 * low else [low]


def _mantissa(value: float, digits: int) -> str:
    """A number as a formula."""
    if 0.01 <= abs(value) < 10_000:
        return f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:.0f}"
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    times = "" if float(mantissa) == 1 else f"{float(mantissa):g} \\cdot "
    return f"{times}10^{{{int(exponent)}}}"


def _label(row: Row, short: Mapping[str, str], without: str | None = None) -> str:
    """The name of a row for a picture: of long values the middle is left out."""
    return _plain(", ".join(_middle(part, 26) for part in sanitize_line(name_of(row, short, without)).split(", ")), 54)


def _middle(text: str, longest: int) -> str:
    half = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"


def _ticks(rows: Iterable[Row], name: str) -> dict[float, str]:
    """The numbers of an axis in order, as they were written."""
    texts = [row.overrides[name] for row in rows if as_number(row.overrides.get(name)) is not None]
    return dict(sorted((float(text), text) for text in reversed(texts)))


def _natural(text: str) -> list[tuple[bool, float, str]]:
    """To sort by: numbers as numbers."""
    values = (part.rpartition("=")[2] for part in text.split(", "))
    return [(number is None, number or 0.0, value) for value in values for number in [as_number(value)]]
