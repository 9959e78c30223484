"""The attention page in headless Chromium, by mouse, touch and keyboard."""

import re
import time

import pytest
import torch
from contrast import text_contrasts
from pages import HOSTILE, attention

from minigpt.interpret.page import write_page


class Reader:
    """A page in the browser, and the mouse, touch and keyboard events of a reader."""

    def __init__(self, browser, file):
        self.browser = browser
        self.resize(1280, 900)
        self.prefer("light")
        browser.get(file.as_uri())
        self.leave()  # whatever the position of the mouse

    def resize(self, width, height):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme):
        features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", features)

    def find(self, selector):
        return self.browser.find_element("css selector", selector)

    def token(self, i):
        return self.find(f".token[data-i='{i}']")

    def hover(self, element):
        from selenium.webdriver import ActionChains

        ActionChains(self.browser, duration=0).move_to_element(element).perform()

    def leave(self):
        self.browser.execute_script("scrollTo(0, 0)")
        self.hover(self.find("h1"))

    def press(self, *keys):
        from selenium.webdriver import ActionChains, Keys

        ActionChains(self.browser).send_keys(*(getattr(Keys, key) for key in keys)).perform()

    def tap(self, i):
        place = self.browser.execute_script(
            "arguments[0].scrollIntoView({block: 'nearest'}); const r = arguments[0].getBoundingClientRect();"
            "return {x: r.x + r.width / 2, y: r.y + r.height / 2}",
            self.token(i),
        )
        for kind, points in (("touchStart", [place]), ("touchEnd", [])):
            event = {"type": kind, "touchPoints": points}
            self.browser.execute_cdp_cmd("Input.dispatchTouchEvent", event)

    def pick(self, field, value):
        self.find(f"#{field} input[value='{value}']").click()

    @property
    def colors(self):
        """The background of each token, as (red, green, blue), or None if it is transparent."""
        found = self.browser.execute_script(
            "return [...document.querySelectorAll('.token')].map(t => getComputedStyle(t).backgroundColor)"
        )
        return [None if color.endswith(", 0)") else tuple(map(int, re.findall(r"\d+", color))) for color in found]

    @property
    def strongest(self):
        """Token and weight of each row of the panel."""
        return self.browser.execute_script(
            "return [...document.querySelectorAll('#strongest tbody tr')]"
            ".map(row => [Number(row.dataset.j), row.querySelector('.number').textContent])"
        )


