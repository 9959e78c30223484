"""Refusals: errors of one line that name what is wrong with an input."""

from collections.abc import Callable
from typing import Any

import pytest

from minigpt.utils.errors import UserError


def refused(
    pattern: str, function: Callable[..., Any], *arguments: Any, **options: Any
) -> UserError:
    """Assert that a call raises a UserError of one line in which a pattern is; return it."""
    with pytest.raises(UserError, match=pattern) as raised:
        function(*arguments, **options)
    assert "\n" not in str(raised.value)
    return raised.value
