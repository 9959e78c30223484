"""Training as a user sees it: real Trainer, real configurations, a small text."""

import csv
import inspect
import math
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
from lightning.pytorch import Trainer

import minigpt
from minigpt import GPT, load_checkpoint
from minigpt.checkpoints.format import read
from minigpt.data.token_files import load
from minigpt.runs import trainer
from minigpt.runs.config_checks import TRAINER_OPTIONS, check_run
from minigpt.runs.metrics import PEAK_FLOPS, device_name
from minigpt.utils.errors import RunError, UserError

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def metrics(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def column(folder: Path, name: str) -> list[float]:
    return [float(row[name]) for row in metrics(folder) if row[name]]


def test_a_run_folder_holds_everything_about_its_run(train: Callable[..., Any]) -> None:
    run = train()
    assert {file.name for file in run.folder.iterdir()} == {
        "metrics.csv",
        "curves.png",
        "samples.txt",
        "summary.json",
        "checkpoints",
        "log.txt",
        ".hydra",
        ".lock",
    }
    assert {file.name for file in (run.folder / "checkpoints").iterdir()} == {
        "best.safetensors",
        "last.safetensors",
        "previous.safetensors",
    }
    keys = "best_val_loss best_step steps tokens params seconds tokens_per_second seed device checkpoint corpus_sha256"
    assert set(keys.split()) <= set(run.summary)
    assert run.summary["status"] == "completed"
    assert run.summary["steps"] == 20
    assert run.summary["tokens"] == 20 * 8 * 16
    assert [int(row["step"]) for row in metrics(run.folder)] == [5, 10, 10, 15, 20, 20]
    assert run.loss == run.summary["best_val_loss"] == min(column(run.folder, "val_loss"))
    assert column(run.folder, "train_loss")[-1] < column(run.folder, "train_loss")[0]
    assert (run.folder / "samples.txt").read_text().count("validation loss") == 2
    height, width, _ = matplotlib.image.imread(run.folder / "curves.png").shape
    assert (height, width) == (720, 960)


def test_the_checkpoint_of_a_run_has_the_loss_that_the_run_reports(train: Callable[..., Any], tmp_path: Path) -> None:
    run = train()
    model, tokenizer = load_checkpoint(run.folder)
    (tokens,) = (tmp_path / "data" / "tokens").glob("*/meta.json")
    val = torch.from_numpy(load(tokens.parent).tokens("val")[:].astype("int64"))
    assert (len(val) - 1) % 16  # the last window is a shorter one
    windows = [val[start : start + 17] for start in range(0, len(val) - 1, 16)]
    with torch.no_grad():
        nats = sum(model(window[None, :-1], window[None, 1:], reduction="sum").item() for window in windows)
    assert nats / (len(val) - 1) == pytest.approx(run.loss, abs=1e-5)
    bits = column(run.folder, "val_bits_per_byte")[-1]
    assert bits == pytest.approx(column(run.folder, "val_loss")[-1] / math.log(2))  # a byte is a token here
    assert tokenizer.decode(tokenizer.encode("fox")) == "fox"


def test_the_first_loss_is_that_of_a_uniform_guess(train: Callable[..., Any]) -> None:
    run = train("max_steps=1", "log_every=1")
    vocab_size = load_checkpoint(run.folder)[0].config.vocab_size
    assert column(run.folder, "train_loss")[0] == pytest.approx(math.log(vocab_size), abs=0.1)


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(train: Callable[..., Any], tmp_path: Path) -> None:
    runs = [train("model.dropout=0.1", f"seed={seed}", folder=tmp_path / f"run{i}") for i, seed in enumerate((7, 7, 8))]
    a, b, c = ([*column(run.folder, "train_loss"), *column(run.folder, "val_loss")] for run in runs)
    assert a == b
    assert a != c


def test_one_batch_can_be_overfitted(train: Callable[..., Any]) -> None:
    run = train("debug=overfit", "optimizer.lr=1e-2", "data.batch_size=2", "max_steps=300", "eval_every=300")
    assert column(run.folder, "train_loss")[-1] < 0.1


def test_the_learning_rate_warms_up_and_decays_over_max_steps(train: Callable[..., Any]) -> None:
    run = train("max_steps=20", "log_every=1", "schedule=linear", "schedule.warmup_steps=4", "optimizer.lr=1e-2")
    rates = column(run.folder, "learning_rate")
    assert rates[:5] == pytest.approx([2e-3, 4e-3, 6e-3, 8e-3, 1e-2])
    assert rates[-1] == pytest.approx(1e-2 / 16)  # a step before the end of the schedule


def test_null_clips_no_gradient(train: Callable[..., Any], tmp_path: Path) -> None:
    free, high = (train(f"trainer.gradient_clip_val={x}", "max_steps=3", folder=tmp_path / x) for x in ("null", "1e9"))
    assert column(free.folder, "train_loss") == column(high.folder, "train_loss")
    assert max(column(free.folder, "grad_norm")) > 1.1


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_every_schedule_trains(train: Callable[..., Any], schedule: str) -> None:
    assert train(f"schedule={schedule}", "max_steps=3").summary["steps"] == 3


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(file.stem, marks=[pytest.mark.slow] if "_" in file.stem else [])  # the large ones of GPT-2
        for file in sorted((CONFIGS / "model").glob("*.yaml"))
        if file.stem != "pretrained"
    ],
)
def test_every_preset_takes_a_step_at_its_own_width(train: Callable[..., Any], preset: str) -> None:
    heads = {"nano": 4, "baby": 6, "gpt2": 12, "gpt2_medium": 16, "gpt2_large": 20, "gpt2_xl": 25}[preset]
    width = {"nano": 128, "baby": 384, "gpt2": 768, "gpt2_medium": 1024, "gpt2_large": 1280, "gpt2_xl": 1600}[preset]
    run = train(
        f"model={preset}",
        f"model.n_embd={width}",
        f"model.n_head={heads}",
        "model.n_layer=1",
        "max_steps=1",
        "data.batch_size=1",
    )
    assert run.summary["steps"] == 1


