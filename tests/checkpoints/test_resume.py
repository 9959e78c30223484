"""Runs that go on: they end as if nothing had stopped them, to the last bit."""

import csv
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.errors import InstantiationException
from lightning.pytorch import Callback, Trainer

from minigpt import load_checkpoint
from minigpt.checkpoints.find import BEST, LAST
from minigpt.checkpoints.format import read, write
from minigpt.data.batches import WindowOrder
from minigpt.ema import EMA
from minigpt.runs.callbacks import LossSpikeDetector
from minigpt.utils.errors import Diverged, UserError
from minigpt.utils.signals import Interrupted

# What Lightning counts for its own loggers and for what it has looked at, and what clocks and folders say.
ASIDE = {
    "seconds",
    "wall_seconds",
    "logged_seconds",
    "config",
    "provenance",
    "epoch_loop.val_loop.batch_progress",
    "epoch_loop.state_dict",
}
CLOCKS = ("seconds", "tokens_per_second", "flops_per_second")
OFTEN = [
    "eval_every=7",
    "callbacks.checkpoint.save_top_k=9",
    "model.dropout=0.1",
]  # 5 does not divide 7: rows lie across


def differences(one: Any, other: Any, at: str = "") -> list[str]:
    """Where two checkpoints differ, but for what clocks said."""
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) else [at]
    if isinstance(one, dict):
        keys = {*one, *other} - ASIDE
        return [where for key in keys for where in differences(one.get(key), other.get(key), f"{at}/{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [where for i, pair in pairs for where in differences(*pair, f"{at}/{i}")]
    return [] if one == other else [at]


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return [{name: value for name, value in row.items() if name not in CLOCKS} for row in csv.DictReader(file)]


def broken_off(run: Path, step: int, folder: Path) -> Path:
    """The folder of a run that was killed some time after the checkpoint of a step: all else may be further on."""
    shutil.copytree(run, folder)
    for file in (folder / "checkpoints").iterdir():
        if file.name != f"step-{step}.safetensors":
            file.unlink()
    (folder / "checkpoints" / f"step-{step}.safetensors").rename(folder / LAST)
    (folder / "summary.json").unlink()
    return folder


def check_same_end(one: Path, other: Path) -> None:
    assert differences(read(one / LAST), read(other / LAST)) == []
    assert rows(one) == rows(other)
    assert (one / "samples.txt").read_text() == (other / "samples.txt").read_text()
    assert read(one / BEST)["global_step"] == read(other / BEST)["global_step"]


@pytest.mark.parametrize(
    "settings",
    [
        "",
        "trainer.accumulate_grad_batches=2 tokenizer=byte",
        "ema_decay=0.9 optimizer=muon tokenizer=bpe tokenizer.vocab_size=300",
        "model.block_size=64 data.batch_size=64 schedule=cosine",  # 4 batches are an epoch
        "callbacks=early_stopping callbacks.early_stopping.patience=1 callbacks.early_stopping.min_delta=0.2",
        "optimizer=muon_fast trainer.gradient_clip_val=null",
        pytest.param(
            "tokenizer=gpt2",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="needs the files of gpt2"),
            ],
        ),
    ],
    ids=["plain", "accumulation", "average", "epochs", "early stopping", "muon", "gpt2"],
)
def test_a_run_that_goes_on_ends_as_if_it_had_never_stopped(
    train: Callable[..., Any], tmp_path: Path, settings: str
) -> None:
    same = [*OFTEN, *settings.split()]
    whole = train(*same, folder=tmp_path / "whole").folder
    first, *_, last = sorted(int(file.stem[5:]) for file in (whole / "checkpoints").glob("step-*"))
    assert (first, last) == (7, 14) if "early" in settings else (7, 20)
    resumed = train(*same, "resume=auto", folder=broken_off(whole, first, tmp_path / "resumed")).folder
    check_same_end(whole, resumed)


