"""Attention maps and induction scores, compared to formulas and to models with hand-set weights."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import ALPHABET, ARCHITECTURES, count_hooks, make_model
from tolerance import assert_near, terms_of
from torch import Tensor

from minigpt.interpret.heads import attention_maps, head_ablation, induction_scores
from minigpt.model import GPT


@pytest.mark.parametrize("settings", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_maps_equal_the_softmax_of_scores_computed_from_the_weights(settings: dict[str, Any]) -> None:
    model = make_model(**settings)
    tokens = torch.randint(len(ALPHABET), (11,))
    maps = attention_maps(model, tokens)
    assert maps.shape == (3, 2, 11, 11)
    for layer, (block, x) in enumerate(zip(model.blocks, inputs_of_attention(model, tokens), strict=True)):
        attention = block.attention
        D, K = attention.head_dim, attention.n_kv_head
        q, k, _ = (x @ attention.qkv.weight.T + (0 if attention.qkv.bias is None else attention.qkv.bias)).split(
            (2 * D, K * D, K * D), dim=-1
        )
        for head in range(2):
            a, b = q[:, head * D : (head + 1) * D], k[:, head % K * D : (head % K + 1) * D]
            if settings.get("qk_norm"):
                a, b = (y / y.square().mean(-1, keepdim=True).sqrt() for y in (a, b))
            if settings.get("position") == "rope":
                a, b = rotated(a), rotated(b)
            scores = a @ b.T / math.sqrt(D)
            expected = torch.stack(
                [torch.cat((row[: t + 1].softmax(0), torch.zeros(10 - t))) for t, row in enumerate(scores)]
            )
            assert_near(maps[layer, head], expected, scores, terms=terms_of(model.config))


def inputs_of_attention(model: GPT, tokens: Tensor) -> list[Tensor]:
    """The input of the attention of every block, (T, C) each, in evaluation mode."""
    model = copy.deepcopy(model).eval()
    x, inputs = model.wte(tokens), []
    if model.config.position == "learned":
        x = x + model.wpe.weight[: len(tokens)]
    rotary = None if model.rotary is None else model.rotary[:, : len(tokens)]
    with torch.no_grad():
        for block in model.blocks:
            inputs.append(block.norm_1(x) if model.config.norm_position == "pre" else x)
            x = block(x[None], rotary, None)[0]
    return [y.detach() for y in inputs]


def rotated(x: Tensor) -> Tensor:
    """Rotary embedding of x (T, D), by multiplication of complex numbers."""
    half = x.size(1) // 2
    pairs = torch.complex(x[:, :half], x[:, half:])
    angle = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(half) / half)
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((pairs.real, pairs.imag), dim=1)


def test_measuring_changes_neither_the_model_nor_the_random_state() -> None:
    model = make_model(dropout=0.4).train()
    tokens = torch.randint(len(ALPHABET), (16,))
    before = torch.get_rng_state()
    first, second = (attention_maps(model, tokens) for _ in range(2))
    induction_scores(model, len(ALPHABET))
    head_ablation(model, [(tokens[None, :-1], tokens[None, 1:])])
    assert torch.equal(first, second)  # without dropout
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert all(module.training for module in model.modules())
    assert len(model.blocks) == 3
    assert count_hooks(model) == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_induction_score_is_nan_for_a_short_block_and_chance_for_uniform_attention() -> None:
    assert induction_scores(make_model(block_size=3), len(ALPHABET)).isnan().all()
    model = make_model()  # with uniform attention
    for block in model.blocks:
        torch.nn.init.zeros_(block.attention.qkv.weight)
        torch.nn.init.zeros_(block.attention.qkv.bias)
    chance = np.mean([1 / n for n in range(9, 17)])  # 8 tokens, repeated once
    assert induction_scores(model, 12).flatten().tolist() == pytest.approx([chance] * 6, rel=1e-5)
