"""An exponential moving average of weights. Depends on torch alone."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class EMA:
    """Exponential moving average of weights (Polyak & Juditsky, 1992), beside them or in their place.

    Update t keeps min(decay, (1 + t) / (10 + t)) of the average: of a short training it forgets the beginning
    (TensorFlow's ExponentialMovingAverage with num_updates).
    """

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        self.parameters: list[Tensor] = list(parameters)
        self.decay, self.updates = decay, 0
        self.shadow = [p.detach().clone() for p in self.parameters]  # the averages; when swapped, the weights
        self.swapped = False

    def load(self, averages: Iterable[Tensor], updates: int) -> None:
        """Go on from averages that were kept, (as the parameters)."""
        for kept, average in zip(self.shadow, averages, strict=True):
            kept.copy_(average)
        self.updates = updates

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights into the average; after an optimizer step."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.shadow, self.parameters, 1 - decay)

    def swap(self) -> None:
        """Exchange weights and averages; nothing is copied."""
        for i, p in enumerate(self.parameters):
            p.data, self.shadow[i] = self.shadow[i], p.data
        self.swapped = not self.swapped

    def state_dicts(self, state: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What `state()` says with the weights in their place, and with the averages."""
        here = state()
        self.swap()
        there = state()
        self.swap()
        return (there, here) if self.swapped else (here, there)
