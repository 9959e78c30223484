"""The GPT: token and position embeddings, blocks, a head. Depends on torch alone.

One model, many points: every value of `GPTConfig` acts here or in `attention.py`. The defaults are
GPT-2 to the weight (tests hold it against Hugging Face's), and the modern values make a Llama
(rope, rmsnorm, swiglu, no biases, untied).

Shapes: B batch, T time, C n_embd, V vocab.
"""

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.attention import KVCache, MultiHeadAttention, rotary_table
from minigpt.config import GPTConfig
from minigpt.ops import ACTIVATIONS, rms_norm

if TYPE_CHECKING:
    from minigpt.data.tokenizer import Ids

_MULTIPLIER, _PRIME = 2_654_435_761, 2_147_483_647  # Knuth's, and 2³¹ - 1


class GPT(nn.Module):
    """A decoder-only transformer language model."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if config.ngram:
            self.ngrams = NGramEmbedding(config)
        if config.smear:
            # Vectors, so that no optimizer takes them for a matrix; the last is for the token before.
            self.smear = nn.ParameterList(torch.zeros(config.n_embd) for _ in range(config.smear))
        rotary = None
        match config.position:
            case "learned":
                self.wpe = nn.Embedding(config.block_size, config.n_embd)
            case "rope":
                rotary = rotary_table(config.block_size, config.head_width, config.rope_base)  # (2, T, D/2)
            case "none":
                pass
            case unknown:
                raise ValueError(f"unknown position {unknown!r}")
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        # Post-norm blocks end in a norm already.
        self.final_norm = make_norm(config) if config.norm_position == "pre" else nn.Identity()
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        self.rotary: Tensor | None
        self.register_buffer("rotary", rotary, persistent=False)
        self._initialize()

    def forward(
        self,
        tokens: "Tensor | Ids",
        targets: "Tensor | Ids | None" = None,
        *,
        cache: "Cache | None" = None,
        reduction: str = "mean",
    ) -> Tensor:
        """Logits, or the loss when targets are given.

        Args:
            tokens: (B, T) token ids of any integer type, T at most `block_size` together with what the cache holds: a
                tensor, or an array as tokenizers return it, which is moved to the model's device.
            targets: (B, T) ids that follow each token, likewise.
            cache: what was read before, from `new_cache`; tokens continue it, and are added to it.
            reduction: "mean" or "sum" of the loss over tokens.

        Returns:
            Logits (B, T, V), or the cross-entropy in nats, a scalar.

        Raises:
            ValueError: tokens are not integers (B, T), or too many.
        """
        tokens = self._ids(tokens)
        start = cache.length if cache else 0
        end = start + tokens.size(1)
        if end > self.config.block_size:
            raise ValueError(f"{end} tokens do not fit into block_size={self.config.block_size}")
        x = self.wte(tokens)  # (B, T, C)
        if self.config.ngram:
            x = x + self.ngrams(tokens, cache)
        if self.config.smear:
            x, last = smear(x, tuple(self.smear), cache.last if cache else None)
            if cache:
                cache.last = last
        if self.config.position == "learned":
            x = x + self.wpe.weight[start:end]  # (T, C)
        rotary = None if self.rotary is None else self.rotary[:, start:end]  # (2, T, D/2)
        if self.config.embed_norm:
            x = rms_norm(x)
        x = F.dropout(x, self.config.dropout, self.training)
        for i, block in enumerate(self.blocks):
            x = block(x, rotary, cache.layers[i] if cache else None)
        x = self.final_norm(x)
        if self.config.width_ratio != 1:
            x = x / self.config.width_ratio  # so that what the head learns does not grow with the width
        logits = self.lm_head(x)  # (B, T, V)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), self._ids(targets).flatten(), reduction=reduction)

    def _ids(self, ids: "Tensor | Ids") -> Tensor:
        """Token ids (B, T) as the embedding takes them; arrays are moved to the model's device."""
        given = ids if isinstance(ids, Tensor) else torch.tensor(ids)
        if given.dim() != 2 or given.is_floating_point():
            raise ValueError(
                f"token ids must be integers (B, T), got {given.dtype} {tuple(given.shape)}; ids[None] adds a batch"
            )
        return given.long() if given is ids else given.long().to(self.wte.weight.device)

    def extra_repr(self) -> str:
        """What is shown of the model before its modules."""
        return f"{self.num_params():,} parameters, block_size={self.config.block_size}"

    def new_cache(self, batch: int) -> "Cache":
        """An empty cache of `block_size` positions for a batch of sequences."""
        config, weight = self.config, self.wte.weight
        shape = (batch, config.n_kv_head or config.n_head, config.block_size, config.head_width)
        return Cache([KVCache(shape, device=weight.device, dtype=weight.dtype) for _ in range(config.n_layer)])

    def num_params(self, *, positions: bool = True) -> int:
        """Trainable numbers; without the learned positions, the count that nanoGPT and GPT-2 papers give."""
        total = sum(p.numel() for p in self.parameters() if p.requires_grad)
        return total if positions or self.config.position != "learned" else total - self.wpe.weight.numel()

    def flops_per_token(self) -> float:
        """Floating-point operations of a training step per token, as `GPTConfig` counts them."""
        return self.config.flops_per_token()

    def _initialize(self) -> None:
        """GPT-2's initialization: normal(0.02), and 1/√(2 n_layer) of it into the residual stream.

        Under mup (Yang et al., 2022, table 8) the matrices of the blocks shrink as the square root of the width grows.
        """
        std, hidden = 0.02 / math.sqrt(self.config.width_ratio), set(self.blocks.modules())
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std if module in hidden else 0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        for name, weight in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                nn.init.normal_(weight, std=std / math.sqrt(2 * self.config.n_layer))
        if self.config.ngram:
            nn.init.zeros_(self.ngrams.out.weight)


