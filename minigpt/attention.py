"""Attention: the formula, and the projections around it. Depends on torch alone.

`attend` is softmax(QKᵀ/√D)V by torch's fused kernel, which never materializes the T×S matrix; `attend_explicit`,
the reference, returns it. `MultiHeadAttention` covers multi-head, grouped- and multi-query, self- and
cross-attention, causal or bidirectional, with rotary position embeddings, QK-norm and a KV cache.

Shapes: B batch, T queries, S keys, C n_embd, H query heads, K key-value heads, D head width.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.config import check_heads
from minigpt.ops import EPS, apply_dropout, rms_norm
from minigpt.utils.checks import one_of
from minigpt.utils.errors import require

_MAX_EXPLICIT = 256  # keys; the memory of the formula grows as T·S


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute scaled dot-product attention with torch's fused kernel.

    In bfloat16 on a CPU the formula trains 1.7 to 5 times as fast as that kernel, and is used for up to 256 keys.

    Args:
        q: (B, H, T, D). k: (B, K, S, D). v: (B, K, S, E); K divides H, and E may differ from D.
        causal: query t sees the keys up to S - T + t: the last query sees all keys.
        mask: boolean, broadcastable to (B, H, T, S), true where a query sees a key.
        scale: factor on the scores, > 0; None is 1/√D.
        dropout: dropout probability of the weights; pass 0 in evaluation.

    Returns:
        (B, H, T, E); zeros for a query that sees no key.

    Source: https://arxiv.org/abs/1706.03762, equation 1
    """
    T, S = q.size(-2), k.size(-2)
    if q.dtype == torch.bfloat16 and q.device.type == "cpu" and S <= _MAX_EXPLICIT and torch.is_grad_enabled():
        return attend_explicit(q, k, v, causal=causal, mask=mask, scale=scale, dropout=dropout)[0]
    # The kernel's own causal mask is for T = S, and a single last query needs none.
    kernel_causal = causal and mask is None and T == S
    visible = None if kernel_causal else _visible(T, S, causal and T > 1, mask, q.device)
    gqa = q.size(1) != k.size(1)
    return F.scaled_dot_product_attention(q, k, v, visible, dropout, kernel_causal, scale=scale, enable_gqa=gqa)