def eventually(holds):
    """Wait until a condition holds: the browser updates asynchronously."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


TEXT = "To be, or not to be,\nthat is the question."


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """A page of two layers of three heads, its weights and its probabilities."""
    weights, probabilities = attention(2, 3, len(TEXT), seed=3)
    probabilities[5] = 0.0004
    probabilities[6] = 0.999
    file = tmp_path_factory.mktemp("page") / "page.html"
    write_page(file, labels=list(TEXT), weights=weights, probabilities=probabilities)
    return file, weights, probabilities


@pytest.fixture
def reader(browser, example):
    browser.get_log("browser")
    yield Reader(browser, example[0])
    assert browser.get_log("browser") == []  # no error, nothing blocked, no request


def expected(row, count=6):
    order = sorted(range(len(row)), key=lambda j: -row[j])[:count]
    return [(j, row[j].item()) for j in order if row[j] >= 0.0005]


def assert_shows(strongest, row):
    """Check that the panel lists the largest weights of a row, to 12 bits."""
    assert [weight for _, weight in expected(row)] == pytest.approx([float(w) for _, w in strongest], abs=1e-3)
    for j, weight in strongest:
        assert float(weight) == pytest.approx(row[j].item(), abs=1e-3)


def test_the_page_shows_the_whole_text_with_its_line_breaks(reader):
    tokens = reader.browser.execute_script(
        "return [...document.querySelectorAll('.token')].map(t => [t.textContent, t.getClientRects()[0].top])"
    )
    assert "".join(text for text, _ in tokens) == TEXT.replace("\n", "⏎\n")
    lines = sorted({top for _, top in tokens})
    assert [sum(top == line for _, top in tokens) for line in lines] == [len(line) for line in TEXT.splitlines(True)]


def test_without_hovering_the_color_shows_the_probability(reader, example):
    probabilities = example[2]
    colors = reader.colors
    assert colors[0] is None  # the first token is not predicted
    assert None not in colors[1:]
    blueness = torch.tensor([b - r for r, _, b in colors[1:]])
    order = probabilities[1:].clamp(min=1e-3).argsort()
    assert (blueness[order].diff() >= -8).all()  # grows with the probability, up to the rounding of colors
    assert blueness[4] < -100 < 100 < blueness[5]
    assert reader.find("#scale-name").text.startswith("Probability")
    assert [tick.text for tick in reader.browser.find_elements("css selector", "#ticks span")] == [
        *("≤ 0.1 %", "1 %", "10 %", "100 %")
    ]


def test_hovering_shows_the_attention_of_the_token_and_leaving_resets_it(reader, example):
    weights = example[1]
    at_rest = reader.colors
    i = 30
    reader.hover(reader.token(i))
    row = weights[0, :, i].mean(0)
    assert_shows(reader.strongest, row)
    colors = reader.colors
    assert None not in colors[: i + 1]
    assert set(colors[i + 1 :]) == {None}  # the future
    darkness = torch.tensor([-sum(color) for color in colors[: i + 1]])
    assert (darkness[row[: i + 1].argsort()].diff() >= -3).all()
    assert reader.find("#scale-name").text.startswith("Attention weight")
    reader.hover(reader.find("#text"))  # between two lines: the color stays
    assert reader.colors == colors
    reader.leave()
    assert reader.colors == at_rest
    assert not reader.strongest


def test_every_layer_and_head_can_be_selected(reader, example):
    weights = example[1]
    i = 25
    for layer in (1, 0):
        for head in (0, 1, 2, -1):
            reader.pick("layers", layer)
            reader.pick("heads", head)
            reader.hover(reader.token(i))
            row = weights[layer, head, i] if head >= 0 else weights[layer, :, i].mean(0)
            assert_shows(reader.strongest, row)
            note = reader.find("#scale-name small").text
            assert note == f"layer {layer + 1}, " + (f"head {head + 1}" if head >= 0 else "mean of all heads")
            assert reader.find("#details h2").text == f"Token {i + 1} ␣"
            for h in range(3):
                line = reader.find(f"#per-head tr[data-head='{h}']")
                j, weight = expected(weights[layer, h, i])[0]
                first = line.find_element("css selector", ".three").text
                assert first.startswith(TEXT[j].replace(" ", "␣").replace("\n", "⏎"))
                assert float(first.split()[-2]) == pytest.approx(weight, abs=1e-3)
                assert line.find_element("css selector", "th").text == f"head {h + 1}"
                assert first.endswith("itself" if j == i else f"−{i - j}")
                assert (line.get_attribute("aria-current") == "true") == (h == head)
            reader.leave()


@pytest.mark.parametrize(("i", "text"), [(0, "not predicted"), (5, "probability 0.04 %"), (6, "probability 99.9 %")])
def test_a_tooltip_shows_the_probability(reader, i, text):
    assert not reader.find("#tip").is_displayed()
    reader.hover(reader.token(i))
    assert reader.find("#tip").text == text
    tip, token = reader.find("#tip").rect, reader.token(i).rect
    assert tip["y"] + tip["height"] <= token["y"] + 4
    assert 0 <= tip["x"] <= token["x"] + token["width"] <= tip["x"] + tip["width"] + 40
    reader.leave()
    assert not reader.find("#tip").is_displayed()


def test_a_click_pins_a_token_across_heads_and_escape_unpins_it(reader, example):
    weights = example[1]
    reader.token(20).click()
    reader.leave()
    assert_shows(reader.strongest, weights[0, :, 20].mean(0))
    reader.pick("layers", 1)
    reader.pick("heads", 2)
    assert_shows(reader.strongest, weights[1, 2, 20])
    reader.hover(reader.token(33))  # hovering takes precedence over the pinned token
    assert_shows(reader.strongest, weights[1, 2, 33])
    reader.leave()
    assert_shows(reader.strongest, weights[1, 2, 20])
    reader.press("ESCAPE")
    assert not reader.strongest
    reader.token(20).click()
    reader.token(20).click()
    reader.leave()
    assert not reader.strongest


def test_every_control_is_reachable_by_keyboard(reader, example):
    weights = example[1]
    reader.press("TAB", "ARROW_RIGHT")  # layers and heads are one tab stop each
    reader.press("TAB", "ARROW_RIGHT", "ARROW_RIGHT")
    reader.press("TAB")  # the text is the third tab stop
    assert_shows(reader.strongest, weights[1, 1, 0])
    reader.press("ARROW_RIGHT", "ARROW_RIGHT", "ARROW_RIGHT")
    assert_shows(reader.strongest, weights[1, 1, 3])
    assert reader.find("#tip").is_displayed()
    reader.press("ARROW_DOWN")  # the second line begins at 21
    assert_shows(reader.strongest, weights[1, 1, 24])
    reader.press("ARROW_UP", "ARROW_LEFT")
    assert_shows(reader.strongest, weights[1, 1, 2])
    reader.press("END")
    assert_shows(reader.strongest, weights[1, 1, len(TEXT) - 1])
    reader.press("HOME", "ARROW_LEFT")
    assert_shows(reader.strongest, weights[1, 1, 0])
    reader.press("ARROW_RIGHT", "ARROW_RIGHT", "ENTER", "TAB")
    assert_shows(reader.strongest, weights[1, 1, 2])
    assert reader.token(2).get_attribute("aria-selected") == "true"
    assert reader.find("#spoken").get_attribute("textContent").startswith("layer 2, head 2: ")
    reader.press("ESCAPE")
    assert not reader.strongest


def test_a_tap_selects_a_token_on_a_small_screen_without_covering_it(reader, example):
    weights = example[1]
    reader.resize(360, 640)
    before = reader.browser.execute_script("return arguments[0].offsetTop", reader.token(30))
    reader.tap(30)
    eventually(lambda: reader.strongest)
    assert_shows(reader.strongest, weights[0, :, 30].mean(0))
    assert reader.browser.execute_script("return arguments[0].offsetTop", reader.token(30)) == before
    seen = "const r = arguments[0].getBoundingClientRect();"
    seen += "return document.elementFromPoint(r.x + r.width / 2, r.y + r.height / 2) === arguments[0]"
    assert reader.browser.execute_script(seen, reader.token(30))
    assert reader.browser.execute_script("return document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast_in_light_and_dark_mode(reader, scheme):
    reader.prefer(scheme)
    page = reader.browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", page))) < 200) == (scheme == "dark")
    eventually(lambda: (sum(reader.colors[17]) < 400) == (scheme == "dark"))
    for act in (lambda: None, lambda: reader.hover(reader.token(30)), lambda: reader.pick("heads", 1)):
        act()
        contrasts = text_contrasts(reader.browser)
        assert len(contrasts) > len(TEXT)
        assert [(element, ratio) for element, ratio in contrasts if ratio < 4.5] == []


def test_colors_follow_the_color_scheme(reader):
    light = reader.colors
    reader.prefer("dark")
    eventually(lambda: all(sum(a) > sum(b) for a, b in zip(light[1:], reader.colors[1:], strict=True)))


def test_hostile_tokens_are_shown_as_text_and_do_not_run(browser, tmp_path):
    weights, probabilities = attention(1, 1, len(HOSTILE))
    file = tmp_path / "page.html"
    write_page(file, labels=HOSTILE, weights=weights, probabilities=probabilities)
    reader = Reader(browser, file)
    for i in range(len(HOSTILE)):
        reader.hover(reader.token(i))
    assert reader.token(2).text == HOSTILE[2]
    assert browser.title == "What the heads attend to"
    assert not browser.find_elements("css selector", "img, svg, b b, span b")
    assert browser.get_log("browser") == []