@pytest.mark.parametrize("debug", ["fast", "profile"])
def test_debug_presets_run(train: Callable[..., Any], debug: str) -> None:
    run = train(f"debug={debug}", *(["max_steps=25", "eval_every=25"] if debug == "profile" else []))
    if debug == "fast":
        assert run.summary["steps"] == 20  # the test's own max_steps stands after the preset's
    else:
        assert "aten::" in (run.folder / "fit-profile.txt").read_text()
        (trace,) = run.folder.glob("fit-profile*.pt.trace.json")
        assert trace.stat().st_size > 10_000


def test_early_stopping_stops_and_completes_the_run(train: Callable[..., Any]) -> None:
    run = train("callbacks=early_stopping", "optimizer.lr=1e-9", "callbacks.early_stopping.min_delta=1", "max_steps=90")
    assert run.summary["steps"] < 90
    assert run.summary["status"] == "completed"


@pytest.mark.slow
def test_a_compiled_model_trains_to_the_same_loss(train: Callable[..., Any], tmp_path: Path) -> None:
    eager = train("max_steps=5", folder=tmp_path / "eager")
    compiled = train("max_steps=5", "compile=true", folder=tmp_path / "compiled")
    assert compiled.loss == pytest.approx(eager.loss, abs=1e-4)
    assert isinstance(load_checkpoint(compiled.folder)[0], GPT)


def test_a_checkpoint_is_plain_data_and_self_contained(train: Callable[..., Any], tmp_path: Path) -> None:
    run = train("max_steps=2")
    shutil.rmtree(tmp_path / "data")
    content = read(run.folder / "checkpoints" / "last.safetensors")
    assert content["global_step"] == 2
    assert content["minigpt"]["config"]["max_steps"] == 2
    assert content["minigpt"]["corpus_sha256"] == run.summary["corpus_sha256"]
    assert {"optimizer_states", "lr_schedulers", "loops", "rng"} <= set(content)
    load_checkpoint(run.folder)