def attend_explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute `attend` by its formula, and return the output (B, H, T, E) and the weights (B, H, T, S)."""
    T, S, D = q.size(-2), k.size(-2), q.size(-1)
    groups = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)  # (B, H, S, ·)
    scores = (q * (D**-0.5 if scale is None else scale)) @ k.mT  # (B, H, T, S)
    visible = _visible(T, S, causal, mask, q.device)
    if visible is not None:
        # Finite, because the gradient of a softmax over minus infinity is NaN.
        hidden = scores.new_zeros(visible.shape).masked_fill_(~visible, torch.finfo(scores.dtype).min / 2)
        scores = scores + hidden
    weights = scores.softmax(dim=-1)
    if visible is not None and (mask is not None or T > S):  # a query may see no key
        weights = weights.masked_fill(~visible, 0.0)
    weights = apply_dropout(weights, dropout)
    return weights @ v, weights


def _visible(T: int, S: int, causal: bool, mask: Tensor | None, device: torch.device) -> Tensor | None:
    """Combine `causal` and `mask`; None if every query sees every key."""
    mask = None if mask is None else torch.atleast_2d(mask)
    if not causal:
        return mask
    lower = torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)  # (T, S)
    return lower if mask is None else lower & mask


def rotary_table(
    length: int,
    head_dim: int,
    base: float = 10000.0,
    *,
    start: int = 0,
    scaling: tuple[float, float, float, int] | None = None,
) -> Tensor:
    """Return the cosines and sines (2, length, D/2) of the rotary embedding of the positions from `start` on.

    Args:
        scaling: factor, low and high frequency factor and original context length T of Llama 3.1: wavelengths above
            T/low are multiplied by the factor, those below T/high are not, and between them is a linear transition.

    Source: https://arxiv.org/abs/2104.09864; scaling: https://arxiv.org/abs/2407.21783
    """
    # In float64: the product of a large position and a frequency exceeds the precision of float32.
    options: Any = {"dtype": torch.float64, "device": "cpu"}
    frequency = base ** (-torch.arange(0, head_dim, 2, **options) / head_dim)  # (D/2,)
    if scaling is not None:
        factor, low, high, original_length = scaling
        turns = original_length * frequency / (2 * math.pi)  # within the original context
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (kept + (1 - kept) / factor)
    angle = torch.outer(torch.arange(start, start + length, **options), frequency)  # (T, D/2)
    return torch.stack((angle.cos(), angle.sin())).float()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of x (B, H, T, D) by the angles of a `rotary_table` (2, T, D/2)."""
    cos, sin = table.to(x.dtype)  # (T, D/2) each
    a, b = x.chunk(2, dim=-1)  # (B, H, T, D/2) each
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class KVCache:
    """Keys and values of one layer, in preallocated memory of `shape` (B, K, capacity, D)."""

    def __init__(self, shape: tuple[int, int, int, int], *, device: torch.device, dtype: torch.dtype) -> None:
        self.k = torch.empty(shape, device=device, dtype=dtype)
        self.v = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, K, T, D) and return all stored ones, (B, K, length, D) each."""
        start, self.length = self.length, self.length + k.size(2)
        self.k[:, :, start : self.length] = k
        self.v[:, :, start : self.length] = v
        return self.k[:, :, : self.length], self.v[:, :, : self.length]


class MultiHeadAttention(nn.Module):
    """Project to queries, keys and values, attend in every head, project back.

    Args:
        n_embd, n_head, head_dim: C, H and D; None is D = C / H.
        n_kv_head: K, a divisor of H; None is H. K < H is grouped-query attention (https://arxiv.org/abs/2305.13245),
            K = 1 multi-query attention (https://arxiv.org/abs/1911.02150).
        qkv_bias: biases of queries, keys and values; None is `bias`.
        dropout, out_dropout: dropout probability of the weights and of the output; None is `dropout`.
        causal: mask future positions.
        qk_norm: RMS-normalize queries and keys per head (https://arxiv.org/abs/2010.04245); `qk_norm_weights` adds
            learned weights (D,), and `norm_eps` is added to the mean square.
        scale: factor on the scores; None is 1/√D.
        backend: "fused" (`attend`) or "explicit" (`attend_explicit`).
        out_proj: project the concatenated heads to C; False returns them, (B, T, H·D).
    """

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        *,
        n_kv_head: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        qkv_bias: bool | None = None,
        dropout: float = 0.0,
        out_dropout: float | None = None,
        causal: bool = True,
        qk_norm: bool = False,
        qk_norm_weights: bool = False,
        norm_eps: float = EPS,
        scale: float | None = None,
        backend: str = "fused",
        out_proj: bool = True,
    ) -> None:
        super().__init__()
        check_heads(n_embd, n_head, n_kv_head, head_dim)
        require("backend", backend, *one_of(("fused", "explicit")))
        self.n_head, self.n_kv_head = n_head, n_kv_head or n_head
        self.head_dim = head_dim or n_embd // n_head
        self.dropout, self.out_dropout = dropout, dropout if out_dropout is None else out_dropout
        self.causal, self.qk_norm, self.scale, self.backend = causal, qk_norm, scale, backend
        self.q_width = n_head * self.head_dim  # H·D
        self.kv_width = self.n_kv_head * self.head_dim  # K·D
        self.qkv = nn.Linear(n_embd, self.q_width + 2 * self.kv_width, bias=bias if qkv_bias is None else qkv_bias)
        self.norm_eps = norm_eps
        learned = qk_norm and qk_norm_weights
        self.q_norm = nn.Parameter(torch.ones(self.head_dim)) if learned else None
        self.k_norm = nn.Parameter(torch.ones(self.head_dim)) if learned else None
        self.out = nn.Linear(self.q_width, n_embd, bias=bias) if out_proj else nn.Identity()

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        rotary: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attend from every position of x (B, T, C) to x, or to a context (B, S, C); return (B, T, C).

        Args:
            mask: boolean, broadcastable to (B, H, T, S), true where a query sees a key.
            rotary: (2, T, D/2), `rotary_table` of the positions of x.
            cache: keys and values of the positions before x; those of x are appended.
        """
        q, k, v = self._project(x, context, rotary)  # (B, H, T, D), (B, K, S, D) twice
        if cache is not None:
            k, v = cache.append(k, v)
        options = self._options(mask)
        y = attend(q, k, v, **options) if self.backend == "fused" else attend_explicit(q, k, v, **options)[0]
        y = y.transpose(1, 2).flatten(2)  # (B, H, T, D) -> (B, T, H·D)
        return apply_dropout(self.out(y), self.out_dropout, self.training)

    def attention_weights(
        self, x: Tensor, context: Tensor | None = None, *, mask: Tensor | None = None, rotary: Tensor | None = None
    ) -> Tensor:
        """Return the attention weights (B, H, T, S) of `forward`, with either backend."""
        return attend_explicit(*self._project(x, context, rotary), **self._options(mask))[1]

    def _options(self, mask: Tensor | None) -> dict[str, Any]:
        dropout = self.dropout * self.training
        return {"causal": self.causal, "mask": mask, "scale": self.scale, "dropout": dropout}

    def _project(self, x: Tensor, context: Tensor | None, rotary: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, D), and keys and values (B, K, S, D), normalized and rotated."""
        if context is None:
            q, k, v = self.qkv(x).split((self.q_width, self.kv_width, self.kv_width), dim=-1)
        else:
            rows = (self.q_width, 2 * self.kv_width)
            w_q, w_kv = self.qkv.weight.split(rows)
            b_q, b_kv = (None, None) if self.qkv.bias is None else self.qkv.bias.split(rows)
            q = F.linear(x, w_q, b_q)
            k, v = F.linear(context, w_kv, b_kv).split(self.kv_width, dim=-1)
        # (B, T, H·D) -> (B, H, T, D)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (q, k, v))
        if self.qk_norm:
            q, k = rms_norm(q, self.q_norm, eps=self.norm_eps), rms_norm(k, self.k_norm, eps=self.norm_eps)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        return q, k, v
