"""A resumed run equals an uninterrupted one, bit for bit."""

import os
import re
import shutil
import signal
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins import MixedPrecision
from ranks import train_on_ranks
from refusals import refused
from small_runs import composed, rows, small_run, table
from torch.utils._pytree import keystr, tree_flatten_with_path

from minigpt import load_checkpoint
from minigpt.checkpoints.find import BEST, LAST
from minigpt.checkpoints.format import read, write
from minigpt.runs.run_config import check_run
from minigpt.runs.run_dir import read_summary
from minigpt.training.ema import EMA
from minigpt.utils.errors import NonFiniteLoss
from minigpt.utils.signals import Interrupted

# What may differ: times, paths, and progress that Lightning counts for its loggers.
IGNORED = re.compile(
    r"'((wall_|logged_)?seconds|config|provenance|epoch_loop\.(val_loop\.batch_progress|state_dict))'"
)
SAMPLES = "callbacks.samples.max_new_tokens=20"
ACCUMULATED = [
    "trainer.accumulate_grad_batches=2",
    "data.eval_batch_size=16",
    "model.dropout=0.1",
    SAMPLES,
]
ACCUMULATED += ["ema_decay=0.9"]
# log_every=5 does not divide 7: rows span checkpoints.
OFTEN = ["eval_every=7", "callbacks.checkpoint.save_top_k=9", "model.dropout=0.1", SAMPLES]


def state(file: Path) -> dict[str, Any]:
    leaves = [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(read(file))[0]]
    values = {
        path: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for path, leaf in leaves
    }
    return {path: value for path, value in values.items() if not IGNORED.search(path)}


def broken_off(run: Path, step: int, folder: Path) -> Path:
    """Copy a run as if it was killed some time after the checkpoint of a step; its logs may have later rows."""
    shutil.copytree(run, folder)
    for file in (folder / "checkpoints").glob("*.safetensors"):
        if file.name != f"step-{step}.safetensors":
            file.unlink()
    (folder / "checkpoints" / f"step-{step}.safetensors").rename(folder / LAST)
    (folder / "summary.json").unlink()
    return folder


def check_same_end(one: Path, other: Path) -> None:
    assert state(one / LAST) == state(other / LAST)
    assert rows(one) == rows(other)
    assert (one / "samples.txt").read_text(encoding="utf-8") == (other / "samples.txt").read_text(
        encoding="utf-8"
    )
    assert read(one / BEST)["global_step"] == read(other / BEST)["global_step"]


RUNS = {
    "epochs": "model.block_size=64 data.batch_size=64 schedule=cosine",  # 4 batches are an epoch
    "early stopping": """
        callbacks=early_stopping callbacks.early_stopping.patience=1 callbacks.early_stopping.min_delta=0.2""",
    "bfloat16": "trainer.precision=bf16-mixed model.ngram=3 model.ngram_dropout=0.2",
    "all in bfloat16": "trainer.precision=bf16-true ema_decay=0.99",
}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_equals_an_uninterrupted_one(train, trained, tmp_path, name):
    same = [*RUNS[name].split(), *OFTEN]
    whole = trained(*same)
    first, *_, last = sorted(int(file.stem[5:]) for file in (whole / "checkpoints").glob("step-*"))
    assert (first, last) == (7, 14) if "early" in name else (7, 20)
    resumed = train(
        *same, "resume=auto", folder=broken_off(whole, first, tmp_path / "resumed")
    ).folder
    check_same_end(whole, resumed)


def test_a_paused_run_continues_as_if_it_had_not_paused(train, trained, capsys):
    same = [
        *OFTEN,
        "ema_decay=0.9",
        "optimizer=muon",
        "schedule=cosine",
        "trainer.accumulate_grad_batches=2",
    ]
    whole = trained(*same)
    for pause_at, step in ((7, 7), (14, 14), (7, 14)):  # an earlier step trains nothing
        run = train(*same, f"pause_at={pause_at}", "resume=auto")
        how = f"paused at step {step}; to continue, run the same command with resume=auto pause_at=null and this "
        assert capsys.readouterr().out.startswith(how)
        assert (run.summary["status"], run.summary["steps"]) == ("paused", step)
        assert state(run.folder / LAST) == state(whole / f"checkpoints/step-{step}.safetensors")
    assert train(*same, "resume=auto", "pause_at=null").summary["status"] == "completed"
    check_same_end(whole, run.folder)


