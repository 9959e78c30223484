"""Learning-rate schedules: factors on the peak learning rate, functions of the step. Depends on nothing."""

import math


def cosine(step: int, *, max_steps: int, warmup_steps: int, final_lr_frac: float) -> float:
    """Warm up linearly, then follow half a cosine from 1 to `final_lr_frac` (Loshchilov & Hutter, 2017)."""
    progress = _progress(step, max_steps, warmup_steps)
    return _warmup(step, warmup_steps) * (
        final_lr_frac + (1 - final_lr_frac) * 0.5 * (1 + math.cos(math.pi * progress))
    )


def linear(step: int, *, max_steps: int, warmup_steps: int, final_lr_frac: float) -> float:
    """Warm up linearly, then fall on a straight line from 1 to `final_lr_frac`."""
    return _warmup(step, warmup_steps) * (1 - (1 - final_lr_frac) * _progress(step, max_steps, warmup_steps))


def constant(step: int, *, max_steps: int, warmup_steps: int) -> float:
    """Warm up linearly, then stay at 1."""
    return _warmup(step, warmup_steps)


def _warmup(step: int, warmup_steps: int) -> float:
    """The first step already learns, and the step after the warm-up is the first at the peak."""
    return min(1.0, (step + 1) / (warmup_steps + 1))


def _progress(step: int, max_steps: int, warmup_steps: int) -> float:
    """0 at the end of the warm-up, 1 at `max_steps`."""
    return min(1.0, max(0.0, (step - warmup_steps) / max(1, max_steps - warmup_steps)))
