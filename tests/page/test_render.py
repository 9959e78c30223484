"""The page as one file: modules in the order of their imports, and a policy that allows nothing else."""

import base64
import hashlib
import re
from pathlib import Path

import pytest

from minigpt.page import render as module
from minigpt.page.render import render

PAGE = Path(module.__file__).parent


def script_of(page: str) -> str:
    (script,) = re.findall('<script type="module">(.*?)</script>', page, re.DOTALL)
    return script


def test_the_policy_allows_the_script_and_the_style_of_the_page_and_nothing_else() -> None:
    page = render({})
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


def test_numbers_that_json_lacks_are_an_error_before_the_page_is_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        render({"loss": float("nan")})


def test_a_module_is_in_the_script_once_after_those_that_it_imports() -> None:
    script, before = script_of(render({})), set[str]()
    modules = module._modules("browser.js", {})
    for name, source in sorted(modules.items(), key=lambda item: script.index(item[1])):
        assert script.count(source) == 1
        assert set(re.findall(r'^import .* "\./(.*)";$', (PAGE / name).read_text(), re.MULTILINE)) <= before
        before.add(name)


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
