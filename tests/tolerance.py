"""Tolerances of rounding errors between two computations of the same quantity."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from minigpt.model.config import GPTConfig


def rounding(*values: Tensor | float, terms: int, dtype: torch.dtype | None = None) -> float:
    """Return 8 eps √terms times the largest absolute value: independent rounding errors grow as a
    square root.

    `terms` is the number of summands over all consecutive sums; `dtype` that of the first value if
    it is None.
    """
    first = values[0]
    dtype = dtype or (first.dtype if isinstance(first, Tensor) else torch.float32)
    largest = max(float(torch.as_tensor(value).detach().abs().max()) for value in values)
    return 8 * torch.finfo(dtype).eps * math.sqrt(terms) * largest


def assert_near(actual: Tensor, expected: Tensor, *others: Tensor, **options: Any) -> None:
    """Assert that values are equal up to `rounding` of the expected values and the others."""
    assert_close(actual, expected, rtol=0, atol=rounding(expected, *others, **options))


def terms_of(config: GPTConfig) -> int:
    """Return the sum of the lengths of the dot products from a token to its logits."""
    n_inner = config.n_inner or 4 * config.n_embd
    layer = (
        config.n_embd + config.head_width + config.block_size + config.n_head * config.head_width
    )
    return config.n_layer * (layer + config.n_embd + n_inner) + config.n_embd
