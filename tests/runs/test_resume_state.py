"""Settings against the state of a checkpoint, and the best checkpoint against the summary."""

import shutil
from math import fsum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import make_model
from small_runs import column

from minigpt import load_checkpoint
from minigpt.checkpoints.find import BEST, LAST
from minigpt.checkpoints.format import read
from minigpt.extras.corpora.run_corpus import validation_batches
from minigpt.runs.callbacks.resume_state import ResumeState
from minigpt.runs.run_dir import read_summary

FAST = ["callbacks.samples=null", "callbacks.snapshots=null"]
# Only the first validation, of step 5, is an improvement.
STOP = [
    *FAST,
    "callbacks=early_stopping",
    "callbacks.early_stopping.min_delta=9",
    "eval_every=5",
    "max_steps=50",
]
# Losses that rise and fall again, with a checkpoint at every step.
UNSTABLE = [
    *FAST,
    "max_steps=12",
    "schedule=constant",
    "schedule.warmup_steps=0",
    "optimizer.lr=0.3",
    "eval_every=1",
]


@pytest.fixture
def copied(trained, tmp_path):
    """Copy a small run, which is trained once: `copied("max_steps=5")` returns its folder."""
    return lambda *line: Path(shutil.copytree(trained(*line), tmp_path / "run"))


@pytest.mark.parametrize(("patience", "pause_at"), [(5, 10), (2, "null")])
def test_the_patience_is_that_of_the_command_line(
    train, copied, capsys, monkeypatch, tmp_path, pause_at, patience
):
    monkeypatch.chdir(tmp_path)
    first = read_summary(copied(*STOP, f"pause_at={pause_at}"))
    assert first["steps"] == (10 if pause_at == 10 else 20)
    again = train(*STOP, "resume=auto", f"callbacks.early_stopping.patience={patience}").summary
    assert (again["status"], again["stopped_early"]) == ("completed", True)
    assert again["steps"] == max(5 + 5 * patience, first["steps"] + 5)  # at least one validation
    assert again["reason"].startswith(
        f"stopped early at step {again['steps']} of 50: Monitored metric val_loss did not"
    )
    out, err = capsys.readouterr()
    assert (
        f"callbacks.early_stopping.patience changed from 3 to {patience}; it applies from step"
        in err
    )
    assert f"\n{again['reason']}\n" in out
    assert "\nrun folder       run\n" in out  # the shortest path from here


def test_a_run_that_stopped_early_continues_without_the_callback_that_stopped_it(train, copied):
    assert read_summary(copied(*STOP, "pause_at=null"))["steps"] == 20
    line = [*STOP, "max_steps=30", "resume=auto", "~callbacks.early_stopping"]
    assert train(*line).summary["steps"] == 30


def test_a_resumed_run_says_its_learning_rate_and_logs_its_warnings(train, capsys):
    line = [*FAST, "schedule=linear", "schedule.warmup_steps=0"]
    run = train(*line, "max_steps=10")
    train(*line, "max_steps=20", "optimizer.lr=1e-2", "resume=auto")
    err = capsys.readouterr().err
    expected = (
        "training    10 steps from step 10 at learning rate 0.005, "  # half way from 0.01 to 0
    )
    warnings = [text for text in err.splitlines() if text.startswith("warning: ")]
    assert [text.split()[1] for text in warnings] == ["optimizer.lr", "max_steps"]
    log = (run.folder / "log.txt").read_text(encoding="utf-8").splitlines()
    assert [log.count(text) for text in warnings] == [1, 1]
    assert any(text.startswith(expected) for text in log)
    # Of step 15
    assert column(run.folder, "learning_rate")[-2] == pytest.approx(0.01 * (1 - 14 / 20))


def test_a_new_run_has_an_early_stopping_of_its_own(train, tmp_path):
    other = train(*STOP, "pause_at=15")
    run = train(*STOP, f"resume={other.folder}", folder=tmp_path / "new")
    assert run.summary["steps"] == 35  # step 20 is its first validation
    assert f"Best score: {column(run.folder, 'val_loss')[0]:.3f}." in run.summary["reason"]


@pytest.mark.parametrize("kind", ["mps", "cuda", "xpu"])
def test_the_generator_of_the_device_is_saved_and_restored(kind, monkeypatch):
    # Which draws the dropout masks there; functions of torch stand in for that device
    generator = [torch.arange(3)]
    monkeypatch.setattr(getattr(torch, kind), "get_rng_state", lambda: generator[0].clone())
    monkeypatch.setattr(
        getattr(torch, kind), "set_rng_state", lambda state: generator.__setitem__(0, state)
    )
    monkeypatch.setattr("minigpt.runs.callbacks.resume_state.apply_config", lambda *given: None)
    module = SimpleNamespace(model=make_model(), device=torch.device(kind), max_steps=9)
    progress = {"global_step": 2, "val_check_interval": 2, "accumulate_grad_batches": 1}
    trainer: Any = SimpleNamespace(**progress, world_size=1, global_rank=0)
    saved = {}
    resumed = ResumeState({})
    ResumeState({}).on_save_checkpoint(trainer, module, saved)
    generator[0] += 1
    resumed.rng = saved["rng"]
    torch.manual_seed(1)
    resumed.on_train_start(trainer, module)
    assert (generator[0].tolist(), torch.initial_seed()) == ([0, 1, 2], 0)


def test_a_missing_best_of_a_complete_run_is_mentioned(train, copied, capsys):
    (copied() / BEST).unlink()
    train("resume=auto")
    assert "best.safetensors of step 20 is missing\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "harm",
    [
        "none",
        "last is damaged",
        "best is damaged",
        pytest.param("best is missing", marks=pytest.mark.slow),
    ],
)
def test_the_best_checkpoint_summary_and_metrics_agree_after_resuming(
    train, trained, copied, capsys, harm
):
    losses = column(trained(*UNSTABLE), "val_loss")
    triples = zip(losses, losses[1:], losses[2:], strict=False)
    best = next(i for i, (x, y, z) in enumerate(triples, 1) if x == min(losses[:i]) and z < x < y)
    # The best of another course, or worse
    last = best + 2 if harm == "last is damaged" else best + 1
    folder = copied(*UNSTABLE, f"pause_at={last}")
    damaged = folder / (LAST if harm == "last is damaged" else BEST)
    if harm != "none":
        damaged.unlink()
    if "damaged" in harm:
        damaged.write_bytes(b"damaged")
    # With a rate that changes no loss any more
    summary = train(*UNSTABLE, "resume=auto", "optimizer.lr=1e-9").summary
    lost = f"the best checkpoint, of step {best}, is not in" in capsys.readouterr().err
    assert (lost, summary["best_step"] == best) == (harm != "none", harm == "none")
    # The file, the summary, metrics.csv and the loss of the model in the file agree.
    assert read(folder / BEST)["global_step"] == summary["best_step"]
    assert summary["checkpoint"] == BEST
    assert column(folder, "val_loss")[summary["best_step"] - 1] == summary["best_val_loss"]
    model, _ = load_checkpoint(folder / BEST)
    batches = list(validation_batches(folder / BEST, model))
    with torch.no_grad():
        nats = fsum(model(x, y, reduction="sum").item() for x, y in batches)
    assert nats / sum(int((y >= 0).sum()) for _, y in batches) == pytest.approx(
        summary["best_val_loss"], rel=1e-5
    )
