"""One trial of the faults that are quick to inject; `make faults` runs many trials of all."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from robustness.faults import FAULTS
from robustness.faults.tools import Fault, Skipped
from small_runs import wandb_records

from minigpt.runs.callbacks.shutdown import GracefulShutdown
from minigpt.utils.signals import (
    END_SIGNALS,
    Interrupted,
    handle_signals,
    raise_interrupted,
    raise_on_signal,
)

MARKS = {"fast": [], "slow": [pytest.mark.slow], "ci": [pytest.mark.slow, pytest.mark.ci]}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=MARKS[fault.suite], id=fault.name)
        for fault in FAULTS
        if fault.suite in MARKS
    ],
)
def test_a_run_recovers_from_a_fault(fault: Fault, tmp_path: Path) -> None:
    try:
        fault(tmp_path, 0)
    except Skipped as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize(
    ("originality", "torn"),
    [(["callbacks.originality.characters=50"], ""), ([], "─"), ([], "── step 20, valid")],
    ids=["table", "bar", "header"],
)
def test_what_a_run_wrote_after_its_last_checkpoint_is_written_again_once(
    trained: Callable[..., Path],
    train: Callable[..., Any],
    tmp_path: Path,
    originality: list[str],
    torn: str,
) -> None:
    # Killed before its summary, or with a sample that a full disk cut off
    settings = ["callbacks.samples.max_new_tokens=20", *originality]
    whole = trained(*settings)
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "summary.json").unlink()
    with open(folder / "samples.txt", "a", encoding="utf-8") as file:
        file.write(torn)
    train(*settings, "resume=auto")
    written, expected = ((run / "samples.txt").read_text("utf-8") for run in (folder, whole))
    assert written == expected


@pytest.mark.slow
def test_weights_and_biases_gets_the_results_of_a_whole_run(
    train: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    curves: None,
) -> None:
    # Also the originality of its text, and also if its picture cannot be written
    (tmp_path / "run/curves.png").mkdir(parents=True)
    (tmp_path / "run/.hydra").mkdir()  # of a run, which continues
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(
        "logger=wandb",
        "callbacks.originality.characters=20",
        "resume=auto",
        "max_steps=4",
        "eval_every=4",
    )
    assert "Weights & Biases is lost" not in capsys.readouterr().err
    records = wandb_records(tmp_path / "run")
    assert [record["exit"]["exit_code"] for record in records if record["type"] == "exit"] == [0]
    assert "generated_text" in json.dumps(records)


def test_only_a_second_signal_ends_a_run_at_once() -> None:
    # In a process, a run with short steps ends as fast after the first
    trainer: Any = None
    with handle_signals(END_SIGNALS, raise_interrupted):
        GracefulShutdown(sync_every=1).on_train_start(trainer, None)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)


def test_a_terminal_that_closes_ends_a_run_once_though_it_sends_two_signals() -> None:
    # The shell sends one, and the system another; before and after the training too
    trainer: Any = None
    with handle_signals(END_SIGNALS, raise_interrupted):
        shutdown = GracefulShutdown(sync_every=1)
        with handle_signals(END_SIGNALS, raise_interrupted):
            shutdown.on_train_start(trainer, None)
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)
        assert shutdown.received == signal.SIGHUP
        with pytest.raises(Interrupted) as ended:
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
    assert ended.value.exit_code == 129


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    # As SIGHUP is with nohup
    trainer: Any = None
    with handle_signals(END_SIGNALS, raise_interrupted):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with raise_on_signal(), handle_signals(END_SIGNALS, raise_interrupted):
            GracefulShutdown(sync_every=1).on_train_start(trainer, None)
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
