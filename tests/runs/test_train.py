"""Training as a user sees it: real Trainer, real configurations, a small text."""

import inspect
import itertools
import re
import shutil
import time

import matplotlib.image
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from omegaconf import OmegaConf
from refusals import refused
from small_runs import column, rows

import minigpt
from minigpt import GPT, generate, load_checkpoint
from minigpt.checkpoints.find import BEST, LAST, PREVIOUS
from minigpt.checkpoints.format import read
from minigpt.extras.playground.history import read_history, read_samples
from minigpt.runs.callbacks.collective_timeout import CollectiveTimeout
from minigpt.runs.run_config import TRAINER_OPTIONS, check_run
from minigpt.runs.trainer import build_trainer
from minigpt.sampling.generation import stream
from minigpt.sweeps.results import read_sweep


def test_a_run_folder_holds_everything_about_its_run(finished):
    folder = finished.folder
    summary = finished.summary
    results = {"metrics.csv", "curves.png", "samples.txt", "summary.json", "log.txt"}
    assert {file.name for file in folder.iterdir()} == {*results, "checkpoints", ".hydra", ".lock"}
    files = {"best.safetensors", "last.safetensors", "previous.safetensors", "snapshots"}
    assert {file.name for file in (folder / "checkpoints").iterdir()} == files
    assert column(folder, "step") == [5, 10, 10, 15, 20, 20]
    assert summary["best_val_loss"] == min(column(folder, "val_loss"))
    losses = column(folder, "train_loss")
    assert losses[-1] < losses[0]
    assert matplotlib.image.imread(folder / "curves.png").shape[:2] == (720, 960)
    recorded = OmegaConf.load(folder / ".hydra/overrides.yaml")  # without those of Hydra
    assert (recorded[0][:10], recorded[-1]) == ("data.path=", "callbacks.samples.max_new_tokens=20")
    content = read(folder / LAST)
    assert content["global_step"] == content["minigpt"]["config"]["max_steps"] == 20
    assert content["minigpt"]["corpus_sha256"] == summary["corpus_sha256"]
    origin = content["minigpt"]["provenance"]
    names = {"command", "host", "versions", "commit", "dirty", "init_from", "resumed_from"}
    assert names == set(origin)
    assert origin == {name: summary[name] for name in origin}
    refused("already holds a run", minigpt.train, [f"hydra.run.dir={folder}"])
    assert OmegaConf.load(folder / ".hydra/overrides.yaml") == recorded


class Remove(Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, *args):
        shutil.rmtree(self.folder, ignore_errors=True)


def test_a_run_holds_its_token_files_open(train, trained, tmp_path):
    target = "+callbacks.remove._target_=test_train.Remove"
    run = train(target, f"+callbacks.remove.folder={tmp_path}/data/tokens")
    assert not (tmp_path / "data/tokens").exists()
    assert rows(run.folder) == rows(trained())


def test_a_run_prints_what_it_will_do_and_its_results(finished):
    folder = finished.folder
    summary = finished.summary
    text = (folder / "log.txt").read_text(encoding="utf-8")
    lines = text.splitlines()
    printed = finished.stderr.splitlines()
    assert lines == [line for line in printed if not line.startswith("warning")]
    first = ["model", "data", "training", "device", "run"]
    assert [line.split()[0] for line in lines[:5]] == first
    model, tokenizer = load_checkpoint(folder)
    tokens = 20 * 8 * 16
    per_token = model.config.flops_per_token()
    for part in (
        f"{sum(p.numel() for p in model.parameters()):,} parameters",
        f"18,000 training tokens; tokenizer char, vocab_size {tokenizer.vocab_size}; ",
        "; validation on 10 % of the tokens",
        f"20 steps, {tokens:,} tokens ({tokens / 18_000:.2f} epochs)",
        f"{per_token * tokens:.3g} FLOPs ({per_token:.3g} per token)",
        "block_size 16",
        f"{summary['device']}, precision 32-true",
    ):
        assert part in text
    results = f"""
validation loss  {summary["best_val_loss"]:.4f} at step 20
time             {summary["wall_seconds"]:,.1f} s, training {summary["seconds"]:,.1f} s
run folder       {folder}
curves           {folder}/curves.png
best checkpoint  {folder}/checkpoints/best.safetensors
"""
    assert results in finished.stdout


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(train, finished, tmp_path):
    size = f"model.vocab_size={load_checkpoint(finished.folder)[1].vocab_size}"  # the default
    losses = {}
    for seed in (1337, 8):
        run = train(f"seed={seed}", size, "max_steps=5", folder=tmp_path / f"{seed}")
        losses[seed] = column(run.folder, "train_loss")
    assert losses[1337] == column(finished.folder, "train_loss")[:1] != losses[8]


