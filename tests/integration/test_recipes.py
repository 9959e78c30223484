"""The recipes: their sizes, nanoGPT's values, training by these values, and overrides of a group."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import CONFIGS, column, composed
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import minigpt
from minigpt.config import GPTConfig
from minigpt.data.batches import WindowOrder
from minigpt.model import GPT

CHARACTERS = 65  # of tiny shakespeare
RECIPES = sorted(file.stem for file in (CONFIGS / "experiment").glob("*.yaml"))
FROM_SCRATCH = [name for name in RECIPES if not name.startswith("finetune")]


@pytest.mark.parametrize("name", FROM_SCRATCH)
def test_a_recipe_is_no_larger_than_nanogpts(name: str):
    """At most 0.81M parameters as nanoGPT's CPU recipe, or 10.65M without positions as its GPU recipe."""
    with torch.device("meta"):
        model = GPT(GPTConfig(**{**composed(f"experiment={name}").model, "vocab_size": CHARACTERS}))
    if name.endswith("_cpu") and name != "best_cpu":
        assert model.num_params() <= 810_000
    else:
        assert model.config.num_params(positions=False) <= 10_650_000


@pytest.mark.parametrize("name", RECIPES)
def test_another_optimizer_and_schedule_replace_all_values_of_a_recipes(name: str):
    cfg = composed(f"experiment={name}", "optimizer=adamw", "schedule=constant")
    assert set(cfg.optimizer) == {"_target_", "lr", "betas", "weight_decay"}
    assert cfg.optimizer.lr == 3e-3
    assert set(cfg.schedule) == {"_target_", "warmup_steps"}


@pytest.mark.parametrize(
    "name", [name for name in FROM_SCRATCH if name not in ("nanogpt_cpu", "fast_cpu", "sprint_cpu")]
)
def test_a_recipe_trains(train, name: str):
    """Train a small version on a CPU."""
    assert train(f"experiment={name}", "compile=false", "max_steps=3").loss < 4.0


@pytest.mark.parametrize("name", sorted(set(RECIPES) - set(FROM_SCRATCH)))
def test_a_finetuning_lowers_the_loss(name: str, text: Path, gpt2_folder: Path, tmp_path: Path):
    """Of a small model, whose random weights have the loss of a uniform guess."""
    small = ["trainer=cpu", "model.block_size=32", f"data.path={text}", f"data.folder={tmp_path}/data"]
    small += [f"init_from={gpt2_folder}", "optimizer.lr=1e-2", "~callbacks.samples", f"hydra.run.dir={tmp_path}/run"]
    assert minigpt.train([f"experiment={name}", *small])["best_val_loss"] < math.log(300) - 0.5


def test_nanogpts_recipe_equals_a_training_loop_with_its_values(text: Path, tmp_path: Path):
    config = {"n_layer": 4, "n_head": 4, "n_embd": 128, "bias": False, "position": "learned", "activation": "gelu"}
    model = initial(text, norm="layernorm", tie_embeddings=True, **config)
    decayed, norms = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), foreach=False, fused=False)
    expected = loop(text, model, [*model.parameters()], [optimizer], batch_size=12, warmup_steps=100)
    losses, rates = figures("nanogpt_cpu", text, tmp_path)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert rates == pytest.approx([1e-3 * step / 101 for step in (1, 2, 3, 4)])


