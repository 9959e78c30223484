"""Norms and activations: one table each, by name, for the model and the decoder. Depends on torch alone.

On a CPU, passes over memory are what RMSNorm and ReLU² cost: the versions here take half the time of torch's.
Elsewhere, and in other precisions than float32, they are torch's own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """x / √(mean(x²) + eps) over the last dimension, times weight (C,): (…, C) to (…, C) (Zhang & Sennrich, 2019)."""
    if not _use_fused_cpu(x):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    normed: Tensor = _RMSNorm.apply(x, eps) if torch.is_grad_enabled() else x * _rms_factor(x, eps)
    return normed if weight is None else normed * weight


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)² (So et al., 2021)."""
    if not _use_fused_cpu(x):
        return F.relu(x).square()
    squared: Tensor = _ReLUSquared.apply(x) if torch.is_grad_enabled() else F.relu(x).square_()
    return squared


def swiglu(x: Tensor) -> Tensor:
    """silu(a) · b for the halves a and b of x: (…, 2C) to (…, C) (Shazeer, 2020)."""
    gate, x = x.chunk(2, dim=-1)
    return F.silu(gate) * x


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """(x - mean(x)) / √(var(x) + 1e-5) over the last dimension, times weight, plus bias: (…, C) to (…, C)."""
    return torch.layer_norm(x, x.shape[-1:], weight, bias)


# By the names of `config.ACTIVATIONS`, which says how many inner widths enter each; one comes out.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": relu_squared,
    "swiglu": swiglu,
}
# By the names of `config.NORMS`: functions of x (…, C), weight (C,) and bias (C,).
NORMS: dict[str, Callable[[Tensor, Tensor | None, Tensor | None], Tensor]] = {
    "layernorm": layer_norm,
    "rmsnorm": lambda x, weight, bias: rms_norm(x, weight),
    "rmsnorm_noscale": lambda x, weight, bias: rms_norm(x),
}


def _use_fused_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling()


def _rms_factor(x: Tensor, eps: float) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.size(-1)).add_(eps).rsqrt_()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        factor = _rms_factor(x, eps)
        y = x * factor
        ctx.save_for_backward(y, factor)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        y, factor = ctx.saved_tensors
        along = torch.linalg.vecdot(gradient, y).unsqueeze(-1)  # (…, 1)
        return torch.addcmul(gradient, y, along, value=-1 / y.size(-1)).mul_(factor), None


class _ReLUSquared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = F.relu(x)
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return (gradient * positive).mul_(2)
