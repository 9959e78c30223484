"""Optimizers against torch's, schedules against formulas, averages of the weights, mup."""

import copy
import math
import re
from typing import Any

import pytest
import torch
from models import make_model
from refusals import refused
from small_runs import composed
from tolerance import assert_near, rounding
from torch import Tensor, nn
from torch.testing import assert_close

from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.format import read
from minigpt.model.gpt import GPT
from minigpt.runs.run_config import check_run
from minigpt.training.ema import EMA
from minigpt.training.optim import adamw, muon, orthogonalize
from minigpt.training.schedules import constant, cosine, linear

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


def test_adamw_equals_torchs_with_decay_on_matrices_alone_and_leaves_frozen_weights():
    # The gradient of key biases is rounding error, and Adam would enlarge it.
    ours = make_model(smear=2).double()
    ours.blocks[0].requires_grad_(False)
    theirs = copy.deepcopy(ours)
    groups = {0.3: [], 0.0: []}
    for name, weight in theirs.named_parameters():
        groups[0.0 if re.search(r"norm|bias|smear", name) else 0.3].append(weight)
    decayed = [{"params": weights, "weight_decay": decay} for decay, weights in groups.items()]
    reference = torch.optim.AdamW(decayed, lr=0.01, betas=(0.8, 0.95), foreach=False, fused=False)
    optimizer = adamw(ours, lr=0.01, betas=[0.8, 0.95], weight_decay=0.3)
    tokens, targets = torch.randint(23, (2, 3, 8))
    for _ in range(5):
        for network, step in ((ours, optimizer), (theirs, reference)):
            step.zero_grad()
            network(tokens, targets).backward()
            step.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_close(a, b, atol=1e-9, rtol=1e-7)


def test_adamw_takes_a_decay_rate_of_0():
    optimizer = adamw(make_model(), lr=0.01, betas=[0, 0.99], weight_decay=0.0)
    assert optimizer.defaults["betas"] == (0.0, 0.99)


@pytest.mark.parametrize(
    ("max_steps", "warmup_steps", "final"),
    [(1000, 100, 0.1), (50, 0, 0.0), (20, 19, 0.5), (5, 100, 0.1)],
)
def test_schedules_rise_in_a_line_and_fall_as_nanogpts_or_in_a_line(
    max_steps: int, warmup_steps: int, final: float
):
    lengths = {"max_steps": max_steps, "warmup_steps": warmup_steps}
    for step in range(max_steps + 5 if warmup_steps < max_steps else max_steps):
        found = [schedule(step, **lengths, final_lr_frac=final) for schedule in (cosine, linear)]
        found.append(constant(step, **lengths))
        if step < warmup_steps:
            expected = [(step + 1) / (warmup_steps + 1)] * 3
        else:  # get_lr of nanoGPT's train.py for a peak of 1
            ratio = min(1, (step - warmup_steps) / (max_steps - warmup_steps))
            falling = (0.5 * (1 + math.cos(math.pi * ratio)), 1 - ratio)
            expected = [*(final + factor * (1 - final) for factor in falling), 1]
        assert found == pytest.approx(expected)


def test_checkpoints_hold_the_ema_weights(trained):
    same = ["max_steps=4", "trainer.accumulate_grad_batches=2"]
    plain = read(trained(*same) / LAST)
    content = read(trained(*same, "ema_decay=0.9") / LAST)
    assert content["ema_updates"] == 4  # one per optimizer step
    for name, average in content["state_dict"].items():
        assert not torch.equal(average, content["unaveraged"][name]), name
        # The EMA changes no training
        assert torch.equal(plain["state_dict"][name], content["unaveraged"][name])


@pytest.mark.parametrize(
    ("dtype", "decay", "updates", "rounds"),
    # In bfloat16, steps of 0.001 of the way would round to nothing.
    [(torch.float32, 0.5, 0, 1), (torch.bfloat16, 0.999, 100_000, 100)],
)
def test_the_ema_follows_its_formula_and_is_kept_by_a_swap(dtype, decay, updates, rounds):
    weight = torch.nn.Parameter(torch.ones(1, dtype=dtype))
    average = EMA([weight], decay)
    average.updates = updates
    expected = 1.0
    values = [2.0, 5.0, 3.0, -1.0, 4.0, 0.5, 7.0, 9.0] * rounds
    for t, value in enumerate(values, start=updates + 1):
        weight.data.fill_(value)
        average.update()
        used = min(decay, (1 + t) / (10 + t))
        expected = used * expected + (1 - used) * value
        average.swap()  # as a validation between two steps
        assert weight.item() == pytest.approx(expected, rel=1e-5)
        average.swap()
        assert (weight.item(), weight.dtype) == (value, dtype)


def test_an_average_of_shards_in_half_precision_is_refused():
    half = ["trainer=fsdp", "trainer.precision=bf16-true", "ema_decay=0.9"]
    refused(
        r"trainer\.precision must be another than bf16-true and 16-true with trainer=",
        check_run,
        composed(*half),
    )
    check_run(composed(*half, "ema_decay=null"))


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
    # Return the exponent of the width with which activations change in four steps, by layer
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
    # Return tokens and targets (4, 16): an arithmetic sequence per row, plus a period of three
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
    groups = OPTIMIZERS[optimizer](model).param_groups
    values = {p: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    return {name: values[p] for name, p in model.named_parameters()}
