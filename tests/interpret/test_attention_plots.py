"""Plots of attention maps and head ablation."""

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import colormaps, image
from tiny_models import svg_texts, uniform

from minigpt.interpret.attention_plots import plot_ablation, plot_maps


def matches(path: Path, color: tuple[float, ...]) -> np.ndarray[Any, Any]:
    """Which pixels of a picture, without the color bar at its right, have a color of components from 0 to 1."""
    pixels = image.imread(path)[..., :3]
    pixels = pixels[:, : round(0.9 * pixels.shape[1])]
    return np.abs(pixels - np.array(color[:3])).max(-1) <= 2 / 255


def test_the_future_is_blank_and_all_maps_share_one_color_scale(tmp_path: Path) -> None:
    weights = torch.ones(2, 2, 30, 30)  # the upper triangle too: it must stay blank
    weights[1, 1] = 0.1
    one, tenth = colormaps["magma_r"](1.0), colormaps["magma_r"](math.sqrt(0.1))
    plot_maps(tmp_path / "all.png", weights, ["a"] * 30)
    dark, light = matches(tmp_path / "all.png", one).sum(), matches(tmp_path / "all.png", tenth).sum()
    assert dark == pytest.approx(3 * light, rel=0.05)


def test_a_plot_shows_tokens_layers_heads_and_their_names(tmp_path: Path) -> None:
    texts = [*"R\n $x$", "日", " antidisestablishmentarianism", "\t\r", "\x7f\xad", ""]
    weights = uniform(11).expand(2, 2, 11, 11)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # for glyphs missing from the font
        plot_maps(tmp_path / "a.svg", weights, texts, names=[["", "induction"], ["", ""]], title="a $ title $")
        plot_maps(tmp_path / "b.svg", weights, texts, layer=2, head=1)
    shown = svg_texts(tmp_path / "a.svg")
    labels = ["R", "⏎", "␣", "$", "x", "$", "⟨U+65E5⟩", "␣antidisest…", "⇥⟨U+000D⟩"]
    labels += ["⟨U+007F⟩⟨U+…", "∅"]
    for label in labels:
        assert shown.count(label) == 4 * labels.count(label)  # two rows of maps and two columns
    assert [text for text in shown if "layer" in text] == [f"layer {n} · head {m}" for n in (1, 2) for m in (1, 2)]
    assert shown.count("induction") == 1
    assert "a $ title $" in shown
    large = svg_texts(tmp_path / "b.svg")
    assert [text for text in large if "layer" in text] == ["layer 2 · head 1"]
    assert large.count("0.33") == 3  # the weights in the third row of uniform attention


def test_the_ablation_plot_shows_the_increase_of_each_head(tmp_path: Path) -> None:
    plot_ablation(tmp_path / "v.svg", torch.tensor([[0.4, -0.0101, 0.0], [1.25, 0.1, 0.2]]), loss=1.86471)
    shown = svg_texts(tmp_path / "v.svg")
    increases = ["+0.400", "-0.010", "+0.000", "+1.250", "+0.100", "+0.200"]
    assert [text for text in shown if text[0] in "+-"] == increases
    assert any("1.8647 with all heads" in text for text in shown)
