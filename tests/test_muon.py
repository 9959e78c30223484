"""Muon compared with torch's Muon and AdamW, with the singular value decomposition, and with separate matrices."""

import copy
from typing import Any

import pytest
import torch
from tolerance import assert_near, rounding
from torch import Tensor, nn
from torch.testing import assert_close

from minigpt.config import GPTConfig
from minigpt.model import GPT
from minigpt.optim import Muon, muon, orthogonalize

OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "newton_schulz_steps": 5}
ADAM: dict[str, Any] = {"adam_lr": 0.01, "betas": (0.9, 0.95), "ngram_weight_decay": 0.2}
SHAPES = [(48, 48), (96, 32), (24, 80)]


@pytest.mark.parametrize("shape", SHAPES)
def test_muon_equals_torchs_in_one_precision(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    before = torch.randn(shape, generator=generator(0))
    ours, theirs = (nn.Parameter(before.clone()) for _ in range(2))
    optimizer = make({ours: [shape[0]]})
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's casts on every device
    for step in range(4):
        for weight in (ours, theirs):
            weight.grad = torch.randn(shape, generator=generator(step))
        optimizer.step()
        reference.step()
    assert_close(ours, theirs, rtol=0, atol=after(4, before, theirs))


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonalization_keeps_singular_vectors_and_equalizes_singular_values(shape: tuple[int, int]):
    u, s, v = torch.linalg.svd(torch.randn(shape, generator=generator(1)), full_matrices=False)
    # Five steps raise singular values of at least 0.01 of the Frobenius norm into the range.
    s = torch.linspace(0.05, 1, len(s))
    assert s.min() / s.norm() > 0.01
    matrix = (u @ s.diag() @ v).double()  # not reduced to bfloat16
    levelled = u.mT @ orthogonalize(matrix[None], 5)[0].float() @ v.mT
    assert levelled.diagonal().min() > 0.65
    assert levelled.diagonal().max() < 1.25
    assert_near(levelled, levelled.diagonal().diag(), terms=5 * 3 * 80)


def test_concatenated_projections_are_orthogonalized_separately():
    network = model(n_kv_head=2, activation="swiglu", n_inner=40)
    before = copy.deepcopy(network)
    optimizer = muon(network, **ADAM | OPTIONS | {"weight_decay": 0.0})
    for parameter, drawn in zip(network.parameters(), gradients(network, 0), strict=True):
        parameter.grad = drawn
    optimizer.step()
    for name, rows in (
        ("attention.qkv", [32, 16, 16]),
        ("mlp.up", [40, 40]),
        ("mlp.down", [32]),
        ("attention.out", [32]),
    ):
        now, then = (each.blocks[1].get_submodule(name).weight for each in (network, before))
        for update in (now - then).detach().split(rows):
            scale = 0.02 * max(1, update.size(0) / update.size(1)) ** 0.5
            values = torch.linalg.svdvals(update) / scale
            assert values.min() > 0.6, name
            assert values.max() < 1.25, name


def test_parameters_without_a_gradient_do_not_change():
    network = model()
    optimizer = muon(network, **ADAM, **OPTIONS)
    before = copy.deepcopy(network)
    network.blocks[0].mlp.up.weight.grad = torch.randn(128, 32)
    optimizer.step()
    for (name, a), b in zip(network.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(a, b) == (name != "blocks.0.mlp.up.weight"), name


def make(rows: dict[nn.Parameter, list[int]], **changes: Any) -> Muon:
    """Build Muon for matrices and the row counts of the matrices that are concatenated in each."""
    return Muon([{"kind": "muon", "params": [*rows], **OPTIONS, **changes}], rows)


def after(steps: int, before: Tensor, weights: Tensor) -> float:
    """Bound the rounding error of weights after some steps of five iterations of three products of 80 columns."""
    return rounding(before, terms=steps) + rounding(weights - before, terms=steps * 5 * 3 * 80)


def model(**settings: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=8, vocab_size=17, n_layer=2, n_head=4, n_embd=32, **settings))


def gradients(network: GPT, seed: int) -> list[Tensor]:
    drawn = generator(seed)
    return [torch.randn(p.shape, generator=drawn) for p in network.parameters()]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
