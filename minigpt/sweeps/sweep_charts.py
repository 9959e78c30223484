"""The charts of the page of a sweep, in Vega-Lite: losses over settings, learning curves, parallel coordinates.

An entry of their data has the rank of its row and, in the learning curves, the number of its run; `sweep_page.html`
sets the signals `lit_row` and `lit_run` to those under the pointer. Text from files is data, never an expression.
"""

from collections.abc import Sequence
from math import inf, prod
from typing import Any

import altair as alt

from minigpt.sweeps.ranking import Row, highest_converged
from minigpt.sweeps.results import COMPLETED, NATS, Point
from minigpt.sweeps.sweep_plots import MAX_ANNOTATED, MAX_NAMES
from minigpt.utils.terminal import sanitize_line

MAX_CURVE_POINTS, MAX_TICKS = 10_000, 12  # of all learning curves together; of an axis of the parallel coordinates
_LIGHT = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151")  # viridis from the lowest loss to the highest,
_DARK = ("#fde725", "#8bd646", "#2fb47c", "#238a8d", "#355f8d")  # without the colors close to the background
_RANGE = [alt.ExprRef(f"dark ? '{dark}' : '{light}'") for light, dark in zip(_LIGHT, _DARK, strict=True)]
_LIT = "(lit_row < 0 || datum.row == lit_row) && (lit_run < 0 || !isValid(datum.run) || datum.run == lit_run)"
_OPACITY: Any = alt.when(_LIT).then(alt.value(1)).when("datum.row == lit_row").then(alt.value(0.4))
_BASE = alt.Chart(alt.NamedData("data")).encode(opacity=_OPACITY.otherwise(alt.value(0.15)))
_INK: Any = alt.when("!isValid(datum.loss)").then(alt.value("currentColor"))
_INK = _INK.when("luminance(scale('color', datum.loss)) > 0.179").then(alt.value("black")).otherwise(alt.value("white"))


def swept_chart(rows: Sequence[Row]) -> dict[str, Any]:
    """Describe a heat map of two settings, or else the losses over one setting or of the best rows by name."""
    values = {name: _values(rows, name) for name in rows[0].short_names}
    if len(values) == 2 and len(rows) > prod(map(len, values.values())) / 2:
        return _heat_map(rows, *sorted(values, key=lambda name: -len(values[name])))
    (low, high), along = loss_limits(rows), next(iter(values)) if len(values) == 1 else None
    dots: list[Any] = []
    for i, row in enumerate(rows):
        if row.loss is not None and (along or i < MAX_NAMES):
            name, spread = _value(row, along) if along else f"{i + 1}  {sanitize_line(row.label())}", row.interval or 0
            dots += [{"row": i, "y": name, "loss": row.loss, "low": row.loss - spread, "high": row.loss + spread}]
    ends = [dot[end] for dot in dots if dot["loss"] <= high for end in ("low", "high")]
    x: dict[str, Any] = {"scale": alt.Scale(domain=[min(low, *ends), max(ends)], clamp=True, nice=True)}
    x |= {"title": f"best validation loss ({rows[0].unit})"}
    title = sanitize_line(along) if along else f"{len(dots)} of {len(rows)} combinations of settings"
    y = alt.Axis(grid=True, labelLimit=160, title=title)
    order = alt.Scale(domain=values[along] if along else [dot["y"] for dot in dots])
    base = _BASE.encode(alt.Y("y:N", scale=order, axis=y), color=_color(rows))
    spreads = base.mark_rule(strokeWidth=2).encode(alt.X("low:Q", **x), alt.X2("high:Q"))
    means = base.mark_point(filled=True, size=120).encode(alt.X("loss:Q", **x))
    return _chart([spreads, means], dots, height=max(120, 28 * len(dots)))


def _heat_map(rows: Sequence[Row], x: str, y: str) -> dict[str, Any]:
    """Describe a grid of two settings, with the mean loss and the status in each cell."""
    columns, lines = alt.Scale(domain=_values(rows, x)), alt.Scale(domain=_values(rows, y)[::-1])
    cells: list[Any] = []
    for i, row in reversed(list(enumerate(rows))):  # of two rows in a cell the better one is on top
        text = [*row.loss_text.split(" ", 1), *(["tied"] if i and row.tied else [])]
        text += [] if row.status == COMPLETED else row.status.split(", ")
        cells += [{"row": i, "loss": row.loss, "x": _value(row, x), "y": _value(row, y), "text": text}]
    base = _BASE.encode(
        alt.X("x:N", scale=columns, title=sanitize_line(x), axis=alt.Axis(labelAngle=0)),
        alt.Y("y:N", scale=lines, title=sanitize_line(y)),
        opacity=_OPACITY.otherwise(alt.value(0.35)),
    )
    legend = alt.Legend(orient="top", gradientLength=160, format=".3f", values=loss_limits(rows))
    filled = alt.when("isValid(datum.loss)").then(_color(rows).legend(legend)).otherwise(alt.value("#8884"))
    border = alt.when("datum.row == 0").then(alt.value("currentColor")).otherwise(alt.value("transparent"))
    layers = [base.mark_rect(strokeWidth=2).encode(color=filled, stroke=border)]
    if len(rows) <= MAX_ANNOTATED:
        text_style: dict[str, Any] = {"dy": alt.ExprRef("-7 * (length(datum.text) - 1)"), "lineHeight": 14}
        layers += [base.mark_text(**text_style).encode(text="text:N", color=_INK)]
    return _chart(layers, cells, width=60 + 58 * len(_values(rows, x)), height=max(260, 54 * len(_values(rows, y))))


