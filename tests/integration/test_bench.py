"""The benchmarks, with small models and few steps."""

import argparse
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from corpora import SHAKESPEARE, needs_shakespeare, values
from models import draw_weights
from small_runs import SCRIPTS, composed

from minigpt.model.config import GPTConfig
from minigpt.model.gpt import GPT
from minigpt.training.schedules import cosine


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS / "bench"))


def bench(*arguments, folder, script="bench"):
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    options = {"env": os.environ | {"CUDA_VISIBLE_DEVICES": ""}, "timeout": 900}
    options |= {"capture_output": True, "encoding": "utf-8"}
    done = subprocess.run(command, cwd=folder, check=False, **options)
    assert done.returncode == 0, done.stderr


@needs_shakespeare
def test_the_text_of_a_benchmark_is_found_beside_one_of_the_user(tmp_path, monkeypatch):
    import common

    settings = values("shakespeare_char")
    (tmp_path / "data").mkdir()
    (tmp_path / "configs").symlink_to(SCRIPTS.parent / "configs")
    (tmp_path / "data/tinyshakespeare.txt").write_text("of the user")
    copy = tmp_path / f"data/tinyshakespeare-{settings['sha256'][:12]}.txt"
    copy.write_bytes(SHAKESPEARE.read_bytes())
    monkeypatch.delenv("MINIGPT_DATA_DIR")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    assert common.text_file() == copy


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


def test_a_row_that_fails_leaves_those_before(tmp_path):
    import gpu

    file = tmp_path / "rows.jsonl"
    session = gpu.Session(argparse.Namespace(rehearse=True, text=None, seeds=1, out=file), tmp_path)
    for speed in (10.0, 30.0, 20.0):
        with session.row("gpt2", "batch 8") as row:
            row["tokens/s"] = speed
    with session.row("memory", "gpt2_xl"):
        raise torch.OutOfMemoryError("out of memory")
    assert not session.failed  # a model that is too large is a result
    with session.row("memory", "gpt2"):
        raise ValueError("no such kernel")
    assert session.failed
    assert len(file.read_text(encoding="utf-8").splitlines()) == 5
    assert "| batch 8 | 20.000 (10.000–30.000) |" in gpu.tables(file)


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
