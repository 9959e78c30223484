"""The page as one file: modules in the order of their imports, and a policy that allows nothing else."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from minigpt.page import render as module
from minigpt.page.render import render

PAGE = Path(module.__file__).parent
INDEX = (
    "<!DOCTYPE html>\n<html>\n<head>\n"
    '<link rel="stylesheet" href="style.css">\n<script type="module" src="server.js"></script>\n'
    "</head>\n<body>\n<p id=out></p>\n</body>\n</html>\n"
)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The files of the page; a test adds its own."""
    contents = {"index.html": INDEX, "style.css": "p { color: red; }\n"}
    monkeypatch.setattr(module, "_read", contents.__getitem__)
    return contents


def script_of(page: str) -> str:
    (script,) = re.findall('<script type="module">(.*?)</script>', page, re.DOTALL)
    return script


def test_modules_run_once_each_after_those_that_they_import(
    files: dict[str, str], open_page: Any, tmp_path: Path
) -> None:
    order = "globalThis.order = [...(globalThis.order ?? []), '{0}'];\nexport const {0} = '{0}';\n"
    files["main.js"] = 'import {b} from "./b.js";\nimport {a, text} from "./a.js";\n\n' + order.format("main")
    files["main.js"] += "document.getElementById('out').textContent = a + b + text() + new C().value;\n"
    files["main.js"] = 'import {C} from "./c.js";\n' + files["main.js"]
    files["b.js"] = 'import {a} from "./a.js";\n' + order.format("b")
    files["a.js"] = order.format("a") + "export function text() { return ' export '; }\n"
    files["c.js"] = "export class C {\n  value = 3;\n}\n"
    (tmp_path / "page.html").write_text(render("main.js", {}))
    run = open_page(tmp_path / "page.html")
    assert run("return order") == ["a", "b", "main"]
    assert run("return document.getElementById('out').textContent") == "ab export 3"
    assert run("return getComputedStyle(document.getElementById('out')).color") == "rgb(255, 0, 0)"


def test_data_and_texts_are_read_as_they_were_given(files: dict[str, str], open_page: Any, tmp_path: Path) -> None:
    hostile = "</script><script>document.title = 'broken'</script><!--<script>&lt;\u2028\ud800é"
    data = {"text": hostile, "numbers": [1, 2.5, None]}
    files["main.js"] = (
        "globalThis.data = JSON.parse(document.getElementById('data').textContent);\n"
        "globalThis.more = document.getElementById('weights').textContent;\n"
    )
    (tmp_path / "page.html").write_text(render("main.js", data, "AB+/="), encoding="utf-8")
    run = open_page(tmp_path / "page.html")
    assert json.loads(run("return JSON.stringify(data)")) == data
    assert run("return more") == "AB+/="
    assert run("return document.title") == ""


@pytest.mark.parametrize("entry", ["browser.js", "saved.js"])
def test_the_policy_allows_the_script_and_the_style_of_the_page_and_nothing_else(entry: str) -> None:
    page = render(entry, {})
    (policy,) = re.findall('<meta http-equiv="Content-Security-Policy" content="(.*?)">', page)
    (style,) = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script_of(page))]
    assert policy.split("; ") == [
        "default-src 'none'",
        f"style-src 'sha256-{digests[0]}'",
        f"script-src 'sha256-{digests[1]}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    assert page.index("Content-Security-Policy") < page.index("<style>") < page.index("<script")
    assert "src=" not in page
    assert not re.search(r"^(import|export)\b", script_of(page), re.MULTILINE)


def exports(file: Path) -> set[str]:
    declaration = r"^export (?:async )?(?:function\*?|class|const|let) (\w+)"
    return set(re.findall(declaration, file.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("file", sorted(PAGE.glob("*.js")), ids=lambda file: file.name)
def test_modules_can_be_inlined(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    for line in re.findall(r"^import.*", source, re.MULTILINE):
        found = re.fullmatch(r'import \{(\w+(?:, \w+)*)\} from "\./(\w+\.js)";', line)
        assert found, line
        assert set(found[1].split(", ")) <= exports(PAGE / found[2])  # which a script of all modules would not need
    assert len(re.findall(r"^export", source, re.MULTILINE)) == len(exports(file))
    assert "</script" not in source
    assert "<!--" not in source