@pytest.mark.parametrize(
    "damaged", [(), ("summary.json", "metrics.csv", "samples.txt")], ids=["whole", "damaged"]
)
def test_a_killed_run_completes_with_damaged_logs(train, trained, tmp_path, damaged, capsys):
    whole = trained(*OFTEN)
    folder = broken_off(whole, 14 if damaged else 20, tmp_path / "killed")
    for name in damaged:
        (folder / name).write_bytes((whole / name).read_bytes()[:-1] + b"\n\xff\x00{\n")
    assert train(*OFTEN, "resume=auto", folder=folder).summary["status"] == "completed"
    check_same_end(whole, folder)
    assert ("1 of its rows are dropped" in capsys.readouterr().err) == bool(damaged)


class Own(Callback):
    """Logs the step, and a number of its own, in every hook that may log."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        pl_module.log_dict({"own": float(trainer.global_step), "step": 99.0})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.log("own_epoch", float(trainer.global_step))

    def on_validation_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        pl_module.log("own_batch", float(trainer.global_step), on_step=True)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.log("own_val", float(trainer.global_step))


OWN = ["+callbacks.own._target_=test_resume.Own"]
RATES = ["+callbacks.rate._target_=lightning.pytorch.callbacks.LearningRateMonitor"]


@pytest.mark.parametrize("end", ["killed", "terminated", "paused"])
def test_what_callbacks_log_has_the_step_of_the_other_metrics_and_once(
    train, trained, tmp_path, end
):
    same = [
        *OWN,
        *RATES,
        "max_steps=8",
        "eval_every=3",
        "log_every=2",
        "callbacks.checkpoint.save_top_k=9",
    ]
    ask = [
        "+callbacks.ask._target_=test_resume.Terminate",
        "+callbacks.ask.hook=on_train_batch_start",
    ]
    whole, folder = trained(*same), tmp_path / "run"
    if end == "killed":
        broken_off(whole, 3, folder)
    elif end == "paused":
        train(*same, "pause_at=6")
    else:
        with pytest.raises(Interrupted):
            train(*same, *ask, "+callbacks.ask.batch=4")
    train(*same, "resume=auto")
    found = table(folder / "metrics.csv")
    for name in ("own", "own_batch_step", "own_val", "own_epoch"):
        assert all(row["step"] == row[name].removesuffix(".0") for row in found if row[name]), name
    rates = {row["step"]: row["learning_rate"] for row in found if row["learning_rate"]}
    names = ["own", "own_batch_step", "own_val", "lr-AdamW/pg1"]
    assert rates == {
        row["step"]: row[names[-1]] for row in found if row[names[-1]] and row["step"] in rates
    }
    for name in names:
        expected = [row[name] for row in table(whole / "metrics.csv") if row[name]]
        assert [row[name] for row in found if row[name]] == expected, name
    assert [row["own"] for row in found if row["own"]] == [f"{step}.0" for step in range(1, 9)]


def test_after_a_kill_tensorboard_shows_each_step_once(train, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    same = [*OWN, "logger=tensorboard", "callbacks.checkpoint.save_top_k=2"]
    same += ["max_steps=4", "eval_every=2", "log_every=1"]
    whole = train(*same).folder
    for name in ("late", "early"):
        killed = broken_off(whole, 2, tmp_path / name)
        if name == "early":  # before its first checkpoint
            (killed / LAST).unlink()
        train(*same, "resume=auto", folder=killed)
        logged = events.EventAccumulator(str(killed / "tensorboard")).Reload()
        for metric in ("train_loss", "val_loss", "own", "own_val"):
            expected = [
                (int(row["step"]), float(row[metric]))
                for row in table(killed / "metrics.csv")
                if row[metric]
            ]
            found = [(point.step, point.value) for point in logged.Scalars(metric)]
            assert found == [(step, pytest.approx(value)) for step, value in expected]


def test_a_file_of_the_user_beside_the_checkpoints_is_no_checkpoint(train, trained, tmp_path):
    whole = trained(*OFTEN)
    folder = broken_off(whole, 14, tmp_path / "killed")
    mine = [folder / "checkpoints" / f"step-{name}.safetensors" for name in ("old", "7-copy", "")]
    for file in mine:
        file.write_text("mine")
    assert (
        train(*OFTEN, "callbacks.checkpoint.save_top_k=1", "resume=auto", folder=folder).summary[
            "steps"
        ]
        == 20
    )
    check_same_end(whole, folder)
    assert [file.read_text(encoding="utf-8") for file in mine] == ["mine"] * 3


@pytest.mark.slow
@pytest.mark.ci
def test_two_processes_resume_bit_for_bit(text, tmp_path):
    runs = []
    for strategy in ("ddp", "fsdp"):
        same = [
            f"trainer={strategy}",
            "trainer.accelerator=cpu",
            "trainer.devices=2",
            "optimizer=muon",
        ]
        same += ["model.layer_repeats=2", "model.tie_embeddings=true"]
        same = [*small_run(text, tmp_path / "data", *same, *OFTEN), "ema_decay=0.9", "resume=auto"]
        for folder, pause_at in (("whole", "null"), ("paused", 7), ("paused", "null")):
            runs.append(
                [*same, f"pause_at={pause_at}", f"hydra.run.dir={tmp_path}/{strategy}/{folder}"]
            )
    train_on_ranks(runs)
    for strategy in ("ddp", "fsdp"):
        check_same_end(tmp_path / strategy / "whole", tmp_path / strategy / "paused")


def test_a_run_resumes_in_another_folder(train, trained, tmp_path):
    whole = trained(*OFTEN)
    resumed = train(
        *OFTEN, f"resume={whole}/checkpoints/step-7.safetensors", folder=tmp_path / "new"
    ).folder
    weights = [load_checkpoint(folder / LAST)[0].state_dict() for folder in (whole, resumed)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    assert rows(resumed) == [row for row in rows(whole) if int(row["step"]) > 7]
    assert (tmp_path / "latest").resolve() == resumed
    further = train(
        "max_steps=22", *OFTEN, "resume=auto", folder=resumed
    ).summary  # which keeps where the run began
    assert further["resumed_from"] == f"{whole}/checkpoints/step-7.safetensors, step 7"


def test_the_best_checkpoint_of_a_folder_is_from_its_own_run(train, trained, tmp_path):
    worse = train(
        "max_steps=25", "optimizer.lr=0.5", f"resume={trained()}", folder=tmp_path / "worse"
    )
    assert worse.loss > read_summary(trained())["best_val_loss"]
    assert read(worse.folder / BEST)["global_step"] == worse.summary["best_step"] == 25


def test_changed_max_steps_and_optimizer_settings_apply_after_resuming(train, trained, capsys):
    changes = ["max_steps=30", "optimizer.lr=0.0005", "optimizer.weight_decay=0.3"]
    resumed = train(f"resume={trained()}", *changes).folder
    warnings = capsys.readouterr().err
    assert (
        "max_steps changed from 20 to 30; the learning-rate schedule follows it from step 20 on"
        in warnings
    )
    assert "optimizer.lr changed from 0.003 to 0.0005; it applies from step 20 on" in warnings
    expected, found = (
        {row["step"]: row["learning_rate"] for row in rows(folder) if row["learning_rate"]}
        for folder in (trained(*changes), resumed)
    )
    assert found == {step: expected[step] for step in ("25", "30")}
    assert read(resumed / LAST)["optimizer_states"][0]["param_groups"][0]["weight_decay"] == 0.3


def test_save_top_k_checkpoints_are_kept(train):
    line = [
        "eval_every=4",
        "callbacks.checkpoint.save_top_k=2",
        "optimizer.lr=1e-9",
    ]  # the losses hardly move
    checkpoints = train(*line, "pause_at=12").folder / "checkpoints"
    mine = {"step-good.safetensors", "step-3.safetensors", "step-99.safetensors"}  # of the user
    for name in mine:
        (checkpoints / name).write_text("precious")
    run = train(*line, "resume=auto")
    assert {(checkpoints / name).read_text(encoding="utf-8") for name in mine} == {"precious"}
    lowest = sorted(
        (float(row["val_loss"]), int(row["step"])) for row in rows(run.folder) if row["val_loss"]
    )[:2]
    kept = {file.name for file in (run.folder / "checkpoints").glob("*.safetensors")}
    steps = {f"step-{step}.safetensors" for _, step in lowest}
    assert kept - mine == {"best.safetensors", "last.safetensors", "previous.safetensors"} | steps
    assert read(run.folder / BEST)["global_step"] == lowest[0][1]


def test_a_node_of_the_user_keeps_at_least_one_checkpoint(train):
    node = (
        "{_target_: minigpt.runs.callbacks.checkpoint_callback.CheckpointCallback, save_top_k: 0}"
    )
    refused(
        "save_top_k must be an integer ≥ 1, got 0",
        train,
        f"+callbacks.own={node}",
        "callbacks.checkpoint=null",
    )


def test_checkpoints_hold_the_ema_weights(trained):
    content, plain = (
        read(trained(*ACCUMULATED, *more) / LAST) for more in ([], ["ema_decay=null"])
    )
    assert content["ema_updates"] == 20  # one per optimizer step
    for name, average in content["state_dict"].items():
        assert not torch.equal(average, content["unaveraged"][name]), name
        # The EMA changes no training
        assert torch.equal(plain["state_dict"][name], content["unaveraged"][name])


@pytest.mark.parametrize(
    ("dtype", "decay", "updates", "rounds"),
    # In bfloat16, steps of 0.001 of the way would round to nothing.
    [(torch.float32, 0.5, 0, 1), (torch.bfloat16, 0.999, 100_000, 100)],
)
def test_the_ema_follows_its_formula_and_is_kept_by_a_swap(dtype, decay, updates, rounds):
    weight = torch.nn.Parameter(torch.ones(1, dtype=dtype))
    average, expected = EMA([weight], decay), 1.0
    average.updates = updates
    for t, value in enumerate(
        [2.0, 5.0, 3.0, -1.0, 4.0, 0.5, 7.0, 9.0] * rounds, start=updates + 1
    ):
        weight.data.fill_(value)
        average.update()
        used = min(decay, (1 + t) / (10 + t))
        expected = used * expected + (1 - used) * value
        average.swap()  # as a validation between two steps
        assert weight.item() == pytest.approx(expected, rel=1e-5)
        average.swap()
        assert (weight.item(), weight.dtype) == (value, dtype)


@pytest.mark.parametrize(("precision", "beta"), [("bf16-true", 0.999), ("32-true", 0.999)])
def test_means_that_the_precision_rounds_away_are_a_warning(train, precision, beta, capsys):
    train(f"optimizer.betas=[0.9,{beta}]", f"trainer.precision={precision}", "max_steps=1")
    warned = (
        "warning: a decay rate of 0.999 of the optimizer rounds to 1 in bfloat16"
        in capsys.readouterr().err
    )
    assert warned == (precision == "bf16-true")


def test_an_average_of_shards_in_half_precision_is_refused():
    half = ["trainer=fsdp", "trainer.precision=bf16-true", "ema_decay=0.9"]
    refused(
        r"trainer\.precision must be another than bf16-true and 16-true with trainer=",
        check_run,
        composed(*half),
    )
    check_run(composed(*half, "ema_decay=null"))


class Poison(Callback):
    """Makes weights NaN before step 15."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 14:
            pl_module.model.wte.weight.data.fill_(torch.nan)


