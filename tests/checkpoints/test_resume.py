"""A resumed run equals an uninterrupted one, bit for bit, also without its text."""

import os
import re
import shutil
import signal
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import corpus_of, folder_of
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins import MixedPrecision
from ranks import train_on_ranks
from refusals import refused
from small_runs import column, rows, small_run, table
from torch.utils._pytree import keystr, tree_flatten_with_path

from minigpt import load_checkpoint
from minigpt.checkpoints.find import BEST, LAST
from minigpt.checkpoints.format import read, write
from minigpt.runs.run_dir import read_summary
from minigpt.utils.errors import NonFiniteLoss
from minigpt.utils.signals import Interrupted

# What may differ: times, paths, and progress that Lightning counts for its loggers.
IGNORED = re.compile(
    r"'((wall_|logged_)?seconds|config|provenance"
    r"|epoch_loop\.(val_loop\.batch_progress|state_dict))'"
)
SAMPLES = "callbacks.samples.max_new_tokens=20"
ACCUMULATED = [
    "trainer.accumulate_grad_batches=2",
    "data.eval_batch_size=16",
    "model.dropout=0.1",
    "ema_decay=0.9",
    SAMPLES,
]
# log_every=5 does not divide 7: rows span checkpoints.
OFTEN = ["eval_every=7", "callbacks.checkpoint.save_top_k=9", "model.dropout=0.1", SAMPLES]


def state(file: Path) -> dict[str, Any]:
    found = {}
    for path, leaf in tree_flatten_with_path(read(file))[0]:
        if not IGNORED.search(keystr(path)):
            found[keystr(path)] = leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf
    return found


def broken_off(run: Path, step: int, folder: Path) -> Path:
    """Copy a run as if it was killed some time after the checkpoint of a step.

    Its logs may have later rows.
    """
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
    assert (one / "samples.txt").read_bytes() == (other / "samples.txt").read_bytes()
    assert read(one / BEST)["global_step"] == read(other / BEST)["global_step"]


class At(Callback):
    """Call a function of this module in a hook of Lightning, for one batch or for all."""

    def __init__(self, hook: str, do: str, batch: int | None) -> None:
        def act(trainer: Trainer, module: Any, *_: Any) -> None:
            if batch in (None, trainer.fit_loop.epoch_loop.batch_idx):
                globals()[do](trainer, module)

        setattr(self, hook, act)


def at(hook: str, do: Callable[[Any, Any], None], batch: int | str = "null") -> list[str]:
    node = f"{{_target_: test_resume.At, hook: {hook}, do: {do.__name__}, batch: {batch}}}"
    return [f"+callbacks.zz={node}"]


