"""Pictures of what `inspection` measures. Matplotlib is imported where something is drawn.

Shapes: L layers, H heads, T time.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minigpt.utils.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIGNS = {"\n": "⏎", " ": "␣", "\t": "⇥"}
_FONT = "DejaVu Sans Mono"  # comes with matplotlib
_COLORS = "magma_r"  # begins at a cream that stands out from the blank half, darkens evenly


def legible(text: str) -> str:
    """The text of a token with a sign for every character that could not be seen."""
    signs = (_SIGNS.get(c) or (c if c.isprintable() else _code(c)) for c in text)
    return "".join(signs) or "∅"


def _code(character: str) -> str:
    point = ord(character)
    return f"^{chr(point ^ 64)}" if point < 32 or point == 127 else f"U+{point:X}"


def plot_maps(
    path: Path,
    weights: Tensor,
    texts: Sequence[str],
    *,
    names: Sequence[Sequence[str]] | None = None,
    layers: slice = slice(None),
    heads: slice = slice(None),
    title: str = "",
) -> None:
    """Draw what heads attend to: a map a head, queries down, keys across, all in one color scale.

    Args:
        path: of the picture; its end is its format.
        weights: (L, H, T, T). texts: of the T tokens.
        names: what each head does, from `head_names`.
        layers, heads: which of them to draw; a single map is drawn large.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    L, H, T, _ = weights.shape
    rows, columns = range(L)[layers], range(H)[heads]
    single = len(rows) == len(columns) == 1
    labels = _labels(texts)
    longest = max(map(len, labels))
    # Inches: tokens get the room that their labels need, as long as the picture does not outgrow a screen.
    room = T * 0.16 if single else max(T * 0.085, min(T * 0.15, 2.6))
    side = min(max(room, 5.0), 14.0) if single else min(max(room, 1.9), max(30 / max(L, H), 1.2))
    step = max(1, round(0.068 * T / side))  # label every token where labels of 5 points fit
    size = min(10.0, 72 * side / T * step * 0.9)
    turn = 90 if longest > 2 else 0  # degrees
    big = max(1.0, min(2.0, side / 1.5, side * max(len(rows), len(columns)) / 11))  # type of a large picture
    length = longest * size * 0.0085  # of a label
    left, right, gap = 0.3 * big + 0.1 + length, 0.85 * big, (0.12, 0.32 * big)
    top, bottom = 0.35 * big + (0.25 * big if title else 0), 0.3 * big + 0.1 + (length if turn else size / 60)
    width = left + len(columns) * (side + gap[0]) + right
    height = top + len(rows) * (side + gap[1]) - gap[1] + bottom
    figure = Figure(figsize=(width, height))
    page = figure.add_axes((0, 0, 1, 1))  # in inches from the upper left; axes of their own would take twice the time
    page.set_axis_off()
    norm = PowerNorm(0.5, 0, 1)  # small weights are many, and worth telling apart
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    label: dict[str, Any] = {"fontfamily": _FONT, "fontsize": size, "parse_math": False}
    for i, layer in enumerate(rows):
        for j, head in enumerate(columns):
            x, y, cell = left + j * (side + gap[0]), top + i * (side + gap[1]), side / T
            shown = weights[layer, head].masked_fill(future, float("nan")).numpy()
            image = page.imshow(shown, cmap=_COLORS, norm=norm, extent=(x, x + side, y + side, y))
            for token in range(0, T, step):
                middle = (token + 0.5) * cell
                if i == len(rows) - 1:
                    page.text(x + middle, y + side + 0.05, labels[token], ha="center", va="top", rotation=turn, **label)
                if j == 0:
                    page.text(x - 0.05, y + middle, labels[token], ha="right", va="center_baseline", **label)
            page.text(x, y - 0.05 * big, f"layer {layer + 1} · head {head + 1}", fontsize=9 * big)
            if names and names[layer][head]:
                name: dict[str, Any] = {"color": "#b73779", "weight": "bold", "fontsize": 9 * big}
                page.text(x + side, y + 0.05 * big, names[layer][head], ha="right", va="top", **name)
            if single and T <= 24:
                _write_figures(page, shown, x, y, cell, norm)
    gray: dict[str, Any] = {"fontsize": 9 * big, "color": "0.35"}
    page.text(left, height - 0.1, "attended to: key", va="bottom", **gray)
    page.text(0.1, top, "attends: query", rotation=90, va="top", **gray)
    page.text(left, 0.12, title, fontsize=11 * big, va="top", parse_math=False)
    page.set(xlim=(0, width), ylim=(height, 0), aspect="auto")
    x, tall = width - 0.7 * big, min(height - top - bottom, 4.0 * big)
    axes = figure.add_axes((x / width, 1 - (top + tall) / height, 0.13 * big / width, tall / height))
    bar = figure.colorbar(image, cax=axes, ticks=[0, 0.01, 0.05, 0.1, 0.25, 0.5, 1])
    bar.ax.set_yticklabels(["0", ".01", ".05", ".1", ".25", ".5", "1"], fontsize=8 * big)
    bar.outline.set_visible(False)
    page.text(x, top - 0.13 * big, "weight", fontsize=9 * big)
    _save(figure, path, dpi=110)


