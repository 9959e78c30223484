"""Attention maps, head statistics and ablation, against formulas and hand-set weights."""

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from models import make_model, overlap
from tolerance import rounding, terms_of
from torch import Tensor
from torch.testing import assert_close

from minigpt.extras.interpret import heads

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "position": "rope",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
        "n_kv_head": 1,
    },
    "post-norm": {"norm_position": "post", "qk_norm": True, "head_dim": 6, "dropout": 0.4},
}
small_model = partial(make_model, std=0.4, n_layer=3)  # attention is far from uniform


def uniform(T: int) -> Tensor:
    return (torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None])[None, None]


def test_statistics_of_uniform_attention_equal_their_closed_form():
    table = heads.head_table(uniform(12), torch.zeros(1, 1))
    visible = np.arange(2, 13)  # number of visible keys per query, from the second query on
    expected = {"entropy": np.log(visible), "distance": (visible - 1) / 2}
    expected |= dict.fromkeys(("previous", "self", "first"), 1 / visible)
    for name, values in expected.items():
        assert float(table[name]) == pytest.approx(values.mean(), rel=1e-5), name
    assert heads.head_names(table, 12) == [[""]]


def test_heads_get_the_name_of_the_position_that_they_attend_to():
    T = 16
    positions = (
        torch.eye(T).roll(1, dims=0),
        torch.eye(T),
        torch.eye(T)[:1].expand(T, -1),
        uniform(T)[0, 0],
    )
    table = heads.head_table(torch.stack(positions)[None], torch.zeros(1, 4))
    names = heads.head_names(table, T)
    assert names == heads.head_names(table, 8) == [["previous token", "self", "first token", ""]]
    assert heads.head_names(table, 7) == [[""] * 4]  # of a short text
    assert table["distance"][0, :2].tolist() == [1, 0]


def test_a_head_that_matches_a_repeated_prefix_is_an_induction_head():
    # The first layer copies the previous token, the second attends to the copies of the current
    # token.
    V, T = 10, 16
    token, place, copied = slice(0, V), slice(V, V + T), slice(V + T, 2 * V + T)
    C = 2 * V + T
    model = make_model(
        vocab_size=V, block_size=T, n_head=1, n_embd=C, tie_embeddings=False, bias=False, std=None
    )
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.zero_()
            block.attention.out.weight.copy_(torch.eye(C))
            block.mlp.down.weight.zero_()
        model.wte.weight.copy_(torch.eye(V, C))
        model.wpe.weight.zero_()[:, place] = torch.eye(T)
        q, k, v = model.blocks[0].attention.qkv.weight.view(3, C, C)
        q[: T - 1, place][:, 1:] = 4 * torch.eye(T - 1)
        k[:T, place] = 4 * torch.eye(T)
        v[copied, token] = torch.eye(V)
        q, k, v = model.blocks[1].attention.qkv.weight.view(3, C, C)
        q[:V, token] = 4 * torch.eye(V)
        k[:V, copied] = 4 * torch.eye(V)
    scores = heads.induction_scores(model, 10)
    assert float(scores[1, 0]) > 0.9
    assert float(scores[0, 0]) < 0.1  # it attends to the previous token
    names = heads.head_names(
        heads.head_table(heads.attention_maps(model, torch.arange(10)), scores), 10
    )
    assert names == [["previous token"], ["induction"]]


@pytest.mark.parametrize("settings", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_ablating_a_head_equals_silencing_it(settings):
    model = small_model(**settings)
    rows = torch.randint(23, (5, 17))
    # 2, 2 and 1
    dloss, loss = heads.head_ablation(model, [(x[:, :-1], x[:, 1:]) for x in rows.split(2)])
    rounded = rounding(loss, terms=terms_of(model.config))
    assert loss == pytest.approx(model(rows[:, :-1], rows[:, 1:]).item(), abs=rounded)
    for layer, head in product(range(3), range(2)):
        attention: Any = model.blocks[layer].attention
        keep = (torch.arange(2) != head).repeat_interleave(attention.head_dim)  # (H·D,)
        silenced = attention.out.register_forward_pre_hook(
            lambda _, args, keep=keep: (args[0] * keep,)
        )
        with silenced, torch.no_grad():
            expected = float(model(rows[:, :-1], rows[:, 1:])) - loss
        assert float(dloss[layer, head]) == pytest.approx(expected, abs=rounded), (layer, head)
    assert dloss[0].abs().min() > 1e-3


@pytest.mark.parametrize("settings", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_values_weighted_by_the_maps_are_the_output_of_the_fused_attention(settings):
    model, tokens = small_model(**settings), torch.randint(23, (11,))
    maps = heads.attention_maps(model, tokens)
    assert maps.shape == (3, 2, 11, 11)
    assert_close(maps.sum(-1), torch.ones(3, 2, 11))
    assert maps.triu(1).count_nonzero() == 0

    def compare(attention: Any, args: Any, output: Tensor) -> None:
        projected = attention.qkv(args[0])[0]  # (T, (H + 2 K)·D)
        v = projected[:, -attention.n_kv_head * attention.head_dim :].unflatten(
            1, (attention.n_kv_head, -1)
        )
        weighted = next(remaining) @ v.transpose(0, 1)  # (H, T, D)
        assert_close(
            attention.out(weighted.transpose(0, 1).flatten(1)), output[0], rtol=1e-4, atol=1e-5
        )

    remaining = iter(maps)
    for block in model.blocks:
        block.attention.register_forward_hook(compare)
    with torch.no_grad():
        model(tokens[None])
    assert next(remaining, None) is None


def test_measuring_changes_neither_the_model_nor_the_random_state():
    model = small_model(dropout=0.4).train()
    tokens = torch.randint(23, (16,))
    before = torch.get_rng_state()
    first, second = (heads.attention_maps(model, tokens) for _ in range(2))
    heads.induction_scores(model, 23)
    heads.head_ablation(model, [(tokens[None, :-1], tokens[None, 1:])])
    assert torch.equal(first, second)  # without dropout
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training and not module._forward_pre_hooks for module in model.modules())


def test_maps_of_one_model_can_be_computed_in_several_threads():
    model = small_model(dropout=0.4)
    calls = [partial(heads.attention_maps, model, torch.randint(23, (16,))) for _ in range(2)]
    expected = [call() for call in calls]
    for maps, own in zip(overlap(model.train(), *calls), expected, strict=True):
        assert torch.equal(maps, own)


def test_the_induction_score_is_nan_for_a_short_block_and_chance_for_uniform_attention():
    assert heads.induction_scores(make_model(block_size=3), 23).isnan().all()
    model = make_model()
    for block in model.blocks:
        torch.nn.init.zeros_(block.attention.qkv.weight)
        torch.nn.init.zeros_(block.attention.qkv.bias)
    chance = np.mean([1 / n for n in range(9, 17)])  # 8 tokens, repeated once
    assert heads.induction_scores(model, 12).flatten().tolist() == pytest.approx(
        [chance] * 4, rel=1e-5
    )
