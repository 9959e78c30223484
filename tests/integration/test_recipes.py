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
from torch.optim.lr_scheduler import LambdaLR

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
    small = name.endswith("_cpu") and name != "best_cpu"
    assert model.config.num_params(positions=small) <= (810_000 if small else 10_650_000)


@pytest.mark.parametrize("name", RECIPES)
def test_another_optimizer_and_schedule_replace_all_values_of_a_recipes(name: str):
    cfg = composed(f"experiment={name}", "optimizer=adamw", "schedule=constant")
    assert set(cfg.optimizer) == {"_target_", "lr", "betas", "weight_decay"}
    assert cfg.optimizer.lr == 3e-3
    assert set(cfg.schedule) == {"_target_", "warmup_steps"}


# test_readme.py trains the others, and those below.
@pytest.mark.parametrize("name", ["best_cpu", "best_gpu", "fast_gpu", "nanogpt_gpu", "sprint_4x128_cpu"])
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
    model = initial(text, 64, norm="layernorm", tie_embeddings=True, **config)
    decayed, norms = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), foreach=False, fused=False)
    expected = loop(text, model, [optimizer], warmup_steps=100, block_size=64)
    losses, rates = figures("nanogpt_cpu", text, tmp_path)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert rates == pytest.approx([1e-3 * step / 101 for step in (1, 2, 3, 4)])


def test_the_fast_recipe_equals_a_training_loop_with_its_values(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = {"n_layer": 2, "n_head": 3, "n_embd": 96, "bias": False, "norm": "rmsnorm_noscale", "position": "rope"}
    config |= {"activation": "relu2", "qk_norm": True, "tie_embeddings": False, "embed_norm": True}
    model = initial(text, 128, ngram=5, ngram_buckets=8192, ngram_dim=16, smear=2, **config)
    w = {key: weight.detach().clone() for key, weight in model.named_parameters()}
    names = [f"blocks.{i}.attention.qkv.weight" for i in (0, 1)]
    for name in names:  # queries, keys and values are matrices of their own
        w |= dict(zip([name + x for x in "qkv"], w.pop(name).chunk(3), strict=True))
    w = {name: nn.Parameter(weight) for name, weight in w.items()}

    def forward(tokens: Tensor) -> Tensor:
        return functional_call(model, w | {name: torch.cat([w[name + x] for x in "qkv"]) for name in names}, (tokens,))

    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's Muon casts on every device
    table = w["ngrams.table.weight"]
    rest = [weight for key, weight in w.items() if not key.startswith("blocks.") and weight is not table]
    groups = [{"params": [table], "weight_decay": 1.0}, {"params": rest, "weight_decay": 0.0}]
    matrices = [weight for key, weight in w.items() if key.startswith("blocks.")]
    optimizers = [
        torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95), foreach=False, fused=False),
        torch.optim.Muon(matrices, lr=0.02, momentum=0.9, weight_decay=0.1),
    ]
    expected = loop(text, forward, optimizers, warmup_steps=20, block_size=128)
    losses, rates = figures("fast_cpu", text, tmp_path)
    assert losses == pytest.approx(expected, rel=1e-7)
    assert rates == pytest.approx([0.02 * step / 21 for step in (1, 2, 3, 4)])


def initial(text: Path, block_size: int, **config: Any) -> GPT:
    """Return the initial model of seed 1337, in float64."""
    torch.manual_seed(1337)
    return GPT(GPTConfig(block_size=block_size, vocab_size=len(set(text.read_text())), **config)).double()


def loop(
    text: Path,
    forward: Callable[[Tensor], Tensor],
    optimizers: list[torch.optim.Optimizer],
    *,
    warmup_steps: int,
    block_size: int,
) -> list[float]:
    """Train for four steps of 12 windows, all in the warm-up; gradients are clipped to norm 1."""
    content = text.read_text()
    letters = sorted(set(content))
    train = torch.tensor([letters.index(c) for c in content[: int(0.9 * len(content))]])
    starts = WindowOrder(len(train), block_size, 1337).starts(np.arange(4 * 12)).reshape(4, 12, 1)
    schedules = [LambdaLR(optimizer, lambda step: (step + 1) / (warmup_steps + 1)) for optimizer in optimizers]
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    found = []
    for step in range(4):
        window = train[torch.from_numpy(starts[step]) + torch.arange(block_size + 1)]
        loss = F.cross_entropy(forward(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for either in (*optimizers, *schedules):
            either.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        found.append(loss.item())
    return found


def figures(name: str, text: Path, tmp_path: Path) -> tuple[list[float], list[float]]:
    """Return the losses and learning rates of four steps of a recipe on another text."""
    settings = ["trainer.accelerator=cpu", "trainer.precision=64-true", "max_steps=4", "log_every=1"]
    settings += ["data=text", f"data.path={text}", f"data.folder={tmp_path}/data", "data.val_fraction=0.1"]
    minigpt.train([f"experiment={name}", *settings, "~callbacks.samples", f"hydra.run.dir={tmp_path}/run"])
    return column(tmp_path / "run", "train_loss"), column(tmp_path / "run", "learning_rate")
