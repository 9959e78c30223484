"""mup: updates of activations do not depend on the width, and at the base width mup equals standard bitwise."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_muon import ADAM, OPTIONS
from tolerance import assert_near
from torch import Tensor

from minigpt.config import GPTConfig
from minigpt.model import GPT
from minigpt.optim import adamw, muon

ADAMW = {"lr": 4e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
MUON = ADAM | OPTIONS | {"lr": 0.08, "adam_lr": 0.04, "ngram_weight_decay": 0.1}
OPTIMIZERS = {"adamw": (adamw, ADAMW), "muon": (muon, MUON)}
BASE = {"base_n_embd": 64, "base_head_dim": 16}
HEADS = {"wider heads": lambda width: 4, "more heads": lambda width: width // 16}
heads = pytest.mark.parametrize("n_head", HEADS.values(), ids=HEADS)


@heads
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_under_mup_updates_of_activations_have_the_same_size_at_every_width(
    optimizer: str, n_head: Callable[[int], int]
):
    # Muon's products grow with the cube of the width.
    widths = (64, 128, 256, 512) if optimizer == "adamw" else (64, 256)
    for name, slope in slopes(widths, optimizer, n_head, parametrization="mup").items():
        assert abs(slope) < 0.25, f"{name}: width^{slope:.2f}"


@heads
def test_under_the_standard_parametrization_updates_of_activations_grow_with_the_width(n_head: Callable[[int], int]):
    for name, slope in slopes((64, 256), "adamw", n_head).items():
        assert slope > (0.5 if name == "logits" else 1), f"{name}: width^{slope:.2f}"
    assert slopes((64, 256), "muon", n_head)["logits"] > 0.5  # updates of its matrices do not depend on the width


def slopes(widths: tuple[int, ...], optimizer: str, n_head: Callable[[int], int], **settings: Any) -> dict[str, float]:
    """Return the exponent of the width with which the changes of activations grow, by layer."""
    changes = [changes_of(optimizer, n_embd=width, n_head=n_head(width), **settings) for width in widths]
    x = torch.tensor(widths).log()
    x = x - x.mean()
    return {
        name: float(x @ torch.stack([change[name] for change in changes]).log() / x.square().sum())
        for name in changes[0]
    }


def changes_of(optimizer: str, **settings: Any) -> dict[str, Tensor]:
    """Return the change of activations and attention weights in ten steps on one batch: mean |x_10 - x_0|."""
    model, (tokens, targets) = build(**settings), batch()
    before = activations(model, tokens)
    train_on(model, optimizer, tokens, targets, steps=10)
    return {name: (x - before[name]).abs().mean() for name, x in activations(model, tokens).items()}


@torch.no_grad()
def activations(model: GPT, tokens: Tensor) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    layers = {"logits": model.lm_head}
    for i, block in enumerate(model.blocks):
        layers |= {f"attention {i}": block.attention, f"mlp {i}": block.mlp}
    hooks = [
        layer.register_forward_hook(lambda _, given, x, name=name: seen.update({name: x, f"{name} of": given[0]}))
        for name, layer in layers.items()
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return {name: seen[name] for name in layers} | {
        f"weights {i}": block.attention.attention_weights(seen[f"attention {i} of"])
        for i, block in enumerate(model.blocks)
    }


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False, "ngram": 3, "smear": 1, "qk_norm": True}], ids=str)
def test_at_the_base_width_mup_equals_standard_bitwise(changes: dict[str, Any], optimizer: str):
    standard, mup = (build(n_embd=64, n_head=4, parametrization=name, **changes) for name in ("standard", "mup"))
    for steps in (0, 2):
        for model in (standard, mup):
            train_on(model, optimizer, *batch(), steps=steps)
        for (name, a), b in zip(standard.named_parameters(), mup.parameters(), strict=True):
            assert torch.equal(a, b), name
        assert torch.equal(standard(batch()[0]), mup(batch()[0]))
    assert rates(standard, optimizer) == rates(mup, optimizer)


def test_at_four_times_the_base_width_all_values_follow_table_8():
    model = build(n_embd=256, n_head=4, parametrization="mup", tie_embeddings=False, ngram=3, smear=1)
    hidden = {f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("attention.qkv", "mlp.up")}
    residual = {f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("attention.out", "mlp.down")}
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and name != "ngrams.out.weight":
            std = 0.01 if name in hidden else 0.005 if name in residual else 0.02  # 1/√(2·2) into the residual stream
            assert weight.std().item() == pytest.approx(std, rel=0.05), name
    for name, (rate, decay) in rates(model, "adamw").items():
        if name in hidden | residual:
            assert (rate, decay) == (1e-3, 0.4), name
        else:
            assert (rate, decay) == (4e-3, 0.1 if name.endswith("weight") and "norm" not in name else 0), name
    assert all(block.attention.scale == math.sqrt(16) / 64 for block in model.blocks)
    seen: list[Tensor] = []
    model.final_norm.register_forward_hook(lambda *args: seen.append(args[-1]))
    logits = model(batch()[0])
    assert_near(logits, seen[0] @ model.lm_head.weight.T / 4, terms=256)


def build(**settings: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=16, vocab_size=64, n_layer=2, **BASE, **settings))


def batch() -> tuple[Tensor, Tensor]:
    """Return tokens and targets (4, 16): arithmetic sequences, one per row, plus a period of three."""
    generator, t = torch.Generator().manual_seed(0), torch.arange(17)
    start, step = torch.randint(64, (4, 1), generator=generator), torch.randint(1, 7, (4, 1), generator=generator)
    text = (start + step * t + t % 3) % 64
    return text[:, :-1], text[:, 1:]


def train_on(model: GPT, optimizer: str, tokens: Tensor, targets: Tensor, *, steps: int) -> None:
    make, options = OPTIMIZERS[optimizer]
    optimizer = make(model, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(tokens, targets).backward()
        optimizer.step()


def rates(model: GPT, optimizer: str) -> dict[str, tuple[float, float]]:
    """Return the learning rate and weight decay of every parameter."""
    make, options = OPTIMIZERS[optimizer]
    groups = make(model, **options).param_groups
    values = {p: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    return {name: values[p] for name, p in model.named_parameters()}
