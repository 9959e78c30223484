"""Sampling from logits: repetition penalty, temperature, top-k, top-p, min-p, and the draw. Depends on torch alone.

The order is that of Hugging Face's logits processors; each filter acts on the output of the one before. Every sample
has its own random generator, which gives one number per token, so a sample does not depend on the rest of the batch.

Shapes: B samples, V vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minigpt.generation_settings import check_settings

_NUMBERS_PER_REFILL = 64  # of each generator of `PerSampleRNG`


@dataclass(frozen=True)
class Sampling:
    """Sampling settings; a value out of range raises UserError.

    Args:
        temperature: divides the logits; 0 is greedy decoding, which takes the first of equal maxima.
        top_k: keep the k most likely tokens, exactly k even if several have equal logits.
        top_p: keep the smallest set of most likely tokens with this total probability.
        min_p: keep tokens with at least this fraction of the highest probability.
        repetition_penalty: divides positive logits of tokens in the text and multiplies negative ones; 1 disables it.

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

    def filter(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Apply all filters to logits (B, V): excluded tokens get -inf. `seen` (B, V): true for tokens in the text."""
        if self.repetition_penalty != 1:
            assert seen is not None
            penalty = self.repetition_penalty
            logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        if self.temperature == 0:  # no other filter excludes the maximum
            return logits
        if self.temperature != 1:
            if self.temperature < 0.01:  # relative to the maximum, or the quotients overflow to inf and NaN
                logits = logits - logits.amax(dim=-1, keepdim=True)
            logits = logits / max(self.temperature, 1e-30)
        if self.top_k is not None and self.top_k < logits.size(-1):  # `topk` breaks ties: exactly k are kept
            kept, index = logits.topk(self.top_k)  # (B, k)
            logits = torch.full_like(logits, float("-inf")).scatter(-1, index, kept)
        if self.top_p is not None and self.top_p < 1:
            descending, index = logits.sort(dim=-1, descending=True)
            p = descending.softmax(dim=-1)
            excluded = p.cumsum(dim=-1) - p >= self.top_p  # the more likely tokens reach top_p
            descending = descending.masked_fill(excluded, float("-inf"))
            logits = torch.empty_like(logits).scatter(-1, index, descending)
        if self.min_p:
            p = logits.softmax(dim=-1)
            logits = logits.masked_fill(p < self.min_p * p.amax(dim=-1, keepdim=True), float("-inf"))
        return logits

    def draw(self, logits: Tensor, uniform: Tensor, seen: Tensor | None = None) -> Tensor:
        """Draw token ids (B,) by inverse transform sampling, on the device of `uniform`: (B,) numbers in [0, 1)."""
        logits = self.filter(logits, seen)
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        # In float64, a number below 1 times the total stays below the total.
        cumulative = logits.softmax(dim=-1).to(uniform.device).cumsum(dim=-1, dtype=torch.float64)  # (B, V)
        targets = uniform[:, None] * cumulative[:, -1:]  # (B, 1)
        return torch.searchsorted(cumulative, targets, right=True)[:, 0].to(logits.device)


class PerSampleRNG:
    """Uniform float64 numbers in [0, 1) from one generator per seed; on the CPU for MPS, which has no float64."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.device = torch.device("cpu") if device.type == "mps" else device
        self._used = _NUMBERS_PER_REFILL

    def next(self) -> Tensor:
        """Return the next number of each generator, (B,)."""
        if self._used == _NUMBERS_PER_REFILL:
            columns = [torch.rand(_NUMBERS_PER_REFILL, generator=generator) for generator in self.generators]
            self._numbers, self._used = torch.stack(columns, dim=1).double().to(self.device), 0
        self._used += 1
        return self._numbers[self._used - 1]
