"""Attention weights of every head for a text, and the induction score of every head. Depends on torch alone.

Forward pre-hooks record the weights during an ordinary forward pass, so this works for every `GPTConfig`.

Shapes: L layers, H heads, B batch, T time, V vocab.
"""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minigpt.attention import MultiHeadAttention
from minigpt.model import GPT, eval_mode
from minigpt.utils.errors import UserError

if TYPE_CHECKING:
    from minigpt.data.tokenizer import Tokenizer

N_SEQUENCES = 8  # random sequences per induction score


def attention_maps(model: GPT, tokens: Tensor, layers: slice = slice(None)) -> Tensor:
    """Compute the attention weights of every head for one text.

    Args:
        tokens: (T,) ids, T at most `block_size`.
        layers: the ones to compute, counted from 0.

    Returns:
        (L, H, T, T), one row per query; float32, on the CPU.
    """
    return _attention_weights(model, tokens[None], layers)[:, 0]


def induction_scores(model: GPT, vocab_size: int, *, seed: int = 0) -> Tensor:
    """Compute the prefix-matching score of every head, which is high for induction heads.

    A sequence of distinct random tokens is repeated once. In the second copy, an induction head attends to the token
    after the previous occurrence of the current token; the score is the mean weight of that token.

    Returns:
        (L, H), NaN if the block size or the vocabulary is too small for a repeated sequence.

    Source: Olsson et al., 2022, https://arxiv.org/abs/2209.11895
    """
    P = min(model.config.block_size // 2, vocab_size)  # length of one copy
    if P < 2:
        return torch.full((model.config.n_layer, model.config.n_head), float("nan"))
    generator = torch.Generator().manual_seed(seed)
    copy = torch.stack([torch.randperm(vocab_size, generator=generator)[:P] for _ in range(N_SEQUENCES)])  # (B, P)
    weights = _attention_weights(model, torch.cat((copy, copy), dim=1).to(model.wte.weight.device))
    query = torch.arange(P, 2 * P)
    return weights[..., query, query - P + 1].mean(dim=(1, 3))  # (L, B, H, P) -> (L, H)


def prompt_tokens(tokenizer: "Tokenizer", prompt: str, block_size: int, *, truncate: bool = False) -> Tensor:
    """Encode a prompt to token ids (T,), T ≥ 2; `truncate` keeps the last `block_size` tokens of a longer one."""
    tokens = torch.as_tensor(tokenizer.encode(prompt)).long()
    if len(tokens) < 2:
        raise UserError(f"--prompt must have at least 2 tokens, got {len(tokens)}")
    if len(tokens) > block_size and not truncate:
        raise UserError(f"--prompt must have at most block_size={block_size} tokens, got {len(tokens)}; set --truncate")
    return tokens[-block_size:]


@torch.no_grad()
def _attention_weights(model: GPT, tokens: Tensor, layers: slice = slice(None)) -> Tensor:
    """Return the weights (L, B, H, T, T) of some layers for tokens (B, T), on the CPU."""
    weights: list[Tensor] = []

    def record(attention: MultiHeadAttention, args: Any, kwargs: dict[str, Any]) -> None:
        weights.append(attention.attention_weights(*args, rotary=kwargs["rotary"]).float().cpu())

    with eval_mode(model), ExitStack() as hooks:
        for block in model.blocks[layers]:
            attention: Any = block.attention
            hooks.enter_context(attention.register_forward_pre_hook(record, with_kwargs=True))
        model(tokens)
    return torch.stack(weights)
