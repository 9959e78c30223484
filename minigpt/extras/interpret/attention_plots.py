"""Plots of attention maps and of head ablation.

Shapes: L layers, H heads, T time.
"""

import math
import os
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from minigpt.utils.errors import UserError, require
from minigpt.utils.files import atomic_write

FORMATS = (".png", ".pdf", ".svg")
FONT = "DejaVu Sans Mono"  # comes with matplotlib
MAX_LABEL_CHARS = 12
LABELS_PER_INCH = 8  # with more tokens, only every second, third, … is labeled
MAX_TOKENS_WITH_VALUES = 24  # of a single map; its cells have room for the weights


def plot_maps(
    path: Path,
    weights: Tensor,
    texts: Sequence[str],
    *,
    names: Sequence[Sequence[str]] | None = None,
    layer: int | None = None,
    head: int | None = None,
    title: str = "",
) -> None:
    """Plot the attention map of every head, queries down and keys across, on one color scale.

    Args:
        path: of the picture; its suffix is its format.
        weights: (L, H, T, T). texts: of the T tokens.
        names: of each head, from `head_names`.
        layer, head: plot only these, counted from 1. The cells of a single map hold the weights as
            text if they fit.
    """
    L, H, T, _ = weights.shape
    rows, columns = (
        range(L) if layer is None else [layer - 1],
        range(H) if head is None else [head - 1],
    )
    single = len(rows) == len(columns) == 1
    side = 8.0 if single else min(max(2.5, T / 16), 4.0)  # inches per map
    # All maps are in one axes, which fills the figure, in units of a cell: 64 axes would take twice
    # as long.
    lefts, tops = (
        [1.03 * T * i for i in range(len(columns))],
        [1.1 * T * i for i in range(len(rows))],
    )
    width, height = lefts[-1] + T, tops[-1] + T
    figure = Figure(figsize=(side * width / T, side * height / T))
    axes = figure.add_axes((0, 0, 1, 1), frame_on=False)
    # The future stays blank
    maps = weights.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("nan"))
    norm = PowerNorm(0.5, 0, 1)  # distinguishes small weights
    for (y, i), (x, j) in product(zip(tops, rows, strict=True), zip(lefts, columns, strict=True)):
        left, right, bottom, top = x - 0.5, x + T - 0.5, y + T - 0.5, y - 0.5
        image = axes.imshow(
            maps[i, j].numpy(), cmap="magma_r", norm=norm, extent=(left, right, bottom, top)
        )
        axes.text(left, top - 0.01 * T, f"layer {i + 1} · head {j + 1}", fontsize=9)
        if names:
            axes.text(
                right,
                top,
                names[i][j],
                ha="right",
                va="top",
                color="#b73779",
                weight="bold",
                fontsize=9,
            )
    if single and T <= MAX_TOKENS_WITH_VALUES:
        _print_values(axes, maps[rows[0], columns[0]], "{:.2f}", threshold=0.25)
    ticks = range(0, T, math.ceil(T / (LABELS_PER_INCH * side)))
    labels = _labels(texts)[:: ticks.step]
    # Points; a label is at most as high as the cells it covers
    fontsize = min(10.0, 0.9 * 72 * side / T * ticks.step)
    style: Any = {"fontfamily": FONT, "fontsize": fontsize, "parse_math": False}
    axes.set_xticks(
        [x + tick for x in lefts for tick in ticks],
        labels * len(lefts),
        rotation=90 if max(map(len, labels)) > 2 else 0,
        **style,
    )
    axes.set_yticks([y + tick for y in tops for tick in ticks], labels * len(tops), **style)
    axes.tick_params(length=0)
    some = f"; one of {ticks.step} tokens has a label" if ticks.step > 1 else ""
    axes.set(
        xlim=(-0.5, width - 0.5),
        ylim=(height - 0.5, -0.5),
        xlabel=f"key (attended to){some}",
        ylabel="query (attends)",
    )
    axes.set_title(title, pad=24, parse_math=False)
    figure.colorbar(
        image,
        cax=figure.add_axes((1.02, 0.2, 0.02, 0.6)),
        ticks=[0, 0.01, 0.05, 0.1, 0.25, 0.5, 1],
        format="{x:g}",
        label="weight",
    )
    _save(figure, path)


def plot_ablation(path: Path, dloss: Tensor, *, loss: float) -> None:
    """Plot the ablation Δloss of every head: (L, H), and the loss of the intact model, from
    `head_ablation`.
    """
    L, H = dloss.shape
    figure = Figure(figsize=(max(0.8 * H, 3.5) + 2, 0.8 * L + 1.5), layout="compressed")
    axes = figure.subplots()
    limit = float(dloss.nan_to_num().abs().max()) or 1.0
    image = axes.imshow(dloss.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit)
    _print_values(axes, dloss, "{:+.3f}", threshold=0.6 * limit)
    axes.set_xticks(range(H), map(str, range(1, H + 1)))
    axes.set_yticks(range(L), map(str, range(1, L + 1)))
    title = (
        "Increase of the validation loss without one head\n"
        f"nats per token; {loss:.4f} with all heads"
    )
    axes.set(xlabel="head", ylabel="layer", title=title)
    figure.colorbar(image, ax=axes)
    _save(figure, path)


def check_outputs(outputs: Mapping[str, Path | None]) -> None:
    """Raise UserError if an output file, given by flag, has an unknown format or cannot be
    written.
    """
    paths = {flag: path for flag, path in outputs.items() if path is not None}
    for flag, path in paths.items():
        require(
            flag,
            path,
            lambda p: p.suffix.lower() in FORMATS,
            f"a file in {', '.join(FORMATS)} format",
        )
        require(
            flag,
            path,
            lambda p: os.access(p.parent, os.W_OK | os.X_OK),
            "in a folder that exists and is writable",
        )
    if len({path.resolve() for path in paths.values()}) < len(paths):
        raise UserError(
            f"{', '.join(paths)} must be different files, got {', '.join(map(str, paths.values()))}"
        )


def _labels(texts: Sequence[str]) -> list[str]:
    """Return short tick labels; characters that the font lacks are code points."""
    font = font_manager.get_font(font_manager.findfont(FONT))
    symbols = {"\n": "⏎", "\t": "⇥", " ": "␣"}

    def visible(c: str) -> str:
        return symbols.get(c) or (
            c if c.isprintable() and font.get_char_index(ord(c)) > 0 else f"⟨U+{ord(c):04X}⟩"
        )

    labels = ("".join(map(visible, text)) or "∅" for text in texts)
    return [
        text if len(text) <= MAX_LABEL_CHARS else f"{text[: MAX_LABEL_CHARS - 1]}…"
        for text in labels
    ]


def _print_values(axes: Axes, values: Tensor, template: str, *, threshold: float) -> None:
    """Print each value except NaN in its cell, in white where its magnitude exceeds the
    threshold.
    """
    for row, column in values.isfinite().nonzero().tolist():
        value = float(values[row, column])
        color = "white" if abs(value) > threshold else "black"
        axes.text(
            column, row, template.format(value), ha="center", va="center", color=color, fontsize=9
        )


def _save(figure: Figure, path: Path) -> None:
    with atomic_write(path) as partial:
        figure.savefig(partial, dpi=100, format=path.suffix[1:].lower(), bbox_inches="tight")