def test_samples_are_drawn_with_their_settings(trained, finished):
    default = {"prompt": "", "max_new_tokens": 20, "temperature": 0.8, "top_k": None, "seed": 1337}
    given = {"prompt": "fox", "max_new_tokens": 60, "temperature": 2.5, "top_k": 15, "seed": 3}
    other = trained(*(f"callbacks.samples.{name}={value}" for name, value in given.items()))

    def drawn(file, *, prompt, **settings):
        model, tokenizer = load_checkpoint(file)
        tokens = torch.from_numpy(tokenizer.encode(prompt or "\n").astype("int64"))
        return (prompt + tokenizer.decode(generate(model, tokens, **settings)[0].tokens)).strip()

    for folder, settings, less in ((finished.folder, default, given), (other, given, default)):
        samples = dict(read_samples(folder))
        last = drawn(folder / LAST, **settings)
        assert samples == {10: drawn(folder / PREVIOUS, **settings), 20: last}
        for name, value in less.items():
            assert drawn(folder / LAST, **{**settings, name: value}) != last, name
    final = drawn(finished.folder / BEST, **{**default, "max_new_tokens": 20})
    assert finished.stdout.startswith(f"{final}\n")


def test_what_follows_a_training_is_announced_and_ends_after_its_share_of_the_time(
    train, monkeypatch, capsys
):
    def slowly(*args, **settings):
        for step in stream(*args, **settings):
            time.sleep(0.02)
            yield step

    monkeypatch.setattr("minigpt.runs.callbacks.samples.stream", slowly)
    monkeypatch.setattr("minigpt.runs.fit.FINAL_SECONDS", 0.6)
    monkeypatch.setattr("minigpt.runs.fit.FINAL_TOKENS", 300)
    run = train("callbacks.originality.characters=2000", "max_steps=5")
    out, err = capsys.readouterr()
    what = "300 tokens and 2,000 characters, to see how much is copied; at most 1 s"
    assert f"sampling    {what}\n" in err
    assert len(out.partition("\nvalidation loss")[0]) < 100  # of at most 15 tokens
    found = run.summary["originality"].keys()
    assert {"final_sample", "generated_text", "validation_text"} == found
    assert load_checkpoint(run.folder)[0].config.block_size == 16


def test_a_sample_of_a_short_training_is_short_unless_its_length_is_given(train, tmp_path):
    for max_steps, tokens in ((20, 25), (4, 16)):  # of 8 windows of 16 tokens
        line = ["callbacks.samples.seed=1", "eval_every=20", f"max_steps={max_steps}"]
        ((_, sample),) = read_samples(train(*line, folder=tmp_path / f"{tokens}").folder)
        assert abs(len(sample) - tokens) < 3  # spaces at the ends are dropped


def test_one_batch_can_be_overfitted(train):
    small = ["optimizer.lr=1e-2", "data.batch_size=2", "max_steps=100", "eval_every=100"]
    assert column(train("debug=overfit", *small).folder, "train_loss")[-1] < 0.1


def test_null_clips_no_gradient(train, tmp_path):
    losses = []
    for limit in ("1e9", "null"):
        run = train(f"trainer.gradient_clip_val={limit}", "max_steps=3", folder=tmp_path / limit)
        losses.append(column(run.folder, "train_loss"))
    assert losses[0] == losses[1]
    assert max(column(run.folder, "grad_norm")) > 1.1


