"""Muon compared with torch's Muon and AdamW, with the singular value decomposition, and with separate matrices."""

import copy
from typing import Any

import pytest
import torch
from models import make_model
from tolerance import assert_near, rounding
from torch import nn
from torch.testing import assert_close

from minigpt.training.optim import muon, orthogonalize

OPTIONS: dict[str, Any] = {
    "lr": 0.02,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "newton_schulz_steps": 5,
}
ADAM: dict[str, Any] = {"adam_lr": 0.01, "betas": (0.9, 0.95), "ngram_weight_decay": 0.2}
ROWS = {
    "attention.qkv.weight": [32, 16, 16],
    "attention.out.weight": [32],
    "mlp.up.weight": [40, 40],
}
ROWS |= {"mlp.down.weight": [32]}  # of the matrices that are concatenated in each


def test_muon_equals_torchs_on_each_matrix_and_adamw_on_the_rest(monkeypatch: pytest.MonkeyPatch):
    model = make_model(
        n_head=4, n_embd=32, n_kv_head=2, activation="swiglu", n_inner=40, ngram=3, smear=1
    )
    before, parts = copy.deepcopy(model.state_dict()), dict[str, list[nn.Parameter]]()
    for name, weight in model.named_parameters():
        rows = ROWS.get(name.split(".", 2)[-1], [len(weight)])
        parts[name] = [nn.Parameter(part.detach().clone()) for part in weight.split(rows)]
    groups: dict[str, list[nn.Parameter]] = {"matrix": [], "table": [], "other": []}
    for name, weights in parts.items():
        is_matrix = name.split(".", 2)[-1] in ROWS
        groups[
            "matrix" if is_matrix else "table" if name == "ngrams.table.weight" else "other"
        ] += weights
    adam = [
        {"params": groups["table"], "weight_decay": 0.2},
        {"params": groups["other"], "weight_decay": 0.0},
    ]
    optimizers = [
        muon(model, **ADAM, **OPTIONS | {"momentum": 0.9, "newton_schulz_steps": 4}),
        torch.optim.Muon(groups["matrix"], lr=0.02, weight_decay=0.1, momentum=0.9, ns_steps=4),
        torch.optim.AdamW(adam, lr=0.01, betas=(0.9, 0.95)),
    ]
    # torch's casts on every device
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    monkeypatch.setattr("minigpt.training.optim.half_dtype", lambda device: None)
    for _ in range(4):
        for name, weight in model.named_parameters():
            if name not in (
                "blocks.0.mlp.up.weight",
                "wpe.weight",
            ):  # without a gradient, they do not change
                weight.grad = torch.randn(weight.shape)
                for part, gradient in zip(
                    parts[name], weight.grad.split([*map(len, parts[name])]), strict=True
                ):
                    part.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    for name, weight in model.named_parameters():
        theirs = torch.cat(parts[name])
        # Four steps of four iterations of three products of 40 columns.
        atol = rounding(before[name], terms=4) + rounding(
            theirs - before[name], terms=4 * 4 * 3 * 40
        )
        assert_close(
            weight, theirs, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_model_whose_other_weights_are_frozen_is_trained():
    model = make_model()
    for name, weight in model.named_parameters():
        weight.requires_grad_("mlp" in name and weight.dim() == 2)
    optimizer, before = muon(model, **ADAM, **OPTIONS), copy.deepcopy(model.state_dict())
    model(*torch.randint(23, (2, 3, 8))).backward()
    optimizer.step()
    changed = {
        name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])
    }
    assert changed == {name for name, weight in model.named_parameters() if weight.requires_grad}


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
    monkeypatch, dtype: torch.dtype, scale: float
):
    monkeypatch.setattr("minigpt.training.optim.half_dtype", lambda device: dtype)
    gradients = scale * torch.randn(2, 64, 48)
    expected, found = orthogonalize(gradients.double(), 5), orthogonalize(gradients, 5)
    assert found.dtype == torch.float32
    error = (found - expected).norm() / expected.norm()
    # Below: computed in float32
    assert torch.finfo(dtype).eps / 4 < error < 4 * torch.finfo(dtype).eps
