"""Checks of the settings of `generate`, without importing torch: command lines refuse bad values at once."""

from collections.abc import Callable, Sequence
from typing import Any

from minigpt.utils.checks import CLOSED_FRACTION, NON_NEGATIVE, NON_NEGATIVE_INT, POSITIVE_INT, Rule, integer, is_number
from minigpt.utils.errors import require


def check_settings(*, key: Callable[[str], str] = str, **settings: Any) -> None:
    """Raise UserError if a setting of `generate` is out of range; `key` maps its name to that in the message."""
    for name, value in settings.items():
        if value is not None or name not in _OPTIONAL:
            require(key(name), value, *RULES[name])


def _is_stop_list(value: Any) -> bool:
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return listed and all(isinstance(item, str | int) and item != "" for item in value)


_OPTIONAL = ("top_k", "top_p", "min_p")
RULES: dict[str, Rule] = {
    "max_new_tokens": POSITIVE_INT,
    "seed": NON_NEGATIVE_INT,
    "num_samples": integer(1, 65536),
    "temperature": NON_NEGATIVE,
    "top_k": POSITIVE_INT,
    "top_p": (lambda value: is_number(value) and 0 < value <= 1, "in (0, 1]"),
    "min_p": CLOSED_FRACTION,
    "repetition_penalty": (lambda value: is_number(value) and 0.01 <= value <= 100, "in [0.01, 100]"),
    "stop": (_is_stop_list, "a list of non-empty strings and token ids"),
}
