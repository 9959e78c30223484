"""The code blocks of the pages in docs/ run, and print the output that the page shows."""

import re
from pathlib import Path
from typing import Any

import pytest
from small_runs import ROOT, composed

from minigpt.runs.config_checks import check_run

PAGES = sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_code_block_runs_and_prints_the_output_that_follows(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = [(text.count("\n", 0, found.start()) + 1, *found.groups()) for found in FENCE.finditer(text)]
    assert text.count("```") == 2 * len(blocks)
    names: dict[str, Any] = {}
    for line, language, body in blocks:
        # Code in any other language would be untested; test_readme.py and test_bench.py run the commands.
        assert language in ("bash", "text", "python"), f"{page.name}, line {line}"
        if language == "python" and page.name != "training.md":  # run by test_readme.py
            assert not capsys.readouterr().out, f"{page.name}: the output of the code above line {line} is not shown"
            # Empty lines make the line numbers of a traceback those of the page.
            exec(compile("\n" * line + body, str(page), "exec"), names)
        elif language == "text":
            assert body == capsys.readouterr().out, f"{page.name}, line {line}"
    assert not capsys.readouterr().out, f"{page.name}: the output of the last code block is not shown"


def test_every_override_in_the_tables_of_recipes_is_valid() -> None:
    (page,) = (page for page in PAGES if page.name == "recipes.md")
    cells = re.findall(r"\| `([^`]+=[^`]+)` \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(cells) > 20
    for cell in cells:
        check_run(composed(*([] if cell.startswith("experiment=") else ["experiment=sprint_cpu"]), *cell.split()))
