"""Attention: the formula, and the projections around it. Depends on torch alone.

`attend` is softmax(QKᵀ/√D)V by torch's fused kernel, which never materializes the T×S matrix;
`attend_explicit`, the reference, returns it. `MultiHeadAttention` covers multi-head, grouped- and
multi-query self-attention, causal or bidirectional, with rotary position embeddings, QK-norm and a
KV cache.

Shapes: B batch, T queries, S keys, C n_embd, H query heads, K key-value heads, D head width.
"""

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.model.config import check_heads
from minigpt.model.ops import CPU, EPS, apply_dropout, rms_norm

Rotary: TypeAlias = Tensor | tuple[Tensor, ...]  # a rotary table, or its cosines and sines

# Keys up to which the formula is faster. With AMX, the kernel takes 2.8 times as long as the
# formula at 128 keys, and 0.9 times as long at 256.
_MAX_EXPLICIT = 128 if CPU.get("amx_bf16") else 256


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
    # The kernel has a causal mask for T = S alone. Symbolic sizes that are equal are so at every
    # length. A single query is the last one, which sees all keys.
    kernel_causal = causal and mask is None and bool(q.size(2) == k.size(2))
    if causal and not kernel_causal and q.size(2) > 1:
        mask = _visible(q, k, mask)  # (…, T, S)
    # Fewer heads of keys: on a GPU, one fused kernel takes them, in 16 bits and without a mask.
    if q.is_cuda and q.size(1) != k.size(1) and (mask is not None or q.dtype == torch.float32):
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))  # (B, H, S, D)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        None if mask is None else torch.atleast_2d(mask),  # the kernel takes no 1-D mask
        dropout,
        kernel_causal,
        scale=scale,
        enable_gqa=bool(q.size(1) != k.size(1)),
    )  # (B, H, T, E)


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
    """Compute `attend` by its formula; return its output (B, H, T, E) and weights (B, H, T, S)."""
    groups = q.size(1) // k.size(1)
    k = k.repeat_interleave(groups, dim=1)  # (B, K, S, D) -> (B, H, S, D)
    v = v.repeat_interleave(groups, dim=1)  # (B, K, S, E) -> (B, H, S, E)
    factor = q.size(-1) ** -0.5 if scale is None else scale
    scores = (q * factor) @ k.mT  # (B, H, T, S)
    visible = _visible(q, k, mask) if causal else mask  # (…, T, S)
    if visible is not None:
        # Finite, because the gradient of a softmax over minus infinity is NaN; and added, because
        # the gradient of a sum is no work.
        lowest = torch.finfo(scores.dtype).min / 2
        scores = scores + scores.new_zeros(visible.shape).masked_fill_(~visible, lowest)
    weights = scores.softmax(dim=-1)  # (B, H, T, S)
    # Without a mask, each query sees a key if there are no more queries than keys.
    if visible is not None and (mask is not None or q.size(2) > k.size(2)):
        weights = weights.masked_fill(~visible, 0.0)
    weights = apply_dropout(weights, dropout)
    return weights @ v, weights  # (B, H, T, E), (B, H, T, S)


def formula_is_faster(q: Tensor, k: Tensor) -> bool:
    """Whether the formula trains faster than the kernel: 1.7 to 5 times, in bfloat16 on a CPU."""
    return (
        q.dtype == torch.bfloat16
        and q.device.type == "cpu"
        and torch.is_grad_enabled()
        and not torch.compiler.is_exporting()  # what is exported serves every length
        and not torch.jit._trace.is_tracing()
        and k.size(2) <= _MAX_EXPLICIT
    )


def _visible(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    T = q.size(2)
    S = k.size(2)
    lower = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)  # (T, S)
    return lower if mask is None else lower & mask


