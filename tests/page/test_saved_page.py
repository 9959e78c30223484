"""The page of one text in headless Chromium: what a reader sees and can select."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from contrast import text_contrasts
from readers import CHARACTERS, Reader, make_run

from minigpt.interpret.heads import attention_maps
from minigpt.interpret.text_page import score_tokens, write_page
from minigpt.page.render import describe

TEXT = "First line\nand the second"
IMAGE = "<img src=x onerror=\"document.title='broken'\">"
HOSTILE = ["</script>", "<!--<script>", IMAGE, "&lt;b&gt;", "\r\n", "\u2028", "\ud800"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, list[dict[str, Any]], Path]:
    """Weights, tokens and page of a text."""
    folder = tmp_path_factory.mktemp("saved")
    model, ids = make_run(folder / "run"), CHARACTERS.encode(TEXT)
    weights, tokens = attention_maps(model, ids), score_tokens(model, CHARACTERS, torch.as_tensor(ids).long())
    description = describe("run", model.config, "char")
    write_page(folder / "page.html", description=description, tokens=tokens, weights=weights)
    return weights, tokens, folder / "page.html"


@pytest.fixture
def reader(browser: Any, saved: Any) -> Any:
    reader = Reader(browser, saved[2].as_uri())
    reader.wait_until(lambda: reader.text == TEXT)
    yield reader
    assert browser.get_log("browser") == []


def test_the_text_is_shown_and_cannot_be_changed(reader: Reader) -> None:
    assert reader.token_text() == TEXT
    reader.find("#text").send_keys("more")
    assert reader.text == TEXT
    assert [button.text for button in reader.find_all("button") if button.is_displayed() and button.is_enabled()] == []
    assert reader.run("return backend.generate === undefined")
    reader.open("Attention")
    assert [button.text for button in reader.find_all("#attention button")] == ["mean", "1", "2"] * 2  # none silences


def test_pointing_at_a_token_shows_its_alternatives(reader: Reader, saved: Any) -> None:
    token = saved[1][4]
    reader.hover(reader.tokens()[4])
    shown = [e.text for e in reader.find_all(".alternatives .percent")][:10]
    assert [float(p.split()[0]) for p in shown] == pytest.approx(
        [100 * math.exp(t["logprob"]) for t in token["top"]], rel=0.01
    )
    assert all(not button.is_enabled() for button in reader.find_all(".alternatives button"))


def test_attention_shades_the_text_while_the_pointer_is_on_a_token(reader: Reader, saved: Any) -> None:
    colors = reader.backgrounds()
    reader.open("Attention")
    reader.find(".heads [aria-label='layer 1, head 2']").click()
    reader.hover(reader.tokens()[9])
    reader.wait_until(lambda: len(reader.backgrounds()[9]) == 3)
    shades = [sum(color) for color in reader.backgrounds()[:10]]
    ordered = [shades[i] for i in saved[0][0, 1, 9, :10].argsort()]
    assert all(after - before <= 6 for before, after in pairwise(ordered))
    assert all(len(color) == 4 for color in reader.backgrounds()[10:])  # transparent
    reader.hover(reader.find("h1"))
    assert reader.backgrounds() == colors


def test_tokens_are_selected_by_keyboard(reader: Reader) -> None:
    from selenium.webdriver import Keys

    reader.find("#text").send_keys(Keys.CONTROL, Keys.HOME)
    for _ in range(3):
        reader.press(Keys.ARROW_RIGHT)
    reader.wait_until(lambda: "Token 3 r" in reader.find("#token").text)


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


def test_hostile_tokens_are_text(browser: Any, tmp_path: Path) -> None:
    likely = {"rank": 0, "logprob": -1.5}
    tokens = [
        {"id": i, "text": text, **likely, "top": [{"id": i, "text": text, **likely}]} for i, text in enumerate(HOSTILE)
    ]
    weights = torch.ones(1, 1, len(HOSTILE), len(HOSTILE)).tril()
    weights /= weights.sum(-1, keepdim=True)
    description = {"name": IMAGE, "facts": IMAGE, "n_layer": 1, "n_head": 1, "block_size": 8}
    write_page(tmp_path / "page.html", description=description, tokens=tokens, weights=weights)
    reader = Reader(browser, (tmp_path / "page.html").as_uri())
    reader.wait_until(lambda: len(reader.tokens()) == len(HOSTILE))
    reader.open("Attention")
    for token in reader.tokens()[:3]:
        reader.hover(token)
    assert [token.get_property("textContent") for token in reader.tokens()[:4]] == HOSTILE[:4]
    assert browser.title == "minigpt"
    assert browser.get_log("browser") == []
