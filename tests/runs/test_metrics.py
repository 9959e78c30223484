"""Every column of metrics.csv and every field of summary.json, against a training loop in plain torch."""

import csv
import hashlib
import json
import math
import platform
import random
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from omegaconf import OmegaConf
from ranks import train_on_ranks
from small_runs import ROOT
from torch.nn import functional as F

import minigpt
from minigpt import GPT, GPTConfig, load_checkpoint
from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.format import read
from minigpt.data.batches import WindowOrder
from minigpt.runs import metrics
from minigpt.utils.errors import RunError

SHAPE = {"block_size": 16, "n_layer": 1, "n_head": 2, "n_embd": 32, "bias": False, "position": "rope"}
SETTINGS = f"""
    {" ".join(f"model.{name}={value}" for name, value in SHAPE.items())}
    tokenizer=char data=text data.val_fraction=0.2 data.batch_size=8 data.eval_batch_size=10
    trainer.accelerator=cpu trainer.accumulate_grad_batches=2 trainer.gradient_clip_val=1.3
    optimizer=adamw optimizer.lr=0.05 optimizer.betas=[0.8,0.95] optimizer.weight_decay=0.5
    schedule=linear schedule.warmup_steps=3 schedule.final_lr_frac=0.1
    max_steps=12 eval_every=5 log_every=5 seed=7 callbacks.samples.max_new_tokens=5
""".split()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 3001 characters, some of two bytes; 2400 are trained on, and no window of 16 ends with it."""
    words, drawn = ["été", "la", "reine", "où", "dort"], random.Random(0)
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    file.write_text(" ".join(drawn.choice(words) for _ in range(1000))[:3001], encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, SimpleNamespace]:
    """One run in this process, and two more in two processes: DDP, and FSDP."""
    base = tmp_path_factory.mktemp("runs")
    given = [*SETTINGS, f"data.path={corpus}", f"data.folder={base}/data"]
    exact = [*given, "trainer.precision=64-true"]  # FSDP has no 64 bits
    both = [[*exact, "trainer=ddp"], [*given, "trainer.precision=32-true", "trainer=fsdp"]]
    both = [[*run, f"hydra.run.dir={base}/{run[-1][8:]}", "trainer.devices=2"] for run in both]
    began = time.perf_counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(metrics.PEAK_FLOPS, metrics.device_name(torch.device("cpu")), 1e12)
        minigpt.train([*exact, "trainer=cpu", f"hydra.run.dir={base}/one"])
    wall = time.perf_counter() - began
    command = train_on_ranks(both)
    commands = {"one": " ".join(sys.argv), "ddp": command, "fsdp": command}
    return {
        name: SimpleNamespace(
            folder=base / name,
            world=1 if name == "one" else 2,
            rel=1e-4 if name == "fsdp" else 1e-9,
            rows=rows(base / name),
            summary=json.loads((base / name / "summary.json").read_text()),
            wall=wall if name == "one" else math.inf,
            command=commands[name],
        )
        for name in commands
    }


@pytest.fixture(scope="module")
def loop(corpus: Path, runs: dict[str, SimpleNamespace]) -> SimpleNamespace:
    """The same training without Lightning, optimizers of ours or a data module, with the settings as numbers."""
    text = corpus.read_text(encoding="utf-8")
    ids = torch.from_numpy(load_checkpoint(runs["one"].folder)[1].encode(text).astype("int64"))
    train, val = ids[:2400], ids[2400:]
    torch.manual_seed(7)
    model = GPT(GPTConfig(**SHAPE, vocab_size=len(set(text)))).double()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.5},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.8, 0.95),
        foreach=False,
        fused=False,
    )
    starts = torch.from_numpy(WindowOrder(2400, 16, 7).starts(torch.arange(12 * 16).numpy())).view(12, 16, 1)
    found: dict[str, Any] = {"losses": [], "norms": [], "rates": [], "val": {}}
    for step in range(1, 13):
        window = train[starts[step - 1] + torch.arange(17)]  # (16, 17)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad *= min(1.0, 1.3 / (norm + 1e-6))
        rate = 0.05 * min(step / 4, 1 - 0.9 * (step - 4) / 9)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        for name, value in (("losses", loss.detach()), ("norms", norm), ("rates", rate)):
            found[name].append(float(value))
        if step in (5, 10, 12):
            with torch.no_grad():
                windows = (val[i : i + 17] for i in range(0, 600, 16))
                nats = sum(F.cross_entropy(model(w[None, :-1])[0], w[1:], reduction="sum") for w in windows)
            found["val"][step] = float(nats) / 600
    assert min(found["norms"]) < 1.3 < 2 < max(found["norms"])  # so that another limit is another training
    return SimpleNamespace(**found, text=text, params=sum(p.numel() for p in model.parameters()))


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_of_training_is_what_a_plain_loop_computes(
    runs: dict[str, SimpleNamespace], loop: SimpleNamespace
) -> None:
    for run in runs.values():
        train = [row for row in run.rows if row["train_loss"]]
        assert [int(row["step"]) for row in train] == [5, 10, 12]
        for row, before in zip(train, (0, 5, 10), strict=True):
            step = int(row["step"])
            mean = sum(loop.losses[before:step]) / (step - before)
            assert float(row["train_loss"]) == pytest.approx(mean, rel=run.rel)
            assert float(row["grad_norm"]) == pytest.approx(loop.norms[step - 1], rel=run.rel)
            assert float(row["learning_rate"]) == pytest.approx(loop.rates[step - 1], rel=1e-12)
            assert int(row["tokens"]) == step * 2 * 8 * 16
            assert row["val_loss"] == row["val_bits_per_byte"] == ""


def test_a_row_of_validation_is_the_mean_over_every_target(
    runs: dict[str, SimpleNamespace], loop: SimpleNamespace
) -> None:
    for run in runs.values():
        val = [row for row in run.rows if row["val_loss"]]
        assert [int(row["step"]) for row in val] == [5, 10, 12]
        characters = loop.text[2400:]
        bytes_per_token = len(characters.encode()) / len(characters)
        assert bytes_per_token > 1.1
        for row in val:
            loss, rel = loop.val[int(row["step"])], max(run.rel, 1e-6)  # summed up in 32 bits
            assert float(row["val_loss"]) == pytest.approx(loss, rel=rel)
            assert float(row["val_bits_per_byte"]) == pytest.approx(loss / math.log(2) / bytes_per_token, rel=rel)
            assert {name for name, value in row.items() if value} == {"step", "val_loss", "val_bits_per_byte"}


def test_speeds_are_those_of_the_clock_beside_them(runs: dict[str, SimpleNamespace], loop: SimpleNamespace) -> None:
    for run in runs.values():
        flops = 6 * loop.params + 12 * 1 * 2 * 16 * 16
        before = {"tokens": 0.0, "seconds": 0.0}
        for row in run.rows:
            if not row["train_loss"]:
                continue
            now = {name: float(value) for name, value in row.items() if value}
            elapsed = (now["tokens"] - before["tokens"]) / now["tokens_per_second"]
            assert elapsed == pytest.approx(now["seconds"] - before["seconds"], abs=0.0011, rel=1e-3)
            assert elapsed > 0
            assert now["flops_per_second"] == pytest.approx(now["tokens_per_second"] * flops, rel=1e-3)
            assert now["mfu"] == pytest.approx(now["flops_per_second"] / (run.world * 1e12), rel=1e-9)
            before = now


def test_a_summary_is_what_was_measured(runs: dict[str, SimpleNamespace], loop: SimpleNamespace, corpus: Path) -> None:
    for run in runs.values():
        found = dict(run.summary)
        best = min(loop.val, key=loop.val.get)
        val = loop.text[2400:]
        assert found.pop("best_val_loss") == pytest.approx(loop.val[best], rel=max(run.rel, 1e-6))
        bits = loop.val[best] / math.log(2) * len(val) / len(val.encode())
        assert found.pop("best_val_bits_per_byte") == pytest.approx(bits, rel=max(run.rel, 1e-6))
        last = [float(row["seconds"]) for row in run.rows if row["seconds"]][-1]
        seconds, wall = found.pop("seconds"), found.pop("wall_seconds")
        assert last <= seconds < wall < run.wall
        assert found.pop("tokens_per_second") == pytest.approx(12 * 256 / seconds, abs=0.1, rel=0.001 / seconds)
        assert found.pop("device").startswith("cpu, ")
        assert list(found.pop("originality")) == ["final_sample", "generated_text", "validation_text"]
        commands = [["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "-uno"]]
        git = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False) for command in commands]
        commit, changes = (result.stdout.strip() if result.returncode == 0 else None for result in git)
        assert (found.pop("commit"), found.pop("dirty")) == (commit, None if commit is None else bool(changes))
        assert found == {
            "best_step": best,
            "steps": 12,
            "world_size": run.world,
            "stopped_early": False,
            "tokens": 12 * 256,
            "params": loop.params,
            "flops": 12 * 256 * (6 * loop.params + 12 * 1 * 2 * 16 * 16),
            "precision": "32-true" if run.rel == 1e-4 else "64-true",
            "checkpoint": "checkpoints/best.safetensors",
            "status": "completed",
            "reason": "",
            "seed": 7,
            "eval_batches": None,
            "validated": f"all {len(val.encode()):,} bytes",
            "corpus": corpus.name,
            "init_from": None,
            "corpus_sha256": hashlib.sha256(corpus.read_bytes()).hexdigest(),
            "tokenizer": "char",
            "command": run.command,
            "host": platform.node(),
            "versions": {
                "minigpt": version("minigpt"),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "lightning": version("lightning"),
            },
        }


def test_every_process_draws_its_own_dropout(runs: dict[str, SimpleNamespace]) -> None:
    for name in ("ddp", "fsdp"):
        first, second = (rng["torch"] for rng in read(runs[name].folder / LAST)["rng"])
        assert not torch.equal(first, second)


def test_a_validation_loss_that_is_nan_ends_the_run(corpus: Path, tmp_path: Path) -> None:
    """Of a single step: the loss before it is finite."""
    given = [*SETTINGS, f"data.path={corpus}", f"data.folder={tmp_path}/data", f"hydra.run.dir={tmp_path}/run"]
    with pytest.raises(RunError, match="at step 1 "):
        minigpt.train([*given, "trainer=cpu", "max_steps=1", "schedule.warmup_steps=0", "optimizer.lr=1e200"])
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["checkpoint"], summary["best_val_loss"]) == ("failed", None, None)


def test_a_resumed_run_counts_the_time_before_it() -> None:
    cfg = {"log_every": 1, "max_steps": 1, "data": {"batch_size": 1}, "trainer": {"accumulate_grad_batches": 1}}
    callback = metrics.MetricsCallback(
        OmegaConf.create(cfg | {"model": {"block_size": 8}}), started=time.perf_counter()
    )
    callback.load_state_dict({"seconds": 50.0, "wall_seconds": 100.0, "losses": [], "logged_seconds": 40.0})
    assert callback.state_dict()["wall_seconds"] >= 100
    assert callback.state_dict()["seconds"] == 50


class Slow(Callback):
    """Takes a fifth of a second at every validation, and measures how long training takes with them."""

    seconds = 0.0

    def on_train_start(self, *_: Any) -> None:
        self.began = time.perf_counter()

    def on_train_end(self, *_: Any) -> None:
        Slow.seconds = time.perf_counter() - self.began

    def on_validation_end(self, *_: Any) -> None:
        time.sleep(0.2)


def test_seconds_of_training_leave_validation_out_and_the_best_may_be_the_first(corpus: Path, tmp_path: Path) -> None:
    """Where the learning rate grows until nothing is learnt."""
    given = [*SETTINGS, f"data.path={corpus}", f"data.folder={tmp_path}/data", f"hydra.run.dir={tmp_path}/run"]
    growing = ["optimizer.lr=3", "schedule.warmup_steps=9", "max_steps=3", "eval_every=1"]
    run = minigpt.train([*given, "trainer=cpu", "+callbacks.slow._target_=test_metrics.Slow", *growing])
    first, second, third = (row for row in rows(tmp_path / "run") if row["val_loss"])
    assert float(first["val_loss"]) < min(float(second["val_loss"]), float(third["val_loss"]))
    assert run["seconds"] < Slow.seconds - 3 * 0.2
    assert (run["best_step"], run["best_val_loss"]) == (1, float(first["val_loss"]))
    assert run["best_val_bits_per_byte"] == float(first["val_bits_per_byte"])
    assert read(tmp_path / "run/checkpoints/best.safetensors")["global_step"] == 1
