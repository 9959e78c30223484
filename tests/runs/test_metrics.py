"""The columns of metrics.csv and the fields of summary.json, against a loop in plain torch."""

import hashlib
import json
import math
import platform
import random
import socket
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import Script
from small_runs import ROOT, SCRIPTS, table
from torch.nn import functional as F

import minigpt
from minigpt import GPT, GPTConfig
from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.format import read
from minigpt.data.batches import WindowOrder
from minigpt.runs.callbacks import metrics
from minigpt.training.language_model import LanguageModel
from minigpt.utils.errors import RunError

pytestmark = pytest.mark.xdist_group("processes")
SHAPE = {
    "block_size": 16,
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 32,
    "bias": False,
    "position": "rope",
}
SETTINGS = f"""
    {" ".join(f"model.{name}={value}" for name, value in SHAPE.items())}
    tokenizer=char data=text data.val_fraction=0.2 data.batch_size=8 data.eval_batch_size=10
    trainer=cpu trainer.accumulate_grad_batches=2 trainer.gradient_clip_val=1.3
    trainer.precision=64-true
    optimizer=adamw optimizer.lr=0.05 optimizer.betas=[0.8,0.95] optimizer.weight_decay=0.5
    schedule=linear schedule.warmup_steps=3 schedule.final_lr_frac=0.1
    max_steps=12 eval_every=5 log_every=5 seed=7 callbacks.samples=null
    callbacks.originality.characters=400
""".split()
RANKS = {
    "one": (),
    "ddp": ("trainer=ddp", "trainer.accelerator=cpu"),
    "fsdp": (
        "trainer=fsdp",
        "trainer.accelerator=cpu",
        "trainer.precision=32-true",
    ),  # it has no 64 bits
}


@pytest.fixture(scope="session")
def given(once):
    """Settings, with a text of 3001 characters, some of two bytes.

    2400 are trained on; no window of 16 ends there.
    """

    def build(folder):
        drawn = random.Random(0)
        words = (drawn.choice(["été", "la", "reine", "où", "dort"]) for _ in range(1000))
        (folder / "text.txt").write_text(" ".join(words)[:3001], encoding="utf-8")

    return [*SETTINGS, f"data.path={once('metrics-text', build)}/text.txt"]


def set_peak_flops():
    metrics.PEAK_FLOPS[metrics.device_name(torch.device("cpu"))] = 1e12


@pytest.fixture(
    scope="session",
    params=["one", "fsdp", pytest.param("ddp", marks=[pytest.mark.slow, pytest.mark.ci])],
)
def run(request, given, once):
    """A run in one process, and in two as torchrun starts them."""
    ranks = "0" if request.param == "one" else "01"

    def build(folder):
        env = {}
        if len(ranks) > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
            env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"}
            env["GROUP_RANK"] = "0"
        line = [*given, *RANKS[request.param], f"data.folder={folder}/data"]
        began = time.perf_counter()
        started = []
        for rank in ranks:
            own = env | {"RANK": rank, "LOCAL_RANK": rank} if env else {}
            options = {"prepare": set_peak_flops, "output": folder / rank, "env": own}
            started.append(Script("train.py", *line, f"hydra.run.dir={folder}/run", **options))
        assert [one.wait() for one in started] == [0] * len(ranks), started[0].stderr
        (folder / "wall").write_text(str(time.perf_counter() - began))

    built = once(f"metrics-{request.param}", build)
    folder = built / "run"
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return SimpleNamespace(
        folder=folder,
        world=len(ranks),
        rel=1e-4 if request.param == "fsdp" else 1e-9,
        rows=table(folder / "metrics.csv"),
        summary=summary,
        wall=float((built / "wall").read_text()),
        command=[*given, *RANKS[request.param], f"data.folder={built}/data"],
    )


