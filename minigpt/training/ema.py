"""An exponential moving average (EMA) of weights. Depends on torch alone."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from minigpt.model.ops import local_shard


class EMA:
    """Hold an exponential moving average of parameters (https://doi.org/10.1137/0330046).

    Update t uses min(decay, (1 + t) / (10 + t)), as TensorFlow's ExponentialMovingAverage with
    num_updates, so that a short training forgets the initialization. Averages of weights in half
    precision, in which small updates round to nothing, are in float32, also while they are swapped
    in. Under FSDP2 each rank averages its shards, which must be in float32.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        self.parameters: list[Tensor] = list(parameters)
        self.decay = decay
        self.updates = 0
        self.swapped = False
        # The averages; while swapped, the weights.
        self.shadow = [
            p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for p in self.parameters
        ]

    def load(self, averages: Iterable[Tensor], updates: int) -> None:
        """Resume from stored averages, in the order of the parameters, after `updates` updates."""
        for shadow, average in zip(self.shadow, averages, strict=True):
            if hasattr(shadow, "to_local"):  # a DTensor
                from torch.distributed.tensor import distribute_tensor  # slow to import

                average = distribute_tensor(
                    average,
                    shadow.device_mesh,  # type: ignore[attr-defined]
                    shadow.placements,  # type: ignore[attr-defined]
                )
            shadow.copy_(average)
        self.updates = updates

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages; call it after every optimizer step."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        averages = [local_shard(p) for p in self.shadow]
        weights = [
            local_shard(p).to(average.dtype)
            for p, average in zip(self.parameters, averages, strict=True)
        ]
        torch._foreach_lerp_(averages, weights, 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and averages."""
        for i, p in enumerate(self.parameters):
            if hasattr(p, "to_local"):  # FSDP2 holds the memory of the shards
                weight = local_shard(p)
                average = local_shard(self.shadow[i])
                before = weight.clone()
                weight.copy_(average)
                average.copy_(before)
            else:
                p.data, self.shadow[i] = self.shadow[i], p.data
        self.swapped = not self.swapped
