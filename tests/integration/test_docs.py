"""The code blocks of the pages in docs/ run, and print the output that the page shows."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
from small_runs import ROOT, composed

from minigpt.runs.config_checks import check_run

PAGES = sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_code_block_runs_and_prints_the_output_that_follows(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = list(FENCE.finditer(text))
    assert text.count("```") == 2 * len(blocks)
    names: dict[str, Any] = {}
    printed = ""
    for block in blocks:
        language, body = block.groups()
        line = text.count("\n", 0, block.start()) + 1
        if language == "bash" or page.name == "training.md":  # run by test_readme.py, and test_bench.py
            continue
        if language == "text":
            assert body == printed, f"{page.name}, line {line}: the code above prints\n{printed}"
            printed = ""
            continue
        # Code in any other language would be untested.
        assert language == "python", f"{page.name}, line {line}"
        assert not printed, f"{page.name}: the output of the code above line {line} is not shown\n{printed}"
        with contextlib.redirect_stdout(io.StringIO()) as output:
            # Empty lines make the line numbers of a traceback those of the page.
            exec(compile("\n" * line + body, str(page), "exec"), names)
        printed = output.getvalue()
    assert not printed, f"{page.name}: the output of the last code block is not shown\n{printed}"


@pytest.mark.slow
def test_every_override_in_the_tables_of_recipes_is_valid() -> None:
    (page,) = (page for page in PAGES if page.name == "recipes.md")
    cells = re.findall(r"\| `([^`]+=[^`]+)` \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(cells) > 20
    for cell in cells:
        check_run(composed(*([] if cell.startswith("experiment=") else ["experiment=sprint_cpu"]), *cell.split()))