@pytest.fixture(scope="session")
def loop(given):
    """The same training without Lightning, our optimizers and data, with settings as numbers."""
    file = Path(given[-1].removeprefix("data.path="))
    text = file.read_text(encoding="utf-8")
    ids = torch.tensor([sorted(set(text)).index(character) for character in text])
    train = ids[:2400]
    val = ids[2400:]
    torch.manual_seed(7)
    model = GPT(GPTConfig(**SHAPE, vocab_size=len(set(text)))).double()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.95), foreach=False, fused=False)
    starts = torch.from_numpy(WindowOrder(2400, 16, 7).starts(torch.arange(12 * 16).numpy())).view(
        12, 16, 1
    )
    found = SimpleNamespace(losses=[], norms=[], rates=[], val={}, file=file, text=text, bits={})
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
        for values, value in (
            (found.losses, loss.detach()),
            (found.norms, norm),
            (found.rates, rate),
        ):
            values.append(float(value))
        if step in (5, 10, 12):
            with torch.no_grad():
                windows = (val[i : i + 17] for i in range(0, 600, 16))
                nats = sum(
                    F.cross_entropy(model(w[None, :-1])[0], w[1:], reduction="sum") for w in windows
                )
            found.val[step] = float(nats) / 600
            found.bits[step] = found.val[step] / math.log(2) / (len(text[2400:].encode()) / 601)
    # So that another limit is another training
    assert min(found.norms) < 1.3 < 2 < max(found.norms)
    found.params = sum(p.numel() for p in model.parameters())
    found.flops = 6 * found.params + 12 * 1 * 2 * 16 * 16  # per token
    return found


def test_rows_are_what_a_plain_loop_computes(run, loop):
    train = [row for row in run.rows if row["train_loss"]]
    val = [row for row in run.rows if row["val_loss"]]
    assert [row["step"] for row in train] == [row["step"] for row in val] == ["5", "10", "12"]
    for row, before in zip(train, (0, 5, 10), strict=True):
        step = int(row["step"])
        mean = sum(loop.losses[before:step]) / (step - before)
        assert float(row["train_loss"]) == pytest.approx(mean, rel=run.rel)
        assert float(row["grad_norm"]) == pytest.approx(loop.norms[step - 1], rel=run.rel)
        assert float(row["learning_rate"]) == pytest.approx(loop.rates[step - 1], rel=1e-12)
        assert int(row["tokens"]) == step * 2 * 8 * 16
        assert row["val_loss"] == row["val_bits_per_byte"] == ""
    for row in val:
        step = int(row.pop("step"))
        expected = {"val_loss": loop.val[step], "val_bits_per_byte": loop.bits[step]}
        found = {name: float(value) for name, value in row.items() if value}
        assert found == pytest.approx(expected, rel=max(run.rel, 1e-6))  # summed up in 32 bits


def test_speeds_are_those_of_the_clock_beside_them(run, loop):
    before = {"tokens": 0.0, "seconds": 0.0}
    for row in run.rows:
        if row["train_loss"]:
            now = {name: float(value) for name, value in row.items() if value}
            elapsed = (now["tokens"] - before["tokens"]) / now["tokens_per_second"]
            assert elapsed == pytest.approx(
                now["seconds"] - before["seconds"], abs=0.0011, rel=1e-3
            )
            assert elapsed > 0
            assert now["flops_per_second"] == pytest.approx(
                now["tokens_per_second"] * loop.flops, rel=1e-3
            )
            assert now["mfu"] == pytest.approx(
                now["flops_per_second"] / (run.world * 1e12), rel=1e-9
            )
            before = now


