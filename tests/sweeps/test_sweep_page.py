"""The page of a sweep in headless Chromium: linked charts, samples, hostile text and odd sweeps."""

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from minigpt.sweeps.answer import answer
from minigpt.sweeps.ranking import ranked
from minigpt.sweeps.results import COMPLETED, Point
from minigpt.sweeps.sweep_charts import swept_chart
from minigpt.sweeps.sweep_page import MAX_SAMPLE_CHARS, sweep_page
from minigpt.utils.terminal import sanitize_line

ActionChains = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install selenium").ActionChains
wait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
NONE = Path("missing/run")
HOSTILE = "</script><script>document.title=0</script><!--<img src=x onerror='document.title=0'>${1} {{vega}}"


def point(folder: Path, loss: float | None, status: str = COMPLETED, bits: float = 1, **overrides: str) -> Point:
    """A run with a curve down to its loss, and with two samples that name its folder."""
    if folder != NONE:
        folder.mkdir()
        samples = (f"── step {step}, validation loss 2.0 ──\n{step} {folder.name}\n\n" for step in (5, 10))
        (folder / "samples.txt").write_text("".join(samples), encoding="utf-8")
    totals = {} if loss is None else {"best_val_loss": loss, "best_val_bits_per_byte": bits * loss / math.log(2)}
    curve = () if loss is None else tuple((100 * k, loss + 1 / k) for k in range(1, 6))
    return Point(folder, overrides, status, totals=totals, curve=curve)


def grid(folder: Path) -> list[Point]:
    """Two settings and two seeds; wider models, more heads and the first seed have lower losses."""
    return [
        point(folder / f"{n}-{h}-{seed}", 9 - n / 64 - h / 4 + seed / 20, n_embd=str(n), n_head=str(h), seed=str(seed))
        for n, h, seed in product((32, 64, 128), (1, 2), (1, 2))
    ]


