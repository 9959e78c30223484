"""Checks of the settings of `generate`, without importing torch: command lines refuse bad values at once."""

from collections.abc import Callable, Sequence
from typing import Any

from minigpt.utils.checks import is_number, require, whole_number


def check_settings(*, key: Callable[[str], str] = str, **settings: Any) -> None:
    """Check settings of `minigpt.generation.generate`, given by name.

    Args:
        key: maps a setting's name to the key or flag in the error message.
        settings: values by name, as for `generate`; None disables `top_k`, `top_p` and `min_p`.

    Raises:
        UserError: a value is out of range.
    """
    for name, value in settings.items():
        accepts, expected = _CHECKS[name]
        if value is not None or name not in _OPTIONAL:
            require(key(name), value, accepts, expected)


def _number(accepts: Callable[[float], bool]) -> Callable[[Any], bool]:
    return lambda value: is_number(value) and accepts(value)


def _is_stop_list(value: Any) -> bool:
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return listed and all(isinstance(item, str | int) and item != "" for item in value)


_OPTIONAL = ("top_k", "top_p", "min_p")
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (whole_number(1), "an integer in [1, 2⁶³)"),
    "seed": (whole_number(0), "an integer in [0, 2⁶³)"),
    "num_samples": (lambda value: whole_number(1)(value) and value <= 65536, "an integer in [1, 65536]"),
    "temperature": (_number(lambda value: 0 <= value < float("inf")), "a finite number ≥ 0"),
    "top_k": (whole_number(1), "an integer in [1, 2⁶³)"),
    "top_p": (_number(lambda value: 0 < value <= 1), "in (0, 1]"),
    "min_p": (_number(lambda value: 0 <= value <= 1), "in [0, 1]"),
    "repetition_penalty": (_number(lambda value: 0.01 <= value <= 100), "in [0.01, 100]"),
    "stop": (_is_stop_list, "a list of non-empty strings and token ids"),
}
