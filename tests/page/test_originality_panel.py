"""The originality panel of the page in headless Chromium: what a text has in common with the training text."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from readers import Reader
from servers import serving
from small_runs import small_run

import minigpt
from minigpt.checkpoints.export_html import export_html
from minigpt.checkpoints.find import BEST
from minigpt.checkpoints.init_from import find_pretrained
from minigpt.checkpoints.validation_split import find_corpus
from minigpt.interpret.originality import Index, build_index, originality, validation_text


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run of a few steps: its folder, the index of its training text, and the figures of its validation text."""
    base = tmp_path_factory.mktemp("trained")
    minigpt.train([*small_run(text, base / "data"), f"hydra.run.dir={base}/run", "max_steps=5"])
    corpus = find_corpus(base / "run" / BEST)
    validation = originality(build_index(corpus), validation_text(corpus, 20_000))
    return SimpleNamespace(folder=base / "run", index=build_index(corpus), validation=validation)


@pytest.fixture
def reader(browser: Any, trained: SimpleNamespace) -> Iterator[Reader]:
    """A person at the page of the run; the console must be empty at the end."""
    with serving([trained.folder]) as server:
        reader = Reader(browser, f"{server.url}/")
        reader.set("max_tokens", 30)
        yield reader
        assert browser.get_log("browser") == []


def texts(reader: Reader, selector: str) -> list[str]:
    return reader.run("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector)


def underlined(reader: Reader) -> str:
    return "".join(texts(reader, "#first .copied"))


def check_underlined(reader: Reader, index: Index) -> list[dict[str, Any]]:
    """Wait until the spans of the text that the training text has are underlined; return them."""
    spans = originality(index, reader.text)["spans"]
    marked = {i for span in spans for i in range(span["start"], span["end"])}
    reader.wait_until(lambda: underlined(reader) == "".join(reader.text[i] for i in sorted(marked)))
    return spans


def figures(reader: Reader) -> list[list[float | None]]:
    """The shares of new n-grams in percent and the longest copy: of the text, then of the validation text."""
    rows = reader.run("""return [...document.querySelectorAll("#originality tbody tr")].map(
        row => [...row.cells].slice(1).map(cell => cell.textContent))""")
    columns = zip(*rows, strict=True)
    return [[None if cell == "–" else float(cell.removesuffix(" %")) for cell in column] for column in columns]


def expected_figures(found: dict[str, Any]) -> list[Any]:
    shares = [None if share is None else pytest.approx(100 * share, abs=0.06) for share in found["new"].values()]
    return [*shares, found["longest"]]


def test_the_copied_part_is_underlined_and_counted_while_the_panel_is_open(
    reader: Reader, trained: SimpleNamespace
) -> None:
    part = trained.index.text.decode()[1000:1060]
    reader.write(f"zoo {part} zoo")
    assert underlined(reader) == ""
    reader.open("Originality")
    (span,) = check_underlined(reader, trained.index)
    assert part in reader.text[span["start"] : span["end"]]
    expected = [expected_figures(originality(trained.index, reader.text)), expected_figures(trained.validation)]
    reader.wait_until(lambda: figures(reader) == expected)
    (hint,) = texts(reader, "#originality .context")
    reader.hover(reader.tokens()[span["start"] + 10])
    before, part, after = texts(reader, "#originality .context > *")  # where it stands in the training text
    assert part == reader.text[span["start"] : span["end"]]
    assert before.removeprefix("… ") + part + after.removesuffix(" …") in trained.index.text.decode()
    reader.hover(reader.tokens()[len(reader.text) - 1])  # is not underlined
    assert texts(reader, "#originality .context") == [hint]
    reader.open("Originality")
    reader.wait_until(lambda: underlined(reader) == "")
    reader.open("Originality")
    check_underlined(reader, trained.index)
    reader.generate()
    longer = expected_figures(originality(trained.index, reader.text))
    reader.wait_until(lambda: figures(reader)[0] == longer)


def test_without_the_token_files_the_panel_says_why_and_the_rest_works(browser: Any, finished: SimpleNamespace) -> None:
    error = "the token files of the run are not in"
    with serving([finished.folder]) as server:
        reader = Reader(browser, f"{server.url}/")
        reader.set("max_tokens", 30)
        reader.write("the quick brown fox jumps over")
        reader.open("Originality")
        reader.wait_until(lambda: error in reader.find("#originality .error").text)
        assert (underlined(reader), figures(reader)) == ("", [])
        reader.generate()
        assert len(reader.text) == 60
        assert error in reader.find("#originality .error").text


def test_an_exported_page_has_no_such_panel(browser: Any, finished: SimpleNamespace, tmp_path: Path) -> None:
    export_html(find_pretrained(str(finished.folder)), tmp_path / "page.html")
    reader = Reader(browser, (tmp_path / "page.html").as_uri())
    assert [e.text for e in reader.find_all("summary") if e.is_displayed()] == ["Attention", "Training"]