@pytest.fixture
def show(browser: Any, open_page: Any, tmp_path: Path) -> Any:
    """Open the page of points in the browser; it makes no request and logs no error."""

    def open_(points: list[Point], title: str = "sweep", width: int = 1280) -> Any:
        rows = ranked(points)
        content = sweep_page(title, [*map(sanitize_line, answer(rows))], rows)
        (tmp_path / "page.html").write_text(content, encoding="utf-8", newline="\n")
        size = {"width": width, "height": 1100, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        run = open_page(tmp_path / "page.html")
        assert run("return document.documentElement.scrollWidth") <= width
        return browser

    yield open_
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert (tmp_path / "page.html").stat().st_size < 2e6


def until(page: Any, condition: Any) -> None:
    wait(page, 60, poll_frequency=0.02).until(lambda _: condition())


def text(page: Any, name: str) -> str:
    return page.find_element("id", name).get_property("textContent")


def opacities(page: Any, chart: str, mark: str) -> list[float]:
    """The opacities of the marks of a chart, by rank; those of the heat map in reverse."""
    marks = page.find_elements("css selector", f"#{chart} .mark-{mark} path[aria-label]")
    return [float(element.get_attribute("opacity")) for element in marks]


@pytest.mark.parametrize(("run", "name"), [(3, "128-1-2"), (8, "32-2-1")])  # runs by rank
def test_the_curve_under_the_pointer_is_highlighted_with_its_cell_line_and_sample(show, tmp_path, run, name):
    page = show(grid(tmp_path))
    assert text(page, "sample") == "10 128-2-1"  # of the best run
    ends = page.find_elements("css selector", "#curves .mark-symbol path[aria-label]")
    ActionChains(page, duration=0).move_to_element(ends[run]).perform()
    curves = [1 if i == run else 0.4 if i // 2 == run // 2 else 0.15 for i in range(12)]
    until(page, lambda: opacities(page, "curves", "line") == curves)
    until(page, lambda: opacities(page, "parallel", "line") == [1 if i == run // 2 else 0.15 for i in range(6)])
    until(page, lambda: opacities(page, "swept", "rect") == [1 if 5 - i == run // 2 else 0.35 for i in range(6)])
    assert text(page, "sample") == f"10 {name}"
    assert text(page, "tip").startswith("n_embd={}, n_head={}, seed={}: ".format(*name.split("-")))
    assert f"in {name}" in text(page, "facts")


def test_a_clicked_cell_and_a_chosen_run_stay_until_escape(show, tmp_path):
    page = show(grid(tmp_path), width=390)
    page.find_element("css selector", "#swept .mark-rect path[aria-label]").click()  # of the highest loss
    ActionChains(page, duration=0).move_to_element(page.find_element("id", "summary")).perform()
    until(page, lambda: opacities(page, "curves", "line") == [0.15] * 10 + [1, 1])
    assert text(page, "sample") == "10 32-1-1"
    page.find_element("css selector", "#runs option:nth-child(4)").click()
    until(page, lambda: opacities(page, "curves", "line") == [0.15, 0.15, 0.4, 1] + [0.15] * 8)
    assert text(page, "sample") == "10 128-1-2"
    page.find_element("css selector", "#runs").send_keys("\ue00c")  # Escape
    until(page, lambda: opacities(page, "curves", "line") == [1] * 12)


def test_hostile_text_is_shown_and_does_not_run(show, tmp_path):
    hostile = point(tmp_path / "a", 1.0, **{f"x.{HOSTILE}": HOSTILE, "\ud800": "\udc00"})
    sample = f"── step 2, validation loss 1.0000 ──\nhostile {HOSTILE}\x00\x1b[31m\u202e"
    (tmp_path / "a/samples.txt").write_bytes(sample.encode() + b"\xff" + b"x" * 3000)
    page = show([hostile, *grid(tmp_path)[:2]], title=HOSTILE)
    assert page.title == HOSTILE
    assert text(page, "sample").startswith(f"hostile {HOSTILE}␀␛[31m⟨U+202E⟩\ufffdxxx")
    assert len(text(page, "sample")) == MAX_SAMPLE_CHARS
    assert f"={HOSTILE}, \\ud800=\\udc00" in text(page, "answer")


def test_a_cell_of_the_heat_map_has_its_loss_and_why_it_is_not_complete() -> None:
    values = {("1", "1"): (2.0, COMPLETED), ("1", "2"): (2.5, "running"), ("2", "1"): (None, "failed")}
    rows = ranked([point(NONE, loss, status, a=a, b=b) for (a, b), (loss, status) in values.items()])
    cells = swept_chart(rows)["spec"]["datasets"]["data"]
    assert [cell["text"] for cell in cells] == [["–", "failed"], ["2.5000", "running"], ["2.0000"]]


def runs(*losses: float | None, status: str = COMPLETED, name: str = "lr") -> list[Point]:
    return [point(NONE, loss, status, **{name: str(i + 1)}) for i, loss in enumerate(losses)]


ODD = {  # points, and a text of the page
    "no losses": (runs(None, None, status="failed"), "No run has a validation loss."),
    "failed and running": ([*runs(2.0, 3.0, status="running"), *runs(None, status="failed")], "1 failed, 2 running"),
    "diverged": (runs(2.0, 2.1, 2.2, 1e30), "losses above the scales: 1"),
    "seeds only": (runs(2.0, 2.1, name="seed"), "Parallel coordinates need two"),
    "one point without a curve": (
        [Point(NONE, {"a": "1"}, totals={"best_val_loss": 2.0})],
        "No run has a learning curve.",
    ),
    "settings that runs lack": ([*runs(2.0), *runs(3.0, name="optimizer")], "default"),
    "words": ([point(NONE, len(o + a), opt=o, act=a) for o in ("muon", "adamw") for a in ("relu", "id")], "muon"),
    "hundreds": ([point(NONE, i % 7 + 1, lr=str(i), n=str(i % 5), d=str(i % 3)) for i in range(300)], "20 of 300"),
    "tokenizers": ([point(NONE, 2.0, bits=i, tokenizer=str(i)) for i in (1, 2)], "best loss\nbits per byte"),
}


@pytest.mark.parametrize("sweep", ODD)
def test_the_page_of_an_odd_sweep_says_what_it_does_not_show(show, sweep):
    points, expected = ODD[sweep]
    page = show(points, width=390)
    content = text(page, "summary") + page.find_element("css selector", "main").get_property("textContent")
    assert expected.replace("\n", "") in content.replace("\n", "")
    assert text(page, "sample") == "This run has no sample."
    assert ("nats" in content) == (sweep not in ("tokenizers", "no losses"))  # the unit of the ranking
