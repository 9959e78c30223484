"""From logits to a token: what is left out, in which order, and the draw. Depends on torch alone.

The order is that of Hugging Face's processors: repetition penalty, temperature, top-k, top-p, min-p; each
sees what the ones before it left. Every sample has a generator of its own that gives one number a token, so
its text does not depend on what else is drawn.

Shapes: B samples, V vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from minigpt.utils.errors import UserError

_BLOCK = 64  # numbers that a generator gives at a time


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        temperature: divides the logits; 0 takes the likeliest token, the first of several.
        top_k: keep the k likeliest tokens, exactly k also where they tie.
        top_p: keep the fewest likeliest tokens that have this probability together (Holtzman et al., 2019).
        min_p: keep tokens with this fraction of the likeliest one's probability (Nguyen et al., 2024).
        repetition_penalty: divides positive logits of tokens that are in the text already, and multiplies negative
            ones (Keskar et al., 2019); 1 does nothing.

    Raises:
        UserError: a value is impossible.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, possible, expected in (
            ("temperature", lambda x: 0 <= x < float("inf"), "a number of at least 0"),
            ("top_k", lambda x: isinstance(x, int) and x >= 1, "a whole number of at least 1"),
            ("top_p", lambda x: 0 < x <= 1, "a number above 0 and up to 1"),
            ("min_p", lambda x: 0 <= x <= 1, "a number from 0 to 1"),
            ("repetition_penalty", lambda x: 0.01 <= x <= 100, "a number from 0.01 to 100"),
        ):
            value = getattr(self, name)
            if value is None and name in ("top_k", "top_p", "min_p"):
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not possible(value):
                raise UserError(f"{name}={value} is not possible; it takes {expected}")

    def filter(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Logits (B, V) with -inf for what is left out.

        Args:
            seen: boolean (B, V), true for tokens that are in the text; needed where there is a repetition penalty.
        """
        logits = self._penalize(logits, seen)
        if self.temperature not in (0, 1):
            if self.temperature < 0.01:  # from the largest: far beyond what numbers hold, inf - inf would come of it
                logits = logits - logits.amax(dim=-1, keepdim=True)
            logits = logits / self._divisor
        if self.top_k is not None and self.top_k < logits.size(-1):
            kept, index = logits.topk(self.top_k)  # (B, k)
            logits = torch.full_like(logits, float("-inf")).scatter(-1, index, kept)
        if self.top_p is not None and self.top_p < 1:
            falling, index = logits.sort(dim=-1, descending=True)
            p = falling.softmax(dim=-1)
            enough = p.cumsum(dim=-1) - p >= self.top_p  # the likelier ones are
            enough[:, 0] = False
            falling = falling.masked_fill(enough, float("-inf"))
            logits = torch.empty_like(logits).scatter(-1, index, falling)
        if self.min_p:
            p = logits.softmax(dim=-1)
            logits = logits.masked_fill(p < self.min_p * p.amax(dim=-1, keepdim=True), float("-inf"))
        return logits

    def draw(self, logits: Tensor, uniform: Tensor, seen: Tensor | None = None) -> Tensor:
        """Token ids (B,) from logits (B, V) and a number from [0, 1) each, (B,), on whose device it is drawn."""
        if self.temperature == 0:
            return self._penalize(logits, seen).argmax(dim=-1)
        logits = self.filter(logits, seen)
        # The number lies in one token's part of the probability. In 64 bits it stays below the total.
        upto = logits.softmax(dim=-1).to(uniform.device).cumsum(dim=-1, dtype=torch.float64)  # (B, V)
        return torch.searchsorted(upto, uniform[:, None] * upto[:, -1:], right=True)[:, 0].to(logits.device)

    @cached_property
    def _divisor(self) -> Tensor:
        return torch.tensor(max(self.temperature, 1e-30))  # a plain number is made a tensor at every use

    def _penalize(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        penalty = self.repetition_penalty
        if penalty == 1:
            return logits
        assert seen is not None
        return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


class PerSampleRNG:
    """Numbers from [0, 1), a row of them from each of several generators, in 64 bits.

    Args:
        seeds: of the generators.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.device = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
        self._used = _BLOCK

    def next(self) -> Tensor:
        """One from each generator, (B,)."""
        if self._used == _BLOCK:
            block = torch.stack([torch.rand(_BLOCK, generator=generator) for generator in self.generators], dim=1)
            self._block, self._used = block.double().to(self.device), 0
        self._used += 1
        return self._block[self._used - 1]
