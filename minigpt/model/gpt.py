"""The GPT: token and position embeddings, blocks, a head. Depends on torch alone.

Every value of `GPTConfig` is used here or in `attention.py`. With activation=gelu_tanh, the
defaults are GPT-2, equal to Hugging Face's in every weight; rope, rmsnorm, swiglu, no biases and
untied embeddings make a Llama.

Shapes: B batch, T time, C n_embd, D head width, V vocab.
"""

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from minigpt.model.attention import KVCache, MultiHeadAttention, Rotary, rotary_table
from minigpt.model.config import GPTConfig
from minigpt.model.embeddings import NGramEmbedding, smear
from minigpt.model.ops import ACTIVATIONS, NORMS, apply_dropout, rms_norm


class GPT(nn.Module):
    """A decoder-only transformer language model.

    Attributes:
        checkpoint_blocks: n: in training, recompute the activations of every n-th block in the
            backward pass, to save memory (https://arxiv.org/abs/1604.06174); None: keep all.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        # Token embeddings, and what is added to them.
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if config.ngram:
            self.ngrams = NGramEmbedding(config)
        if config.smear:
            # Vectors, which optimizers do not decay; the last is for the previous token.
            self.smear = nn.ParameterList(torch.zeros(config.n_embd) for _ in range(config.smear))
        # Positions: a learned embedding, or angles for the attention.
        rotary = None
        if config.position == "learned":
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        elif config.position == "rope":
            rotary = rotary_table(
                config.block_size,
                config.head_width,
                config.rope_base,
                scaling=config.rope_scaling,
            )  # (2, block_size, 1, D)
        self.rotary: Tensor | None = None if rotary is None else nn.Buffer(rotary, persistent=False)
        blocks = [Block(config) for _ in range(config.n_layer // config.layer_repeats)]
        # With repeats, the same blocks in turn: https://arxiv.org/abs/1807.03819
        self.blocks = nn.ModuleList(blocks * config.layer_repeats)
        # The head. Post-norm blocks end in a norm already.
        self.final_norm = Norm(config) if config.norm_position == "pre" else nn.Identity()
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        self.checkpoint_blocks: int | None = None
        self._initialize()

    def forward(
        self,
        tokens: Tensor | Iterable[Iterable[int]],
        targets: Tensor | Iterable[Iterable[int]] | None = None,
        documents: Tensor | None = None,
        *,
        cache: "Cache | None" = None,
        reduction: str = "mean",
    ) -> Tensor:
        """Compute the logits (B, T, V), or the cross-entropy in nats if targets are given.

        Args:
            tokens: (B, T) integer token ids, T at most `block_size` minus the length of the cache:
                a tensor, or an array or nested list, which is moved to the model's device.
            targets: (B, T) the id after each token, likewise; -100 is ignored. Or (B, T, V), the
                probabilities of all ids there.
            documents: (B, T) the number of the document of each token, ascending in a row. A token
                attends to its own document alone, and learned positions count from its start.
                Embeddings of n-grams and smear also read tokens of the document before.
            cache: from `new_cache`; the tokens continue it and are appended to it.
            reduction: of the loss, in float32 or more: "mean", "sum", or "none" for (B·T,).

        Raises:
            ValueError: the tokens are not integers (B, T), or too many; the targets have another
                shape, or are all ignored; on a CPU, an id is not in the vocabulary.
        """
        # The positions follow those of the cache.
        tokens = self._to_ids(tokens)
        start = cache.layers[0].length if cache else 0
        end = start + tokens.size(1)
        if end > self.config.block_size:
            raise ValueError(f"{end} tokens exceed block_size={self.config.block_size}")
        # Embed; torch names neither the id nor the size of the vocabulary.
        try:
            positions = slice(start, end) if documents is None else _positions(documents)
            x = self.embed(tokens, positions, cache)  # (B, T, C)
        except IndexError as error:
            if tokens.min() >= 0 and tokens.max() < self.config.vocab_size:  # it is of a hook
                raise
            raise ValueError(
                f"token ids must be in [0, {self.config.vocab_size}), "
                f"got {tokens.min()} to {tokens.max()}"
            ) from error
        # Half the memory traffic for the sums between blocks; in float16 they could overflow.
        if (
            x.is_cuda
            and torch.is_autocast_enabled("cuda")
            and torch.get_autocast_dtype("cuda") == torch.bfloat16
        ):
            x = x.bfloat16()
        # The blocks, with the rotary embeddings of these positions.
        masks: tuple[Tensor, ...] = ()  # none for one document: a replaced block may take none
        if documents is not None:
            masks = (documents[:, None, :, None] == documents[:, None, None, :],)  # (B, 1, T, T)
        # Two slices (T, 1, D): exported, one slice of both would be another kind at T tokens.
        rotary = (
            None
            if self.rotary is None
            else tuple(table[start:end] for table in self.rotary.unbind())
        )
        for i, block in enumerate(self.blocks):
            recomputed = self.checkpoint_blocks and i % self.checkpoint_blocks == 0
            if recomputed and self.training and cache is None:
                x = checkpoint(block, x, rotary, None, *masks, use_reentrant=False)  # (B, T, C)
            else:
                x = block(x, rotary, cache.layers[i] if cache else None, *masks)  # (B, T, C)
        # Logits, or the loss.
        logits = self.logits(x)  # (B, T, V)
        if targets is None:
            return logits
        if isinstance(targets, Tensor) and targets.dim() == 3:
            # In the type of the loss, not in bfloat16, as autocast has the logits.
            expected = targets.to(torch.promote_types(logits.dtype, torch.float32))  # (B, T, V)
        else:
            expected = self._to_ids(targets)  # (B, T)
        if expected.shape != logits.shape[: expected.dim()]:
            raise ValueError(
                "targets must have the shape of the "
                f"{'tokens' if expected.dim() == 2 else 'logits'}, "
                f"{(*logits.shape[: expected.dim()],)}, got {(*expected.shape,)}"
            )
        return self._loss(logits.flatten(0, 1), expected.flatten(0, 1), reduction)

    def embed(self, tokens: Tensor, positions: slice | Tensor, cache: "Cache | None") -> Tensor:
        """Return the input of the first block (B, T, C).

        Args:
            tokens: (B, T); they follow those of the cache.
            positions: index of (B, T) or (T,).
            cache: n-gram embeddings and smear read what is before the tokens, and append to it.
        """
        B, T = tokens.shape
        x = self.wte(tokens)  # (B, T, C)
        if cache is None:
            cache = self.new_cache(B, 0)
        if self.config.ngram:
            padded = torch.cat((cache.last_tokens, tokens), dim=1)  # (B, ngram - 1 + T)
            x = x + self.ngrams(padded)  # (B, T, C)
            cache.last_tokens = padded[:, T:]
        if self.config.smear:
            # FSDP2 can gather the embedding in bfloat16.
            padded = torch.cat((cache.last_embeddings.to(x.dtype), x), dim=1)  # (B, smear + T, C)
            x = smear(x, padded, self.smear)  # (B, T, C)
            cache.last_embeddings = padded[:, T:]
        if self.config.position == "learned":
            x = x + self.wpe.weight[positions]
        if self.config.embed_norm:
            x = rms_norm(x, eps=self.config.norm_eps)
        return apply_dropout(x, self.config.dropout, self.training)

    def logits(self, x: Tensor) -> Tensor:
        """Map the output of the last block (…, C) to logits (…, V)."""
        x = self.final_norm(x)  # (…, C)
        # Under mup, updates of the head change the logits equally at every width.
        if self.config.width_ratio != 1:
            x = x / self.config.width_ratio
        logits = self.lm_head(x)  # (…, V)
        cap = self.config.logit_softcap  # of Gemma 2, https://arxiv.org/abs/2408.00118
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def new_cache(self, batch: int, length: int | None = None) -> "Cache":
        """Return an empty cache of `length` positions for `batch` sequences.

        Args:
            length: by default `block_size`; 0: for embeddings and tokens alone.
        """
        config = self.config
        weight = self.wte.weight
        length = config.block_size if length is None else length
        shape = (batch, config.n_kv_head or config.n_head, length, config.head_width)
        return Cache(
            [
                KVCache(shape, device=weight.device, dtype=weight.dtype)
                for _ in range(config.n_layer if length else 0)
            ],
            torch.zeros(
                batch, config.smear, config.n_embd, device=weight.device, dtype=weight.dtype
            ),
            # The padding of n-grams is the id after the last of the vocabulary.
            torch.full((batch, max(0, config.ngram - 1)), config.vocab_size, device=weight.device),
        )

    def num_params(self) -> int:
        """Return the number of trainable parameters."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def _to_ids(self, ids: Tensor | Iterable[Iterable[int]]) -> Tensor:
        if not isinstance(ids, Tensor):
            ids = torch.tensor(ids, device=self.wte.weight.device)
        if ids.dim() != 2 or ids.is_floating_point():
            raise ValueError(
                f"token ids must be integers (B, T), got {ids.dtype} {tuple(ids.shape)}; "
                "ids[None] adds a batch"
            )
        return ids.long()

    def _loss(self, logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # (B·T, V)
        try:
            loss = F.cross_entropy(logits, targets, reduction=reduction)  # (), or (B·T,)
        except IndexError as error:
            raise ValueError(
                f"targets must be in [0, {self.config.vocab_size}), or -100, which is ignored; "
                f"got {targets.min()} to {targets.max()}"
            ) from error
        # The value on a GPU is not read; under vmap it cannot be, and in compiled code not tested.
        if reduction == "mean" and loss.is_cpu and not torch.compiler.is_compiling():
            with suppress(RuntimeError):
                if loss.isnan() and (targets == -100).all():
                    raise ValueError("the targets have no id: all are -100, which is ignored")
        return loss

    def _initialize(self) -> None:
        """Initialize as GPT-2: normal(0.02), times 1/√(2 n_layer) for projections to the residuals.

        Under mup, matrices of the blocks are divided by the square root of the width ratio
        (https://arxiv.org/abs/2203.03466, table 8).
        """
        std = 0.02 / math.sqrt(self.config.width_ratio)
        hidden = set(self.blocks.modules())
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std if module in hidden else 0.02)
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                nn.init.normal_(parameter, std=std / math.sqrt(2 * self.config.n_layer))
            elif name.endswith(("bias", "ngrams.out.weight")):
                nn.init.zeros_(parameter)


