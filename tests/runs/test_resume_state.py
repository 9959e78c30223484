"""What the command line says against the state of a checkpoint, and the best checkpoint against metrics and summary."""

from collections.abc import Callable
from math import fsum
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_runs import column, small_run

import minigpt
from minigpt import load_checkpoint
from minigpt.checkpoints.find import BEST, LAST
from minigpt.checkpoints.format import read
from minigpt.checkpoints.validation_split import validation_batches

Train = Callable[..., SimpleNamespace]
FAST = ["callbacks.samples=null", "callbacks.snapshots=null"]
# Only the first validation, of step 5, is an improvement.
STOP = [*FAST, "callbacks=early_stopping", "callbacks.early_stopping.min_delta=9", "eval_every=5", "max_steps=50"]
# Losses that rise and fall again, with a checkpoint at every step.
UNSTABLE = [*FAST, "max_steps=12", "schedule=constant", "schedule.warmup_steps=0", "optimizer.lr=0.3", "eval_every=1"]


@pytest.mark.parametrize(
    ("patience", "pause_at"), [(5, 10), pytest.param(2, 10, marks=pytest.mark.slow), (5, "null"), (2, "null")]
)
def test_the_patience_is_that_of_the_command_line(
    train: Train, capsys: pytest.CaptureFixture[str], pause_at: object, patience: int
) -> None:
    first = train(*STOP, f"pause_at={pause_at}")
    assert first.summary["steps"] == (10 if pause_at == 10 else 20)
    capsys.readouterr()
    again = train(*STOP, "resume=auto", f"callbacks.early_stopping.patience={patience}").summary
    assert again["stopped_early"]
    at_once = first.summary["steps"] + 5  # the validations without improvement are as many already
    assert again["steps"] == max(5 + 5 * patience, at_once)
    changed = f"callbacks.early_stopping.patience changed from 3 to {patience}; it applies from step"
    assert changed in capsys.readouterr().err


def test_a_run_that_stopped_early_continues_without_the_callback_that_stopped_it(train: Train) -> None:
    assert train(*STOP, "max_steps=30").summary["steps"] == 20
    assert train(*STOP, "max_steps=30", "resume=auto", "~callbacks.early_stopping").summary["steps"] == 30


def test_a_new_run_has_an_early_stopping_of_its_own(train: Train, tmp_path: Path) -> None:
    other = train(*STOP, "pause_at=15")
    run = train(*STOP, f"resume={other.folder}", folder=tmp_path / "new")
    assert run.summary["steps"] == 35  # step 20 is its first validation
    assert f"Best score: {column(run.folder, 'val_loss')[0]:.3f}." in run.summary["reason"]


def test_a_missing_best_of_a_complete_run_is_mentioned(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    (train(*FAST, "max_steps=1").folder / BEST).unlink()
    train(*FAST, "max_steps=1", "resume=auto")
    assert "best.safetensors of step 1 is missing\n" in capsys.readouterr().err


def check_best(run: SimpleNamespace) -> None:
    """Check that the file, the summary, metrics.csv and the loss of the model in the file agree on the best."""
    step, loss = run.summary["best_step"], run.summary["best_val_loss"]
    assert (read(run.folder / BEST)["global_step"], run.summary["checkpoint"]) == (step, BEST)
    assert column(run.folder, "val_loss")[step - 1] == loss
    model, _ = load_checkpoint(run.folder / BEST)
    with torch.no_grad():
        sums = [model(x, y, reduction="sum").item() for x, y in validation_batches(run.folder / BEST, model)]
        targets = sum(int((y >= 0).sum()) for _, y in validation_batches(run.folder / BEST, model))
    assert fsum(sums) / targets == pytest.approx(loss, rel=1e-5)


@pytest.fixture(scope="module")
def losses(text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The validation losses of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("unstable")
    minigpt.train([*small_run(text, folder / "data"), *UNSTABLE, f"hydra.run.dir={folder}/run"])
    return column(folder / "run", "val_loss")


@pytest.mark.parametrize("harm", ["none", "last is damaged", "best is missing", "best is damaged"])
def test_the_best_checkpoint_summary_and_metrics_agree_after_resuming(
    train: Train, losses: list[float], capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    triples = zip(losses, losses[1:], losses[2:], strict=False)
    best = next(i for i, (x, y, z) in enumerate(triples, 1) if x == min(losses[:i]) and z < x < y)
    last = best + 2 if harm == "last is damaged" else best + 1  # the best of another course, or worse
    folder = train(*UNSTABLE, f"pause_at={last}").folder
    damaged = folder / (LAST if harm == "last is damaged" else BEST)
    if harm != "none":
        damaged.unlink()
    if "damaged" in harm:
        damaged.write_bytes(b"damaged")
    capsys.readouterr()
    run = train(*UNSTABLE, "resume=auto", "optimizer.lr=1e-9")  # which changes no loss any more
    assert (f"the best checkpoint, of step {best}, is not in" in capsys.readouterr().err) == (harm != "none")
    assert (run.summary["best_step"] == best) == (harm == "none")
    check_best(run)