def terminate(trainer: Any, module: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fail(trainer: Any, module: Any) -> None:
    raise OSError("no such device")


def poison(trainer: Any, module: Any) -> None:
    module.model.wte.weight.data.fill_(torch.nan)


def save_early(trainer: Any, module: Any) -> None:
    trainer.save_checkpoint(Path(trainer.default_root_dir) / "checkpoints/early.safetensors")


RUNS = {
    # 4 batches are an epoch
    "epochs": """
        model.block_size=64 data.batch_size=64 model.n_embd=16 model.n_layer=1 schedule=cosine
        max_steps=14""",
    "early stopping": """
        callbacks=early_stopping callbacks.early_stopping.patience=1
        callbacks.early_stopping.min_delta=0.2 model.n_layer=1""",
    "bfloat16": """
        trainer.precision=bf16-mixed model.ngram=3 model.ngram_dropout=0.2 model.n_layer=1
        max_steps=14""",
    "all in bfloat16": "trainer.precision=bf16-true ema_decay=0.99 model.n_layer=1 max_steps=14",
}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_equals_an_uninterrupted_one(train, trained, tmp_path, name):
    same = [*RUNS[name].split(), *OFTEN]
    whole = trained(*same)
    first, *_, last = sorted(int(file.stem[5:]) for file in (whole / "checkpoints").glob("step-*"))
    assert (first, last) == (7, 14)
    killed = broken_off(whole, first, tmp_path / "killed")
    train(*same, "resume=auto", folder=killed)
    check_same_end(whole, killed)


def test_a_paused_run_continues_as_if_it_had_not_paused(train, trained, capsys):
    same = [
        *OFTEN,
        "ema_decay=0.9",
        "optimizer=muon",
        "schedule=cosine",
        "trainer.accumulate_grad_batches=2",
    ]
    whole = trained(*same)
    for pause_at, step in ((14, 14), (7, 14)):  # an earlier step trains nothing
        run = train(*same, f"pause_at={pause_at}", "resume=auto")
        how = "run the same command with resume=auto pause_at=null and this "
        assert capsys.readouterr().out.startswith(f"paused at step {step}; to continue, {how}")
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
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        pl_module.log_dict({"own": float(trainer.global_step), "step": 99.0})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.log("own_epoch", float(trainer.global_step))

    def on_validation_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        pl_module.log("own_batch", float(trainer.global_step), on_step=True)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.log("own_val", float(trainer.global_step))


OWN = "+callbacks.own._target_=test_resume.Own"
RATES = "+callbacks.rate._target_=lightning.pytorch.callbacks.LearningRateMonitor"


@pytest.mark.parametrize("end", ["killed", "terminated"])
def test_what_callbacks_log_has_the_step_of_the_other_metrics_and_once(
    train, trained, tmp_path, end
):
    steps = ["max_steps=8", "eval_every=3", "log_every=2", "callbacks.checkpoint.save_top_k=9"]
    same = [OWN, RATES, *steps]
    whole = trained(*same)
    folder = tmp_path / "run"
    if end == "killed":
        broken_off(whole, 3, folder)
    else:
        with pytest.raises(Interrupted):
            train(*same, *at("on_train_batch_start", terminate, 4))
    train(*same, "resume=auto")
    found = table(folder / "metrics.csv")
    for name in ("own", "own_batch_step", "own_val", "own_epoch"):
        assert all(row["step"] == row[name].removesuffix(".0") for row in found if row[name]), name
    rates = {row["step"]: row["learning_rate"] for row in found if row["learning_rate"]}
    rate = "lr-AdamW/pg1"
    assert rates.items() <= {row["step"]: row[rate] for row in found if row[rate]}.items()
    for name in ("own", "own_batch_step", "own_val", rate):
        expected = [row[name] for row in table(whole / "metrics.csv") if row[name]]
        assert [row[name] for row in found if row[name]] == expected, name
    assert [row["own"] for row in found if row["own"]] == [f"{step}.0" for step in range(1, 9)]


def test_tensorboard_has_the_curves_and_after_a_kill_each_step_once(train, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    steps = ["max_steps=4", "eval_every=2", "log_every=1", "callbacks.checkpoint.save_top_k=2"]
    same = [OWN, "logger=tensorboard", *steps]
    whole = train(*same).folder
    for name in ("late", "early"):
        killed = broken_off(whole, 2, tmp_path / name)
        if name == "early":  # before its first checkpoint
            (killed / LAST).unlink()
        train(*same, "resume=auto", folder=killed)
        logged = events.EventAccumulator(str(killed / "tensorboard")).Reload()
        assert "hp_metric" not in logged.Tags()["scalars"]  # a constant -1
        for metric in ("train_loss", "val_loss", "learning_rate", "own", "own_val"):
            found = [(point.step, point.value) for point in logged.Scalars(metric)]
            written = [row for row in table(killed / "metrics.csv") if row[metric]]
            expected = [(int(row["step"]), pytest.approx(float(row[metric]))) for row in written]
            assert found == expected


@pytest.mark.slow
@pytest.mark.ci
def test_two_processes_resume_bit_for_bit(text, tmp_path):
    runs = []
    model = ["model.layer_repeats=2", "model.tie_embeddings=true", "optimizer=muon"]
    spread = ["trainer.accelerator=cpu", "trainer.devices=2", "ema_decay=0.9", "resume=auto"]
    same = small_run(text, tmp_path / "data", *model, *OFTEN, *spread)
    for strategy in ("ddp", "fsdp"):
        for folder, pause_at in (("whole", "null"), ("paused", 7), ("paused", "null")):
            place = f"hydra.run.dir={tmp_path}/{strategy}/{folder}"
            runs.append([*same, f"trainer={strategy}", f"pause_at={pause_at}", place])
    train_on_ranks(runs)
    for strategy in ("ddp", "fsdp"):
        check_same_end(tmp_path / strategy / "whole", tmp_path / strategy / "paused")


def test_a_run_resumes_in_another_folder(train, trained, tmp_path):
    whole = trained(*OFTEN)
    source = f"{whole}/checkpoints/step-7.safetensors"
    resumed = train(*OFTEN, f"resume={source}").folder
    weights = [load_checkpoint(folder / LAST)[0].state_dict() for folder in (whole, resumed)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    assert rows(resumed) == [row for row in rows(whole) if int(row["step"]) > 7]
    assert (tmp_path / "latest").resolve() == resumed
    # Which keeps where the run began
    further = train("max_steps=22", *OFTEN, "resume=auto").summary
    assert further["resumed_from"] == f"{source}, step 7"


def test_the_best_checkpoint_of_a_folder_is_from_its_own_run(train, trained):
    worse = train("max_steps=22", "optimizer.lr=0.5", f"resume={trained()}")
    assert worse.loss > read_summary(trained())["best_val_loss"]
    assert read(worse.folder / BEST)["global_step"] == worse.summary["best_step"] == 22


def test_changed_max_steps_and_optimizer_settings_apply_after_resuming(train, trained, capsys):
    changes = ["max_steps=25", "optimizer.lr=0.0005", "optimizer.weight_decay=0.3"]
    resumed = train(f"resume={trained()}", *changes).folder
    warnings = capsys.readouterr().err
    follows = "the learning-rate schedule follows it from step 20 on"
    assert f"max_steps changed from 20 to 25; {follows}" in warnings
    assert "optimizer.lr changed from 0.003 to 0.0005; it applies from step 20 on" in warnings
    expected = column(trained(*changes), "learning_rate")
    assert column(resumed, "learning_rate") == expected[-1:]
    assert read(resumed / LAST)["optimizer_states"][0]["param_groups"][0]["weight_decay"] == 0.3


def test_save_top_k_checkpoints_are_kept_and_no_file_of_the_user_is_one(train):
    # The losses hardly move
    line = ["eval_every=4", "callbacks.checkpoint.save_top_k=2", "optimizer.lr=1e-9"]
    checkpoints = train(*line, "pause_at=12").folder / "checkpoints"
    names = ("old", "good", "7-copy", "", "3", "99")
    mine = {f"step-{name}.safetensors" for name in names}
    for name in mine:
        (checkpoints / name).write_text("precious")
    run = train(*line, "resume=auto")
    assert run.summary["steps"] == 20
    assert {(checkpoints / name).read_text(encoding="utf-8") for name in mine} == {"precious"}
    validated = [row for row in rows(run.folder) if row["val_loss"]]
    lowest = sorted((float(row["val_loss"]), int(row["step"])) for row in validated)[:2]
    kept = {file.name for file in checkpoints.glob("*.safetensors")}
    steps = {f"step-{step}.safetensors" for _, step in lowest}
    assert kept - mine == {"best.safetensors", "last.safetensors", "previous.safetensors"} | steps
    assert read(run.folder / BEST)["global_step"] == lowest[0][1]


def test_a_node_of_the_user_keeps_at_least_one_checkpoint(train):
    target = "minigpt.runs.callbacks.checkpoint_callback.CheckpointCallback"
    own = f"+callbacks.own={{_target_: {target}, save_top_k: 0}}"
    refused("save_top_k must be an integer ≥ 1, got 0", train, own, "callbacks.checkpoint=null")


def test_a_nan_loss_stops_the_run_and_leaves_the_last_good_checkpoint(train, tmp_path):
    with pytest.raises(NonFiniteLoss, match=r"the loss is nan at step 15 \(learning rate 0\.0"):
        train(*at("on_train_batch_start", poison, 14))
    summary = read_summary(tmp_path / "run")
    last = read(tmp_path / "run" / LAST)
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


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_that_cannot_resume_keeps_what_it_had_reached(train, tmp_path, killed):
    reached = train("pause_at=10").summary
    if killed:  # before it wrote one
        (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(OSError, match="no such device"):
        train("resume=auto", *at("on_fit_start", fail))
    failed = read_summary(tmp_path / "run")
    assert failed["status"] == "failed"
    assert ": no such device (" in failed["reason"]
    kinds = ("best", "steps", "tokens", "flops", "params", "checkpoint")
    known = {name for name in reached if name.startswith(kinds)} - {"tokens_per_second"}
    if not killed:
        known |= {"seconds", "wall_seconds", "device"}
    assert {name: failed[name] for name in known} == {name: reached[name] for name in known}
    assert train("resume=auto").summary["steps"] == 20


def test_a_step_that_fails_is_not_counted_though_a_callback_has_logged_it(train, tmp_path):
    with pytest.raises(OSError, match="no such device"):
        train(RATES, "log_every=1", *at("on_train_batch_start", fail, 2))
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


@pytest.mark.parametrize(
    ("batch", "during"), [(19, "train"), (19, "validation"), (39, "validation")]
)
def test_a_terminated_run_resumes_with_the_validation_that_was_due(train, trained, batch, during):
    with pytest.raises(Interrupted):
        train(*ACCUMULATED, *at(f"on_{during}_batch_start", terminate, batch))
    check_same_end(trained(*ACCUMULATED), train(*ACCUMULATED, "resume=auto").folder)


class Scaled(Callback):
    """Trains in 16-mixed, which Lightning has for GPUs alone; in the first steps it overflows."""

    def setup(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        trainer.strategy.precision_plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)


SCALED = "+callbacks.scaled._target_=test_resume.Scaled"


def test_a_run_that_is_terminated_at_a_step_that_16_mixed_skips_resumes_bit_for_bit(
    train, tmp_path
):
    scaled = [SCALED, "max_steps=30", "eval_every=30", "log_every=1", SAMPLES]
    with pytest.raises(Interrupted):
        train(*scaled, *at("on_train_batch_start", terminate, 4))
    norms = column(tmp_path / "run", "grad_norm")
    assert (len(norms), isfinite(norms[-1])) == (5, False)
    assert read(tmp_path / "run" / LAST)["global_step"] == 5
    resumed = train(*scaled, "resume=auto").folder
    whole = train(*scaled, folder=tmp_path / "whole").folder
    assert isfinite(column(whole, "grad_norm")[-1])  # the scale has fallen
    check_same_end(whole, resumed)


def test_a_run_resumes_on_a_gpu_with_the_other_16_bit_type(train):
    # Of bfloat16, there is no loss scale to restore
    line = ["max_steps=6", "eval_every=2", "resume=auto"]
    for more, precision, steps in (
        (["trainer.precision=bf16-mixed", "pause_at=2"], "bf16-mixed", 2),
        ([SCALED, "pause_at=4"], "16-mixed", 4),
        (["trainer.precision=bf16-mixed"], "bf16-mixed", 6),
    ):
        found = train(*line, *more).summary
        assert (found["steps"], found["precision"]) == (steps, precision)


def test_metrics_and_samples_are_synced_before_their_checkpoint(train, tmp_path, monkeypatch):
    fsync = os.fsync
    synced = {}
    checkpoints = []

    def watch(descriptor: int) -> None:
        fsync(descriptor)
        file = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if file.name.startswith(".last.safetensors"):
            checkpoints.append(file)
            for name in ("metrics.csv", "samples.txt"):
                assert synced[name] == (tmp_path / "run" / name).read_bytes()
        elif file.is_file():
            synced[file.name] = file.read_bytes()

    monkeypatch.setattr(os, "fsync", watch)
    train(SAMPLES)
    assert len(checkpoints) == 2


def test_a_callback_may_save_a_checkpoint_before_the_training(train):
    run = train(*at("on_fit_start", save_early), "max_steps=2", "eval_every=2")
    weights, _ = load_checkpoint(run.folder / "checkpoints/early.safetensors")
    assert weights.config == load_checkpoint(run.folder)[0].config


def test_a_run_whose_documents_were_cut_elsewhere_by_an_earlier_version_is_not_resumed(
    train, tmp_path, text
):
    (tmp_path / "texts").mkdir()
    for name, size in (("a_intro.txt", 400), ("b_book.txt", 9000)):
        (tmp_path / "texts" / name).write_bytes(text.read_bytes()[:size])
    texts = f"data.path={tmp_path}/texts"
    last = train(texts, "max_steps=1").folder / LAST
    train(texts, "max_steps=2", "resume=auto")
    content = read(last)
    del content["minigpt"]["corpus_provenance"]["cut"]  # the earlier version cut at 400
    write(content, last)
    was = (
        r"cut between the splits \(at the start of a document in the checkpoint, within a document"
    )
    refused(was, train, texts, "max_steps=3", "resume=auto")


@pytest.fixture
def textless(train, trained, text, tmp_path):
    same = [f"data.path={tmp_path}/mine.txt", *OFTEN]
    shutil.copy(text, tmp_path / "mine.txt")
    train(*same, "pause_at=7")
    (tmp_path / "mine.txt").unlink()
    return [*same, "resume=auto"]


def test_a_run_resumes_without_its_text_on_its_token_files_also_given_as_files(
    train, trained, textless, tmp_path, capsys
):
    (meta,) = tmp_path.glob("data/tokens/*/meta.json")
    bins = [f"data.{split}_bin={meta.parent}/{split}.bin" for split in ("train", "val")]
    as_files = shutil.copytree(tmp_path / "run", tmp_path / "files")
    train(*textless[1:], *bins, folder=as_files)
    check_same_end(trained(*OFTEN), as_files)
    capsys.readouterr()
    resumed = train(*textless)
    assert "mine.txt does not exist: resuming on the token files in " in capsys.readouterr().err
    check_same_end(trained(*OFTEN), resumed.folder)
    whole = read_summary(trained(*OFTEN))
    for name in ("corpus_sha256", "validated", "tokenizer"):
        assert resumed.summary[name] == whole[name]
    more = ["max_steps=21", f"resume={resumed.folder}"]
    further = train(*textless[:-1], *more, folder=tmp_path / "further")
    assert further.summary["corpus_sha256"] == whole["corpus_sha256"]


def test_only_the_token_files_of_the_run_replace_its_text(train, textless, tmp_path):
    for change in ("tokenizer=byte", "data.val_fraction=0.2", "data.path=typo.txt"):
        missing = "typo.txt" if "typo" in change else "mine.txt"
        pattern = rf"data\.path=.*{missing} does not exist; .*other settings select the text"
        refused(pattern, train, *textless, change)
    pattern = r"mine\.txt does not exist; give a file, .* such as '\S*', or a list \[a.txt,b.txt\]$"
    refused(pattern, train, *textless, folder=tmp_path / "new")
    (meta,) = tmp_path.glob("data/tokens/*/meta.json")
    meta.write_bytes(meta.read_bytes().replace(b'"val_fraction": 0.1', b'"val_fraction": 0.11'))
    pattern = r"does not exist; .*; or restore its token files: .* has none of the run"
    refused(pattern, train, *textless)


def test_token_files_of_another_split_are_refused_whatever_the_settings_are(
    train, trained, text, tmp_path
):
    folder = folder_of(corpus_of(text, tmp_path, val_fraction=0.2))
    bins = [f"data.{split}_bin={folder}/{split}.bin" for split in ("train", "val")]
    refused(
        r"data\.val_fraction \(0\.1 in the checkpoint, 0\.2 now\)",
        train,
        *bins,
        "max_steps=21",
        f"resume={trained()}",
    )
