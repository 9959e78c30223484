"""Every code line of the pages in docs/ runs, and prints what the page says that it prints."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from minigpt.runs.config_checks import check_run

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pages
def test_every_code_block_runs_and_prints_what_follows_it(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = list(FENCE.finditer(text))
    assert text.count("```") == 2 * len(blocks)
    names: dict[str, Any] = {}
    printed = ""
    for block in blocks:
        language, body = block.groups()
        line = text.count("\n", 0, block.start()) + 1
        if language == "text":
            assert body == printed, f"{page.name}, line {line}: the code before it prints\n{printed}"
            printed = ""
            continue
        # A block of another language would be code that nothing runs.
        assert language == "python", f"{page.name}, line {line}"
        assert not printed, f"{page.name}: what the code before line {line} prints is not shown\n{printed}"
        with contextlib.redirect_stdout(io.StringIO()) as output:
            # The empty lines make a traceback name the line of the page.
            exec(compile("\n" * line + body, str(page), "exec"), names)
        printed = output.getvalue()
    assert not printed, f"{page.name}: what its last code prints is not shown\n{printed}"


@pages
def test_every_file_that_a_page_points_to_exists(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_page_on_attention_has_code() -> None:
    (page,) = (page for page in PAGES if page.name == "attention.md")
    assert len(FENCE.findall(page.read_text(encoding="utf-8"))) > 10


@pytest.mark.slow
def test_every_setting_of_the_recipes_exists() -> None:
    (page,) = (page for page in PAGES if page.name == "recipes.md")
    cells = re.findall(r"\| `([^`]+=[^`]+)` \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(cells) > 20
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        for cell in cells:
            overrides = cell.split()
            if not cell.startswith("experiment="):
                overrides.insert(0, "experiment=sprint_cpu")
            check_run(compose("train", overrides))
