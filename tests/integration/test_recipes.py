"""The recipes: their sizes, training by their values; the benchmarks, with few steps."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from models import draw_weights
from small_runs import CONFIGS, SCRIPTS, column, composed
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import minigpt
from minigpt.data.batches import WindowOrder
from minigpt.model.config import GPTConfig
from minigpt.model.gpt import GPT
from minigpt.training.schedules import cosine

CHARACTERS = 65  # of tiny shakespeare
RECIPES = sorted(file.stem for file in (CONFIGS / "experiment").glob("*.yaml"))
FROM_SCRATCH = [name for name in RECIPES if not name.startswith("finetune")]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_no_larger_than_nanogpts_and_takes_another_optimizer_and_schedule(name):
    # At most 0.81M parameters as nanoGPT's CPU recipe, or 10.65M as its GPU's, less positions; of
    # the tables of n-grams a token reads a row each
    cfg = composed(f"experiment={name}", "optimizer=adamw", "schedule=constant")
    assert set(cfg.optimizer) == {"_target_", "lr", "betas", "weight_decay"}
    assert cfg.optimizer.lr == 3e-3
    assert set(cfg.schedule) == {"_target_", "warmup_steps"}
    if name in FROM_SCRATCH:
        with torch.device("meta"):
            model = GPT(GPTConfig(**{**cfg.model, "vocab_size": CHARACTERS}))
        small = name.endswith("_cpu") and name != "best_cpu"
        config = model.config
        rows = max(0, config.ngram - 1) * config.ngram_buckets * config.ngram_dim
        most = 810_000 if small else 10_650_000
        assert config.num_params(positions=small) - rows <= most


# test_readme.py trains the others, and those below.
@pytest.mark.parametrize(
    "name", ["best_cpu", "best_gpu", "fast_gpu", "nanogpt_gpu", "sprint_4x128_cpu"]
)
def test_a_recipe_trains(train, name):
    # Train a small version on a CPU
    small = ["compile=false", "model.layer_repeats=1", "max_steps=3"]
    assert train(f"experiment={name}", *small).loss < 4.0


@pytest.mark.parametrize("name", sorted(set(RECIPES) - set(FROM_SCRATCH)))
def test_a_finetuning_lowers_the_loss(name, text, gpt2_folder, tmp_path):
    # Of a small model, whose random weights have the loss of a uniform guess
    small = ["trainer=cpu", "trainer.precision=32-true", "model.block_size=32", "max_steps=20"]
    small += [
        "data.batch_size=4",
        "trainer.accumulate_grad_batches=2",
        "eval_every=20",
        "optimizer.lr=1e-2",
        "originality=null",
    ]
    small += [f"data.path={text}", f"data.folder={tmp_path}/data", f"hydra.run.dir={tmp_path}/run"]
    small += [f"init_from={gpt2_folder}", "~callbacks.samples", "schedule.warmup_steps=2"]
    assert minigpt.train([f"experiment={name}", *small])["best_val_loss"] < math.log(300) - 0.5


def test_the_fast_recipe_equals_a_training_loop_with_its_values(text, tmp_path, monkeypatch):
    # Of four steps with torch's Muon and AdamW, all in the warm-up, in float64
    content = text.read_text(encoding="utf-8")
    letters = sorted(set(content))
    train = torch.tensor([letters.index(c) for c in content[: int(0.9 * len(content))]])
    config = {"block_size": 256, "n_layer": 2, "n_head": 2, "n_embd": 96, "bias": False}
    config |= {"norm": "rmsnorm_noscale", "position": "rope", "activation": "relu2"}
    config |= {"qk_norm": True, "embed_norm": True, "tie_embeddings": False, "smear": 2}
    config |= {"ngram": 5, "ngram_buckets": 32768, "ngram_dim": 16, "vocab_size": len(letters)}
    # The weights; queries, keys and values are matrices of their own
    torch.manual_seed(1337)
    model = GPT(GPTConfig(**config)).double()
    w = {key: weight.detach().clone() for key, weight in model.named_parameters()}
    names = [f"blocks.{i}.attention.qkv.weight" for i in (0, 1)]
    for name in names:
        w |= dict(zip([name + x for x in "qkv"], w.pop(name).chunk(3), strict=True))
    w = {name: nn.Parameter(weight) for name, weight in w.items()}
    # The optimizers; torch's Muon casts on every device
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    monkeypatch.setattr("minigpt.training.optim.half_dtype", lambda device: None)
    table = w["ngrams.table.weight"]
    others = [weight for key, weight in w.items() if not key.startswith("blocks.")]
    rest = [weight for weight in others if weight is not table]
    groups = [{"params": [table], "weight_decay": 1.0}, {"params": rest, "weight_decay": 0.0}]
    matrices = [weight for key, weight in w.items() if key.startswith("blocks.")]
    optimizers = [
        torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95), foreach=False, fused=False),
        torch.optim.Muon(matrices, lr=0.02, momentum=0.9, weight_decay=0.1),
    ]
    schedules = [LambdaLR(optimizer, lambda step: (step + 1) / 21) for optimizer in optimizers]
    # The steps
    expected = []
    for starts in WindowOrder(len(train), 256, 1337).starts(np.arange(4 * 6)).reshape(4, 6, 1):
        window = train[torch.from_numpy(starts) + torch.arange(257)]
        fused = {}
        for name in names:
            fused[name] = torch.cat([w[name + part] for part in "qkv"])
        logits = functional_call(model, w | fused, (window[:, :-1],))
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, [*w.values()])
        for weight, gradient in zip(w.values(), gradients, strict=True):
            weight.grad = gradient
        nn.utils.clip_grad_norm_(w.values(), 1.0)
        for either in (*optimizers, *schedules):
            either.step()
        expected.append(loss.item())
    # The same by the recipe
    run = tmp_path / "run"
    settings = ["trainer.accelerator=cpu", "trainer.precision=64-true", "max_steps=4"]
    settings += ["log_every=1", "eval_batches=1", "~callbacks.samples", "originality=null"]
    settings += ["data=text", f"data.path={text}", f"data.folder={tmp_path}/data"]
    settings += ["data.val_fraction=0.1", f"hydra.run.dir={run}"]
    minigpt.train(["experiment=fast_cpu", *settings])
    assert column(run, "train_loss") == pytest.approx(expected, rel=1e-7)
    rates = [0.02 * step / 21 for step in (1, 2, 3, 4)]
    assert column(run, "learning_rate") == pytest.approx(rates)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS / "bench"))


def bench(*arguments, folder, script="bench"):
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    options = {"env": os.environ | {"CUDA_VISIBLE_DEVICES": ""}, "timeout": 900}
    options |= {"capture_output": True, "encoding": "utf-8"}
    done = subprocess.run(command, cwd=folder, check=False, **options)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_time_to_loss_benchmark_runs_the_baseline_and_the_recipes(small, tmp_path):
    options = ["--recipes", "baseline,sprint_cpu eval_every=5", "--rounds", "1"]
    options += ["--losses", "4,0.1", "--overrides", *small]
    bench("time_to_loss", *options, folder=tmp_path)
    written = (tmp_path / "runs/bench/time_to_loss.json").read_text(encoding="utf-8")
    rows = json.loads(written)["rows"]
    curves = [(row["recipe"], len(row["curve"])) for row in rows]
    assert curves == [("baseline", 2), ("sprint_cpu", 4)]
    for row in rows:
        first = next(point for point in row["curve"] if point["loss"] <= 4)
        assert row["crossings"] == {"4.0": first, "0.1": None}
        assert 0 < first["seconds"] <= row["train s"] + 0.01


@pytest.mark.slow
def test_every_part_of_the_gpu_benchmark_is_rehearsed_on_a_cpu(tmp_path):
    options = ["--rehearse", "--seeds", "1", "--out", "rows.jsonl"]
    bench(*options, script="bench/gpu.py", folder=tmp_path)
    written = (tmp_path / "rows.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in written.splitlines()]
    parts = [*dict.fromkeys(row["part"] for row in rows)]
    assert parts == ["recipes", "gpt2", "sampling", "memory", "minutes", "threads"]
    assert not any("error" in row for row in rows)
    assert {row["machine"].split(",")[0] for row in rows} == {"REHEARSAL on a CPU"}


@pytest.mark.parametrize(("device", "params"), [("cpu", 804_096), ("cuda", 10_745_088)])
def test_the_baseline_equals_the_recipe_of_nanogpt(device, params, monkeypatch):
    import bare_nanogpt as nanogpt

    recipe = nanogpt.RECIPES[device]
    cfg = composed(f"experiment=nanogpt_{'cpu' if device == 'cpu' else 'gpu'}")
    ours = GPT(GPTConfig(**{**cfg.model, "vocab_size": 65})).eval()
    baseline = nanogpt.GPT(65, recipe).eval()
    assert sum(p.numel() for p in baseline.parameters()) == ours.num_params() == params
    values = cfg.data.batch_size, cfg.model.block_size, cfg.model.dropout
    assert values == (recipe.batch, recipe.block, recipe.dropout)
    assert (cfg.optimizer.betas, cfg.optimizer.weight_decay) == ([0.9, 0.99], 0.1)
    assert cfg.trainer.gradient_clip_val == 1.0
    draw_weights(ours)
    # Both order parameters from the embeddings to the final norm, block by block
    with torch.no_grad():
        for weight, reference in zip(ours.parameters(), baseline.parameters(), strict=True):
            reference.copy_(weight)
    monkeypatch.setattr(nanogpt, "VAL_BATCH", 2)
    block = recipe.block
    tokens = torch.randint(65, (1, 5 * block + 7))
    # The last has 7
    windows = [tokens[:, i : i + block + 1] for i in range(0, tokens.shape[1] - 1, block)]
    losses = [ours(window[:, :-1], window[:, 1:]).item() for window in windows]
    expected = np.average(losses, weights=[window.numel() - 1 for window in windows])
    assert nanogpt.validate(baseline, tokens[0]) == pytest.approx(expected, rel=1e-5)
    for step in range(cfg.max_steps):
        factor = cosine(step, max_steps=cfg.max_steps, warmup_steps=100, final_lr_frac=0.1)
        assert nanogpt.learning_rate(step, cfg.max_steps) == pytest.approx(
            cfg.optimizer.lr * factor
        )