class Cache:
    """What a model has read of a batch of sequences: keys and values of every layer, and what came last."""

    def __init__(self, layers: list[KVCache]) -> None:
        self.layers = layers
        self.last: Tensor | None = None  # embeddings, (B, smear, C)
        self.last_tokens: Tensor | None = None  # (B, ngram - 1)

    @property
    def length(self) -> int:
        return self.layers[0].length

    def clear(self) -> None:
        """Forget all, and keep the memory."""
        self.last = self.last_tokens = None
        for layer in self.layers:
            layer.length = 0


class NGramEmbedding(nn.Module):
    """Embeddings of the last 2 … `ngram` tokens, each n-gram hashed into a table (Pagnoni et al., 2024, 3.2.1).

    They give the first block what it would otherwise spend most of a short training on: counts of n-grams.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.vocab_size, self.orders, self.buckets = config.vocab_size, config.ngram - 1, config.ngram_buckets
        self.table = nn.Embedding(self.orders * self.buckets, config.ngram_dim)
        self.out = nn.Linear(self.orders * config.ngram_dim, config.n_embd, bias=False)

    def forward(self, tokens: Tensor, cache: Cache | None) -> Tensor:
        """Token ids (B, T) to (B, T, C)."""
        T = tokens.size(1)
        before = cache.last_tokens if cache else None
        if before is None:  # one more than any id: nothing stands there
            before = tokens.new_full((tokens.size(0), self.orders), self.vocab_size)
        padded = torch.cat((before, tokens), dim=1)  # (B, orders + T)
        if cache:
            cache.last_tokens = padded[:, -self.orders :]
        hashed, rows = tokens, []
        for n in range(1, self.orders + 1):
            # Multiplied modulo a prime: below 2⁶³, for ids below 2³¹.
            hashed = (hashed * _MULTIPLIER + padded[:, self.orders - n :][:, :T] + 1) % _PRIME
            rows.append(hashed % self.buckets + (n - 1) * self.buckets)
        embedded = self.table(torch.stack(rows, dim=-1))  # (B, T, orders, ngram_dim)
        return self.out(embedded.flatten(2))


class Block(nn.Module):
    """Attention and MLP, each added to the residual stream, with the norm before or after."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.pre_norm = {"pre": True, "post": False}[config.norm_position]
        self.norm_1 = make_norm(config)
        self.attention = MultiHeadAttention(
            config.n_embd,
            config.n_head,
            n_kv_head=config.n_kv_head,
            head_dim=config.head_dim,
            bias=config.bias,
            dropout=config.dropout,
            qk_norm=config.qk_norm,
            scale=config.attention_scale,
        )
        self.norm_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: Tensor | None, cache: KVCache | None) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        if self.pre_norm:
            x = x + self.attention(self.norm_1(x), rotary=rotary, cache=cache)
            return x + self.mlp(self.norm_2(x))
        x = self.norm_1(x + self.attention(x, rotary=rotary, cache=cache))
        return self.norm_2(x + self.mlp(x))


def smear(x: Tensor, factors: Collection[Tensor], before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add to each position of x (B, T, C) the k before it, times k factors (C,), of which the last is for the nearest.

    Args:
        before: the k positions before x, (B, k, C); None is nothing.

    Returns:
        The mixture (B, T, C), and the last k positions of x, (B, k, C).
    """
    k, T = len(factors), x.size(1)
    if before is None:
        before = x.new_zeros(x.size(0), k, x.size(2))
    padded = torch.cat((before, x), dim=1)  # (B, k + T, C)
    for i, factor in enumerate(factors):
        x = x + factor * padded[:, i : i + T]
    return x, padded[:, -k:]


class MLP(nn.Module):
    """Widen, apply the activation, narrow; a gated activation is widened twice."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.activation, self.dropout = ACTIVATIONS[config.activation], config.dropout
        self.up = nn.Linear(config.n_embd, config.up_width, bias=config.bias)
        self.down = nn.Linear(config.inner_width, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        x = self.activation(self.up(x))  # (B, T, inner)
        return F.dropout(self.down(x), self.dropout, self.training)


class RMSNorm(nn.Module):
    """Scale to a root mean square of 1 (Zhang & Sennrich, 2019), then by learnt weights if there are any."""

    def __init__(self, width: int, *, weight: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if weight else None

    def forward(self, x: Tensor) -> Tensor:
        """(…, C) to (…, C)."""
        return rms_norm(x, self.weight)


def make_norm(config: GPTConfig) -> nn.Module:
    """The norm over n_embd that a config names."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.n_embd, bias=config.bias)
    return RMSNorm(config.n_embd, weight={"rmsnorm": True, "rmsnorm_noscale": False}[config.norm])
