"""The benchmarks, with small models and few steps."""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPTS, composed
from matplotlib import image

from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.format import read, write
from minigpt.config import GPTConfig
from minigpt.model import GPT
from minigpt.schedules import cosine
from minigpt.utils.errors import UserError


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of the benchmarks are imported from their folder."""
    monkeypatch.syspath_prepend(str(SCRIPTS / "bench"))


def bench(*arguments: str, folder: Path) -> str:
    """Run a benchmark on a CPU; return what it prints."""
    script = "bench/gpu.py" if arguments[0] == "gpu" else "bench"
    command = [sys.executable, str(SCRIPTS / script), *arguments[script != "bench" :]]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_attention_benchmark_writes_a_table_a_json_file_and_a_plot(tmp_path: Path) -> None:
    output = bench("attention", "--sizes", "64,512,2048", "--rounds", "1", folder=tmp_path)
    results = json.loads((tmp_path / "runs" / "bench" / "attention.json").read_text(encoding="utf-8"))
    rows = results["rows"]
    assert results["benchmark"] == "attention"
    assert [(row["dropout"], row["T"]) for row in rows] == [(p, T) for p in (0, 0.1) for T in (64, 512, 2048)]
    for row in rows:
        for path in ("fused", "explicit"):
            assert 0 < row[f"{path} forward ms"] < row[f"{path} ms"]
            assert (f"{path} MB" in row) == (row["T"] >= 256)
        assert row["fused/explicit"] > 0

    table = [line.split("|")[1:-1] for line in output.splitlines() if line.startswith("|")]
    assert {len(cells) for cells in table} == {10}
    assert [cells[2].strip() for cells in table[2:]] == ["64", "512", "2048"] * 2
    assert image.imread(tmp_path / "runs" / "bench" / "attention.png").shape[1] >= 1000

    if sys.platform == "linux":  # peak memory is a lower bound on other systems
        short, long, dropped = rows[1], rows[2], rows[5]
        weights = 2 * 2048**2 * 4 / 2**20  # MB of the T×T matrices of two heads at T = 2048
        assert long["explicit MB"] > 2 * weights > weights > long["fused MB"]
        assert math.log(long["explicit MB"] / short["explicit MB"], 4) > 1.6
        assert math.log(long["fused MB"] / short["fused MB"], 4) < 1.4
        # The kernel in the table agrees with the measured memory.
        assert (dropped["kernel"] is None) == (dropped["fused MB"] > weights)
        assert long["kernel"] == "flash"


@pytest.mark.parametrize("sizes", ["0", "many"])
def test_invalid_sequence_lengths_are_rejected(sizes: str) -> None:
    from attention import lengths

    with pytest.raises(UserError, match="--sizes must be integers ≥ 1"):
        lengths(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", ["step --recipes nanogpt_cpu --steps 12", "saving"])
def test_a_benchmark_of_training_writes_its_rows(benchmark: str, small: list[str], tmp_path: Path) -> None:
    # Later overrides win over those of the benchmark.
    own = [setting for setting in small if not setting.startswith(("max_steps", "eval_every", "model.n_head"))]
    name, *options = benchmark.split()
    bench(name, *options, "--rounds", "1", "--overrides", *own, "model.n_head=2", folder=tmp_path)
    (row,) = json.loads((tmp_path / "runs" / "bench" / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    if name == "saving":
        assert row["steps between two of baby"] == 250
        assert row["share of training %"] == pytest.approx(100 * row["saving s"] / (250 * row["a step s"]))
    else:
        ours, bare = (row[f"nanogpt_cpu: {loop} tokens/s"] for loop in ("minigpt", "bare"))
        assert row["nanogpt_cpu: ratio"] == pytest.approx(ours / bare)
        assert 0 < row["nanogpt_cpu: minigpt utilization"] < 1


@pytest.mark.slow
def test_the_gpu_benchmark_rehearses_all_parts_on_a_cpu(tmp_path: Path) -> None:
    output = bench("gpu", "--rehearse", "--seeds", "1", "--out", "out", folder=tmp_path)
    parts = json.loads((tmp_path / "out/results.json").read_text(encoding="utf-8"))["parts"]
    rows = {table: part["rows"][table] for part in parts.values() for table in part["rows"]}
    assert [row["row"] for row in rows["recipes"]] == ["best_gpu", "nanoGPT's recipe, bare loop"]
    for row in rows["gpt2"]:
        per_step = int(row["row"]) * 16  # tokens
        overhead = per_step / row["tokens/s"] - per_step / row["bare tokens/s"]
        assert row["overhead ms per step"] == pytest.approx(1e3 * overhead)
    for row in rows["memory"]:
        assert row["measured GB"] == pytest.approx(row["predicted GB"], rel=0.1)
    assert {row["recovered"] for row in rows["faults"]} == {1}
    tables = (tmp_path / "out/tables.md").read_text(encoding="utf-8")
    assert tables.startswith("REHEARSAL")
    assert tables in output
    assert "failed" not in tables
    for name in ("loss.png", "mfu.png"):
        assert image.imread(tmp_path / "out" / name).shape[1] >= 600


def test_the_gpu_benchmark_without_a_gpu_fails_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    error = capsys.readouterr().err
    assert "found no CUDA GPU" in error
    assert error.count("\n") == 1


def test_the_page_of_the_gpu_has_the_tables_of_its_benchmark() -> None:
    import gpu
    from session import NOT_MEASURED, format_tables

    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    blank = format_tables({"rehearsal": False, "parts": {}}, gpu.TABLES)
    assert all(line in page for line in blank.splitlines() if line.startswith("| ") and NOT_MEASURED not in line)
    assert all(f"python scripts/bench/gpu.py {part}" in page for part in gpu.PARTS)


def test_a_part_that_fails_leaves_the_rows_of_the_others(tmp_path: Path, capsys: Any) -> None:
    import gpu

    session = gpu.Session(tmp_path / "out", tmp_path, ["graphs", "memory"], gpu.TABLES, seeds=1, rehearse=True)
    with session.row("graphs", "nano, minigpt, eager") as row:
        row["tokens/s"] = 12345.6
    with session.row("memory", "gpt2_xl, batch 8") as row:
        row["predicted GB"] = 150.0
        raise torch.OutOfMemoryError
    assert not session.failed  # a model that is too large is a result
    with session.row("memory", "gpt2, batch 1"):
        raise ValueError("no such kernel")
    assert session.failed
    assert "memory: gpt2, batch 1: ValueError: no such kernel" in capsys.readouterr().err
    tables = (tmp_path / "out/tables.md").read_text(encoding="utf-8")
    assert "| nano, minigpt, eager | 12,346 | not measured |" in tables
    assert "| gpt2_xl, batch 8 | 150.00 | out of memory | out of memory |" in tables
    assert "| gpt2, batch 1 | failed | failed | failed |" in tables


def test_different_tensors_of_two_checkpoints_are_found(train: Callable[..., Any], tmp_path: Path) -> None:
    from gpu_parts import different_tensors

    one, other = train("max_steps=1").folder / LAST, tmp_path / "other.safetensors"
    content = read(one)
    content["state_dict"]["model.wte.weight"][0, 0] += 1
    write(content, other)
    assert different_tensors(one, one) == []
    assert "state_dict['model.wte.weight']" in different_tensors(one, other)


@pytest.mark.parametrize(("device", "params"), [("cpu", 804_096), ("cuda", 10_745_088)])
def test_the_baseline_equals_the_recipe_of_nanogpt(device: str, params: int) -> None:
    """Same size, same loss with the same weights, same learning rate at every step."""
    import bare_nanogpt as nanogpt

    torch.manual_seed(0)
    recipe = nanogpt.RECIPES[device]
    cfg = composed(f"experiment=nanogpt_{'cpu' if device == 'cpu' else 'gpu'}")
    ours, baseline = GPT(GPTConfig(**{**cfg.model, "vocab_size": 65})).eval(), nanogpt.GPT(65, recipe).eval()
    assert sum(p.numel() for p in baseline.parameters()) == ours.num_params() == params
    values = cfg.data.batch_size, cfg.model.block_size, cfg.model.dropout
    assert values == (recipe.batch, recipe.block, recipe.dropout)
    with torch.no_grad():  # both order parameters from the embeddings to the final norm, block by block
        for weight, reference in zip(ours.parameters(), baseline.parameters(), strict=True):
            assert weight.shape == reference.shape
            weight.copy_(reference.normal_(std=0.2))
    x, y = torch.randint(65, (2, 3, 64))
    torch.testing.assert_close(baseline(x, y), ours(x, y))
    peak = cfg.optimizer.lr
    for step in range(cfg.max_steps):
        factor = cosine(step, max_steps=cfg.max_steps, warmup_steps=100, final_lr_frac=0.1)
        assert nanogpt.learning_rate(step, cfg.max_steps) == pytest.approx(peak * factor)


@pytest.mark.parametrize("characters", [2, 65, 5 * 64 + 7])
def test_the_baseline_validates_on_every_token_but_the_first(monkeypatch: pytest.MonkeyPatch, characters: int) -> None:
    import bare_nanogpt as nanogpt

    torch.manual_seed(0)
    monkeypatch.setattr(nanogpt, "VAL_BATCH", 2)
    model, tokens = nanogpt.GPT(9, nanogpt.RECIPES["cpu"]), torch.randint(9, (characters,))
    with torch.no_grad():
        windows = [slice(start, min(start + 64, characters - 1)) for start in range(0, characters - 1, 64)]
        losses = [model(tokens[None, :-1][:, at], tokens[None, 1:][:, at]).item() for at in windows]
    mean = np.average(losses, weights=[at.stop - at.start for at in windows])
    assert nanogpt.validate(model, tokens) == pytest.approx(mean, rel=1e-5)


@pytest.mark.slow
def test_the_time_to_loss_benchmark_runs_the_baseline_and_the_recipes(small: list[str], tmp_path: Path) -> None:
    recipes = "baseline,sprint_cpu eval_every=5,fast_cpu"
    options = ["--recipes", recipes, "--rounds", "1", "--losses", "4,0.1", "--overrides", *small]
    output = bench("time_to_loss", *options, folder=tmp_path)
    results = json.loads((tmp_path / "runs" / "bench" / "time_to_loss.json").read_text(encoding="utf-8"))
    assert [row["recipe"] for row in results["rows"]] == ["baseline", "sprint_cpu", "fast_cpu"]
    assert [len(row["curve"]) for row in results["rows"]] == [2, 4, 2]
    for row in results["rows"]:
        assert row["curve"][-1]["step"] == 20
        first = next(point for point in row["curve"] if point["loss"] <= 4)
        assert row["crossings"] == {"4.0": first, "0.1": None}
        assert 0 < first["seconds"] <= row["train s"] + 0.01
    assert output.count("\n| ") == 1 + 3
    assert image.imread(tmp_path / "runs" / "bench" / "time_to_loss.png").shape[1] >= 1000


def test_the_error_of_a_failed_run_is_that_of_the_benchmark() -> None:
    from common import launch

    with pytest.raises(UserError, match=r"experiment=sprnt_cpu does not exist \(did you mean sprint_cpu\?\)"):
        launch([sys.executable, SCRIPTS / "train.py", "experiment=sprnt_cpu"])


@pytest.mark.slow
def test_the_sampling_benchmark_compares_with_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sampling

    monkeypatch.setattr(sampling, "SHAPES", {"tiny": {"block_size": 8, "n_layer": 1, "n_head": 2, "n_embd": 16}})
    monkeypatch.setattr(sampling, "BANDWIDTH_BYTES", 1 << 20)
    (row,) = sampling.sampling(argparse.Namespace(rounds=1), tmp_path)
    for streams in ("1 stream", "16 streams"):
        other, ours = (row[f"tiny, {streams}: {what} tokens/s"] for what in ("transformers", "minigpt"))
        assert row[f"tiny, {streams}: over transformers"] == pytest.approx(ours / other)
    bound = 1e9 * row["memory GB/s"] / (4 * (65 * 16 + 12 * 16**2 + 3 * 16))  # the weights, in bytes
    share = row["tiny, 1 stream: minigpt tokens/s"] / bound
    assert row["tiny, 1 stream: share of the bandwidth limit"] == pytest.approx(share)
    assert row["tiny, beyond its block: minigpt tokens/s"] > 0


@pytest.mark.slow
def test_the_server_benchmark_compares_streams_with_sample(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import serve

    monkeypatch.setattr(serve, "CLIENTS", (1, 16))
    monkeypatch.setattr(serve, "N_TOKENS", 20)
    (row,) = serve.serve(argparse.Namespace(rounds=1, overrides=[*small, "model.n_head=2"]), tmp_path)
    for streams, samples in (("1 client", "1 sample"), ("16 clients", "16 samples")):
        speed, reference = row[f"{streams}: tokens/s"], row[f"sample.py, {samples}: tokens/s"]
        assert row[f"{streams}: over sample.py"] == pytest.approx(speed / reference)
        for measurement in ("first token", "per token"):
            assert 0 < row[f"{streams}: {measurement} ms, p50"] <= row[f"{streams}: {measurement} ms, p99"]