def plot_ablation(path: Path, values: Tensor, *, loss: float) -> None:
    """Draw what heads are worth, (L, H) from `head_values`, as a map of layers × heads; loss is that with all."""
    from matplotlib.figure import Figure

    L, H = values.shape
    cell = 0.8
    left, bottom, right, top = 0.7, 0.6, 1.2, 0.85
    width, height = max(left + H * cell + right, 5.6), bottom + L * cell + top
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((left / width, bottom / height, H * cell / width, L * cell / height))
    reach = float(values.nan_to_num().abs().max()) or 1.0
    # Colors from the middle, 0, to both ends alike: silencing a head may also do good.
    image = axes.imshow(values.numpy(), cmap="RdBu_r", vmin=-reach, vmax=reach, aspect="auto")
    for layer in range(L):
        for head in range(H):
            value = float(values[layer, head])
            dark = abs(value) > 0.6 * reach
            style: dict[str, Any] = {
                "ha": "center",
                "va": "center",
                "fontsize": 9,
                "color": "white" if dark else "black",
            }
            axes.text(head, layer, f"{value:+.3f}".replace("-", "−"), **style)
    axes.set_xticks(range(H), [str(n + 1) for n in range(H)])
    axes.set_yticks(range(L), [str(n + 1) for n in range(L)])
    axes.set(xlabel="head", ylabel="layer")
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    axes.set_xticks([n - 0.5 for n in range(1, H)], minor=True)
    axes.set_yticks([n - 0.5 for n in range(1, L)], minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    figure.text(0.2 / width, 1 - 0.18 / height, "What each head is worth", fontsize=12, va="top")
    said = f"rise of the validation loss, nats per token, when it is silent; {loss:.4f} with all"
    figure.text(0.2 / width, 1 - 0.45 / height, said, fontsize=8.5, va="top", color="0.35")
    place = ((left + H * cell + 0.25) / width, bottom / height, 0.13 / width, L * cell / height)
    bar = figure.colorbar(image, cax=figure.add_axes(place))
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    _save(figure, path, dpi=130)


def _labels(texts: Sequence[str]) -> list[str]:
    """What stands at the axes: legible, short, and of characters that the font has."""
    from matplotlib import font_manager

    font = font_manager.get_font(font_manager.findfont(_FONT))
    drawn = ("".join(c if font.get_char_index(ord(c)) else f"U+{ord(c):X}" for c in legible(t)) for t in texts)
    return [text if len(text) <= 12 else f"{text[:11]}…" for text in drawn]


def _write_figures(page: "Axes", shown: Any, x: float, y: float, cell: float, norm: Any) -> None:
    """The weights themselves in the cells of a large map; those that round to 0 are left out."""
    for query, row in enumerate(shown):
        for key, weight in enumerate(row[: query + 1]):
            if weight >= 0.005:
                figure = "1" if weight >= 0.995 else f"{weight:.2f}"[1:]  # .05, as on the bar
                color = "white" if norm(weight) > 0.5 else "black"
                style: dict[str, Any] = {
                    "ha": "center",
                    "va": "center_baseline",
                    "fontsize": 25 * cell,
                    "color": color,
                }
                page.text(x + (key + 0.5) * cell, y + (query + 0.5) * cell, figure, **style)


def _save(figure: "Figure", path: Path, *, dpi: int) -> None:
    """Write a picture whole or not at all."""
    with atomic_write(path) as partial:
        figure.savefig(partial, dpi=dpi, format=path.suffix[1:].lower())