def test_a_run_that_was_killed_right_after_its_last_checkpoint_tells_its_end(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    whole = train(*OFTEN, folder=tmp_path / "whole").folder
    resumed = train(*OFTEN, "resume=auto", folder=broken_off(whole, 20, tmp_path / "killed"))
    assert resumed.summary["status"] == "completed"
    check_same_end(whole, resumed.folder)


@pytest.mark.parametrize("name", ["summary.json", "metrics.csv", "samples.txt"])
def test_a_damaged_file_beside_the_checkpoints_loses_no_run(
    train: Callable[..., Any], tmp_path: Path, name: str, capsys: Any
) -> None:
    whole = train(*OFTEN, folder=tmp_path / "whole").folder
    folder = broken_off(whole, 14, tmp_path / "damaged")
    (folder / name).write_bytes((whole / name).read_bytes()[:-1] + b"\n\xff\x00{\n")
    resumed = train(*OFTEN, "resume=auto", folder=folder)
    check_same_end(whole, resumed.folder)
    assert ("1 of its rows are left out" in capsys.readouterr().err) == (name == "metrics.csv")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_resume_bit_for_bit(launch: Callable[..., Any], tmp_path: Path, strategy: str) -> None:
    two = [*OFTEN, f"trainer={strategy}", "trainer.accelerator=cpu", "trainer.devices=2"]
    whole = launch("train.py", *two, f"hydra.run.dir={tmp_path}/whole")
    assert whole.returncode == 0, whole.stderr
    folder = broken_off(tmp_path / "whole", 7, tmp_path / "resumed")
    resumed = launch("train.py", *two, "resume=auto", f"hydra.run.dir={folder}")
    assert resumed.returncode == 0, resumed.stderr
    check_same_end(tmp_path / "whole", folder)


def test_a_run_goes_on_in_another_folder(train: Callable[..., Any], tmp_path: Path) -> None:
    whole = train(*OFTEN, folder=tmp_path / "whole").folder
    resumed = train(*OFTEN, f"resume={whole}/checkpoints/step-7.safetensors", folder=tmp_path / "new").folder
    assert differences(read(whole / LAST)["state_dict"], read(resumed / LAST)["state_dict"]) == []
    assert rows(resumed) == [row for row in rows(whole) if int(row["step"]) > 7]


def test_the_best_of_a_folder_is_of_its_own_run(train: Callable[..., Any], tmp_path: Path) -> None:
    whole = train(folder=tmp_path / "whole")
    worse = train("max_steps=25", "optimizer.lr=0.5", f"resume={whole.folder}", folder=tmp_path / "worse")
    assert worse.loss > whole.loss
    assert read(worse.folder / BEST)["global_step"] == worse.summary["best_step"] == 25


def test_more_steps_than_before_follow_the_new_schedule(train: Callable[..., Any], capsys: Any) -> None:
    run = train()
    train("resume=auto", "max_steps=30", folder=run.folder)
    assert "max_steps was 20 and is 30, the schedule of the learning rate follows it" in capsys.readouterr().err
    whole = train("max_steps=30", folder=run.folder.with_name("whole"))
    rates = {row["step"]: row["learning_rate"] for row in rows(whole.folder) if row["learning_rate"]}
    after = {row["step"]: row["learning_rate"] for row in rows(run.folder) if row["learning_rate"]}
    assert {step: after[step] for step in ("25", "30")} == {step: rates[step] for step in ("25", "30")}


def test_a_setting_of_the_optimizer_that_is_changed_applies_from_there_on(
    train: Callable[..., Any], capsys: Any
) -> None:
    run = train("schedule=constant", "schedule.warmup_steps=0", "optimizer.lr=0.001", "max_steps=10")
    changed = ["optimizer.lr=0.0005", "optimizer.weight_decay=0.3", "max_steps=20"]
    train("schedule=constant", "schedule.warmup_steps=0", *changed, "resume=auto", folder=run.folder)
    assert "optimizer.lr was 0.001 and is 0.0005, from here on (step 10)" in capsys.readouterr().err
    assert [float(row["learning_rate"]) for row in rows(run.folder) if row["learning_rate"]] == [1e-3, 1e-3, 5e-4, 5e-4]
    groups = read(run.folder / LAST)["optimizer_states"][0]["param_groups"]
    assert groups[0]["weight_decay"] == 0.3


def test_the_best_so_many_checkpoints_are_kept(train: Callable[..., Any], tmp_path: Path) -> None:
    run = train("eval_every=4", "callbacks.checkpoint.save_top_k=2", "optimizer.lr=1e-9")  # the losses hardly move
    lowest = sorted((float(row["val_loss"]), int(row["step"])) for row in rows(run.folder) if row["val_loss"])[:2]
    kept = {file.name for file in (run.folder / "checkpoints").iterdir()}
    assert kept == {
        "best.safetensors",
        "last.safetensors",
        "previous.safetensors",
        *(f"step-{step}.safetensors" for _, step in lowest),
    }
    assert read(run.folder / BEST)["global_step"] == lowest[0][1]
    with pytest.raises(InstantiationException, match=r"save_top_k=0 is not possible"):
        train("callbacks.checkpoint.save_top_k=0", folder=tmp_path / "none")


def test_a_checkpoint_that_was_not_named_best_before_the_end_is_named_after(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    folder = broken_off(train(*OFTEN).folder, 14, tmp_path / "killed")
    assert not (folder / BEST).exists()
    train(*OFTEN, "resume=auto", "eval_every=100", "max_steps=15", "optimizer.lr=1.0", folder=folder)
    assert read(folder / BEST)["global_step"] == 14


def test_the_average_of_the_weights_is_what_is_kept(train: Callable[..., Any]) -> None:
    run = train("ema_decay=0.9", "eval_every=20")
    content = read(run.folder / LAST)
    model, _ = load_checkpoint(run.folder)
    averages = dict(model.named_parameters())
    weights = {name.removeprefix("model."): tensor for name, tensor in content["unaveraged"].items()}
    assert content["ema_updates"] == 20
    for name, average in averages.items():
        assert not torch.equal(average, weights[name]), name
    plain = train("eval_every=20", folder=run.folder.with_name("plain"))
    for name, tensor in load_checkpoint(plain.folder)[0].named_parameters():
        assert torch.equal(tensor, weights[name]), name  # an average changes nothing of the training


def test_what_is_said_at_the_end_is_said_by_the_average(train: Callable[..., Any], tmp_path: Path, capsys: Any) -> None:
    said = []
    for settings in ([], ["~callbacks.checkpoint"]):
        train("ema_decay=0.9", *settings, folder=tmp_path / f"run{len(settings)}")
        said.append(capsys.readouterr().out.partition("\nvalidation loss")[0])
    assert said[0] == said[1] != ""


def test_the_average_is_the_one_of_its_formula() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    average = EMA([weight], 0.5)
    expected = 1.0
    for t, value in enumerate((2.0, 5.0, 3.0, -1.0, 4.0, 0.5, 7.0, 9.0, 2.0, 1.0), start=1):
        with torch.no_grad():
            weight.fill_(value)
        average.update()
        decay = min(0.5, (1 + t) / (10 + t))
        expected = decay * expected + (1 - decay) * value
    average.swap()
    assert weight.item() == pytest.approx(expected, rel=1e-6)
    average.swap()
    assert weight.item() == 1.0


POISONED = ["model.tie_embeddings=false", "max_steps=35", "resume=auto"]  # 17 steps an epoch


@pytest.fixture
def poisoned(
    request: pytest.FixtureRequest, train: Callable[..., Any], tmp_path: Path, text: Path
) -> tuple[list[str], Path, list[int]]:
    """A run of ten steps in which the embedding of one character is no number, and the steps that would meet it."""
    batches = getattr(request, "param", 1)  # of a step
    odd = tmp_path / "odd.txt"
    odd.write_text(text.read_text().replace("number 3", "number §", 1), encoding="utf-8")
    split = [f"data.batch_size={64 // batches}", f"trainer.accumulate_grad_batches={batches}"]
    same = [f"data.path={odd}", *split, *POISONED]
    folder = train(*same, "max_steps=10", folder=tmp_path / "odd").folder
    _, tokenizer = load_checkpoint(folder)
    poison = int(tokenizer.encode("§")[0])
    content = read(folder / LAST)
    content["state_dict"]["model.wte.weight"][poison] = 3e38  # the sum of a row of it is none
    write(content, folder / LAST)
    for name in ("previous.safetensors", "best.safetensors"):
        (folder / "checkpoints" / name).unlink()
    tokens = tokenizer.encode(odd.read_text())[: int(0.9 * 20_000)]
    order = WindowOrder(len(tokens), 16, seed=1337)
    starts = order.starts(np.arange(35 * 64).reshape(35, 64))
    met = [step for step, row in enumerate(starts, 1) if (tokens[row[:, None] + np.arange(16)] == poison).any()]
    return same, folder, [step for step in met if step > 10]


@pytest.mark.parametrize("poisoned", [1, 2], indirect=True)
def test_a_loss_that_is_no_number_stops_at_its_step_and_leaves_the_last_good_checkpoint(
    train: Callable[..., Any], poisoned: tuple[list[str], Path, list[int]]
) -> None:
    same, folder, met = poisoned
    before = (folder / LAST).read_bytes()
    with pytest.raises(Diverged, match=rf"the loss became nan at step {met[0]} \(learning rate 0\.0"):
        train(*same, "eval_every=100", folder=folder)
    assert (folder / LAST).read_bytes() == before
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", met[0] - 1)
    assert summary["reason"].startswith(f"the loss became nan at step {met[0]}")


def test_training_can_go_back_and_past_the_batch_whose_loss_is_no_number(
    train: Callable[..., Any], poisoned: tuple[list[str], Path, list[int]], capsys: Any
) -> None:
    same, folder, met = poisoned
    run = train(*same, "on_divergence=skip", "eval_every=12", folder=folder)
    assert run.summary["status"] == "completed"
    assert run.summary["steps"] == 35
    said = capsys.readouterr().err
    assert f"the loss became nan at step {met[0]} " in said
    assert "going back to the last checkpoint, and past the batches of this step" in said
    left_out = read(folder / LAST)["TokenData"]["left_out"]
    assert left_out[0] == met[0] - 1
    assert 1 <= len(left_out) == said.count("going back") <= len(met) + 1
    assert sorted({int(row["step"]) for row in rows(folder)}) == [5, 10, 12, 15, 20, 24, 25, 30, 35]


def test_going_past_batches_ends_when_it_does_not_help(train: Callable[..., Any], tmp_path: Path, capsys: Any) -> None:
    hopeless = ["optimizer.lr=1e18", "trainer.gradient_clip_val=null", "on_divergence=skip"]
    with pytest.raises(Diverged):
        train(*hopeless, folder=tmp_path / "run")
    assert capsys.readouterr().err.count("going back") == 10


@pytest.mark.slow
def test_two_processes_stop_at_the_step_whose_loss_is_no_number(
    launch: Callable[..., Any], poisoned: tuple[list[str], Path, list[int]]
) -> None:
    same, folder, met = poisoned
    two = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", f"hydra.run.dir={folder}"]
    stopped = launch("train.py", *same, *two, "eval_every=100")
    assert stopped.returncode == 1
    (error,) = (line for line in stopped.stderr.splitlines() if line.startswith("error"))
    assert f"at step {met[0]} " in error
    skipped = launch("train.py", *same, *two, "eval_every=12", "on_divergence=skip")
    assert skipped.returncode == 0, skipped.stderr
    assert read(folder / LAST)["TokenData"]["left_out"][0] == met[0] - 1


def test_a_spike_of_the_loss_is_said_and_logged(train: Callable[..., Any], tmp_path: Path, capsys: Any) -> None:
    """Half a page of another language in the middle of the text."""
    text = tmp_path / "spike.txt"
    line = "the quick brown fox jumps over the lazy dog\n"
    text.write_text(line * 200 + "XQJZKWVYGPBUMDHTQ" * 8 + "\n" + line * 100, encoding="utf-8")
    run = train(f"data.path={text}", "max_steps=400", "eval_every=400", "data.batch_size=4", "optimizer.lr=0.01")
    said = capsys.readouterr().err
    assert "a loss spike at step" in said
    spikes = [row["loss_spike"] for row in rows(run.folder) if row["loss_spike"]]
    assert spikes
    assert f"{max(map(float, spikes)):.3f}" in said


def test_a_loss_that_wanders_as_usual_is_no_spike() -> None:
    usual, random = LossSpikeDetector(), np.random.default_rng(0)
    found = 0
    for loss in np.linspace(4, 2, 3000) + 0.1 * random.standard_normal(3000):
        found += bool(usual.excess(loss))
        usual.take(loss)
    assert found == 0
    assert usual.excess(3.5)


def test_a_run_from_before_a_model_setting_was_there_goes_on(train: Callable[..., Any], tmp_path: Path) -> None:
    begun = train("max_steps=2", folder=tmp_path / "begun")
    content = read(begun.folder / "checkpoints" / "last.safetensors")
    del content["minigpt"]["model"]["embed_norm"]
    write(content, begun.folder / "checkpoints" / "last.safetensors")
    assert train("max_steps=3", f"resume={begun.folder}", folder=tmp_path / "resumed").summary["steps"] == 3


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        (["model.n_embd=64"], r"model\.n_embd \(32 there, 64 here\)"),
        (["tokenizer=byte"], r"the tokenizer \(char there, byte here\)"),
        (["data.path={other}"], r"the corpus \(checksum \w{8}… there, \w{8}… here\)"),
        (["optimizer=muon"], r"optimizer\._target_ \(minigpt\.optim\.adamw there, minigpt\.optim\.muon here\)"),
        (["data.batch_size=4"], r"data\.batch_size \(8 there, 4 here\)"),
        (["trainer.accumulate_grad_batches=2"], r"accumulate_grad_batches \(1 there, 2 here\)"),
        (["max_steps=2"], "raise max_steps"),
    ],
)
def test_what_cannot_go_on_is_refused_with_the_difference(
    train: Callable[..., Any], tmp_path: Path, text: Path, changes: list[str], differs: str
) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[::-1])  # the same characters
    begun = train("max_steps=2", folder=tmp_path / "begun")
    changes = [change.format(other=other) for change in changes]
    with pytest.raises(UserError, match=differs):
        train(*changes, f"resume={begun.folder}", folder=tmp_path / "resumed")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("global_step"),
        lambda content: content["minigpt"].pop("corpus_sha256"),
        lambda content: content["minigpt"].update(config=[]),
        lambda content: content.pop("loops"),
        lambda content: content.update(optimizer_states=[{}]),
        lambda content: content["state_dict"].pop("model.wte.weight"),
        lambda content: content["callbacks"].update(MetricsCallback={"seconds": "all"}),
        lambda content: content.update(rng=[{"torch": 3}]),
    ],
)
def test_a_checkpoint_that_lacks_what_a_run_goes_on_with_is_named(
    train: Callable[..., Any], tmp_path: Path, change: Callable[..., Any]
) -> None:
    begun = train("max_steps=2", folder=tmp_path / "begun")
    content = read(begun.folder / LAST)
    change(content)
    write(content, begun.folder / LAST)
    with pytest.raises(UserError, match=r"last\.safetensors does not hold a run of minigpt"):
        train("max_steps=4", f"resume={begun.folder}", folder=tmp_path / "resumed")


