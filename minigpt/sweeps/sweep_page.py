"""The page of a sweep: losses, learning curves, settings and samples, linked by the pointer, in one HTML file.

Text from files is JSON, which the page shows as text. Its content security policy allows no request, and no script but
its own.
"""

import html
import json
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import resources
from math import inf
from typing import Any

import vl_convert

from minigpt.runs.run_dir import read_samples
from minigpt.sweeps.ranking import Row, count_text
from minigpt.sweeps.results import Point
from minigpt.sweeps.sweep_charts import learning_curves, loss_limits, parallel_coordinates, swept_chart
from minigpt.utils.terminal import escape_control_chars, sanitize_line

MAX_SAMPLE_CHARS = 2000


def sweep_page(title: str, sentences: Sequence[str], rows: Sequence[Row]) -> str:
    """Return the page of a sweep as HTML, with the sentences of its answer."""
    unit = rows[0].unit
    by_loss = [sorted(row.points, key=lambda point: point.loss(unit) or inf) for row in rows]
    runs = [(i, point) for i, row_points in enumerate(by_loss) for point in row_points]
    facts = [count_text(Counter(point.status for _, point in runs))]
    charts: dict[str, Any] = {}
    if losses := [row.loss for row in rows if row.loss is not None]:
        charts = {"swept": swept_chart(rows), "curves": learning_curves(rows, runs)}
        charts["parallel"] = parallel_coordinates(rows)
        if len(losses) < len(rows):
            facts += [f"{len(rows) - len(losses)} of {len(rows)} combinations of settings have no loss"]
        if above := sum(loss > loss_limits(rows)[1] for loss in losses):
            facts += [f"losses above the scales: {above}"]
    data = {
        "summary": sanitize_line("; ".join(facts)),
        "answer": sentences,
        "charts": charts,
        "rows": [sanitize_line(f"{row.label()}: {row.loss_text} {unit}, {row.status}") for row in rows],
        "runs": [_describe(rows[i], i, point) for i, point in runs],
    }
    # JSON in ASCII; <, > and & are the only characters left that HTML interprets.
    values = {"data": re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", json.dumps(data, allow_nan=False))}
    values |= {"title": html.escape(sanitize_line(title)), "nonce": secrets.token_hex(), "vega": _vega()}
    template = resources.files("minigpt.sweeps").joinpath("sweep_page.html").read_text(encoding="utf-8")
    return re.sub(r"{{(\w+)}}", lambda match: values[match[1]], template)


def _describe(row: Row, rank: int, point: Point) -> dict[str, Any]:
    """Return what the page shows of a run, with its last sample."""
    try:
        samples = read_samples(point.folder)
    except OSError:
        samples = []
    seed = f", seed={point.overrides['seed']}" if "seed" in point.overrides and len(row.points) > 1 else ""
    loss = "no loss" if (best := point.loss(row.unit)) is None else f"{best:.4f} {row.unit}"
    reason = f": {point.reason}" if point.reason else ""
    facts = f"rank {rank + 1}, {loss}, {point.status}{reason}, in {point.folder.name}"
    text = escape_control_chars(samples[-1][1])[:MAX_SAMPLE_CHARS] if samples else ""
    return {
        "row": rank,
        "label": sanitize_line(row.label() + seed),
        "tip": sanitize_line(f"{row.label()}{seed}: {loss}"),
        "facts": sanitize_line(facts),
        "sample": text,
    }


@cache
def _vega() -> str:
    """Return the JavaScript of Vega, Vega-Lite and Vega-Embed, which sets `vegaEmbed`."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
