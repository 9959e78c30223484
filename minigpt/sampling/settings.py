"""The settings of `generate`, without importing torch: command lines refuse bad values at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minigpt.utils.checks import (
    CLOSED_FRACTION,
    NON_NEGATIVE,
    NON_NEGATIVE_INT,
    POSITIVE_INT,
    Rule,
    integer,
    is_number,
)
from minigpt.utils.errors import require


@dataclass(frozen=True)
class SamplingSettings:
    """How a token is drawn from logits; a value out of range raises UserError.

    The filters act in the order of Hugging Face's logits processors: repetition penalty,
    temperature, top-k, top-p, min-p, each on the output of the one before.

    Args:
        temperature: divides the logits; 0 is greedy decoding, the first of equal maxima.
        top_k: keep the k most likely tokens, exactly k even if several have equal logits.
        top_p: keep the smallest set of most likely tokens with this total probability.
        min_p: keep tokens with at least this fraction of the highest probability.
        repetition_penalty: divides positive logits of tokens in the text and multiplies negative
            ones; 1 disables it.

    Source:
        top_p: Holtzman et al., 2019, https://arxiv.org/abs/1904.09751
        min_p: Nguyen et al., 2024, https://arxiv.org/abs/2407.01082
        repetition_penalty: Keskar et al., 2019, https://arxiv.org/abs/1909.05858
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_settings(**vars(self))


def check_settings(*, key: Callable[[str], str] = str, **settings: object) -> None:
    """Raise UserError if a setting of `generate` is out of range.

    Args:
        key: maps the name of a setting to that in the message.
    """
    for name, value in settings.items():
        if value is not None or name not in ("top_k", "top_p", "min_p"):
            require(key(name), value, *RULES[name])


def _is_stop(item: object) -> bool:
    return item != "" if isinstance(item, str) else NON_NEGATIVE_INT[0](item)


RULES: dict[str, Rule] = {
    "max_new_tokens": POSITIVE_INT,
    "seed": NON_NEGATIVE_INT,
    "num_samples": integer(1, 65536),
    "temperature": NON_NEGATIVE,
    "top_k": POSITIVE_INT,
    "top_p": (lambda v: is_number(v) and 0 < v <= 1, "in (0, 1]"),
    "min_p": CLOSED_FRACTION,
    "repetition_penalty": (lambda v: is_number(v) and 0.01 <= v <= 100, "in [0.01, 100]"),
    "stop": (
        lambda v: isinstance(v, Sequence) and not isinstance(v, str) and all(map(_is_stop, v)),
        "a list of non-empty strings and token ids",
    ),
}