def test_a_nan_loss_stops_the_run_at_its_step(train: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"(nan|inf|not finite) at step \d+ \(learning rate"):
        train("optimizer.lr=1e18", "trainer.gradient_clip_val=null", "max_steps=30")
    assert '"failed"' in (tmp_path / "run" / "summary.json").read_text()


def test_a_run_folder_is_not_used_twice(train: Callable[..., Any]) -> None:
    train("max_steps=1")
    with pytest.raises(UserError, match="already holds a run"):
        train("max_steps=1")


def test_a_vocabulary_may_be_padded_but_not_cut(train: Callable[..., Any], tmp_path: Path) -> None:
    run = train("model.vocab_size=128", "max_steps=1")
    assert load_checkpoint(run.folder)[0].config.vocab_size == 128
    with pytest.raises(UserError, match=r"model\.vocab_size must be at least"):
        train("model.vocab_size=3", folder=tmp_path / "cut")
    assert not (tmp_path / "cut").exists()


@pytest.mark.parametrize("override", ["~callbacks.checkpoint", "callbacks.checkpoint=null"])
def test_checkpoints_can_be_disabled(train, capsys, override):
    ran = train(override)
    assert ran.summary["checkpoint"] is None
    assert not list(ran.folder.rglob("*.safetensors"))
    assert "best checkpoint" not in capsys.readouterr().out


