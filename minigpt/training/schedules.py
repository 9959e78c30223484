"""Learning-rate schedules: factors on the peak learning rate. Depends on no package.

Each is a function of the optimizer step, with `max_steps`, the length of the run, `warmup_steps`,
over which the factor rises linearly, and, where it falls, `final_lr_frac`, the factor at
`max_steps`. Where the length of a run changes, the step is a fraction.
"""

import math


def cosine(step: float, *, max_steps: int, warmup_steps: int, final_lr_frac: float) -> float:
    """Return the factor of a half cosine from 1 to `final_lr_frac`.

    Source: https://arxiv.org/abs/1608.03983
    """
    decay = 0.5 * (1 + math.cos(math.pi * _progress(step, max_steps, warmup_steps)))
    return _warmup(step, warmup_steps) * (final_lr_frac + (1 - final_lr_frac) * decay)


def linear(step: float, *, max_steps: int, warmup_steps: int, final_lr_frac: float) -> float:
    """Return the factor of a straight line from 1 to `final_lr_frac`."""
    fall = (1 - final_lr_frac) * _progress(step, max_steps, warmup_steps)
    return _warmup(step, warmup_steps) * (1 - fall)


def constant(step: float, *, max_steps: int, warmup_steps: int) -> float:
    """Return 1 after the warm-up."""
    return _warmup(step, warmup_steps)


def _warmup(step: float, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / (warmup_steps + 1))  # positive at step 0


def _progress(step: float, max_steps: int, warmup_steps: int) -> float:
    # 0 at the end of the warm-up, 1 at max_steps.
    return min(1.0, max(0.0, (step - warmup_steps) / max(1, max_steps - warmup_steps)))
