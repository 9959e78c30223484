"""Drawing a token from logits: the filters of `SamplingSettings`, and the random numbers.

Every sample has its own random generator, which gives one number per token, so a sample does not
depend on the rest of the batch. Depends on torch alone.

Shapes: B samples, V vocab.
"""

from collections.abc import Container, Sequence

import torch
from torch import Tensor

from minigpt.sampling.settings import SamplingSettings

_NUMBERS_PER_REFILL = 64  # of each generator of `PerSampleRNG`


def filter_logits(logits: Tensor, settings: SamplingSettings, seen: Tensor | None = None) -> Tensor:
    """Apply all filters to logits (B, V): excluded tokens get -inf.

    Args:
        seen: (B, V), true for tokens in the text; required by a repetition penalty.
    """
    # Repetition penalty
    if settings.repetition_penalty != 1:
        assert seen is not None
        penalty = settings.repetition_penalty
        penalized = torch.where(logits > 0, logits / penalty, logits * penalty)  # (B, V)
        logits = torch.where(seen, penalized, logits)  # (B, V)
    # Temperature; without randomness, no other filter matters: none excludes the maximum
    if settings.temperature == 0:
        return logits
    if settings.temperature != 1:
        # Relative to the maximum, or the quotients would overflow to inf and NaN.
        if settings.temperature < 0.01:
            logits = logits - logits.amax(dim=-1, keepdim=True)  # (B, V)
        logits = logits / min(max(settings.temperature, 1e-30), 1e30)  # a number of float32
    # Top-k; `topk` breaks ties: exactly k are kept
    if settings.top_k is not None and settings.top_k < logits.size(-1):
        kept, index = logits.topk(settings.top_k)  # (B, k) each
        logits = torch.full_like(logits, float("-inf")).scatter(-1, index, kept)  # (B, V)
    # Top-p: a token is excluded if the more likely ones reach it
    if settings.top_p is not None and settings.top_p < 1:
        descending, index = logits.sort(dim=-1, descending=True)  # (B, V) each
        p = descending.softmax(dim=-1)  # (B, V)
        excluded = p.cumsum(dim=-1) - p >= max(settings.top_p, 1e-30)  # (B, V)
        descending = descending.masked_fill(excluded, float("-inf"))  # (B, V)
        logits = torch.empty_like(logits).scatter(-1, index, descending)  # (B, V)
    # Min-p
    if settings.min_p:
        p = logits.softmax(dim=-1)  # (B, V)
        excluded = p < settings.min_p * p.amax(dim=-1, keepdim=True)  # (B, V)
        logits = logits.masked_fill(excluded, float("-inf"))  # (B, V)
    return logits


def draw(
    logits: Tensor,
    settings: SamplingSettings,
    uniform: Tensor,
    seen: Tensor | None = None,
    unused: Tensor | None = None,
) -> Tensor:
    """Draw token ids (B,) by inverse transform sampling, on the device of `uniform`.

    Args:
        logits: (B, V).
        uniform: (B,) numbers in [0, 1).
        seen: as for `filter_logits`.
        unused: (V,), from `unused_ids`.

    Returns:
        Ids (B,) on the device of the logits; V where the maximum of the logits is NaN or infinite.
    """
    if unused is not None:
        logits = logits + unused  # (B, V); NaN and infinity plus -inf are not finite either
    logits = filter_logits(logits, settings, seen)  # (B, V)
    if settings.temperature == 0:
        largest, tokens = logits.max(dim=-1)  # (B,) each; the first of equal ones
        return tokens.masked_fill_((largest - largest).bool(), logits.size(-1))  # NaN, else 0
    # In float64, a number below 1 times the total stays below the total.
    p = logits.softmax(dim=-1).to(uniform.device)  # (B, V)
    cumulative = p.cumsum(dim=-1, dtype=torch.float64)  # (B, V)
    totals = cumulative.select(-1, -1)  # (B,)
    targets = (uniform * totals).unsqueeze(-1)  # (B, 1); NaN is sorted last, which draws V
    return torch.searchsorted(cumulative, targets, right=True).squeeze(-1).to(logits.device)  # (B,)


def unused_ids(tokens: Container[int], vocab_size: int, device: torch.device) -> Tensor | None:
    """Return (V,) -inf for ids that are no token and 0 for others; None if all are tokens."""
    unused = torch.tensor([0.0 if i in tokens else float("-inf") for i in range(vocab_size)])
    return unused.to(device) if unused.any() else None


class PerSampleRNG:
    """Uniform multiples of 2⁻²⁴ in [0, 1), as float64, from one generator per seed.

    MPS has no float64: its numbers are on the CPU.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.device = torch.device("cpu") if device.type == "mps" else device
        self._block = -1

    def number(self, i: int) -> Tensor:
        """Return number i of each generator, (B,).

        i may be that of the call before, or one more, from 0 on.
        """
        if i // _NUMBERS_PER_REFILL != self._block:
            columns = [torch.rand(_NUMBERS_PER_REFILL, generator=each) for each in self.generators]
            self._numbers = torch.stack(columns, dim=1).double().to(self.device)  # (numbers, B)
            self._block = i // _NUMBERS_PER_REFILL
        return self._numbers[i % _NUMBERS_PER_REFILL]  # (B,)