def learning_curves(rows: Sequence[Row], runs: Sequence[tuple[int, Point]]) -> dict[str, Any] | None:
    """Describe the validation loss of each run over tokens, in the color of its row; None without curves."""
    unit, every = rows[0].unit, 1 + sum(len(point.curve) for _, point in runs) // MAX_CURVE_POINTS
    points: list[Any] = []
    later: list[float] = []  # losses after the first validation
    for run, (row, point) in enumerate(runs):
        curve, factor = point.curve[::-1][::every][::-1], (point.loss(unit) or 0) / (point.loss(NATS) or inf)
        if curve and factor:
            shared = {"row": row, "run": run, "loss": rows[row].loss, "done": point.status == COMPLETED}
            points += [shared | {"tokens": tokens, "y": float(f"{factor * loss:.5g}")} for tokens, loss in curve]
            points[-1]["last"] = True
            later += [factor * loss for _, loss in curve[1:] or curve]
    if not points:
        return None
    limits = alt.Scale(domain=[min(later), highest_converged(later)], nice=True)
    y = alt.Y("y:Q", scale=limits, title=f"validation loss ({unit})")
    base = _BASE.encode(alt.X("tokens:Q", axis=alt.Axis(format="~s")), y, alt.Detail("run:N"), color=_color(rows))
    dash = alt.when("datum.done").then(alt.value([1, 0])).otherwise(alt.value([4, 3]))
    width = alt.when("datum.run == lit_run").then(alt.value(3.5)).otherwise(alt.value(1.8))
    lines = base.mark_line(clip=True).encode(strokeDash=dash, strokeWidth=width)
    ends = base.mark_point(filled=True, clip=True).transform_filter("datum.last")
    return _chart([_easier_to_point_at(base), lines, ends], points, height=300)


def parallel_coordinates(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Describe a line per row through its settings, whose values are equally spaced in order, and its mean loss."""
    known = [(i, row, row.loss) for i, row in enumerate(rows) if row.loss is not None]
    if len(known) < 2:
        return None
    (low, high), axis = loss_limits(rows), f"best loss\n{rows[0].unit}"
    axes = [*map(sanitize_line, rows[0].short_names.values()), axis]
    heights = [(i, loss, min(1.06, (loss - low) / (high - low or 1))) for i, _, loss in known]
    lines = [{"row": i, "loss": loss, "axis": axis, "y": height} for i, loss, height in heights]
    ticks = [{"axis": axis, "y": k / 4, "text": f"{low + k / 4 * (high - low):.3f}"} for k in range(5)]
    for name, axis in zip(rows[0].short_names, axes, strict=False):
        values = _values(rows, name)
        place = {value: i / max(1, len(values) - 1) for i, value in enumerate(values)}
        lines += [{"row": i, "loss": loss, "axis": axis, "y": place[_value(row, name)]} for i, row, loss in known]
        shown = values[:: -(-len(values) // MAX_TICKS)]
        ticks += [{"axis": axis, "y": place[value], "text": value} for value in shown]
    style: dict[str, Any] = {"orient": "top", "labelAngle": 0, "labelLimit": 110, "labelPadding": 20, "grid": True}
    style |= {"labelExpr": "split(datum.label, '\\n')", "domain": False, "ticks": False, "title": None}
    y = alt.Y("y:Q", scale=alt.Scale(domain=[0, 1.06]), axis=None)
    base = _BASE.encode(alt.X("axis:N", scale=alt.Scale(domain=axes), axis=alt.Axis(**style)), y)
    line = base.encode(alt.Detail("row:N"), color=_color(rows))
    text = base.mark_text(align="left", dx=5).encode(text="text:N", opacity=alt.value(1))
    layers = [_easier_to_point_at(line), line.mark_line(strokeWidth=2), text.properties(data=alt.NamedData("ticks"))]
    return _chart(layers, lines, ticks=ticks, width=90 * len(axes), height=300)


def _values(rows: Sequence[Row], name: str) -> list[str]:
    """Return the values that a setting takes, as text: numbers in their order, then others."""
    found = {_value(row, name): row.number(name) for row in rows}
    return sorted(found, key=lambda text: (found[text] is None, found[text] or 0.0, text))


def _value(row: Row, name: str) -> str:
    number = row.number(name)
    return sanitize_line(row.overrides.get(name, "default")) if number is None else f"{number:.12g}"


def loss_limits(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the lowest loss, and the highest of rows that did not diverge."""
    losses = [row.loss for row in rows if row.loss is not None]
    return min(losses), highest_converged(losses)


def _color(rows: Sequence[Row]) -> alt.Color:
    scale = alt.Scale(domain=loss_limits(rows), clamp=True, range=_RANGE)
    return alt.Color("loss:Q", title=rows[0].unit, scale=scale, legend=None)


def _easier_to_point_at(lines: alt.Chart) -> alt.Chart:
    """Return wide, invisible lines, to go below the visible ones."""
    return lines.mark_line(aria=False, clip=True, strokeWidth=12).encode(opacity=alt.value(0))


def _chart(layers: list[Any], data: list[Any], *, height: int, width: int = 0, **more: Any) -> dict[str, Any]:
    """Return the Vega-Lite of layers that fill the page, at least `width` pixels."""
    params = [alt.param(name=name, value=value) for name, value in (("dark", False), ("lit_row", -1), ("lit_run", -1))]
    size: dict[str, Any] = {"width": "container", "height": height}
    chart = alt.layer(*layers, autosize=alt.AutoSizeParams(type="fit-x", contains="padding"), **size)
    return {"spec": chart.add_params(*params).to_dict() | {"datasets": {"data": data, **more}}, "width": width}
