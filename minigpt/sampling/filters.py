"""Drawing a token from logits: the filters of `Sampling`, and the random numbers. Depends on torch alone.

Every sample has its own random generator, which gives one number per token, so a sample does not depend on the rest of
the batch.

Shapes: B samples, V vocab.
"""

from collections.abc import Container, Sequence

import torch
from torch import Tensor

from minigpt.sampling.settings import Sampling

_NUMBERS_PER_REFILL = 64  # of each generator of `PerSampleRNG`


def filter_logits(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """Apply all filters to logits (B, V): excluded tokens get -inf. `seen` (B, V): true for tokens in the text."""
    if sampling.repetition_penalty != 1:
        assert seen is not None
        penalty = sampling.repetition_penalty
        logits = torch.where(
            seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits
        )
    if sampling.temperature == 0:  # no other filter excludes the maximum
        return logits
    if sampling.temperature != 1:
        if (
            sampling.temperature < 0.01
        ):  # relative to the maximum, or the quotients overflow to inf and NaN
            logits = logits - logits.amax(dim=-1, keepdim=True)
        logits = logits / min(max(sampling.temperature, 1e-30), 1e30)  # a number of float32
    if sampling.top_k is not None and sampling.top_k < logits.size(
        -1
    ):  # `topk` breaks ties: exactly k are kept
        kept, index = logits.topk(sampling.top_k)  # (B, k)
        logits = torch.full_like(logits, float("-inf")).scatter(-1, index, kept)
    if sampling.top_p is not None and sampling.top_p < 1:
        descending, index = logits.sort(dim=-1, descending=True)
        p = descending.softmax(dim=-1)
        excluded = p.cumsum(dim=-1) - p >= max(
            sampling.top_p, 1e-30
        )  # the more likely tokens reach top_p
        descending = descending.masked_fill(excluded, float("-inf"))
        logits = torch.empty_like(logits).scatter(-1, index, descending)
    if sampling.min_p:
        p = logits.softmax(dim=-1)
        logits = logits.masked_fill(
            p < sampling.min_p * p.amax(dim=-1, keepdim=True), float("-inf")
        )
    return logits


def draw(
    logits: Tensor,
    sampling: Sampling,
    uniform: Tensor,
    seen: Tensor | None = None,
    unused: Tensor | None = None,
) -> Tensor:
    """Draw token ids (B,) by inverse transform sampling, on the device of `uniform`: (B,) numbers in [0, 1).

    V is returned where the maximum of the logits is NaN or infinite. `unused` (V,): from `unused_ids`.
    """
    if unused is not None:
        logits = logits + unused  # NaN and infinity plus -inf are not finite either
    logits = filter_logits(logits, sampling, seen)
    if sampling.temperature == 0:
        largest, tokens = logits.max(dim=-1)  # the first of equal ones
        return tokens.masked_fill_((largest - largest).bool(), logits.size(-1))  # NaN, else 0
    # Of NaN the target is NaN, after all. In float64, a number below 1 times the total stays below the total.
    cumulative = (
        logits.softmax(dim=-1).to(uniform.device).cumsum(dim=-1, dtype=torch.float64)
    )  # (B, V)
    targets = uniform[:, None] * cumulative[:, -1:]  # (B, 1)
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].to(logits.device)


def unused_ids(tokens: Container[int], vocab_size: int, device: torch.device) -> Tensor | None:
    """Return -inf for ids below `vocab_size` that are no token and 0 for others, (V,); None if all are tokens."""
    unused = torch.tensor([0.0 if i in tokens else float("-inf") for i in range(vocab_size)])
    return unused.to(device) if unused.any() else None


class PerSampleRNG:
    """Uniform multiples of 2⁻²⁴ in [0, 1), as float64, from one generator per seed; MPS has no float64: on the CPU."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.device = torch.device("cpu") if device.type == "mps" else device
        self._block = -1

    def number(self, i: int) -> Tensor:
        """Return number i of each generator, (B,); i may be that of the call before, or one more, from 0 on."""
        if i // _NUMBERS_PER_REFILL != self._block:
            columns = [
                torch.rand(_NUMBERS_PER_REFILL, generator=generator)
                for generator in self.generators
            ]
            self._numbers = torch.stack(columns, dim=1).double().to(self.device)
            self._block = i // _NUMBERS_PER_REFILL
        return self._numbers[i % _NUMBERS_PER_REFILL]
