"""Attention maps and induction scores, compared to formulas and to models with hand-set weights."""

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import ALPHABET, ARCHITECTURES, count_hooks, make_model
from torch import Tensor

from minigpt.interpret.heads import attention_maps, head_ablation, induction_scores


@pytest.mark.parametrize("settings", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_values_weighted_by_the_maps_are_the_output_of_the_fused_attention(settings: dict[str, Any]) -> None:
    model = make_model(**settings).eval()
    tokens = torch.randint(len(ALPHABET), (11,))
    maps = attention_maps(model, tokens)
    assert maps.shape == (3, 2, 11, 11)
    torch.testing.assert_close(maps.sum(-1), torch.ones(3, 2, 11))
    assert maps.triu(1).count_nonzero() == 0

    def compare(attention: Any, args: Any, output: Tensor) -> None:
        projected = attention.qkv(args[0])[0]  # (T, (H + 2 K)·D)
        v = projected[:, -attention.n_kv_head * attention.head_dim :].unflatten(1, (attention.n_kv_head, -1))
        weighted = next(remaining) @ v.transpose(0, 1)  # (H, T, D)
        torch.testing.assert_close(attention.out(weighted.transpose(0, 1).flatten(1)), output[0], rtol=1e-4, atol=1e-5)

    remaining = iter(maps)
    with torch.no_grad():
        hooks = [block.attention.register_forward_hook(compare) for block in model.blocks]
        model(tokens[None])
    assert len(hooks) == 3
    assert next(remaining, None) is None


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