@pytest.mark.parametrize("early", [False, True])
def test_a_completed_run_has_nothing_left_to_do(train: Callable[..., Any], capsys: Any, early: bool) -> None:
    stopping = ["callbacks=early_stopping", "callbacks.early_stopping.min_delta=9", "eval_every=4"] if early else []
    run = train(*stopping)
    assert run.summary["stopped_early"] is early
    before = {file.name: file.read_bytes() for file in run.folder.iterdir() if file.is_file()}
    capsys.readouterr()
    assert train(*stopping, "resume=auto", folder=run.folder).summary == run.summary
    assert capsys.readouterr().out.count("\n") == 1
    with pytest.raises(UserError, match=r"resume=.*model\.n_layer"):
        train(*stopping, "resume=auto", "model.n_layer=1", folder=run.folder)
    assert {file.name: file.read_bytes() for file in run.folder.iterdir() if file.is_file()} == before


def test_a_run_resumes_the_one_that_latest_points_at(train: Callable[..., Any], tmp_path: Path) -> None:
    first = train("max_steps=10", "eval_every=5", folder=tmp_path / "first")
    second = train(f"resume={tmp_path}/latest", folder=tmp_path / "second")
    assert second.summary["steps"] == 20
    assert int(rows(second.folder)[0]["step"]) > 10
    assert (tmp_path / "latest").resolve() == second.folder
    assert first.summary["steps"] == 10


