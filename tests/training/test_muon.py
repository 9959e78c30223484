"""Muon against torch's Muon and AdamW, the singular value decomposition, and separate matrices."""

import copy
from typing import Any

import pytest
import torch
from models import make_model
from tolerance import assert_near, rounding
from torch import nn

from minigpt.training.optim import muon, orthogonalize

OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
OPTIONS |= {"newton_schulz_steps": 5}
ADAM: dict[str, Any] = {"adam_lr": 0.01, "betas": (0.9, 0.95), "ngram_weight_decay": 0.2}
# Rows of the matrices that are concatenated in each
ROWS = {"attention.qkv.weight": [32, 16, 16], "attention.out.weight": [32]}
ROWS |= {"mlp.up.weight": [40, 40], "mlp.down.weight": [32]}


def test_muon_equals_torchs_on_each_matrix_and_adamw_on_the_rest(monkeypatch: pytest.MonkeyPatch):
    sizes = {"n_head": 4, "n_embd": 32, "n_kv_head": 2, "n_inner": 40}
    model = make_model(activation="swiglu", ngram=3, smear=1, **sizes)
    before = copy.deepcopy(model.state_dict())
    # Copy each matrix of a weight to a parameter of its own.
    parts = dict[str, list[nn.Parameter]]()
    groups: dict[str, list[nn.Parameter]] = {"matrix": [], "table": [], "other": []}
    for name, weight in model.named_parameters():
        within = name.split(".", 2)[-1]
        kind = "table" if name == "ngrams.table.weight" else "other"
        pieces = weight.split(ROWS.get(within, [len(weight)]))
        parts[name] = [nn.Parameter(piece.detach().clone()) for piece in pieces]
        groups["matrix" if within in ROWS else kind] += parts[name]
    table = {"params": groups["table"], "weight_decay": 0.2}
    other = {"params": groups["other"], "weight_decay": 0.0}
    optimizers = [
        muon(model, **ADAM, **OPTIONS | {"momentum": 0.9, "newton_schulz_steps": 4}),
        torch.optim.Muon(groups["matrix"], lr=0.02, weight_decay=0.1, momentum=0.9, ns_steps=4),
        torch.optim.AdamW([table, other], lr=0.01, betas=(0.9, 0.95)),
    ]
    # torch's casts on every device
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    monkeypatch.setattr("minigpt.training.optim.half_dtype", lambda device: None)
    # Take steps; weights without a gradient do not change.
    for _ in range(4):
        for name, weight in model.named_parameters():
            if name in ("blocks.0.mlp.up.weight", "wpe.weight"):
                continue
            weight.grad = torch.randn(weight.shape)
            gradients = weight.grad.split([len(part) for part in parts[name]])
            for part, gradient in zip(parts[name], gradients, strict=True):
                part.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    # Compare: four steps of four iterations of three products of 40 columns.
    for name, weight in model.named_parameters():
        theirs = torch.cat(parts[name])
        of_steps = rounding(theirs - before[name], terms=4 * 4 * 3 * 40)
        atol = rounding(before[name], terms=4) + of_steps
        assert torch.allclose(weight, theirs, rtol=0, atol=atol), name


def test_a_model_whose_other_weights_are_frozen_is_trained():
    model = make_model()
    for name, weight in model.named_parameters():
        weight.requires_grad_("mlp" in name and weight.dim() == 2)
    optimizer = muon(model, **ADAM, **OPTIONS)
    before = copy.deepcopy(model.state_dict())
    model(*torch.randint(23, (2, 3, 8))).backward()
    optimizer.step()
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name]) != weight.requires_grad, name


@pytest.mark.parametrize("shape", [(48, 48), (96, 32), (24, 80)])
def test_orthogonalization_keeps_singular_vectors_and_equalizes_singular_values(
    shape: tuple[int, int],
):
    u, s, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    # Five steps raise singular values of at least 0.01 of the Frobenius norm into the range.
    s = torch.linspace(0.05, 1, len(s))
    assert s.min() / s.norm() > 0.01
    matrix = (u @ s.diag() @ v).double()  # not reduced to bfloat16
    levelled = u.mT @ orthogonalize(matrix[None], 5)[0].float() @ v.mT
    assert levelled.diagonal().min() > 0.65
    assert levelled.diagonal().max() < 1.25
    assert_near(levelled, levelled.diagonal().diag(), terms=5 * 3 * 80)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1e-8])  # float16 has nothing below 6e-8
def test_orthogonalization_in_16_bits_is_near_that_in_64(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, scale: float
):
    monkeypatch.setattr("minigpt.training.optim.half_dtype", lambda device: dtype)
    gradients = scale * torch.randn(2, 64, 48)
    expected = orthogonalize(gradients.double(), 5)
    found = orthogonalize(gradients, 5)
    assert found.dtype == torch.float32
    error = (found - expected).norm() / expected.norm()
    # Below: computed in float32
    assert torch.finfo(dtype).eps / 4 < error < 4 * torch.finfo(dtype).eps