def test_a_nan_loss_stops_the_run_and_leaves_the_last_good_checkpoint(train, tmp_path):
    with pytest.raises(NonFiniteLoss, match=r"the loss is nan at step 15 \(learning rate 0\.0"):
        train("+callbacks.poison._target_=test_resume.Poison")
    summary, last = read_summary(tmp_path / "run"), read(tmp_path / "run" / LAST)
    assert (summary["status"], summary["steps"], last["global_step"]) == ("failed", 15, 10)
    assert summary["reason"].startswith("the loss is nan at step 15")
    assert all(weight.isfinite().all() for weight in last["state_dict"].values())


@pytest.mark.parametrize(
    "change", [{"loops": None}, {"optimizer_states": [{}]}, {"rng": [{"torch": 3}]}]
)
def test_a_checkpoint_without_what_resuming_needs_is_rejected(train, trained, tmp_path, change):
    write(read(trained() / LAST) | change, tmp_path / "damaged.safetensors")
    refused(
        r"damaged\.safetensors does not hold a run of minigpt",
        train,
        "max_steps=24",
        f"resume={tmp_path}/damaged.safetensors",
    )


class SaveEarly(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "checkpoints/early.safetensors")


class FailAtStart(Callback):
    def on_fit_start(self, *args: Any) -> None:
        raise OSError("no such device")


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_that_cannot_resume_keeps_what_it_had_reached(train, tmp_path, killed):
    reached = train("pause_at=10").summary
    if killed:  # before it wrote one
        (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(OSError, match="no such device"):
        train("resume=auto", "+callbacks.fail._target_=test_resume.FailAtStart")
    failed = read_summary(tmp_path / "run")
    assert (failed["status"], failed["reason"].split(": ")[1].split(" (")[0]) == (
        "failed",
        "no such device",
    )
    known = [
        name
        for name in reached
        if name.startswith(("best", "steps", "tokens", "flops", "params", "checkpoint"))
    ]
    known += [] if killed else ["seconds", "wall_seconds", "device"]
    known.remove("tokens_per_second")
    assert {name: failed[name] for name in known} == {name: reached[name] for name in known}
    assert train("resume=auto").summary["steps"] == 20


class FailInStep(Callback):
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            raise OSError("no such device")


def test_a_step_that_fails_is_not_counted_though_a_callback_has_logged_it(train, tmp_path):
    with pytest.raises(OSError, match="no such device"):
        train(*RATES, "log_every=1", "+callbacks.zz._target_=test_resume.FailInStep")
    assert table(tmp_path / "run" / "metrics.csv")[-1]["step"] == "3"
    assert read_summary(tmp_path / "run")["steps"] == 2


def test_resuming_a_completed_run_does_nothing(train, trained, tmp_path, capsys):
    folder = shutil.copytree(trained(), tmp_path / "run")
    summary = read_summary(folder)
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    assert train("resume=auto", folder=folder).summary == summary | {"folder": str(folder)}
    assert capsys.readouterr().out.count("\n") == 1
    refused(r"resume=.*model\.n_layer", train, "resume=auto", "model.n_layer=1", folder=folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before


def test_a_run_whose_documents_were_cut_elsewhere_by_an_earlier_version_is_not_resumed(
    train, tmp_path, text
):
    (tmp_path / "texts").mkdir()
    for name, size in (("a_intro.txt", 400), ("b_book.txt", 9000)):
        (tmp_path / "texts" / name).write_text(
            text.read_text(encoding="utf-8")[:size], encoding="utf-8"
        )
    settings = [f"data.path={tmp_path}/texts", "max_steps=1"]
    last = train(*settings).folder / LAST
    train(f"data.path={tmp_path}/texts", "max_steps=2", "resume=auto")
    content = read(last)
    del content["minigpt"]["corpus_provenance"]["cut"]  # the earlier version cut at 400
    write(content, last)
    was = r"the cut between the splits \(at the start of a document in the checkpoint, within a document now\)"
    refused(was, train, f"data.path={tmp_path}/texts", "max_steps=3", "resume=auto")


@pytest.fixture
def textless(train, trained, text, tmp_path):
    """A run that paused, whose text is gone: its folder, its settings, and those that resume it."""
    same = [f"data.path={tmp_path}/mine.txt", *OFTEN]
    shutil.copy(text, tmp_path / "mine.txt")
    train(*same, "pause_at=7")
    (tmp_path / "mine.txt").unlink()
    return [*same, "resume=auto"]


def test_a_run_resumes_without_its_text_on_its_token_files(
    train, trained, textless, tmp_path, capsys
):
    resumed = train(*textless)
    assert "mine.txt does not exist: resuming on the token files in " in capsys.readouterr().err
    check_same_end(trained(*OFTEN), resumed.folder)
    whole = read_summary(trained(*OFTEN))
    for name in ("corpus_sha256", "validated", "tokenizer"):
        assert resumed.summary[name] == whole[name]
    further = train(
        *textless[:-1], "max_steps=21", f"resume={resumed.folder}", folder=tmp_path / "further"
    )
    assert further.summary["corpus_sha256"] == whole["corpus_sha256"]


def test_a_run_resumes_on_its_token_files_given_as_files(train, trained, textless, tmp_path):
    (meta,) = tmp_path.glob("data/tokens/*/meta.json")
    bins = [f"data.{split}_bin={meta.parent}/{split}.bin" for split in ("train", "val")]
    check_same_end(trained(*OFTEN), train(*textless[1:], *bins).folder)


def test_only_the_token_files_of_the_run_replace_its_text(train, textless, tmp_path):
    for change, problem in (
        ("tokenizer=byte", "other settings select the text"),
        ("data.val_fraction=0.2", "other settings select the text"),
        ("data.path=typo.txt", "other settings select the text"),
        (
            "seed=1337",
            r"give a file, a folder, a pattern such as '\S*', or a list \[a.txt,b.txt\]$",
        ),  # in a new folder
    ):
        missing = "typo.txt" if "typo" in change else "mine.txt"
        refused(
            rf"data\.path=.*{missing} does not exist; .*{problem}",
            train,
            *textless,
            change,
            folder=tmp_path / ("new" if "seed" in change else "run"),
        )
    (meta,) = tmp_path.glob("data/tokens/*/meta.json")
    meta.write_text(
        meta.read_text(encoding="utf-8").replace('"val_fraction": 0.1', '"val_fraction": 0.11'),
        encoding="utf-8",
    )
    refused(
        r"does not exist; .*; or restore its token files: .* has none of the run", train, *textless
    )


def test_token_files_of_another_split_are_refused_whatever_the_settings_are(
    train, trained, text, tmp_path
):
    train("data.val_fraction=0.2", "max_steps=1", folder=tmp_path / "other")
    for meta in tmp_path.glob("data/tokens/*/meta.json"):
        bins = [f"data.{split}_bin={meta.parent}/{split}.bin" for split in ("train", "val")]
        refused(
            r"data\.val_fraction \(0\.1 in the checkpoint, 0\.2 now\)",
            train,
            *bins,
            "max_steps=21",
            f"resume={trained()}",
        )


class Terminate(Callback):
    def __init__(self, batch: int, hook: str) -> None:
        self.batch = batch
        setattr(self, hook, self.terminate)

    def terminate(self, trainer: Trainer, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == self.batch:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("batch", "during"), [(18, "train"), (19, "train"), (19, "validation"), (39, "validation")]
)
def test_a_terminated_run_resumes_with_the_validation_that_was_due(train, trained, batch, during):
    ask = ["+callbacks.ask._target_=test_resume.Terminate", f"+callbacks.ask.batch={batch}"]
    with pytest.raises(Interrupted):
        train(*ACCUMULATED, *ask, f"+callbacks.ask.hook=on_{during}_batch_start")
    check_same_end(trained(*ACCUMULATED), train(*ACCUMULATED, "resume=auto").folder)


class Scaled(Callback):
    """Trains in 16-mixed, which Lightning has for GPUs alone, with a loss scale at which the first steps overflow."""

    def setup(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        trainer.strategy.precision_plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)


def test_a_run_that_is_terminated_at_a_step_that_16_mixed_skips_resumes_bit_for_bit(
    train, tmp_path
):
    scaled = [
        "+callbacks.scaled._target_=test_resume.Scaled",
        "max_steps=30",
        "eval_every=30",
        "log_every=1",
        SAMPLES,
    ]
    ask = [f"+callbacks.ask.{setting}" for setting in ("_target_=test_resume.Terminate", "batch=4")]
    with pytest.raises(Interrupted):
        train(*scaled, *ask, "+callbacks.ask.hook=on_train_batch_start")
    norms = [float(row["grad_norm"]) for row in rows(tmp_path / "run")]
    assert (len(norms), isfinite(norms[-1]), read(tmp_path / "run" / LAST)["global_step"]) == (
        5,
        False,
        5,
    )
    resumed, whole = (
        train(*scaled, "resume=auto").folder,
        train(*scaled, folder=tmp_path / "whole").folder,
    )
    assert isfinite(float(rows(whole)[-2]["grad_norm"]))  # the scale has fallen
    check_same_end(whole, resumed)


def test_a_run_resumes_on_a_gpu_with_the_other_16_bit_type(train):
    """Of bfloat16, there is no loss scale to restore."""
    scaled = "+callbacks.scaled._target_=test_resume.Scaled"
    train("trainer.precision=bf16-mixed", "eval_every=5", "pause_at=10")
    assert (
        train(scaled, "eval_every=5", "pause_at=15", "resume=auto").summary["precision"]
        == "16-mixed"
    )
    found = train("trainer.precision=bf16-mixed", "eval_every=5", "resume=auto")
    assert (found.summary["steps"], found.summary["precision"]) == (20, "bf16-mixed")


def test_metrics_and_samples_are_synced_before_their_checkpoint(train, tmp_path, monkeypatch):
    folder, fsync = tmp_path / "run", os.fsync
    synced, checkpoints = {}, 0

    def watch(descriptor: int) -> None:
        nonlocal checkpoints
        fsync(descriptor)
        file = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if file.name.startswith(".last.safetensors"):
            checkpoints += 1
            for name in ("metrics.csv", "samples.txt"):
                assert synced[name] == (folder / name).read_bytes()
        elif file.is_file():
            synced[file.name] = file.read_bytes()

    monkeypatch.setattr(os, "fsync", watch)
    train(SAMPLES, folder=folder)
    assert checkpoints == 2


def test_a_callback_may_save_a_checkpoint_before_the_training(train):
    run = train("+callbacks.early._target_=test_resume.SaveEarly", "max_steps=2", "eval_every=2")
    weights, _ = load_checkpoint(run.folder / "checkpoints/early.safetensors")
    assert weights.config == load_checkpoint(run.folder)[0].config
