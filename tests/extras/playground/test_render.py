"""The page as one file: a policy that allows its script and its style and nothing else."""

import base64
import hashlib
import re

import pytest

from minigpt.extras.playground.render import render


def test_the_policy_allows_the_script_and_the_style_of_the_page_and_nothing_else() -> None:
    page = render({})
    (policy,) = re.findall('<meta http-equiv="Content-Security-Policy" content="(.*?)">', page)
    (style,) = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    (script,) = re.findall('<script type="module">(.*?)</script>', page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
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
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)


def test_numbers_that_json_lacks_are_an_error_before_the_page_is_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        render({"loss": float("nan")})