def _positions(documents: Tensor) -> Tensor:
    # The position of each token in its document (B, T)
    places = torch.arange(documents.size(1), device=documents.device)  # (T,)
    return places - torch.searchsorted(documents.contiguous(), documents.contiguous())


class Block(nn.Module):
    """Attention and an MLP, each with a residual connection, and a norm before or after it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.pre_norm = config.norm_position == "pre"
        self.norm_1 = Norm(config)
        self.attention = MultiHeadAttention(
            config.n_embd,
            config.n_head,
            n_kv_head=config.n_kv_head,
            head_dim=config.head_dim,
            bias=config.bias,
            qkv_bias=config.qkv_bias,
            dropout=config.dropout,
            qk_norm=config.qk_norm,
            qk_norm_weights=config.qk_norm_weights,
            norm_eps=config.norm_eps,
            scale=config.attention_scale,
        )
        self.norm_2 = Norm(config)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None = None,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Map (B, T, C) to (B, T, C), or (B, C) to (B, C), as `MultiHeadAttention.forward`."""
        if self.pre_norm:
            x = x + self.attention(self.norm_1(x), mask=mask, rotary=rotary, cache=cache)
            return x + self.mlp(self.norm_2(x))
        x = self.norm_1(x + self.attention(x, mask=mask, rotary=rotary, cache=cache))
        return self.norm_2(x + self.mlp(x))


class MLP(nn.Module):
    """A linear layer, the activation, and a linear layer back to the width."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = config.dropout
        self.up = nn.Linear(config.n_embd, config.up_width, bias=config.bias)
        self.down = nn.Linear(config.inner_width, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.up(x))  # (B, T, C) -> (B, T, inner_width)
        return apply_dropout(self.down(x), self.dropout, self.training)  # (B, T, C)


class Norm(nn.Module):
    """The norm of a config over n_embd, with the parameters `GPTConfig.norm_params`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.function = NORMS[config.norm]
        self.eps = config.norm_eps
        names = config.norm_params
        self.weight = nn.Parameter(torch.ones(config.n_embd)) if "weight" in names else None
        self.bias = nn.Parameter(torch.zeros(config.n_embd)) if "bias" in names else None

    def forward(self, x: Tensor) -> Tensor:  # (…, C)
        return self.function(x, self.weight, self.bias, self.eps)


@dataclass
class Cache:
    """The state of a batch of sequences."""

    layers: list[KVCache]  # keys and values
    last_embeddings: Tensor  # (B, smear, C)
    last_tokens: Tensor  # (B, ngram - 1)