def test_a_summary_is_what_was_measured(run, loop):
    best = min(loop.val, key=loop.val.get)
    rel = max(run.rel, 1e-6)
    seconds = run.summary["seconds"]
    wall = run.summary["wall_seconds"]
    last = [row["seconds"] for row in run.rows if row["seconds"]][-1]
    assert float(last) <= seconds < wall < run.wall
    untracked = ["git", "ls-files", "--others", "--exclude-standard", "*.py", "*.yaml"]
    commands = [["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "-uno"], untracked]
    git = [
        subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
        for command in commands
    ]
    printed = [result.stdout.strip() if result.returncode == 0 else None for result in git]
    (commit, *changes) = printed
    train = str(SCRIPTS / "train.py")
    n_bytes = len(loop.text[2400:].encode())
    assert run.summary["device"].startswith("cpu, ")
    assert list(run.summary["originality"]) == ["final_sample", "generated_text", "validation_text"]
    assert run.summary == {
        "best_val_loss": pytest.approx(loop.val[best], rel=rel),
        "best_val_bits_per_byte": pytest.approx(loop.bits[best], rel=rel),
        "seconds": seconds,
        "wall_seconds": wall,
        "tokens_per_second": pytest.approx(12 * 256 / seconds, abs=0.1, rel=0.001 / seconds),
        "device": run.summary["device"],
        "originality": run.summary["originality"],
        "commit": commit,
        "dirty": None if commit is None else any(changes),
        "code": None,
        "code_sha256": run.summary["code_sha256"],
        "best_step": best,
        "steps": 12,
        "world_size": run.world,
        "thread_changes": [],
        "stopped_early": False,
        "tokens": 12 * 256,
        "params": loop.params,
        "flops": 12 * 256 * loop.flops,
        "precision": "32-true" if run.rel == 1e-4 else "64-true",
        "checkpoint": "checkpoints/best.safetensors",
        "status": "completed",
        "reason": "",
        "seed": 7,
        "eval_batches": None,
        "validated": f"all {n_bytes:,} bytes of text {run.summary['validated'][-8:]}",
        "corpus": "text.txt",
        "init_from": None,
        "resumed_from": None,
        "corpus_sha256": hashlib.sha256(loop.file.read_bytes()).hexdigest(),
        "tokenizer": "char",
        "command": " ".join([train, *run.command, f"hydra.run.dir={run.folder}"]),
        "host": platform.node(),
        "versions": {
            "minigpt": version("minigpt"),
            "python": platform.python_version(),
            "torch": version("torch"),
            "lightning": version("lightning"),
        },
    }


def test_every_process_draws_its_own_dropout(run):
    states = {tuple(rng["torch"].tolist()) for rng in read(run.folder / LAST)["rng"]}
    assert len(states) == run.world


@pytest.fixture
def mine(given, tmp_path):
    return [*given, f"data.folder={tmp_path}/data", f"hydra.run.dir={tmp_path}/run"]


def test_a_validation_loss_that_is_nan_ends_the_run(mine, tmp_path):
    # Of a single step: the loss before it is finite
    with pytest.raises(RunError, match="at step 1 "):
        minigpt.train([*mine, "max_steps=1", "schedule.warmup_steps=0", "optimizer.lr=1e200"])
    summary = json.loads((tmp_path / "run/summary.json").read_text(encoding="utf-8"))
    found = [summary[name] for name in ("status", "checkpoint", "best_val_loss")]
    assert found == ["failed", None, None]


def test_seconds_of_training_leave_validation_out_and_the_best_may_be_the_first(
    mine, tmp_path, monkeypatch
):
    # Of a run whose learning rate grows until nothing is learnt, and which then resumes
    took = []
    monkeypatch.setattr(LanguageModel, "on_validation_start", lambda module: took.append(1000))
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: time.monotonic() + sum(took))
    growing = [
        *mine,
        "optimizer.lr=3",
        "schedule.warmup_steps=9",
        "eval_every=1",
        "callbacks.originality=null",
    ]
    before = minigpt.train([*growing, "max_steps=3"])
    first, second, third = (row for row in table(tmp_path / "run/metrics.csv") if row["val_loss"])
    assert float(first["val_loss"]) < min(float(second["val_loss"]), float(third["val_loss"]))
    assert (before["best_step"], before["best_val_loss"]) == (1, float(first["val_loss"]))
    assert before["best_val_bits_per_byte"] == float(first["val_bits_per_byte"])
    assert read(tmp_path / "run/checkpoints/best.safetensors")["global_step"] == 1
    resumed = minigpt.train([*growing, "max_steps=4", "resume=auto"])
    assert 0 < before["seconds"] < resumed["seconds"] < 1000 < 4000 < resumed["wall_seconds"] < 5000
