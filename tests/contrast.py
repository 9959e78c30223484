"""The contrast of the texts of a page in a browser."""

from typing import Any

SCRIPT = """
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
    const [a, b] = [light(rgba(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    return [e.outerHTML.slice(0, 80), (a + 0.05) / (b + 0.05)];
  });
"""


def text_contrasts(browser: Any) -> list[tuple[str, float]]:
    """Return the element and the WCAG contrast ratio of every text against its background."""
    return browser.execute_script(SCRIPT)