@pytest.mark.parametrize(
    ("name", "shape", "adam", "muon", "warmup_steps"),
    [
        (
            *("fast_cpu", (2, 3, 96), {"lr": 0.01, "weight_decay": 1.0}),
            *({"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}, 20),
        ),
        (
            *("sprint_cpu", (1, 2, 64), {"lr": 0.03, "weight_decay": 0.0}),
            *({"lr": 0.05, "momentum": 0.85, "weight_decay": 0.0}, 5),
        ),
    ],
)
def test_the_fast_recipes_equal_training_loops_with_their_values(
    name: str,
    shape: tuple[int, int, int],
    adam: dict[str, float],
    muon: dict[str, float],
    warmup_steps: int,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    n_layer, n_head, n_embd = shape
    windows = {"fast_cpu": {"batch_size": 12, "block_size": 128}, "sprint_cpu": {"batch_size": 24, "block_size": 64}}[
        name
    ]
    model = initial(
        text,
        windows["block_size"],
        **{"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "bias": False, "norm": "rmsnorm_noscale"},
        **{"position": "rope", "activation": "relu2", "qk_norm": True, "tie_embeddings": False, "embed_norm": True},
        **{"ngram": 5, "ngram_buckets": 8192, "ngram_dim": 16, "smear": 2},
    )
    w = {key: nn.Parameter(weight.detach().clone()) for key, weight in model.named_parameters()}
    for i in range(n_layer):  # queries, keys and values are matrices of their own
        fused = w.pop(f"blocks.{i}.attention.qkv.weight").detach()
        w |= {
            f"blocks.{i}.attention.{x}": nn.Parameter(part.clone())
            for x, part in zip("qkv", fused.chunk(3), strict=True)
        }
    matrices = [weight for key, weight in w.items() if key.startswith("blocks.")]
    table = w["ngrams.table.weight"]
    rest = [weight for key, weight in w.items() if not key.startswith("blocks.") and weight is not table]
    groups = [{"params": [table]}, {"params": rest, "weight_decay": 0.0}]
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's Muon casts on every device
    optimizers = [
        torch.optim.AdamW(groups, betas=(0.8, 0.95), foreach=False, fused=False, **adam),
        torch.optim.Muon(matrices, **muon),
    ]

    def forward(tokens: Tensor) -> Tensor:
        names = [f"blocks.{i}.attention." for i in range(n_layer)]
        fused = {f"{name}qkv.weight": torch.cat([w[name + x] for x in "qkv"]) for name in names}
        return functional_call(model, w | fused, (tokens,))

    expected = loop(text, forward, [*w.values()], optimizers, warmup_steps=warmup_steps, **windows)
    losses, rates = figures(name, text, tmp_path)
    assert losses == pytest.approx(expected, rel=1e-7)
    assert rates == pytest.approx([muon["lr"] * step / (warmup_steps + 1) for step in (1, 2, 3, 4)])


def initial(text: Path, block_size: int = 64, **config: Any) -> GPT:
    """Return the initial model of seed 1337, in float64."""
    torch.manual_seed(1337)
    return GPT(GPTConfig(block_size=block_size, vocab_size=len(set(text.read_text())), **config)).double()


def loop(
    text: Path,
    forward: Callable[[Tensor], Tensor],
    parameters: list[nn.Parameter],
    optimizers: list[torch.optim.Optimizer],
    *,
    batch_size: int,
    warmup_steps: int,
    block_size: int = 64,
) -> list[float]:
    """Train for four steps, all in the warm-up; gradients are clipped to norm 1."""
    content = text.read_text()
    letters = sorted(set(content))
    train = torch.tensor([letters.index(c) for c in content[: int(0.9 * len(content))]])
    starts = WindowOrder(len(train), block_size, 1337).starts(np.arange(4 * batch_size)).reshape(4, batch_size, 1)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    found = []
    for step in range(4):
        window = train[torch.from_numpy(starts[step]) + torch.arange(block_size + 1)]
        tokens, targets = window[:, :-1], window[:, 1:]
        loss = F.cross_entropy(forward(tokens).flatten(0, 1), targets.flatten())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        norm = torch.cat([p.grad.flatten() for p in parameters]).norm()
        for parameter in parameters:
            parameter.grad *= min(1.0, 1 / (norm.item() + 1e-6))
        for optimizer, rates in zip(optimizers, peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = peak * (step + 1) / (warmup_steps + 1)
            optimizer.step()
        found.append(loss.item())
    return found


def figures(name: str, text: Path, tmp_path: Path) -> tuple[list[float], list[float]]:
    """Return the losses and learning rates of four steps of a recipe on another text."""
    settings = ["trainer.accelerator=cpu", "trainer.precision=64-true", "max_steps=4", "log_every=1"]
    data = ["data=text", f"data.path={text}", f"data.folder={tmp_path}/data", "data.val_fraction=0.1"]
    settings += ["~callbacks.samples", f"hydra.run.dir={tmp_path}/run", *data]
    minigpt.train([f"experiment={name}", *settings])
    return column(tmp_path / "run", "train_loss"), column(tmp_path / "run", "learning_rate")
