"""mup: updates of activations do not depend on the width; at the base width it is standard."""

import math
from typing import Any

import pytest
import torch
from models import make_model
from test_muon import ADAM, OPTIONS
from tolerance import assert_near
from torch import Tensor

from minigpt.model.gpt import GPT
from minigpt.training.optim import adamw, muon

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: adamw(model, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1),
    "muon": lambda model: muon(
        model, **ADAM | OPTIONS | {"lr": 0.08, "adam_lr": 0.04, "ngram_weight_decay": 0.1}
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates_of_activations_grow_with_the_width_but_under_mup(optimizer: str):
    for more_heads in (True, False):
        for name, slope in slopes(optimizer, more_heads, parametrization="mup").items():
            assert abs(slope) < 0.25, f"{name}: width^{slope:.2f}"
    standard = slopes(optimizer, more_heads=False)
    assert standard["lm_head"] > 0.5
    # Muon's updates of its matrices do not depend on the width.
    if optimizer == "adamw":
        assert min(standard["blocks.0.attention"], standard["blocks.0.mlp"]) > 1


def slopes(optimizer: str, more_heads: bool, **settings: Any) -> dict[str, float]:
    """Return the exponent of the width with which activations change in four steps, by layer."""
    changes = []
    for width in (64, 256):
        n_head = width // 16 if more_heads else 4
        model = build(n_layer=1, n_embd=width, n_head=n_head, **settings)
        before = activations(model)
        train_on(model, optimizer, steps=4)
        after = activations(model)
        changes.append({name: (after[name] - x).abs().mean() for name, x in before.items()})
    return {name: math.log(changes[1][name] / change, 4) for name, change in changes[0].items()}


@torch.no_grad()
def activations(model: GPT) -> dict[str, Tensor]:
    seen = list[Tensor]()
    layers = {}
    for name, module in model.named_modules():
        if name.endswith(("attention", "mlp", "lm_head")):
            layers[name] = module.register_forward_hook(lambda *given: seen.append(given[-1]))
    model(batch()[0])
    for hook in layers.values():
        hook.remove()
    return dict(zip(layers, seen, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "changes", [{}, {"tie_embeddings": False, "ngram": 3, "smear": 1, "qk_norm": True}], ids=str
)
def test_at_the_base_width_mup_equals_standard_bitwise(changes: dict[str, Any], optimizer: str):
    standard = build(n_embd=64, n_head=4, **changes)
    mup = build(n_embd=64, n_head=4, parametrization="mup", **changes)
    for steps in (0, 2):
        for model in (standard, mup):
            train_on(model, optimizer, steps=steps)
        for (name, a), b in zip(standard.named_parameters(), mup.parameters(), strict=True):
            assert torch.equal(a, b), name
        assert torch.equal(standard(batch()[0]), mup(batch()[0]))
    assert rates(standard, optimizer) == rates(mup, optimizer)


def test_at_four_times_the_base_width_all_values_follow_table_8():
    settings = {"tie_embeddings": False, "ngram": 3, "smear": 1}
    model = build(n_embd=256, n_head=4, parametrization="mup", **settings)
    # Of a hidden matrix; 1/√(2·2) of it into the residual stream
    stds = {"attention.qkv": 0.01, "mlp.up": 0.01, "attention.out": 0.005, "mlp.down": 0.005}
    of_weights = rates(model, "adamw")
    for name, weight in model.named_parameters():
        is_matrix = weight.dim() == 2
        std = stds.get(name.removesuffix(".weight").split(".", 2)[-1]) if is_matrix else None
        if is_matrix and name != "ngrams.out.weight":
            assert weight.std().item() == pytest.approx(std or 0.02, rel=0.05), name
        expected = (1e-3, 0.4) if std else (4e-3, 0.1 if is_matrix else 0)
        assert of_weights[name] == expected, name
    assert all(block.attention.scale == math.sqrt(16) / 64 for block in model.blocks)
    seen: list[Tensor] = []
    model.final_norm.register_forward_hook(lambda *args: seen.append(args[-1]))
    assert_near(model(batch()[0]), seen[0] @ model.lm_head.weight.T / 4, terms=256)


def build(**settings: Any) -> GPT:
    return make_model(std=None, vocab_size=64, base_n_embd=64, base_head_dim=16, **settings).train()


def batch() -> tuple[Tensor, Tensor]:
    """Return tokens and targets (4, 16): an arithmetic sequence per row, plus a period of three."""
    generator = torch.Generator().manual_seed(0)
    t = torch.arange(17)
    start = torch.randint(64, (4, 1), generator=generator)
    text = (start + torch.randint(1, 7, (4, 1), generator=generator) * t + t % 3) % 64
    return text[:, :-1], text[:, 1:]


def train_on(model: GPT, optimizer: str, *, steps: int) -> None:
    chosen = OPTIMIZERS[optimizer](model)
    for _ in range(steps):
        chosen.zero_grad()
        model(*batch()).backward()
        chosen.step()


def rates(model: GPT, optimizer: str) -> dict[str, tuple[float, float]]:
    """Return the learning rate and weight decay of every parameter."""
    groups = OPTIMIZERS[optimizer](model).param_groups
    values = {p: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    return {name: values[p] for name, p in model.named_parameters()}