def rotary_table(
    length: int,
    head_dim: int,
    base: float = 10000.0,
    *,
    start: int = 0,
    scaling: tuple[float, float, float, int] | None = None,
) -> Tensor:
    """Return the cosines and sines (2, length, 1, D) of the rotary embedding from `start` on.

    Both halves of D have the same angles; the sines of the first half are negative, as `rotate`
    needs them.

    Args:
        scaling: factor, low and high frequency factor and original context length T of Llama 3.1:
            wavelengths above T/low are multiplied by the factor, those below T/high are not, and
            between them is a linear transition.

    Source: https://arxiv.org/abs/2104.09864; scaling: https://arxiv.org/abs/2407.21783
    """
    # In float64: the product of a large position and a frequency exceeds the precision of float32.
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu")
    frequency = base ** (-pairs / head_dim)  # (D/2,)
    if scaling is not None:
        factor, low, high, original_length = scaling
        turns = original_length * frequency / (2 * torch.pi)  # within the original context
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (kept + (1 - kept) / factor)
    positions = torch.arange(start, start + length, dtype=torch.float64, device="cpu")  # (T,)
    angle = torch.outer(positions, frequency).repeat(1, 2)  # (T, D)
    sin = angle.sin()
    sin[:, : head_dim // 2].neg_()
    return torch.stack((angle.cos(), sin))[:, :, None].float()  # (2, T, 1, D)


def rotate(x: Tensor, table: Rotary) -> Tensor:
    """Rotate the pairs (i, i + D/2) of x (B, T, H, D) by the angles of a table (2, T, 1, D)."""
    cos, sin = table  # (T, 1, D) each
    swapped = x.roll((x.size(-1) // 2,), dims=-1)  # (B, T, H, D)
    return swapped.mul_(sin.to(x.dtype)).add_(x * cos.to(x.dtype))


class KVCache:
    """Keys and values of one layer, in preallocated memory of `shape` (B, K, capacity, D)."""

    def __init__(
        self, shape: tuple[int, int, int, int], *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.k = torch.empty(shape, device=device, dtype=dtype)
        self.v = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, T, K, D); return all stored ones, (B, K, length, D) each."""
        start = self.length
        self.length += k.size(1)
        self.k[:, :, start : self.length] = k.transpose(1, 2)
        self.v[:, :, start : self.length] = v.transpose(1, 2)
        return self.k[:, :, : self.length], self.v[:, :, : self.length]


class MultiHeadAttention(nn.Module):
    """Project to queries, keys and values, attend in every head, project back.

    Args:
        n_embd, n_head, head_dim: C, H and D; None is D = C / H.
        n_kv_head: K, a divisor of H; None is H. K < H is grouped-query attention
            (https://arxiv.org/abs/2305.13245), K = 1 multi-query attention
            (https://arxiv.org/abs/1911.02150).
        qkv_bias: biases of queries, keys and values; None is `bias`.
        dropout: dropout probability of the weights and of the output.
        causal: mask future positions.
        qk_norm: RMS-normalize queries and keys per head (https://arxiv.org/abs/2010.04245);
            `qk_norm_weights` adds learned weights (D,), and `norm_eps` is added to the mean square.
        scale: factor on the scores; None is 1/√D.
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
        causal: bool = True,
        qk_norm: bool = False,
        qk_norm_weights: bool = False,
        norm_eps: float = EPS,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        check_heads(n_embd, n_head, n_kv_head, head_dim)
        self.n_head = n_head
        self.n_kv_head = n_kv_head or n_head
        self.head_dim = head_dim or n_embd // n_head
        self.q_width = n_head * self.head_dim  # H·D
        self.dropout, self.causal, self.scale = dropout, causal, scale
        self.qk_norm, self.norm_eps = qk_norm, norm_eps
        self.qkv = nn.Linear(
            n_embd,
            self.q_width + 2 * self.n_kv_head * self.head_dim,  # (H + 2·K)·D
            bias=bias if qkv_bias is None else qkv_bias,
        )
        learned = qk_norm and qk_norm_weights
        self.q_norm = nn.Parameter(torch.ones(self.head_dim)) if learned else None
        self.k_norm = nn.Parameter(torch.ones(self.head_dim)) if learned else None
        self.out = nn.Linear(self.q_width, n_embd, bias=bias)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        rotary: Rotary | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attend from every position of x (B, T, C) to x; return (B, T, C).

        One position per sequence may be (B, C) too, for a decoder.

        Args:
            mask: boolean, broadcastable to (B, H, T, S), true where a query sees a key.
            rotary: (2, T, 1, D), `rotary_table` of the positions of x.
            cache: keys and values of the positions before x; those of x are appended.
        """
        q, k, v = self._project(x, rotary)  # (B, T, H, D), (B, T, K, D), (B, T, K, D)
        q = q.transpose(1, 2)  # (B, H, T, D)
        if cache is None:
            k = k.transpose(1, 2)  # (B, K, T, D)
            v = v.transpose(1, 2)  # (B, K, T, D)
        else:
            k, v = cache.append(k, v)  # (B, K, S, D) each
        options: dict[str, Any] = {
            "causal": self.causal,
            "mask": mask,
            "scale": self.scale,
            "dropout": self.dropout if self.training else 0.0,
        }
        if formula_is_faster(q, k):
            y, _ = attend_explicit(q, k, v, **options)  # (B, H, T, D)
        else:
            y = attend(q, k, v, **options)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(*x.shape[:-1], self.q_width)  # (B, T, H·D)
        return apply_dropout(self.out(y), self.dropout, self.training)

    def attention_weights(
        self, x: Tensor, *, mask: Tensor | None = None, rotary: Rotary | None = None
    ) -> Tensor:
        """Return the attention weights (B, H, T, T) of `forward` in evaluation mode."""
        q, k, v = (heads.transpose(1, 2) for heads in self._project(x, rotary))
        return attend_explicit(q, k, v, causal=self.causal, mask=mask, scale=self.scale)[1]

    def _project(self, x: Tensor, rotary: Rotary | None) -> tuple[Tensor, ...]:
        # Queries (B, T, H, D), and keys and values (B, T, K, D), normalized and rotated.
        H = self.n_head
        K = self.n_kv_head
        T = x.size(1) if x.dim() == 3 else 1
        heads = self.qkv(x).view(x.size(0), T, H + 2 * K, self.head_dim)  # (B, T, H + 2·K, D)
        if not self.qk_norm and rotary is None:
            return heads.split_with_sizes((H, K, K), dim=2)
        qk, v = heads.split_with_sizes((H + K, K), dim=2)  # (B, T, H + K, D), (B, T, K, D)
        if self.qk_norm:
            qk = rms_norm(qk, eps=self.norm_eps)
            if self.q_norm is not None and self.k_norm is not None:
                qk = qk * torch.cat((self.q_norm.expand(H, -1), self.k_norm.expand(K, -1)))
        if rotary is not None:
            qk = rotate(qk, rotary)
        return *qk.split_with_sizes((H, K), dim=2), v