def test_a_sample_that_a_killed_run_had_no_time_for_is_written_when_it_resumes(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    whole = train(*OFTEN, "ema_decay=0.9", folder=tmp_path / "whole").folder
    for step in (7, 20):  # in the middle, and at the end
        folder = broken_off(whole, step, tmp_path / f"killed-{step}")
        sections = (folder / "samples.txt").read_text().split("── step ")
        (folder / "samples.txt").write_text("── step ".join(sections[: (7, 14, 20).index(step) + 1]))
        check_same_end(whole, train(*OFTEN, "ema_decay=0.9", "resume=auto", folder=folder).folder)


class Ask(Callback):
    """Asks the run to end where a test wants it."""

    def __init__(self, batch: int, validating: bool) -> None:
        self.batch, self.validating = batch, validating

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch and not self.validating:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == self.batch and self.validating:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("batch", "validating"), [(18, False), (19, False), (19, True), (20, False), (39, False), (39, True)]
)
def test_a_run_that_was_asked_to_end_goes_on_with_the_validation_that_was_due(
    train: Callable[..., Any], tmp_path: Path, batch: int, validating: bool
) -> None:
    settings = ("trainer.accumulate_grad_batches=2", "data.eval_batch_size=16", "model.dropout=0.1", "ema_decay=0.9")
    expected = train(*settings, folder=tmp_path / "whole")
    ask = ["+callbacks.ask._target_=test_resume.Ask", f"+callbacks.ask.batch={batch}"]
    with pytest.raises(Interrupted):
        train(*settings, *ask, f"+callbacks.ask.validating={validating}")
    resumed = train(*settings, "resume=auto")
    check_same_end(expected.folder, resumed.folder)


@pytest.mark.skipif(sys.platform != "linux", reason="looks up the names of open files")
def test_no_checkpoint_outlasts_the_curve_and_the_samples_that_led_there(
    train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If power fails, what is on disk is what was synced."""
    folder, fsync = tmp_path / "run", os.fsync
    synced: dict[str, bytes] = {}
    checkpoints = 0

    def watch(descriptor: int) -> None:
        nonlocal checkpoints
        fsync(descriptor)
        file = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if file.name.startswith(".last.safetensors"):
            checkpoints += 1
            for name in ("metrics.csv", "samples.txt"):  # the first sample is written after the first checkpoint
                assert (name in synced) == (name == "metrics.csv" or checkpoints == 2)
                assert name not in synced or synced[name] == (folder / name).read_bytes()
        elif file.is_file():
            synced[file.name] = file.read_bytes()

    monkeypatch.setattr(os, "fsync", watch)
    train(folder=folder)
    assert checkpoints == 2