def test_the_debug_preset_that_profiles_writes_a_table_and_a_trace_of_the_training(train):
    run = train("debug=profile", "max_steps=25", "data.eval_batch_size=1", "eval_every=10")
    table = (run.folder / "fit-profile.txt").read_text(encoding="utf-8")
    # The rows are the 20 operations that took longest; of these two, every other one is a part.
    assert "run_training_batch" in table
    assert "SingleDeviceStrategy.backward" in table
    assert "validation_step" not in table
    (trace,) = run.folder.glob("fit-profile*.pt.trace.json")
    assert trace.stat().st_size > 10_000


@pytest.mark.parametrize("override", ["~callbacks.checkpoint", "callbacks.checkpoint=null"])
def test_checkpoints_can_be_disabled(train, capsys, override):
    ran = train(override, "max_steps=1")
    assert ran.summary["checkpoint"] is None
    assert not list(ran.folder.glob("checkpoints/*.safetensors"))
    assert "best checkpoint" not in capsys.readouterr().out


def test_a_callback_that_stops_a_training_is_the_reason_why_it_ended(train, monkeypatch, capsys):
    elapsed = itertools.count()  # seconds, one more at every step
    monkeypatch.setattr("lightning.pytorch.callbacks.Timer.time_elapsed", lambda *_: next(elapsed))
    timer = "+callbacks.timer._target_=lightning.pytorch.callbacks.Timer"
    line = [timer, "+callbacks.timer.duration={seconds: 3}", "max_steps=6", "eval_every=6"]
    summary = train(*line).summary
    assert (summary["steps"], summary["status"], summary["stopped_early"]) == (3, "completed", True)
    assert summary["reason"] == "stopped early at step 3 of 6: ended by a callback: Timer"
    assert f"\n{summary['reason']}\n" in capsys.readouterr().out
    train(*line, "resume=auto")
    assert "is complete at step 3 of 6" in capsys.readouterr().out
    line[1] = "+callbacks.timer.duration={days: 1}"
    assert train(*line, "resume=auto").summary["steps"] == 6


def test_callbacks_of_lightning_log_and_write_into_the_run_folder(train, caplog):
    names = ("LearningRateMonitor", "ModelCheckpoint", "ModelSummary")
    own = [f"+callbacks.{name}._target_=lightning.pytorch.callbacks.{name}" for name in names]
    run = train(*own, "eval_every=20")
    rates = column(run.folder, "lr-AdamW/pg1")
    assert len(rates) == 20
    assert column(run.folder, "learning_rate") == rates[4::5]
    (file,) = set((run.folder / "checkpoints").glob("epoch=*.ckpt"))
    assert read(file)["global_step"] == 20
    folders = {path.name for path in run.folder.iterdir() if path.is_dir()}
    assert folders == {"checkpoints", ".hydra"}
    assert "Total params" in caplog.text


NAMES = ("acc,top5", 'a"b', "two\nlines")


class LogOddNames(Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):
        pl_module.log_dict({name: float(trainer.global_step) for name in NAMES})


def test_a_metric_may_have_a_comma_a_quote_or_a_line_break_in_its_name(train):
    odd = ["+callbacks.odd._target_=test_train.LogOddNames", "log_every=1", "eval_every=2"]
    train(*odd, "max_steps=4")
    run = train(*odd, "max_steps=6", "resume=auto")
    assert run.summary["status"] == "completed"
    for name in NAMES:
        assert column(run.folder, name) == [1, 2, 3, 4, 5, 6]
    assert len(read_history(run.folder)["val_loss"]) == 3
    (point,) = read_sweep(run.folder)
    assert (point.totals["best_val_loss"], len(point.curve)) == (run.summary["best_val_loss"], 3)


def test_settings_that_change_no_loss_reach_what_they_set(train, monkeypatch):
    built = []

    def build(*parts):
        built.append(build_trainer(*parts))
        return built[0]

    monkeypatch.setattr("minigpt.runs.fit.build_trainer", build)
    monkeypatch.setattr(GPT, "compile", lambda model: setattr(model, "compiled", True))
    settings = ["compile=true", "checkpoint_blocks=2", "collective_timeout=45"]
    train(*settings, "model.vocab_size=128", "max_steps=1")
    model = built[0].lightning_module.model
    assert (model.compiled, model.checkpoint_blocks, model.config.vocab_size) == (True, 2, 128)
    (callback,) = (each for each in built[0].callbacks if isinstance(each, CollectiveTimeout))
    assert callback.timeout.total_seconds() == 45


