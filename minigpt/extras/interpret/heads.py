"""Attention heads: their weights for a text, statistics of where they attend, and how much the loss
depends on them.

Hooks record the weights during an ordinary forward pass, and an ablation runs the model once per
head, so both work for every `GPTConfig`. Tensors count layers and heads from 0; the printed table
counts them from 1.

Shapes: L layers, H heads, B batch, T time, D head width.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count, product
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from minigpt.model.attention import MultiHeadAttention
from minigpt.model.evaluation import evaluation
from minigpt.model.gpt import GPT
from minigpt.utils.errors import UserError

N_SEQUENCES = 8  # random sequences per induction score
POSITION_THRESHOLD = 0.5  # mean weight on one position: at most one position can exceed it
# 15 times the score of uniform attention for 32 repeated tokens; published induction heads score
# 0.3 to 1.
INDUCTION_THRESHOLD = 0.3
MIN_TOKENS_FOR_NAME = (
    8  # in a shorter text, uniform attention also has large weights on the previous token
)


def prompt_tokens(ids: Sequence[int], block_size: int, *, truncate: bool) -> Tensor:
    """Return the ids (T,) of a prompt to look at, T ≥ 2; `truncate` keeps the last `block_size` of
    a longer one.
    """
    if len(ids) < 2:
        raise UserError(f"--prompt must have at least 2 tokens, got {len(ids)}")
    if len(ids) > block_size and not truncate:
        raise UserError(
            f"--prompt must have at most block_size={block_size} tokens, got {len(ids)}; set "
            "--truncate"
        )
    return torch.tensor(ids[-block_size:])


@torch.no_grad()
def attention_maps(model: GPT, tokens: Tensor, layers: slice = slice(None)) -> Tensor:
    """Return the attention weights of all heads of some layers, (L, H, T, T), one row per query;
    float32, on the CPU.

    `tokens` are the ids (T,) of one text, T at most `block_size`.
    """
    weights: list[Tensor] = []
    layer, wanted = count(), range(model.config.n_layer)[layers]
    caller = get_ident()  # the hooks are called in other threads too, if those use the model

    def record(attention: MultiHeadAttention, args: Any, kwargs: dict[str, Any]) -> None:
        if get_ident() == caller and next(layer) in wanted:
            # (H, T, T)
            weights.append(
                attention.attention_weights(*args, rotary=kwargs["rotary"])[0].float().cpu()
            )

    with (
        evaluation(model),
        ExitStack() as hooks,
    ):  # uncompiled: hooks would make a compiled model compile again
        for block in dict.fromkeys(model.blocks):  # layers may share one
            attention: Any = block.attention
            hooks.enter_context(attention.register_forward_pre_hook(record, with_kwargs=True))
        model(tokens[None])
    return torch.stack(weights)


def induction_scores(model: GPT, vocab_size: int) -> Tensor:
    """Return the prefix-matching score of every head, (L, H), which is high for induction heads.

    A sequence of distinct random tokens is repeated once. In the second copy, an induction head
    attends to the token after the previous occurrence of the current token; the score is the mean
    weight of that token. It is NaN if the block size or the vocabulary is too small for a repeated
    sequence.

    Source: Olsson et al., 2022, https://arxiv.org/abs/2209.11895
    """
    P = min(model.config.block_size // 2, vocab_size)  # length of one copy
    if P < 2:
        return torch.full((model.config.n_layer, model.config.n_head), float("nan"))
    generator, query = torch.Generator().manual_seed(0), torch.arange(P, 2 * P)
    scores = []
    for _ in range(N_SEQUENCES):
        once = torch.randperm(vocab_size, generator=generator)[:P]
        weights = attention_maps(model, torch.cat((once, once)).to(model.wte.weight.device))
        scores.append(weights[..., query, query - P + 1].mean(-1))  # (L, H)
    return torch.stack(scores).mean(0)


def head_table(weights: Tensor, induction: Tensor) -> dict[str, Tensor]:
    """Return statistics of every head, (L, H) each, of weights (L, H, T, T) and the induction
    scores (L, H).

    They are means over all queries except the first, which can only attend to itself: of the
    entropy of the weights (nats), the distance from query to key (tokens), and the weight on the
    previous token, on the query's own token and on the first token.
    """
    T = weights.size(-1)
    query = torch.arange(1, T)
    rows = weights[..., 1:, :]  # (L, H, T - 1, T)
    # (T - 1, T); negative where the causal weight is 0
    distance = (query[:, None] - torch.arange(T)).to(rows)
    return {
        "entropy": torch.special.entr(rows).sum(-1).mean(-1),
        "distance": (rows * distance).sum(-1).mean(-1),
        "previous": weights[..., query, query - 1].mean(-1),
        "self": weights[..., query, query].mean(-1),
        "first": rows[..., 0].mean(-1),
        "induction": induction,
    }


def head_names(table: Mapping[str, Tensor], length: int) -> list[list[str]]:
    """Return L lists of H names: "induction", "previous token", "self", "first token", or "" for
    none of them.

    The table is that of a text of `length` tokens.
    """
    found = {"induction": table["induction"] > INDUCTION_THRESHOLD}  # (L, H) per name
    if length >= MIN_TOKENS_FOR_NAME:
        columns = {"previous token": "previous", "self": "self", "first token": "first"}
        found |= {name: table[column] > POSITION_THRESHOLD for name, column in columns.items()}
    L, H = table["induction"].shape
    return [
        [next((name for name in found if found[name][i, j]), "") for j in range(H)]
        for i in range(L)
    ]


def format_table(table: Mapping[str, Tensor], names: Sequence[Sequence[str]]) -> str:
    """Format the table as text, one line per head."""
    lines = ["layer  head" + "".join(f"{column:>11}" for column in table) + "  name"]
    for layer, head in product(range(len(names)), range(len(names[0]))):
        cells = "".join(f"{float(values[layer, head]):11.3f}" for values in table.values())
        lines.append(f"{layer + 1:5}  {head + 1:4}{cells}  {names[layer][head]}".rstrip())
    return "\n".join(lines)


@torch.no_grad()
def head_ablation(model: GPT, batches: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, float]:
    """Return the increase of the loss without the output of each head, (L, H), and the loss of the
    intact model.

    Args:
        batches: tokens and targets, (B, T) each, on the model's device, and what else the model
            takes; negative targets are ignored. They are read once per head. Losses are in nats
            per token.

    Source: Michel et al., 2019, https://arxiv.org/abs/1905.10650
    """
    L, H = model.config.n_layer, model.config.n_head
    heads = tqdm(
        list(product(range(L), range(H))), desc="ablating every head", unit="head", disable=None
    )
    n_targets = sum(int((targets >= 0).sum()) for _, targets, *_ in batches)

    def loss_of(model: GPT) -> float:
        return sum(float(model(*batch, reduction="sum")) for batch in batches) / n_targets

    with evaluation(model):
        intact = loss_of(model)
        increases = [loss_of(without_head(model, *head)) - intact for head in heads]
    return torch.tensor(increases).view(L, H), intact


def without_head(model: GPT, layer: int, head: int) -> GPT:
    """Return a copy of a model in which the output of a head is zero."""
    model = copy.deepcopy(model)
    model.blocks[layer] = block = copy.deepcopy(model.blocks[layer])  # other layers may share it
    attention: Any = block.attention
    attention.out.weight.detach().unflatten(1, (attention.n_head, -1))[:, head] = 0  # (C, H, D)
    return model