def test_a_failing_sample_is_a_warning(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no text today")

    monkeypatch.setattr("minigpt.runs.samples.generate", fails)
    monkeypatch.setattr("minigpt.interpret.plots.plot_maps", fails)
    run = train("callbacks=attention")
    assert run.summary["status"] == "completed"
    output = capsys.readouterr().err
    assert output.count("warning: Samples failed at step") == 2
    assert output.count("warning: the final sample failed: RuntimeError: no text today") == 1
    assert output.count("warning: AttentionMaps failed at step") == 2


def test_callbacks_of_lightning_log_and_write_into_the_run_folder(train: Callable[..., Any], caplog: Any) -> None:
    names = ("LearningRateMonitor", "ModelCheckpoint", "ModelSummary")
    run = train(*(f"+callbacks.{name}._target_=lightning.pytorch.callbacks.{name}" for name in names), "eval_every=20")
    rates = column(run.folder, "lr-AdamW/pg1")
    assert len(rates) == 20
    assert column(run.folder, "learning_rate") == rates[4::5]
    (file,) = set((run.folder / "checkpoints").glob("epoch=*.ckpt"))
    assert read(file)["global_step"] == 20
    assert {path.name for path in run.folder.iterdir() if path.is_dir()} == {"checkpoints", ".hydra"}
    assert "Total params" in caplog.text


@pytest.mark.parametrize(("supported", "precision"), [(True, "bf16-mixed"), (False, "32-true")])
def test_automatic_precision_is_bfloat16_where_the_device_has_it(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, supported: bool, precision: str
) -> None:
    monkeypatch.setattr(trainer, "has_bfloat16", lambda device: supported and device.type == "cpu")
    run = train("trainer.precision=auto", "max_steps=40", "optimizer.lr=1e-2")
    assert run.summary["precision"] == precision
    assert run.loss < 2.5


def test_options_of_the_trainer_that_are_accepted_work(train: Callable[..., Any], caplog: Any) -> None:
    options = ("deterministic=true", "benchmark=true", "detect_anomaly=true", "num_nodes=1", "profiler=simple")
    assert train(*(f"+trainer.{option}" for option in options), "max_steps=2").summary["steps"] == 2
    assert "run_training_batch" in caplog.text


def test_every_other_option_of_the_trainer_is_refused_in_one_line(train: Callable[..., Any], tmp_path: Path) -> None:
    options = set(inspect.signature(Trainer.__init__).parameters) - {"self", *TRAINER_OPTIONS}
    assert len(options) > 25
    cfg = {"trainer": {"accelerator": "cpu"}}
    check_run(cfg)
    for option in options:
        with pytest.raises(UserError, match=rf"^trainer\.{option} is not an option; [^\n]+$"):
            check_run({"trainer": {option: 0}})
    with pytest.raises(UserError, match=r"limit_val_batches is not an option; .* of a validation eval_batches$"):
        train("+trainer.limit_val_batches=0")
    assert not (tmp_path / "run").exists()


def test_resume_takes_a_path(train: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=r"^resume must be auto, a run folder.*, got True"):
        train("resume=true")


def test_a_run_may_validate_on_a_part_of_the_split(train: Callable[..., Any], tmp_path: Path, capsys: Any) -> None:
    part = ["eval_batches=2", "data.eval_batch_size=8"]
    run = train(*part, "max_steps=10")
    assert "on 2 batches of the split" in capsys.readouterr().out
    assert run.summary["eval_batches"] == 2
    model, _ = load_checkpoint(run.folder)
    (tokens,) = (tmp_path / "data" / "tokens").glob("*/meta.json")
    val = torch.from_numpy(load(tokens.parent).tokens("val")[:].astype("int64"))
    windows = -(-(len(val) - 1) // 16)
    starts = [i * windows // 16 * 16 for i in range(16)]
    x = torch.stack([val[start : start + 17] for start in starts])
    with torch.no_grad():
        assert model(x[:, :-1], x[:, 1:]).item() == pytest.approx(run.loss, rel=1e-5)
    with pytest.raises(UserError, match=r"eval_batches \(2 in the checkpoint, None now\)"):
        train("data.eval_batch_size=8", "resume=auto", "max_steps=20", folder=run.folder)


def test_a_run_prints_what_it_will_do_before_it_trains(train: Callable[..., Any], tmp_path: Path, capsys: Any) -> None:
    run = train("max_steps=10")
    output = capsys.readouterr().err.splitlines()
    lines = (run.folder / "log.txt").read_text().splitlines()
    assert lines == [line for line in output if not line.startswith("warning")]
    assert [line.split()[0] for line in lines[:5]] == ["model", "data", "training", "device", "run"]
    text = "\n".join(lines)
    n_train = int(re.search(r"([\d,]+) training tokens", text)[1].replace(",", ""))
    model, tokenizer = load_checkpoint(run.folder)
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in text
    assert f"tokenizer char, vocab_size {tokenizer.vocab_size}" in text
    assert f"10 steps, {10 * 8 * 16:,} tokens ({10 * 8 * 16 / n_train:.2f} epochs)" in text
    assert f"{model.config.flops_per_token() * 10 * 8 * 16:.3g} FLOPs" in text
    assert "block_size 16" in text
    assert run.summary["device"] in text
    assert "precision 32-true" in text


def test_a_warmup_as_long_as_the_run_is_a_warning(train: Callable[..., Any], tmp_path: Path, capsys: Any) -> None:
    for warmup, warned in ((4, False), (5, True)):
        train("max_steps=5", f"schedule.warmup_steps={warmup}", folder=tmp_path / str(warmup))
        assert ("schedule.warmup_steps=5 is not below max_steps=5" in capsys.readouterr().err) is warned


def test_a_run_records_command_versions_and_commit(train: Callable[..., Any]) -> None:
    run = train("max_steps=1")
    versions = {"minigpt": minigpt.__version__, "torch": torch.__version__, "python": platform.python_version()}
    assert versions.items() <= run.summary["versions"].items()
    assert run.summary["host"] == platform.node()
    assert run.summary["command"] == " ".join(sys.argv)
    git = ["git", "-C", str(CONFIGS.parent), "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    assert run.summary["commit"] == (head or None)
    assert run.summary["dirty"] in (True, False, None)
    kept = read(run.folder / "checkpoints/last.safetensors")["minigpt"]["provenance"]
    assert kept == {name: run.summary[name] for name in kept}
    assert run.summary["wall_seconds"] > run.summary["seconds"] > 0


def test_only_exact_names_of_gpus_have_a_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"NVIDIA L40": 181e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}
    unknown = dict.fromkeys(("NVIDIA A10G", "NVIDIA RTX A1000", "NVIDIA L40G", "H100", "Tesla V100-SXM2-16GB"))
    for name, peak in {**peaks, **unknown}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert PEAK_FLOPS.get(device_name(torch.device("cuda"))) == peak
