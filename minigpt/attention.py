"""Attention: the formula, and the projections around it. Depends on torch alone.

`attend` is softmax(QKᵀ/√D)V through torch's fused kernel, which never forms the T×S matrix;
`attend_explicit` forms it, returns it, and is the reference. `MultiHeadAttention` projects to queries,
keys and values with one matrix, and covers multi-head, grouped and multi-query, self- and
cross-attention, causal or bidirectional, rotary positions, QK-norm and cached decoding.

Shapes: B batch, T queries, S keys, C n_embd, H query heads, K key-value heads, D head width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.ops import rms_norm


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
    """Scaled dot-product attention (Vaswani et al., 2017, eq. 1), fused.

    Args:
        q: (B, H, T, D). k: (B, K, S, D). v: (B, K, S, E); K divides H, and E may differ from D.
        causal: query t of T sees the keys up to S - T + t: the last query sees them all.
        mask: boolean, broadcastable to (B, H, T, S), true where a query may look.
        scale: factor on the scores, above 0; None is 1/√D.
        dropout: probability of dropping a weight; the caller passes 0 when not training.

    Returns:
        (B, H, T, E), zeros for a query that sees no key.
    """
    T, S = q.size(-2), k.size(-2)
    # A single query may see every key, and a square causal mask is what the kernel calls causal.
    kernel_causal = causal and mask is None and T == S
    visible = None if kernel_causal else _visible(T, S, causal and T > 1, mask, q.device)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=visible,
        dropout_p=dropout,
        is_causal=kernel_causal,
        scale=scale,
        enable_gqa=q.size(1) != k.size(1),
    )


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
    """`attend`, written out: returns the output (B, H, T, E) and the weights (B, H, T, S)."""
    T, S, D = q.size(-2), k.size(-2), q.size(-1)
    groups = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)  # (B, H, S, ·)
    scores = q @ k.mT * (D**-0.5 if scale is None else scale)  # (B, H, T, S)
    visible = _visible(T, S, causal, mask, q.device)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    weights = scores.softmax(dim=-1)
    if visible is not None and (mask is not None or T > S):
        weights = weights.masked_fill(~visible, 0.0)  # not nan where a query sees no key
    weights = F.dropout(weights, dropout)
    return weights @ v, weights


def _visible(T: int, S: int, causal: bool, mask: Tensor | None, device: torch.device) -> Tensor | None:
    """The boolean mask that `causal` and `mask` make together, or None where all is visible."""
    mask = None if mask is None else torch.atleast_2d(mask)
    if not causal:
        return mask
    lower = torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)  # (T, S)
    return lower if mask is None else lower & mask


def rotary_table(length: int, head_dim: int, base: float = 10000.0, *, start: int = 0) -> Tensor:
    """Cosines and sines of the rotary embedding (Su et al., 2021) from a position on, (2, length, head_dim / 2)."""
    # In 64 bits: a large position times a frequency has no digits left in 32.
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(start, start + length, dtype=torch.float64), frequency)  # (T, D/2)
    return torch.stack((angle.cos(), angle.sin())).float()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn the pair (i, i + D/2) of every head of x (B, H, T, D) by its position's angle."""
    cos, sin = table.to(x.dtype)  # (T, D/2) each
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class KVCache:
    """Keys and values of one layer, allocated once: (B, K, capacity, D) each."""

    def __init__(self, shape: tuple[int, int, int, int], *, device: torch.device, dtype: torch.dtype) -> None:
        self.k = torch.empty(shape, device=device, dtype=dtype)
        self.v = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store T more positions and return all that are stored, (B, K, length, D) each."""
        start, self.length = self.length, self.length + k.size(2)
        self.k[:, :, start : self.length] = k
        self.v[:, :, start : self.length] = v
        return self.k[:, :, : self.length], self.v[:, :, : self.length]


class MultiHeadAttention(nn.Module):
    """Project to queries, keys and values, attend in every head, project back.

    Args:
        n_embd: width C of the input and the output.
        n_head: number H of query heads.
        n_kv_head: number K of key and value heads, a divisor of H; None is H. Fewer is grouped-query
            attention (Ainslie et al., 2023), one is multi-query attention (Shazeer, 2019).
        head_dim: width D of a head; None is C // H.
        bias: biases in the projections.
        dropout: on the weights, in training only.
        out_dropout: on the output, in training only; None is `dropout`.
        causal: hide the future.
        qk_norm: RMS-normalize queries and keys per head (Henry et al., 2020).
        scale: factor on the scores; None is 1/√D.
        backend: "fused", or "explicit", which forms the weights.
        out_proj: mix the heads with an output projection; False returns them side by side.
    """

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        *,
        n_kv_head: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        out_dropout: float | None = None,
        causal: bool = True,
        qk_norm: bool = False,
        scale: float | None = None,
        backend: str = "fused",
        out_proj: bool = True,
    ) -> None:
        super().__init__()
        if backend not in ("fused", "explicit"):
            raise ValueError(f"backend={backend!r} is not possible; it takes 'fused' or 'explicit'")
        if head_dim is None and n_embd % n_head:
            raise ValueError(f"n_embd={n_embd} is not divisible by n_head={n_head}; set head_dim")
        self.n_head, self.n_kv_head = n_head, n_kv_head or n_head
        if n_head % self.n_kv_head:
            raise ValueError(f"n_head={n_head} is not divisible by n_kv_head={n_kv_head}")
        self.head_dim = head_dim or n_embd // n_head
        self.dropout, self.out_dropout = dropout, dropout if out_dropout is None else out_dropout
        self.causal, self.qk_norm = causal, qk_norm
        self.scale, self.backend = scale, backend
        self.q_width = n_head * self.head_dim  # H·D
        self.kv_width = self.n_kv_head * self.head_dim  # K·D
        self.qkv = nn.Linear(n_embd, self.q_width + 2 * self.kv_width, bias=bias)
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
        """Attend from x (B, T, C) to itself, or to context (B, S, C); returns (B, T, C).

        Args:
            mask: boolean, broadcastable to (B, H, T, S), true where a query may look.
            rotary: `rotary_table` of the positions of x, (2, T, D/2).
            cache: keys and values of the positions before x; those of x are added to it.
        """
        return self._forward(x, context, mask, rotary, cache, self.backend)[0]

    def attention_weights(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        rotary: Tensor | None = None,
    ) -> Tensor:
        """The attention weights (B, H, T, S) of `forward`, formed explicitly whatever the backend."""
        weights = self._forward(x, context, mask, rotary, None, "explicit")[1]
        assert weights is not None
        return weights

    def _forward(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        rotary: Tensor | None,
        cache: KVCache | None,
        backend: str,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = self._project(x, context)  # (B, H, T, D), (B, K, S, D) twice
        if self.qk_norm:
            q, k = rms_norm(q), rms_norm(k)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if cache is not None:
            k, v = cache.append(k, v)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if backend == "fused":
            y = attend(q, k, v, causal=self.causal, mask=mask, scale=self.scale, dropout=dropout)
        else:
            y, weights = attend_explicit(q, k, v, causal=self.causal, mask=mask, scale=self.scale, dropout=dropout)
        y = y.transpose(1, 2).flatten(2)  # (B, H, T, D) -> (B, T, H·D)
        return F.dropout(self.out(y), self.out_dropout, self.training), weights

    def _project(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if context is None:
            q, k, v = self.qkv(x).split((self.q_width, self.kv_width, self.kv_width), dim=-1)
        else:
            rows = (self.q_width, 2 * self.kv_width)
            w_q, w_kv = self.qkv.weight.split(rows)
            b_q, b_kv = (None, None) if self.qkv.bias is None else self.qkv.bias.split(rows)
            q = F.linear(x, w_q, b_q)
            k, v = F.linear(context, w_kv, b_kv).split(self.kv_width, dim=-1)
        return self._heads(q, self.n_head), self._heads(k, self.n_kv_head), self._heads(v, self.n_kv_head)

    def _heads(self, x: Tensor, n: int) -> Tensor:
        return x.unflatten(-1, (n, self.head_dim)).transpose(1, 2)  # (B, T, n·D) -> (B, n, T, D)
