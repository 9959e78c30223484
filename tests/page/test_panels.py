"""The panels of the page in headless Chromium, by mouse and keyboard, with weights of a model in PyTorch."""

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from contrast import text_contrasts
from panel_pages import all_weights, write_page
from readers import Window
from torch import Tensor

from minigpt import GPT, GPTConfig
from minigpt.interpret.heads import attention_maps

TEXTS = [*"abcdefgh", "\n", " the", "é", "", "</script><img src=x onerror=\"document.title='broken'\">"]
IDS = [0, 3, 9, 8, 1, 12, 5, 7, 11, 10, 2, 4]
OTHER_IDS = [4, 4, 2]
LONG_IDS = IDS + IDS[:8]  # 20 tokens, of which the model reads 16
SILENCED = [[0, 1]]
STOPS = {  # of the colors of attention weights
    "light": ["ffffff", "d3c4ff", "a384f7", "6a3fd1", "38158a"],
    "dark": ["191b20", "412f88", "6e4ecb", "a78dff", "efe9ff"],
}
LOSSES = [[step, 1 + 3 * math.exp(-step / 300)] for step in range(10, 1710, 10)]
HISTORY: dict[str, Any] = {
    "train_loss": LOSSES,
    "val_loss": [[step, loss + 0.2] for step, loss in LOSSES[16::17]],
    "samples": [{"step": step, "text": f"sample of step {step}"} for step, _ in LOSSES[16::17]],
}
SINGLE = {"train_loss": [], "val_loss": [[5, 2.0]], "samples": [{"step": 5, "text": "one"}]}


def random_model(**settings: Any) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{"block_size": 16, "vocab_size": 13, "n_layer": 2, "n_head": 3, "n_embd": 24, **settings}))
    for parameter in model.parameters():  # far from the small initial weights, which make attention uniform
        torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


class Reader(Window):
    """A page in the browser, and what a person does with it."""

    def __init__(self, browser: Any, file: Path) -> None:
        super().__init__(browser)
        self.resize(1280)
        self.prefer("light")
        browser.get(file.as_uri())

    def button(self, text: str) -> Any:
        (found,) = [button for button in self.find_all("button") if button.text == text]
        return found

    def head(self, name: str) -> Any:
        return self.find(f".heads [aria-label='{name}']")

    def hover(self, element: Any, x: int = 0, y: int = 0) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.browser, duration=0).move_to_element_with_offset(element, x, y).perform()

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains, Keys

        ActionChains(self.browser).send_keys(*(getattr(Keys, key) for key in keys)).perform()

    def write(self, ids: list[int]) -> None:
        self.run("write(arguments[0])", ids)

    def select(self, i: int) -> None:
        self.hover(self.find_all("#text span")[i])

    def wait(self, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)

    def wait_for_weights(self) -> None:
        self.wait(lambda: self.run("return find('panel').querySelector('.weights').ariaBusy") == "false")

    @property
    def calls(self) -> list[tuple[list[int], int, int | None, list[list[int]]]]:
        return [tuple(call) for call in self.run("return calls.map(c => [c.ids, c.layer, c.head, c.silenced])")]

    @property
    def shade(self) -> Tensor:
        self.wait_for_weights()
        return torch.tensor(self.run("return shades.at(-1)"), dtype=torch.float32)

    @property
    def rows(self) -> list[list[str]]:
        """Weight, context, token and distance of each row of the list."""
        return self.run(
            "return [...document.querySelectorAll('.list tbody tr')].map(row => [...row.querySelectorAll('td, b')]"
            ".map(cell => cell.textContent))"
        )


@pytest.fixture(scope="module")
def model() -> GPT:
    return random_model()


