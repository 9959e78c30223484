"""Optimizers and learning-rate schedules. Depends on torch alone.

An optimizer here is a function of the model that returns a `torch.optim.Optimizer`; a schedule is a
function of the step that returns the factor on the peak learning rate. `configs/optimizer/` and
`configs/schedule/` name them.
"""

import math

import torch
from torch import nn


def adamw(
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter, 2019) that decays matrices and embeddings, not norms and biases.

    Fused where torch has a kernel for the device: 3 to 6 times faster on a CPU.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = parameters[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=lr, betas=(betas[0], betas[1]), fused=fused)


def cosine(step: int, *, max_steps: int, warmup_steps: int, final: float) -> float:
    """Warm up linearly, then follow half a cosine from 1 to `final` (Loshchilov & Hutter, 2017)."""
    progress = _progress(step, max_steps, warmup_steps)
    return _warmup(step, warmup_steps) * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))


def linear(step: int, *, max_steps: int, warmup_steps: int, final: float) -> float:
    """Warm up linearly, then fall on a straight line from 1 to `final`."""
    return _warmup(step, warmup_steps) * (1 - (1 - final) * _progress(step, max_steps, warmup_steps))


def constant(step: int, *, max_steps: int, warmup_steps: int) -> float:
    """Warm up linearly, then stay at 1."""
    return _warmup(step, warmup_steps)


def _warmup(step: int, warmup_steps: int) -> float:
    """The first step already learns, and the step after the warm-up is the first at the peak."""
    return min(1.0, (step + 1) / (warmup_steps + 1))


def _progress(step: int, max_steps: int, warmup_steps: int) -> float:
    """0 at the end of the warm-up, 1 at `max_steps`."""
    return min(1.0, max(0.0, (step - warmup_steps) / max(1, max_steps - warmup_steps)))
