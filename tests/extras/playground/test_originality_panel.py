"""The originality panel of the page: what a text has in common with the training text."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from readers import MAX_TOKENS, Reader
from servers import serving
from small_runs import wait_until

from minigpt.checkpoints.find import BEST
from minigpt.extras.corpora.run_corpus import find_corpus
from minigpt.extras.interpret.originality import Index, build_index, originality, validation_texts


def underlined(reader: Reader) -> str:
    return "".join(reader.texts("#first .copied"))


def check_underlined(reader: Reader, index: Index) -> list[dict[str, Any]]:
    """Wait until the spans of the text that the training text has are underlined; return them."""
    spans = originality(index, reader.text)["spans"]
    marked = set[int]().union(*(range(span["start"], span["end"]) for span in spans))
    expected = "".join(reader.text[i] for i in sorted(marked))
    wait_until(lambda: underlined(reader) == expected)
    return spans


def figures(reader: Reader) -> list[list[float | None]]:
    """The shares of new n-grams in percent and the longest copy, also of the validation text."""
    rows = reader.run("""return [...document.querySelectorAll("#originality tbody tr")].map(
        row => [...row.cells].slice(1).map(cell => cell.textContent))""")
    found: list[list[float | None]] = []
    for column in zip(*rows, strict=True):
        found.append([None if cell == "–" else float(cell.removesuffix(" %")) for cell in column])
    return found


def expected_figures(found: dict[str, Any]) -> list[Any]:
    shares = [share and pytest.approx(100 * share, abs=0.06) for share in found["new"].values()]
    return [*shares, found["longest"]]


@pytest.mark.slow
def test_the_copied_part_is_underlined_and_counted_while_the_panel_is_open(
    browser: Any, train: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    run = train("max_steps=5").folder
    corpus = find_corpus(run / BEST)
    index = build_index(corpus)
    with serving([run]) as server:
        reader = Reader(browser, f"{server.url}/")
        reader.shorten()
        part = index.text.decode()[1000:1060]
        reader.write(f"zoo {part} zoo")
        assert underlined(reader) == ""
        reader.open("Originality")
        (span,) = check_underlined(reader, index)
        assert part in reader.text[span["start"] : span["end"]]
        compared = [reader.text], validation_texts(corpus, 20_000)
        expected = [expected_figures(originality(index, *texts)) for texts in compared]
        wait_until(lambda: figures(reader) == expected)
        (hint,) = reader.texts("#originality .context")
        reader.hover(reader.tokens()[span["start"] + 10])
        # Where it stands in the training text
        before, part, after = reader.texts("#originality .context > *")
        assert part == reader.text[span["start"] : span["end"]]
        assert before.removeprefix("… ") + part + after.removesuffix(" …") in index.text.decode()
        reader.hover(reader.tokens()[len(reader.text) - 1])  # is not underlined
        assert reader.texts("#originality .context") == [hint]
        reader.open("Originality")
        wait_until(lambda: underlined(reader) == "")
        reader.open("Originality")
        check_underlined(reader, index)
        reader.generate()
        longer = expected_figures(originality(index, reader.text))
        wait_until(lambda: figures(reader)[0] == longer)
        assert browser.get_log("browser") == []

        (tmp_path / "data").rename(tmp_path / "moved")
        (run / BEST).touch()
        error = "the token files of the run are not in"
        reader.write("fox")
        wait_until(lambda: error in reader.find("#originality .error").text)
        assert (underlined(reader), figures(reader)) == ("", [])
        before = reader.text
        reader.generate()
        assert len(reader.text) == len(before) + MAX_TOKENS
        assert error in reader.find("#originality .error").text