@pytest.fixture(scope="module")
def file(model: GPT, tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = (IDS, OTHER_IDS, LONG_IDS[-16:], LONG_IDS[:16], IDS[:1])
    weights = [*(all_weights(model, ids) for ids in texts), all_weights(model, IDS, SILENCED)]
    histories = {"run": HISTORY, "single": SINGLE, "none": None}
    return write_page(tmp_path_factory.mktemp("page") / "page.html", model, TEXTS, weights, histories=histories)


@pytest.fixture
def reader(browser: Any, file: Path) -> Iterator[Reader]:
    browser.get_log("browser")
    yield Reader(browser, file)
    assert browser.get_log("browser") == []  # no error, nothing blocked
    assert browser.title == "panels"  # no text ran


@pytest.fixture(scope="module")
def weights(model: GPT) -> Tensor:
    return attention_maps(model, torch.tensor(IDS))  # (L, H, T, T)


def test_a_head_picked_by_mouse_shades_the_text_by_its_weights(reader: Reader, weights: Tensor) -> None:
    reader.write(IDS)
    for name, expected in (("layer 2, head 3", weights[1, 2]), ("layer 1, mean", weights[0].mean(0))):
        reader.head(name).click()
        for i in (7, 0, 11):
            reader.select(i)
            torch.testing.assert_close(reader.shade, expected[i, : i + 1])


def test_heads_are_one_tab_stop_and_picked_by_arrow_keys(reader: Reader) -> None:
    reader.write(IDS)
    reader.press("TAB")
    for key, name in (
        *(("ARROW_RIGHT", f"layer 1, head {head}") for head in (1, 2, 3)),
        ("ARROW_RIGHT", "layer 2, mean"),
        ("ARROW_UP", "layer 1, mean"),
        ("ARROW_LEFT", "layer 2, head 3"),
        ("ARROW_DOWN", "layer 1, head 3"),
    ):
        reader.press(key)
        assert reader.browser.switch_to.active_element.accessible_name == name
        assert [button.accessible_name for button in reader.find_all(".heads [aria-checked='true']")] == [name]
    assert len(reader.find_all(".heads [tabindex='0']")) == 1
    reader.wait_for_weights()
    assert reader.calls[-1] == (IDS, 0, 2, [])
    reader.press("TAB")
    assert reader.browser.switch_to.active_element.text == "Silence layer 1, head 3"


def test_the_list_has_the_tokens_with_the_highest_weights(reader: Reader, weights: Tensor) -> None:
    reader.write(IDS)
    reader.head("layer 2, head 1").click()
    reader.select(10)
    reader.wait_for_weights()
    top = weights[1, 0, 10].topk(6)
    shown = {"\n": "⏎", " the": "␣the", "": "∅"}
    tokens = [TEXTS[IDS[i]] for i in top.indices.tolist()]
    assert [row[0] for row in reader.rows] == [f"{weight:.3f}" for weight in top.values.tolist()]
    assert [row[2] for row in reader.rows] == [shown.get(token, token) for token in tokens]
    assert [row[3] for row in reader.rows] == ["itself" if i == 10 else f"{10 - i} back" for i in top.indices.tolist()]
    assert reader.find(".list caption").text == "c attends to (layer 2, head 1)"
    reader.select(4)
    contexts = {row[3]: row[1] for row in reader.rows}
    assert contexts["2 back"] == "        ad␣the⏎b</scrip"  # ten characters before the token, nine after it


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_map_has_the_colors_of_the_weights(scheme: str, reader: Reader, weights: Tensor) -> None:
    reader.write(IDS)
    reader.head("layer 1, head 2").click()
    reader.wait_for_weights()
    T = len(IDS)
    read = (
        "const copy = new OffscreenCanvas(12, 12).getContext('2d');"
        "copy.drawImage(document.querySelector('canvas'), 0, 0);"
        "return [...copy.getImageData(0, 0, 12, 12).data]"
    )
    stops = torch.tensor([list(bytes.fromhex(stop)) for stop in STOPS[scheme]]).float()
    reader.prefer(scheme)
    reader.wait(lambda: reader.run(read)[:3] == stops[-1].tolist())  # the first token attends to itself
    pixels = torch.tensor(reader.run(read)).view(T, T, 4)
    place = weights[0, 1].sqrt() * (len(stops) - 1)
    low = place.long().clamp(max=len(stops) - 2)
    expected = stops[low].lerp(stops[low + 1], (place - low)[..., None])  # (T, T, 3)
    causal = torch.ones(T, T).tril().bool()
    assert (pixels[..., :3] - expected)[causal].abs().max() <= 2  # 256 colors, rounded
    assert torch.equal(pixels[..., 3] == 255, causal)  # nothing is drawn for later tokens
    label = reader.find("canvas").get_attribute("aria-label")
    assert label == "Map of the attention weights of layer 1, head 2, 12 queries by 12 keys"


def test_the_map_names_the_weight_under_the_pointer(reader: Reader, weights: Tensor) -> None:
    reader.write(IDS)
    reader.head("layer 1, head 2").click()
    reader.wait_for_weights()
    canvas = reader.find("canvas")
    cell = canvas.size["width"] / 12
    reader.hover(canvas, round(-3.5 * cell), round(1.5 * cell))  # of the center: query 7, key 2
    assert reader.find("figcaption").text == f"h (8) → ␣the (3): {weights[0, 1, 7, 2]:.3f}"
    reader.hover(canvas, round(3.5 * cell), round(-3.5 * cell))  # a key after the query
    assert reader.find("figcaption").text == "Each row is a query, each column a key."


def test_selecting_tokens_fetches_nothing_and_marks_their_rows(reader: Reader) -> None:
    reader.write(IDS)
    reader.wait_for_weights()
    reader.run("globalThis.drawn = 0; panel.map.draw = () => { drawn++; }")
    for i in (4, 11, 0):
        reader.select(i)
        marker, canvas = reader.find(".marker").rect, reader.find("canvas").rect
        assert marker["y"] - canvas["y"] == pytest.approx(canvas["height"] * i / 12, abs=1)
        assert marker["width"] == pytest.approx(canvas["width"] * (i + 1) / 12, abs=1)
    reader.run("select(null)")
    assert not reader.find(".marker").is_displayed()
    assert reader.run("return shades.at(-1)") is None
    time.sleep(0.3)
    assert reader.calls == [(IDS, 0, None, [])]
    assert reader.run("return drawn") == 0


def test_an_outdated_fetch_is_aborted_and_ignored(reader: Reader, weights: Tensor) -> None:
    reader.write(IDS)
    reader.wait_for_weights()
    reader.run("delays.push(1000, 0)")
    reader.head("layer 1, head 1").click()
    reader.wait(lambda: len(reader.calls) == 2)
    reader.head("layer 2, head 2").click()
    reader.select(9)
    reader.wait(lambda: reader.run("return calls[1].aborted"))  # when its second is over
    torch.testing.assert_close(reader.shade, weights[1, 1, 9, :10])
    reader.run("delays.push(1000)")
    reader.head("layer 1, mean").click()
    reader.head("layer 2, head 2").click()  # is still there
    torch.testing.assert_close(reader.shade, weights[1, 1, 9, :10])
    reader.wait(lambda: reader.run("return calls.map(call => call.aborted)") == [False, True, False, True])


def test_a_text_that_grows_is_fetched_when_it_stops(reader: Reader) -> None:
    reader.write(IDS[:1])
    reader.wait_for_weights()
    reader.run("for (let count = 2; count <= arguments[0].length; count++) write(arguments[0].slice(0, count))", IDS)
    assert reader.run("return find('panel').querySelector('.weights').ariaBusy") == "true"
    reader.wait_for_weights()
    assert [call[0] for call in reader.calls] == [IDS[:1], IDS]


def test_silencing_a_head_changes_the_weights_of_later_layers(reader: Reader, model: GPT, weights: Tensor) -> None:
    key = json.dumps([IDS, 1, 1, SILENCED], separators=(",", ":"))
    expected = torch.tensor(all_weights(model, IDS, SILENCED)[key])
    assert not torch.allclose(expected, weights[1, 1])
    reader.write(IDS)
    assert not reader.button("Choose a head to silence it").is_enabled()  # the mean is selected
    reader.head("layer 1, head 2").click()
    reader.button("Silence layer 1, head 2").click()
    assert reader.button("Restore layer 1, head 2").is_displayed()
    silenced = reader.head("layer 1, head 2, silenced")
    assert "line-through" in silenced.value_of_css_property("text-decoration")
    reader.head("layer 2, head 2").click()
    reader.select(11)
    torch.testing.assert_close(reader.shade, expected[11])
    reader.button("Restore all").click()
    assert reader.browser.switch_to.active_element.accessible_name == "layer 2, head 2"
    torch.testing.assert_close(reader.shade, weights[1, 1, 11])
    assert reader.run("return silencings") == [SILENCED, []]
    reader.head("layer 1, head 2").click()
    for _ in range(2):
        reader.find(".actions button").click()
    assert reader.run("return silencings") == [SILENCED, [], SILENCED, []]
    assert not reader.run("return find('panel').querySelector('.actions').lastChild.checkVisibility()")


def test_a_saved_text_cannot_be_computed_without_heads(browser: Any, model: GPT, tmp_path: Path) -> None:
    reader = Reader(browser, write_page(tmp_path / "saved.html", model, TEXTS, [all_weights(model, IDS)], saved=True))
    reader.write(IDS)
    reader.head("layer 1, head 2").click()
    assert [button.text for button in reader.find_all("button")] == ["mean", "1", "2", "3"] * 2


def test_a_token_of_a_long_text_has_the_weights_of_the_window_that_holds_it(reader: Reader, model: GPT) -> None:
    reader.write(LONG_IDS)
    reader.head("layer 2, head 1").click()
    reader.select(17)
    expected = attention_maps(model, torch.tensor(LONG_IDS[-16:]))[1, 0, 13, :14]
    torch.testing.assert_close(reader.shade, torch.cat((torch.zeros(4), expected)))
    reader.select(2)
    reader.wait(lambda: reader.run("return shades.at(-1)") is not None)
    torch.testing.assert_close(reader.shade, attention_maps(model, torch.tensor(LONG_IDS[:16]))[1, 0, 2, :3])


def test_an_error_is_shown_until_the_head_is_picked_again(reader: Reader) -> None:
    reader.write(IDS)
    reader.wait_for_weights()
    reader.run("globalThis.attention = backend.attention; backend.attention = async () => { throw new Error('lost'); }")
    reader.head("layer 1, head 1").click()
    reader.wait(lambda: reader.find(".error").text == "lost")
    reader.select(3)
    assert reader.run("return shades.at(-1)") is None
    assert not reader.find("canvas").is_displayed()
    reader.run("backend.attention = attention")
    reader.head("layer 1, head 1").click()
    reader.select(4)
    assert len(reader.shade) == 5
    assert reader.find(".error").text == ""


def test_a_hidden_panel_fetches_and_shades_nothing(reader: Reader) -> None:
    reader.run("panel.visible = false")
    reader.write(IDS)
    reader.select(4)
    time.sleep(0.3)
    assert reader.calls == []
    assert reader.run("return shades") == []
    reader.run("panel.visible = true")
    assert len(reader.shade) == 5
    reader.run("panel.visible = false")
    assert reader.run("return shades.at(-1)") is None
    reader.run("panel.visible = true")
    assert len(reader.shade) == 5
    assert len(reader.calls) == 1
    reader.run("delays.push(100)")
    reader.head("layer 1, head 1").click()
    reader.wait(lambda: len(reader.calls) == 2)
    reader.run("panel.visible = false")
    reader.wait(lambda: reader.run("return calls[1].aborted"))
    reader.run("panel.visible = true")
    reader.wait_for_weights()
    assert reader.calls[1:] == [(IDS, 0, 0, [])] * 2


def test_another_model_restores_its_heads(reader: Reader) -> None:
    reader.write(IDS)
    reader.head("layer 1, head 2").click()
    reader.button("Silence layer 1, head 2").click()
    reader.run("panel.setModel(null)")
    assert reader.find_all(".heads button") == []
    reader.run("panel.setModel({name: 'other', n_layer: 1, n_head: 2, block_size: 4})")
    assert [button.accessible_name for button in reader.find_all(".heads button")] == [
        f"layer 1, {head}" for head in ("mean", "head 1", "head 2")
    ]
    assert reader.run("return panel.silenced") == []


@pytest.mark.parametrize(("width", "scheme"), [(320, "light"), (390, "dark"), (1280, "light")])
def test_panels_fit_every_screen_and_have_contrast(width: int, scheme: str, browser: Any, tmp_path: Path) -> None:
    model = random_model(n_layer=12, n_head=12)
    page = write_page(tmp_path / "page.html", model, TEXTS, [all_weights(model, IDS)], histories={"run": HISTORY})
    reader = Reader(browser, page)
    reader.resize(width)
    reader.prefer(scheme)
    reader.write(IDS)
    reader.run("showHistory(find('history'), backend, 'run')")
    reader.wait(lambda: reader.find_all("svg"))
    reader.head("layer 12, head 11").click()
    reader.button("Silence layer 12, head 11").click()
    reader.head("layer 12, head 12").click()
    reader.select(11)
    assert reader.run("return document.documentElement.scrollWidth") <= width
    heads = reader.find(".heads")
    assert reader.run("return arguments[0].scrollHeight <= arguments[0].clientHeight", heads)
    if width > 320:
        assert reader.run("return arguments[0].scrollWidth <= arguments[0].clientWidth", heads)
    contrasts = [(text, ratio) for text, ratio in text_contrasts(browser) if "<text" not in text]
    assert len(contrasts) > 180
    assert [(text, ratio) for text, ratio in contrasts if ratio < 4.5] == []
    colors = "return [...document.querySelectorAll('svg text')].map(text => getComputedStyle(text).fill)"
    assert set(reader.run(colors)) == {
        reader.find(".soft").value_of_css_property("color").replace("rgba", "rgb").replace(", 1)", ")")
    }


def places(reader: Reader, name: str) -> list[list[float]]:
    return [
        [float(x) for x in point.split(",")]
        for point in reader.find(f"polyline.{name}").get_attribute("points").split()
    ]


@pytest.mark.parametrize("width", [390, 1280])
def test_curves_have_the_points_of_the_history_at_their_ticks(width: int, reader: Reader) -> None:
    reader.resize(width)
    reader.run("showHistory(find('history'), backend, 'run')")
    reader.wait(lambda: reader.find_all("svg"))
    assert reader.find("svg").size["width"] == reader.find("#history").size["width"] - 34
    ticks = reader.run(
        "return [...document.querySelectorAll('svg text')].map(t => [t.textContent, Number(t.getAttribute('x')),"
        "Number(t.getAttribute('y')), t.getAttribute('text-anchor')])"
    )
    x_ticks = {float(text.replace(",", "")): x for text, x, _, anchor in ticks if anchor == "middle"}
    y_ticks = {float(text): y for text, _, y, anchor in ticks if anchor == "end"}
    assert list(x_ticks) == (list(range(0, 1700, 200)) if width == 1280 else [0, 500, 1000, 1500])
    assert list(y_ticks) == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
    per_step, per_nat = (x_ticks[1000] - x_ticks[0]) / 1000, y_ticks[2.0] - y_ticks[1.0]
    for name in ("train_loss", "val_loss"):
        expected = [[x_ticks[0] + step * per_step, y_ticks[1.0] + (loss - 1) * per_nat] for step, loss in HISTORY[name]]
        torch.testing.assert_close(torch.tensor(places(reader, name)), torch.tensor(expected), rtol=0, atol=0.01)
    assert len(reader.find_all("svg circle")) == len(HISTORY["val_loss"])
    label = reader.find(".plot").get_attribute("aria-label")
    assert label.endswith("training loss 1.010 at step 1,700, validation loss 1.210 at step 1,700")
    assert {text for text, *_, anchor in ticks if anchor is None} == {"loss (nats per token)", "step"}


def test_samples_are_chosen_by_keyboard(reader: Reader) -> None:
    reader.run("showHistory(find('history'), backend, 'run')")
    reader.wait(lambda: reader.find_all("pre"))
    assert reader.find("pre").text == "sample of step 1700"
    reader.find("#history input").click()  # at the center
    for key, step in (("HOME", 170), ("ARROW_RIGHT", 340), ("ARROW_RIGHT", 510), ("END", 1700)):
        reader.press(key)
        assert reader.find("pre").text == f"sample of step {step}"
        assert (
            reader.find("output").text
            == f"step {step:,}"
            == reader.find("#history input").get_attribute("aria-valuetext")
        )


def test_a_history_may_be_short_or_missing_or_fail(reader: Reader) -> None:
    reader.run("showHistory(find('history'), backend, 'single')")
    reader.wait(lambda: reader.find_all("svg"))
    assert len(reader.find_all("svg circle")) == 1
    assert "NaN" not in reader.find("svg").get_attribute("outerHTML")
    assert (reader.find("pre").text, reader.find_all("#history input")) == ("one", [])
    reader.run("showHistory(find('history'), backend, 'none')")
    reader.wait(lambda: reader.find("#history").text == "This run has no readable metrics.csv.")
    reader.run(
        "backend.history = async () => { throw new Error('gone'); }; showHistory(find('history'), backend, 'run')"
    )
    reader.wait(lambda: reader.find("#history .error").text == "gone")


def test_a_late_history_of_another_model_is_not_shown(reader: Reader) -> None:
    reader.run(
        "const {history} = backend, wait = ms => new Promise(resolve => setTimeout(resolve, ms));"
        "backend.history = async model => { await wait(model === 'run' ? 200 : 0); return history(model); };"
        "showHistory(find('history'), backend, 'run'); showHistory(find('history'), backend, 'none')"
    )
    time.sleep(0.4)
    assert reader.find("#history").text == "This run has no readable metrics.csv."
