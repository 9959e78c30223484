"""mup: updates of activations do not depend on the width, and at the base width mup equals standard bitwise."""

import copy
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


@pytest.mark.parametrize("more_heads", [True, False], ids=["more heads", "wider heads"])
def test_updates_of_activations_grow_with_the_width_but_under_mup(more_heads: bool):
    for optimizer in OPTIMIZERS:
        for name, slope in slopes(optimizer, more_heads, parametrization="mup").items():
            assert abs(slope) < 0.25, f"{optimizer}, {name}: width^{slope:.2f}"
    for name, slope in slopes("adamw", more_heads).items():
        assert slope > (0.5 if name == "lm_head" else 1), f"{name}: width^{slope:.2f}"
    # Muon's updates of its matrices do not depend on the width.
    assert slopes("muon", more_heads)["lm_head"] > 0.5


def slopes(optimizer: str, more_heads: bool, **settings: Any) -> dict[str, float]:
    """Return the exponent of the width with which activations change in ten steps, by layer."""
    changes = []
    for width in (64, 256):
        model = build(n_embd=width, n_head=width // 16 if more_heads else 4, **settings)
        before = activations(model)
        train_on(model, optimizer, steps=10)
        changes.append(
            {name: (x - before[name]).abs().mean() for name, x in activations(model).items()}
        )
    return {name: math.log(changes[1][name] / change, 4) for name, change in changes[0].items()}


@torch.no_grad()
def activations(model: GPT) -> dict[str, Tensor]:
    model, seen = copy.deepcopy(model), list[Tensor]()
    layers = [
        name for name, _ in model.named_modules() if name.endswith(("attention", "mlp", "lm_head"))
    ]
    for name in layers:
        model.get_submodule(name).register_forward_hook(lambda *given: seen.append(given[-1]))
    model(batch()[0])
    return dict(zip(layers, seen, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "changes", [{}, {"tie_embeddings": False, "ngram": 3, "smear": 1, "qk_norm": True}], ids=str
)
def test_at_the_base_width_mup_equals_standard_bitwise(changes: dict[str, Any], optimizer: str):
    standard, mup = (
        build(n_embd=64, n_head=4, parametrization=name, **changes) for name in ("standard", "mup")
    )
    for steps in (0, 2):
        for model in (standard, mup):
            train_on(model, optimizer, steps=steps)
        for (name, a), b in zip(standard.named_parameters(), mup.parameters(), strict=True):
            assert torch.equal(a, b), name
        assert torch.equal(standard(batch()[0]), mup(batch()[0]))
    assert rates(standard, optimizer) == rates(mup, optimizer)


def test_at_four_times_the_base_width_all_values_follow_table_8():
    model = build(
        n_embd=256, n_head=4, parametrization="mup", tie_embeddings=False, ngram=3, smear=1
    )
    hidden = {f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("attention.qkv", "mlp.up")}
    residual = {
        f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("attention.out", "mlp.down")
    }
    of_weights = rates(model, "adamw")
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and name != "ngrams.out.weight":
            # 1/√(2·2) into the residual stream
            std = 0.01 if name in hidden else 0.005 if name in residual else 0.02
            assert weight.std().item() == pytest.approx(std, rel=0.05), name
        expected = (
            (1e-3, 0.4) if name in hidden | residual else (4e-3, 0.1 if weight.dim() == 2 else 0)
        )
        assert of_weights[name] == expected, name
    assert all(block.attention.scale == math.sqrt(16) / 64 for block in model.blocks)
    seen: list[Tensor] = []
    model.final_norm.register_forward_hook(lambda *args: seen.append(args[-1]))
    logits = model(batch()[0])
    assert_near(logits, seen[0] @ model.lm_head.weight.T / 4, terms=256)


def build(**settings: Any) -> GPT:
    return make_model(std=None, vocab_size=64, base_n_embd=64, base_head_dim=16, **settings).train()


def batch() -> tuple[Tensor, Tensor]:
    """Return tokens and targets (4, 16): arithmetic sequences, one per row, plus a period of three."""
    generator, t = torch.Generator().manual_seed(0), torch.arange(17)
    start, step = (
        torch.randint(64, (4, 1), generator=generator),
        torch.randint(1, 7, (4, 1), generator=generator),
    )
    text = (start + step * t + t % 3) % 64
    return text[:, :-1], text[:, 1:]


def train_on(model: GPT, optimizer: str, *, steps: int) -> None:
    optimizer = OPTIMIZERS[optimizer](model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(*batch()).backward()
        optimizer.step()


def rates(model: GPT, optimizer: str) -> dict[str, tuple[float, float]]:
    """Return the learning rate and weight decay of every parameter."""
    groups = OPTIMIZERS[optimizer](model).param_groups
    values = {p: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    return {name: values[p] for name, p in model.named_parameters()}
