"""Snapshots of real runs, and the commands that use them."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minigpt import load_checkpoint
from minigpt.checkpoints.find import BEST, find_snapshots
from minigpt.checkpoints.format import read
from minigpt.model import GPT
from minigpt.runs.snapshots import log_spaced
from minigpt.utils.errors import UserError

Train = Callable[..., SimpleNamespace]
STEPS = [0, *range(1, 11), 12, 13, 15, 17, 20]  # round(20 ** (i / 22)) for i up to 22, and 0


def weights(file: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = read(file)["state_dict"]
    return state


def in_bfloat16(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.bfloat16() for name, tensor in state.items()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("last", [1, 2, 20, 1_000_000])
@pytest.mark.parametrize("count", [2, 3, 24])
def test_snapshots_are_from_the_first_to_the_last_step(last: int, count: int) -> None:
    steps = sorted(log_spaced(last, count))
    assert (steps[0], steps[-1], len(steps) <= count) == (0, last, True)


def test_steps_of_snapshots_have_even_logarithms() -> None:
    ratios = [b / a for a, b in pairwise(sorted(log_spaced(1_000_000, 24))[8:])]
    assert ratios == pytest.approx([1e6 ** (1 / 22)] * 15, rel=0.02)


def test_a_run_keeps_the_first_the_last_and_steps_between(train: Train) -> None:
    run = train("ema_decay=0.9", "data.batch_size=4", "trainer.accumulate_grad_batches=2")
    files = find_snapshots(run.folder)
    assert list(files) == STEPS
    torch.manual_seed(1337)
    model, tokenizer = load_checkpoint(run.folder)
    initial = {f"model.{name}": tensor for name, tensor in GPT(model.config).state_dict().items()}
    assert equal(weights(files[0]), in_bfloat16(initial))
    assert equal(weights(files[20]), in_bfloat16(weights(run.folder / "checkpoints/last.safetensors")))  # the averages
    assert not equal(weights(files[17]), weights(files[20]))
    of_step, its_tokenizer = load_checkpoint(run.folder, step=10)
    assert equal({f"model.{name}": x.bfloat16() for name, x in of_step.state_dict().items()}, weights(files[10]))
    assert its_tokenizer.to_dict() == tokenizer.to_dict()
    with pytest.raises(UserError, match="has no snapshot of step 11; it has those of 0, 1, 2, 3"):
        load_checkpoint(run.folder / BEST, step=11)


@pytest.mark.parametrize("ema", ["0.9", "null"])
def test_snapshots_are_the_weights_of_checkpoints_and_change_no_training(
    train: Train, tmp_path: Path, ema: str
) -> None:
    same = [f"ema_decay={ema}", "callbacks.checkpoint.save_top_k=2"]  # with step-10.safetensors
    run, without = (
        train(*same, *more, folder=tmp_path / str(len(more))) for more in ([], ["callbacks.snapshots=null"])
    )
    for step in (10, 20):
        checkpoint = weights(run.folder / f"checkpoints/step-{step}.safetensors")
        assert equal(weights(find_snapshots(run.folder)[step]), in_bfloat16(checkpoint))
        assert equal(checkpoint, weights(without.folder / f"checkpoints/step-{step}.safetensors"))


def test_a_resumed_run_has_the_same_snapshots(train: Train, tmp_path: Path) -> None:
    whole = find_snapshots(train("ema_decay=0.9", folder=tmp_path / "whole").folder)
    folder = train("ema_decay=0.9", "pause_at=10", folder=tmp_path / "run").folder
    assert list(find_snapshots(folder)) == [step for step in STEPS if step <= 10]
    (folder / "checkpoints/snapshots/step-14.safetensors").write_bytes(b"of another schedule")
    train("ema_decay=0.9", "resume=auto", folder=folder)
    resumed = find_snapshots(folder)
    assert list(resumed) == STEPS
    assert all(equal(weights(resumed[step]), weights(whole[step])) for step in STEPS)


def test_snapshots_are_limited_by_their_size_and_turned_off(train: Train, tmp_path: Path) -> None:
    size = train("max_steps=1", folder=tmp_path / "one").summary["params"] * 2 / 1e6
    for i, (limit, expected) in enumerate(
        ((f"max_mb={3.5 * size:g}", [0, 1, 20]), (f"max_mb={1.5 * size:.3g}", []), ("count=2", [0, 20]))
    ):
        folder = train(f"callbacks.snapshots.{limit}", folder=tmp_path / str(i)).folder
        assert list(find_snapshots(folder)) == expected
    assert not find_snapshots(train("callbacks.snapshots=null", folder=tmp_path / "none").folder)


def test_a_snapshot_that_cannot_be_written_is_only_a_warning(train: Train, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/checkpoints/snapshots").write_text("a file")
    assert train("max_steps=1", "eval_every=1").loss
    assert "step-0.safetensors cannot be written" in capsys.readouterr().err