def test_options_of_the_trainer_that_are_accepted_work(train, caplog):
    options = ("benchmark=true", "detect_anomaly=true", "num_nodes=1", "profiler=simple")
    given = ("trainer.deterministic=true", *(f"+trainer.{option}" for option in options))
    assert train(*given, "max_steps=2", "callbacks.samples.max_new_tokens=9").summary["steps"] == 2
    assert "run_training_batch" in caplog.text
    assert torch.are_deterministic_algorithms_enabled()  # also after the samples
    torch.use_deterministic_algorithms(False)


def test_every_other_option_of_the_trainer_is_refused_in_one_line():
    options = set(inspect.signature(Trainer.__init__).parameters) - {"self", *TRAINER_OPTIONS}
    assert len(options) > 25
    check_run(OmegaConf.create({"trainer": {"accelerator": "cpu"}}))
    for option in options:
        pattern = rf"^trainer\.{option} is not an option; [^\n]+ eval_batches$"
        refused(pattern, check_run, {"trainer": {option: 0}})


def test_a_run_may_validate_on_a_part_of_the_split(train, finished, capsys):
    run = train("data.eval_batch_size=8", "max_steps=10", "eval_batches=2")
    assert "on 2 batches of the split" in capsys.readouterr().out
    assert run.summary["eval_batches"] == 2
    model, _ = load_checkpoint(run.folder)
    windows = -(-(len(finished.val) - 1) // 16)
    starts = [i * windows // 16 * 16 for i in range(16)]
    assert run.summary["validated"].startswith(f"16 of {windows} windows of 16 tokens in ")
    x = torch.stack([finished.val[start : start + 17] for start in starts])
    with torch.no_grad():
        assert model(x[:, :-1], x[:, 1:]).item() == pytest.approx(run.loss, rel=1e-5)


def test_a_warmup_as_long_as_the_run_is_a_warning(train, tmp_path, capsys):
    for warmup in (1, 2):
        train("max_steps=2", f"schedule.warmup_steps={warmup}", folder=tmp_path / f"{warmup}")
        warning = "schedule.warmup_steps=2 is not below max_steps=2"
        assert (warning in capsys.readouterr().err) == (warmup == 2)


@pytest.mark.parametrize(
    ("precision", "rate", "warmup", "step"),
    [
        ("bf16-true", 1e-5, 3, 10),
        ("bf16-true", 1e-5, 10, 20),  # the first validation is in the warmup
        ("bf16-true", 1e-3, 3, None),
        ("32-true", 1e-5, 3, None),
    ],
)
def test_weights_that_rounding_keeps_as_they_were_are_a_warning(
    train, capsys, precision, rate, warmup, step
):
    settings = [
        f"trainer.precision={precision}",
        f"optimizer.lr={rate}",
        f"schedule.warmup_steps={warmup}",
        "optimizer.betas=[0.9,0.999]",
        "callbacks.checkpoint.save_top_k=2",
        "callbacks.snapshots=null",
        "seed=7",
    ]
    folder = train(*settings).folder
    err = capsys.readouterr().err
    pattern = r"warning: at step (\d+), ([\d.]+)% of the weights of the blocks have changed, .*auto"
    rounds = "warning: a decay rate of 0.999 of the optimizer rounds to 1 in bfloat16"
    assert (rounds in err) == (precision == "bf16-true")
    warned = re.findall(pattern + "\n", err)
    assert len(warned) == err.count("have changed") == (step is not None)
    model, _ = load_checkpoint(folder / f"checkpoints/step-{step or 10}.safetensors")
    torch.manual_seed(7)
    initial = GPT(model.config).to(torch.float32 if precision == "32-true" else torch.bfloat16)
    pairs = zip(model.blocks.parameters(), initial.blocks.parameters(), strict=True)
    changed = torch.cat([(new != old).flatten() for new, old in pairs]).float().mean().item()
    if step is None:
        assert changed > 0.9
    else:
        assert changed < 0.4
        assert warned == [(str(step), f"{100 * changed:.1f}")]
