"""Norms, activations and dropout, for the model and the decoder. Depends on torch alone.

An entry in `NORMS` or `ACTIVATIONS`, and its size in `minigpt.model.config`, adds one. RMSNorm and
ReLU² are limited by memory bandwidth on a CPU: the versions here make half as many passes over
memory as torch's. On other devices and in other precisions, they call torch's.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

# Properties of this CPU by name. PyTorch before 2.11 has no such function; then a CPU counts as one
# without bfloat16.
CPU: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
EPS = 1e-5  # default of what is added to the variance or the mean square


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS
) -> Tensor:
    """Normalize x (…, C) to mean 0 and variance 1, times weight (C,), plus bias (C,).

    Source: https://arxiv.org/abs/1607.06450
    """
    return torch.layer_norm(x, x.shape[-1:], _in_type_of(x, weight), _in_type_of(x, bias), eps)


def rms_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS
) -> Tensor:
    """Normalize x (…, C) to root mean square 1, times weight (C,), plus bias (C,).

    Source: https://arxiv.org/abs/1910.07467
    """
    if _autocasts_norms(x):
        # Without weights, the kernel adds in float32 anyway; with them, autocast converts x since
        # PyTorch 2.12.
        x = x if weight is None else x.to(torch.promote_types(x.dtype, torch.float32))
        with torch.autocast("cuda", enabled=False):
            y = F.rms_norm(x, x.shape[-1:], _in_type_of(x, weight), eps)
    elif not _use_fused_cpu(x, torch.float32):
        y = F.rms_norm(x, x.shape[-1:], _in_type_of(x, weight), eps)
    else:
        y = _RMSNorm.apply(x, eps)[0] if torch.is_grad_enabled() else x * _rms_factor(x, eps)
        y = y if weight is None else y * weight
    return y if bias is None else y + bias


def relu_squared(x: Tensor) -> Tensor:
    """Return max(x, 0)² (https://arxiv.org/abs/2109.08668)."""
    if not _use_fused_cpu(x, torch.float32, torch.bfloat16):
        x = F.relu(x)
        return x * x  # `square` is float32 under autocast on a GPU
    return _ReLUSquared.apply(x)[0] if torch.is_grad_enabled() else x.relu().square_()


def swiglu(x: Tensor) -> Tensor:
    """Return silu(a) · b for the halves a and b of x (https://arxiv.org/abs/2002.05202)."""
    gate, x = x.chunk(2, dim=-1)  # (…, 2·C) -> (…, C) each
    return F.silu(gate) * x  # (…, C)


NORMS: dict[str, Callable[..., Tensor]] = {
    "layernorm": layer_norm,
    "rmsnorm": rms_norm,
    "rmsnorm_noscale": rms_norm,
}
ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),  # of GPT-2, https://arxiv.org/abs/1606.08415
    "relu": F.relu,
    "relu2": relu_squared,
    "swiglu": swiglu,
}


def local_shard(tensor: Tensor) -> Tensor:
    """Return the shard of this rank under FSDP2, else the tensor itself."""
    # A DTensor has `to_local`; its class is slow to import.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def apply_dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """In training, zero each element of x with probability p and divide the others by 1 - p.

    On a CPU one random number of 64 bits decides on four elements, because torch's dropout draws
    one per element, which takes longer than the rest of it.
    https://jmlr.org/papers/v15/srivastava14a.html
    """
    if not training or p == 0:
        return x
    dropped = round(p * (1 << 16))  # of the 65,536 values of 16 bits
    if not 0 < dropped < 1 << 16 or not _use_fused_cpu(x, torch.float32, torch.bfloat16):
        return F.dropout(x, p)
    drawn = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(1 << 63), None)  # uniform
    kept = drawn.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - (1 << 15)
    return x * kept.to(x.dtype).div_(1 - p)


def _use_fused_cpu(x: Tensor, *dtypes: torch.dtype) -> bool:
    return (
        x.is_cpu
        and x.dtype in dtypes
        and not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and not torch._C._are_functorch_transforms_active()  # by torch.func.vmap or others
    )


def _autocasts_norms(x: Tensor) -> bool:
    # Autocast computes a norm in float32, and returns that.
    return x.is_cuda and torch.is_autocast_enabled("cuda")


def _in_type_of(x: Tensor, weight: Tensor | None) -> Tensor | None:
    # FSDP2 gathers bfloat16; autocast converts both itself. `to` of the same type takes two thirds
    # of the time of a layer norm of one row.
    if weight is None or weight.dtype == x.dtype or _autocasts_norms(x):
        return weight
    return weight.to(x.dtype)


def _rms_factor(x: Tensor, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # (…, C) -> (…, 1)
    return norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()  # 1 / √(mean(x²) + eps)


# What the backward passes of these functions use is an output too, so that they can be
# differentiated again:
# https://docs.pytorch.org/tutorials/intermediate/custom_function_double_backward_tutorial.html


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        factor = _rms_factor(x, eps)
        y = x * factor
        ctx.save_for_backward(y, factor)
        ctx.set_materialize_grads(False)
        return y, factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_factor: Tensor | None) -> tuple[Tensor, None]:
        y, factor = ctx.saved_tensors
        along = torch.linalg.vecdot(gradient, y).unsqueeze(-1)  # (…, C) -> (…, 1)
        if of_factor is not None:
            along = along + of_factor * factor
        return torch.addcmul(gradient, y, along, value=-1 / y.size(-1)).mul_(factor), None


class _ReLUSquared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> tuple[Tensor, Tensor]:
        positive = F.relu(x)
        ctx.save_for_backward(positive)
        ctx.set_materialize_grads(False)
        return positive * positive, positive

    @staticmethod
    def backward(ctx: Any, gradient: Any, of_positive: Tensor | None) -> Tensor:
        (positive,) = ctx.saved_tensors
        if of_positive is None:
            return (gradient * positive).mul_(2)
        of_x = of_positive * (positive > 0)
        return of_x if gradient is None else (gradient * positive).mul_(2) + of_x
