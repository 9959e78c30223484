"""The page of one text in headless Chromium: what a reader sees and can select, by mouse, touch and keyboard."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from contrast import text_contrasts
from readers import Reader
from torch import Tensor

from minigpt.interpret.text_page import write_page

IMAGE = "<img src=x onerror=\"document.title='broken'\">"
TEXTS = [*"ad", " the", "\n", "b", f"</script><!--<script>{IMAGE}", *"fh", "", *"éce"]
L, H, T = 2, 3, len(TEXTS)
STOPS = {  # of the colors of attention weights
    "light": ["ffffff", "d3c4ff", "a384f7", "6a3fd1", "38158a"],
    "dark": ["191b20", "412f88", "6e4ecb", "a78dff", "efe9ff"],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tensor]:
    """The address of a page with one text of odd tokens, and its random attention weights (L, H, T, T)."""
    scores = 3 * torch.randn(L, H, T, T, generator=torch.Generator().manual_seed(0))
    weights = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
    likely = {"rank": 0, "logprob": -1.0}
    top = [{"id": i, "text": text, **likely} for i, text in enumerate(["&lt;b&gt;", "\r\n", "\u2028", IMAGE])]
    tokens = [{"id": i, "text": text, **likely, "top": top} for i, text in enumerate(TEXTS)]
    description = {"name": IMAGE, "facts": IMAGE, "n_layer": L, "n_head": H, "block_size": T}
    file = tmp_path_factory.mktemp("saved") / "page.html"
    write_page(file, description=description, tokens=tokens, weights=weights)
    return file.as_uri(), weights


@pytest.fixture
def reader(browser: Any, saved: tuple[str, Tensor]) -> Iterator[Reader]:
    """The page; no text in it may run, and the console must be empty at the end."""
    reader = Reader(browser, saved[0], height=1400)
    reader.wait_until(lambda: len(reader.tokens()) == T)
    yield reader
    assert browser.title == "minigpt"
    assert browser.get_log("browser") == []


def test_the_text_is_shown_and_cannot_be_changed(reader: Reader) -> None:
    assert [token.get_property("textContent") for token in reader.tokens()] == TEXTS
    text = reader.text
    reader.find("#text").send_keys("more")
    assert reader.text == text == "".join(TEXTS)
    assert [button.text for button in reader.find_all("button") if button.is_displayed() and button.is_enabled()] == []
    assert reader.run("return backend.generate === undefined")
    reader.open("Attention")
    heads = [button.text for button in reader.find_all("#attention button")]
    assert heads == ["mean", "1", "2", "3"] * 2  # none silences
    reader.hover(reader.tokens()[4])
    alternatives = reader.find_all(".alternatives button")
    assert len(alternatives) == 4
    assert not any(button.is_enabled() for button in alternatives)


def test_attention_shades_the_text_while_the_pointer_is_on_a_token(reader: Reader, saved: Any) -> None:
    colors = reader.backgrounds()
    reader.open("Attention")
    reader.find(".heads [aria-label='layer 1, head 2']").click()
    reader.hover(reader.tokens()[9])
    reader.wait_until(lambda: len(reader.backgrounds()[9]) == 3)
    shades = [sum(color) for color in reader.backgrounds()[:10]]
    ordered = [shades[i] for i in saved[1][0, 1, 9, :10].argsort()]
    assert all(after - before <= 6 for before, after in pairwise(ordered))
    assert all(len(color) == 4 for color in reader.backgrounds()[10:])  # transparent
    reader.hover(reader.find("h1"))
    assert reader.backgrounds() == colors


def test_tokens_are_selected_by_touch(reader: Reader) -> None:
    reader.resize(360, 740)
    box = reader.run(
        "const r = arguments[0].getBoundingClientRect(); return {x: r.x + r.width / 2, y: r.y + r.height / 2}",
        reader.tokens()[5],
    )
    for kind, points in (("touchStart", [box]), ("touchEnd", [])):
        reader.browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    reader.wait_until(lambda: "Token 6 " in reader.find("#token").text)


def test_colors_follow_the_scheme(reader: Reader) -> None:
    before = reader.backgrounds()
    reader.prefer("dark")
    reader.wait_until(lambda: reader.backgrounds() != before)
    reader.open("Attention")
    reader.hover(reader.tokens()[9])
    assert [(element, ratio) for element, ratio in text_contrasts(reader.browser) if ratio < 4.5] == []


def test_the_list_has_the_tokens_with_the_highest_weights(reader: Reader, saved: tuple[str, Tensor]) -> None:
    weights = saved[1]
    reader.open("Attention")
    shown = {"\n": "⏎", " the": "␣the", "": "∅"}
    for name, of_head in (("layer 2, head 1", weights[1, 0]), ("layer 1, mean", weights[0].mean(0))):
        reader.choose_head(name)
        reader.hover(reader.tokens()[10])
        rows, top = reader.attended(), of_head[10].topk(6)
        tokens = [TEXTS[i] for i in top.indices.tolist()]
        assert [float(row[0]) for row in rows] == pytest.approx(top.values.tolist(), abs=1.1e-3)
        assert [row[2] for row in rows] == [shown.get(token, token) for token in tokens]
        assert [row[3] for row in rows] == ["itself" if i == 10 else f"{10 - i} back" for i in top.indices.tolist()]
        assert reader.find(".list caption").text == f"c attends to ({name})"
    reader.hover(reader.tokens()[4])
    contexts = {row[3]: row[1] for row in reader.attended()}
    assert contexts["2 back"] == "        ad␣the⏎b</scrip"  # ten characters before the token, nine after it


def test_the_map_has_the_colors_of_the_weights_and_names_them(reader: Reader, saved: tuple[str, Tensor]) -> None:
    weights = saved[1][0, 1]
    reader.open("Attention")
    reader.choose_head("layer 1, head 2")
    read = (
        f"const copy = new OffscreenCanvas({T}, {T}).getContext('2d');"
        "copy.drawImage(document.querySelector('canvas'), 0, 0);"
        f"return [...copy.getImageData(0, 0, {T}, {T}).data]"
    )
    for scheme, colors in STOPS.items():
        stops = torch.tensor([list(bytes.fromhex(color)) for color in colors]).float()
        reader.prefer(scheme)
        reader.wait_until(lambda: reader.run(read)[:3] == stops[-1].tolist())  # noqa: B023  # attends to itself
        pixels = torch.tensor(reader.run(read)).view(T, T, 4)
        place = weights.sqrt() * (len(stops) - 1)
        low = place.long().clamp(max=len(stops) - 2)
        expected = stops[low].lerp(stops[low + 1], (place - low)[..., None])  # (T, T, 3)
        causal = torch.ones(T, T).tril().bool()
        assert (pixels[..., :3] - expected)[causal].abs().max() <= 2  # 256 colors, rounded
        assert torch.equal(pixels[..., 3] == 255, causal)  # nothing is drawn for later tokens
    canvas = reader.find("canvas")
    label = "Map of the attention weights of layer 1, head 2, 12 queries by 12 keys"
    assert canvas.get_attribute("aria-label") == label
    cell = canvas.size["width"] / T
    reader.hover(canvas, round(-3.5 * cell), round(1.5 * cell))  # of the center: query 7, key 2
    caption, weight = reader.find("figcaption").text.split(": ")
    assert (caption, float(weight)) == ("h (8) → ␣the (3)", pytest.approx(weights[7, 2].item(), abs=1.1e-3))
    reader.hover(canvas, round(3.5 * cell), round(-3.5 * cell))  # a key after the query
    assert reader.find("figcaption").text == "Each row is a query, each column a key."
