"""A person who reads and uses the page in headless Chromium."""

from collections.abc import Iterator
from typing import Any

import pytest
from small_runs import wait_until

webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install selenium")
ActionChains = webdriver.ActionChains
Keys = webdriver.Keys
Select = pytest.importorskip("selenium.webdriver.support.ui").Select


MAX_TOKENS = 15
# Whether the tokens are those of the text and nothing is generated; `ended`: after a generation.
IS_IDLE = """
    const [ended] = arguments, find = name => document.querySelector(name);
    const tokens = [...document.querySelectorAll("#first .token")].map(e => e.textContent).join("");
    return tokens === find("#text").value && find("#generate").innerText !== "Stop"
        && (!ended || find("#status").innerText.includes("tokens"));
"""


# A page in a window of the browser, and the mouse, touch and keyboard events of a person
class Reader:
    def __init__(self, browser: Any, url: str, width: int = 1280, height: int = 1000) -> None:
        self.browser = browser
        self.run = browser.execute_script
        self.resize(width, height)
        self.prefer("light")
        browser.get("about:blank")
        browser.get_log("browser")
        browser.get(url)
        wait_until(lambda: self.run("return document.querySelector('#facts')?.textContent"))

    def resize(self, width: int, height: int = 1400) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: str) -> None:
        features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", features)

    def find(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def find_all(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    # Press keys at once, where the focus is
    def press(self, *keys: str) -> None:
        actions = ActionChains(self.browser, duration=0)
        for key in keys:
            actions.key_down(key)
        for key in reversed(keys):
            actions.key_up(key)
        actions.perform()

    # Move the pointer to an element, to an offset from its center
    def hover(self, element: Any, x: int = 0, y: int = 0) -> None:
        ActionChains(self.browser, duration=0).move_to_element_with_offset(element, x, y).perform()

    # Click where an element is, though it can be below another one
    def click(self, element: Any) -> None:
        ActionChains(self.browser, duration=0).move_to_element(element).click().perform()

    # Write at the cursor, and wait for the colors of the tokens
    def write(self, text: str) -> None:
        self.find("#text").send_keys(text)
        self.wait_for_tokens()

    def wait_for_tokens(self) -> None:
        wait_until(lambda: self.run(IS_IDLE, False))

    # Choose an item of a list
    def choose(self, selector: str, text: str) -> None:
        Select(self.find(selector)).select_by_visible_text(text)

    # Set a number of the settings
    def set(self, name: str, value: object) -> None:
        self.find(f"[name={name}]").send_keys(
            Keys.CONTROL, "a", Keys.NULL, str(value) or Keys.DELETE
        )

    # Let the page generate `MAX_TOKENS` tokens at a time
    def shorten(self) -> None:
        script = """const field = document.querySelector("[name=max_tokens]");
            field.value = arguments[0];
            field.dispatchEvent(new InputEvent("input", {bubbles: true}));"""
        self.run(script, MAX_TOKENS)

    # Open a panel, or close it if it is open
    def open(self, panel: str) -> None:
        (summary,) = [summary for summary in self.find_all("summary") if summary.text == panel]
        summary.click()

    def choose_head(self, name: str) -> None:
        self.find(f".heads [aria-label='{name}']").click()
        self.wait_for_weights()

    def wait_for_weights(self) -> None:
        wait_until(lambda: self.find(".weights").get_attribute("aria-busy") == "false")

    # Weight, context, token and distance of each token that the selected one attends to
    def attended(self) -> list[list[str]]:
        return self.run("""return [...document.querySelectorAll("#attention tbody tr")].map(
            row => [...row.querySelectorAll("td, b")].map(cell => cell.textContent))""")

    def generate(self) -> None:
        self.find("#generate").click()
        self.wait_for_generation()

    def wait_for_generation(self) -> None:
        wait_until(lambda: self.run(IS_IDLE, True))

    @property
    def text(self) -> str:
        return self.run("return document.querySelector('#text').value")

    def token_text(self, pane: str = "#first") -> str:
        return "".join(self.texts(f"{pane} .token"))

    # The texts of all elements
    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
        return self.run(script, selector)

    def tokens(self) -> list[Any]:
        return self.find_all("#first .token")

    # The red, green and blue of the background of each token
    def backgrounds(self) -> list[list[int]]:
        script = """return [...document.querySelectorAll("#first .token")].map(
            e => getComputedStyle(e).backgroundColor.match(/[\\d.]+/g).map(Number))"""
        return self.run(script)

    # The loss in nats per token of each model on each shown text
    def losses(self) -> dict[str, list[float | None]]:
        rows = self.run("""return [...document.querySelectorAll("#losses tbody tr")].map(
            row => [...row.cells].map(cell => cell.textContent))""")
        found = {}
        for name, *cells in rows:
            found[name] = [float(cell.split()[0]) if cell != "–" else None for cell in cells]
        return found


# A person at a page; the console must be empty at the end
def open_at(browser: Any, url: str) -> Iterator[Reader]:
    reader = Reader(browser, url)
    reader.shorten()
    yield reader
    assert browser.get_log("browser") == []


CONTRASTS = """
const rgba = text => text.match(/[\\d.]+/g).map(Number);
const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const behind = e => {
  const color = rgba(getComputedStyle(e).backgroundColor);
  return color.length === 3 || color[3] === 1 ? color : behind(e.parentElement);
};
return [...document.querySelectorAll("body *:not(script, noscript)")]
  .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
  .map(e => {
    const lights = [light(rgba(getComputedStyle(e).color)), light(behind(e))];
    const [a, b] = lights.sort((x, y) => y - x);
    return [e.outerHTML.slice(0, 80), (a + 0.05) / (b + 0.05)];
  });
"""


# Return the element and the WCAG contrast ratio of every text against its background
def text_contrasts(browser: Any) -> list[tuple[str, float]]:
    return browser.execute_script(CONTRASTS)
