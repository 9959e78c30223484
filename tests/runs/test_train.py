"""Training as a user sees it: real Trainer, real configurations, a small text."""

import errno
import inspect
import itertools
import json
import os
import pkgutil
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import hydra
import matplotlib.image
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer
from processes import close_output
from small_runs import column, composed, rows
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import minigpt
from minigpt import GPT, GPTConfig, generate, load_checkpoint
from minigpt.checkpoints.find import BEST, LAST, PREVIOUS
from minigpt.checkpoints.format import read
from minigpt.extras.playground.history import read_history, read_samples
from minigpt.runs.callbacks.collective_timeout import CollectiveTimeout
from minigpt.runs.lightning_workarounds import unscale_before_clipping
from minigpt.runs.run_config import TRAINER_OPTIONS, check_run
from minigpt.runs.run_dir import read_summary
from minigpt.runs.trainer import build_trainer, partial_from_config
from minigpt.sampling.generation import stream
from minigpt.sweeps.results import read_sweep
from minigpt.training.language_model import LanguageModel
from minigpt.training.precision import half_dtype, training_precision
from minigpt.utils.errors import UserError
from minigpt.utils.ranks import TORCHRUN
from minigpt.utils.signals import END_SIGNALS


def test_a_run_folder_holds_everything_about_its_run(finished):
    folder, summary = finished.folder, finished.summary
    results = {"metrics.csv", "curves.png", "samples.txt", "summary.json", "log.txt"}
    assert {file.name for file in folder.iterdir()} == {*results, "checkpoints", ".hydra", ".lock"}
    files = {"best.safetensors", "last.safetensors", "previous.safetensors", "snapshots"}
    assert {file.name for file in (folder / "checkpoints").iterdir()} == files
    assert column(folder, "step") == [5, 10, 10, 15, 20, 20]
    assert summary["best_val_loss"] == min(column(folder, "val_loss"))
    assert column(folder, "train_loss")[-1] < column(folder, "train_loss")[0]
    assert matplotlib.image.imread(folder / "curves.png").shape[:2] == (720, 960)
    recorded = OmegaConf.load(folder / ".hydra/overrides.yaml")  # without those of Hydra
    assert (recorded[0][:10], recorded[-1]) == ("data.path=", "callbacks.samples.max_new_tokens=20")
    content = read(folder / LAST)
    assert content["global_step"] == content["minigpt"]["config"]["max_steps"] == 20
    assert content["minigpt"]["corpus_sha256"] == summary["corpus_sha256"]
    origin = content["minigpt"]["provenance"]
    assert {"command", "host", "versions", "commit", "dirty", "init_from", "resumed_from"} == set(
        origin
    )
    assert origin == {name: summary[name] for name in origin}
    with pytest.raises(UserError, match="already holds a run"):
        minigpt.train([f"hydra.run.dir={folder}"])
    assert OmegaConf.load(folder / ".hydra/overrides.yaml") == recorded


class Remove(Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, *args):
        shutil.rmtree(self.folder, ignore_errors=True)


def test_a_run_holds_its_token_files_open(train, trained, tmp_path):
    remove = [
        "+callbacks.remove._target_=test_train.Remove",
        f"+callbacks.remove.folder={tmp_path}/data/tokens",
    ]
    run = train(*remove)
    assert not (tmp_path / "data/tokens").exists()
    assert rows(run.folder) == rows(trained())


def test_a_run_prints_what_it_will_do_and_its_results(finished):
    folder, summary, tokens = finished.folder, finished.summary, 20 * 8 * 16
    text = (folder / "log.txt").read_text(encoding="utf-8")
    assert text.splitlines() == [
        line for line in finished.stderr.splitlines() if not line.startswith("warning")
    ]
    assert [line.split()[0] for line in text.splitlines()[:5]] == [
        "model",
        "data",
        "training",
        "device",
        "run",
    ]
    model, tokenizer = load_checkpoint(folder)
    for part in (
        f"{sum(p.numel() for p in model.parameters()):,} parameters",
        f"18,000 training tokens; tokenizer char, vocab_size {tokenizer.vocab_size}; validation on 10 % of the tokens",
        f"20 steps, {tokens:,} tokens ({tokens / 18_000:.2f} epochs)",
        f"{model.config.flops_per_token() * tokens:.3g} FLOPs ({model.config.flops_per_token():.3g} per token)",
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
    same, other = (
        train(f"seed={x}", size, "max_steps=5", folder=tmp_path / str(x)) for x in (1337, 8)
    )
    assert column(same.folder, "train_loss") == column(finished.folder, "train_loss")[:1]
    assert column(same.folder, "train_loss") != column(other.folder, "train_loss")


def test_samples_are_drawn_with_their_settings(trained, finished):
    default = {"prompt": "", "max_new_tokens": 20, "temperature": 0.8, "top_k": None, "seed": 1337}
    given = {"prompt": "fox", "max_new_tokens": 60, "temperature": 2.5, "top_k": 15, "seed": 3}
    other = trained(*(f"callbacks.samples.{name}={value}" for name, value in given.items()))

    def drawn(file, *, prompt, **settings):
        model, tokenizer = load_checkpoint(file)
        tokens = torch.from_numpy(tokenizer.encode(prompt or "\n").astype("int64"))
        return (prompt + tokenizer.decode(generate(model, tokens, **settings)[0].tokens)).strip()

    for folder, settings, less in ((finished.folder, default, given), (other, given, default)):
        assert dict(read_samples(folder)) == {
            step: drawn(folder / file, **settings) for step, file in ((10, PREVIOUS), (20, LAST))
        }
        for name, value in less.items():
            assert (
                drawn(folder / LAST, **{**settings, name: value}) != read_samples(folder)[-1][1]
            ), name
    final = drawn(finished.folder / BEST, **{**default, "max_new_tokens": 400})
    assert finished.stdout.startswith(f"{final}\n")


def test_what_follows_a_training_is_announced_and_ends_after_its_share_of_the_time(
    train, monkeypatch, capsys
):
    def slowly(*args, **settings):
        for step in stream(*args, **settings):
            time.sleep(0.02)
            yield step

    monkeypatch.setattr("minigpt.runs.callbacks.samples.stream", slowly)
    monkeypatch.setattr("minigpt.runs.fit.FINAL_SECONDS", 1)
    run = train("originality=2000")
    out, err = capsys.readouterr()
    assert (
        "sampling    400 tokens and 2,000 characters, to see how much is copied; at most 1 s\n"
        in err
    )
    assert len(out.partition("\nvalidation loss")[0]) < 100  # of at most 25 tokens
    assert {"final_sample", "generated_text", "validation_text"} == run.summary[
        "originality"
    ].keys()
    assert load_checkpoint(run.folder)[0].config.block_size == 16


def test_a_sample_of_a_short_training_is_short_unless_its_length_is_given(train, tmp_path):
    for tokens, given in (
        (25, ()),
        (16, ("max_steps=4",)),
        (70, ("callbacks.samples.max_new_tokens=70",)),
    ):
        line = (
            "callbacks.samples.seed=1",
            "eval_every=20",
            *given,
        )  # 20 steps of 8 windows of 16 tokens
        samples = read_samples(train(*line, folder=tmp_path / str(tokens)).folder)
        assert abs(len(samples[0][1]) - tokens) < 3  # spaces at the ends are dropped


def test_one_batch_can_be_overfitted(train):
    run = train(
        "debug=overfit", "optimizer.lr=1e-2", "data.batch_size=2", "max_steps=100", "eval_every=100"
    )
    assert column(run.folder, "train_loss")[-1] < 0.1


def test_null_clips_no_gradient(train, tmp_path):
    free, high = (
        train(f"trainer.gradient_clip_val={x}", "max_steps=3", folder=tmp_path / x)
        for x in ("null", "1e9")
    )
    assert column(free.folder, "train_loss") == column(high.folder, "train_loss")
    assert max(column(free.folder, "grad_norm")) > 1.1


def test_the_debug_preset_that_profiles_writes_a_table_and_a_trace_of_the_training(train):
    run = train("debug=profile", "max_steps=25", "data.eval_batch_size=1", "eval_every=10")
    table = (run.folder / "fit-profile.txt").read_text(encoding="utf-8")
    # The rows are the 20 operations that took longest; of these two, every other one is a part.
    assert "run_training_batch" in table
    assert "SingleDeviceStrategy.backward" in table
    assert "validation_step" not in table
    (trace,) = run.folder.glob("fit-profile*.pt.trace.json")
    assert trace.stat().st_size > 10_000


LEFT_BEHIND = {
    "Kubeflow": {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "no.invalid", "MASTER_PORT": "1"},
    "Lightning": {"LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "2"},
    "torchrun": {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "1", "RANK": "two"},
    "sbatch": {
        "SLURM_NTASKS": "2",
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "a",
        "SLURM_PROCID": "0",
    },
    "salloc": {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "interactive"},
    "a step of one task": {
        **{
            "SLURM_NTASKS": "2",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_JOB_NAME": "a",
        },
        **{
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "0",
            "SLURM_STEP_NODELIST": "a",
        },
    },
}


@pytest.mark.parametrize("program", LEFT_BEHIND)
def test_a_process_that_is_no_rank_trains_alone_whatever_its_environment_has_of_ranks(
    program, train, trained, monkeypatch, capsys
):
    # As if Lightning had been imported with these variables
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    for name, value in LEFT_BEHIND[program].items():
        monkeypatch.setenv(name, value)
    before = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    run = train("trainer.strategy=ddp")
    warned = "SLURM_NTASKS" not in LEFT_BEHIND[program]
    names = ", ".join(
        name for name in (*TORCHRUN, "NODE_RANK", "GROUP_RANK") if name in LEFT_BEHIND[program]
    )
    assert (f"warning: {names} ignored: without " in capsys.readouterr().err) == warned
    assert rows(run.folder) == rows(trained("trainer.strategy=ddp"))
    assert {name: os.environ.get(name) for name in before} == before
    assert "MASTER_PORT" in before or "MASTER_PORT" not in os.environ
    with pytest.raises(UserError, match="already holds a run"):
        train()


def test_training_leaves_hydra_of_the_program_as_it_was(train, trained, tmp_path, monkeypatch):
    """As in a program of Hydra, or a notebook after `hydra.initialize`."""
    monkeypatch.setattr(BaseContainer, "_resolvers", dict(BaseContainer._resolvers))
    (tmp_path / "mine.yaml").write_text("a: ${now:x}")
    hydra.initialize_config_dir(str(tmp_path), version_base=None)
    OmegaConf.register_new_resolver("now", lambda pattern: "of the user", replace=True)
    try:
        cfg = hydra.compose("mine", return_hydra_config=True)
        cfg.hydra.runtime.output_dir = "of the user"
        HydraConfig.instance().set_config(cfg)
        ours = GlobalHydra.instance().hydra, dict(BaseContainer._resolvers)
        assert rows(train().folder) == rows(trained())
        with pytest.raises(UserError):
            train("max_steps=-1")
        assert (GlobalHydra.instance().hydra, BaseContainer._resolvers) == ours
        assert HydraConfig.get().runtime.output_dir == "of the user"
        assert hydra.compose("mine").a == "of the user"
    finally:
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None
    train(folder=tmp_path / "without")
    assert not HydraConfig.initialized()


class Wait(Callback):
    """Wait until another run has begun, or for a second."""

    trains = 0
    most = 0

    def on_train_start(self, trainer, pl_module):
        Wait.trains += 1
        Wait.most = max(Wait.most, Wait.trains)
        time.sleep(0.3)

    def on_train_end(self, trainer, pl_module):
        Wait.trains -= 1


def test_runs_of_two_threads_train_one_after_the_other(train, trained, tmp_path):
    def run(seed):
        return train(
            f"seed={seed}",
            "+callbacks.wait._target_=test_train.Wait",
            folder=tmp_path / f"{seed}",
        )

    with ThreadPoolExecutor(2) as threads:
        runs = [*threads.map(run, (1337, 7))]
    assert Wait.most == 1
    for found, seed in zip(runs, (1337, 7), strict=True):
        assert rows(found.folder) == rows(trained(f"seed={seed}"))


class Fail(Callback):
    def __init__(self, error):
        self.error = pkgutil.resolve_name(error)

    def setup(self, *args, **kwargs):
        raise self.error


@pytest.mark.parametrize(
    "error", ["builtins:KeyboardInterrupt", "builtins:ZeroDivisionError", None]
)
def test_training_leaves_signal_handlers_of_the_program_as_they_were(train, error):
    def mine(*_):
        raise KeyboardInterrupt

    given = {signum: signal.signal(signum, mine) for signum in END_SIGNALS}
    fails = ["+callbacks.fail._target_=test_train.Fail", f"+callbacks.fail.error={error}"]
    try:
        with nullcontext() if error is None else pytest.raises((SystemExit, ZeroDivisionError)):
            train("max_steps=2", *(fails if error else ()))
        assert {signal.getsignal(signum) for signum in END_SIGNALS} == {mine}
    finally:
        for handler in given.items():
            signal.signal(*handler)


TWO = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
PROGRAM = """
import json, os, sys
import minigpt

print("the program runs")
before = {name: os.environ.get(name) for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
results = []
for overrides in json.loads(sys.stdin.read()):
    try:
        results.append(minigpt.train(overrides))
    except minigpt.utils.errors.UserError as error:
        results.append(str(error))
    assert before == {name: os.environ.get(name) for name in before}
print(json.dumps(results))
"""


@pytest.mark.slow
def test_a_program_trains_several_runs_on_two_ranks_and_runs_once(small, trained, tmp_path):
    """Also after a run on one, and after one that fails; with arguments and standard input of its own."""
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    seeds = [["seed=7"], TWO, ["optimizer.lr=1e30", *TWO], ["seed=7", *TWO], []]
    given = json.dumps([[*small, *overrides] for overrides in seeds])
    command = [sys.executable, "program.py", "--an=argument"]
    result = subprocess.run(
        command, input=given, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("the program runs") == 1
    first, second, failed, third, last = json.loads(result.stdout.splitlines()[-1])
    assert "the loss is nan" in failed
    for found, seed, size in ((first, 7, 1), (second, 1337, 2), (third, 7, 2), (last, 1337, 1)):
        assert found["world_size"] == size
        assert column(Path(found["folder"]), "val_loss") == pytest.approx(
            column(trained(f"seed={seed}"), "val_loss")
        )


def test_a_part_that_other_ranks_cannot_import_is_refused(train, monkeypatch):
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "Mine", Callback, raising=False)
    with pytest.raises(
        UserError, match="_target_ must be of a module, got __main__; move it to where"
    ):
        train("+callbacks.mine._target_=__main__.Mine", *TWO)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_taken_port_is_named(devices, train, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", f"{port}")
        with pytest.raises(
            UserError, match=rf"^MASTER_PORT must be a free port, got {port}; set this"
        ):
            train("trainer=ddp", "trainer.accelerator=cpu", f"trainer.devices={devices}")


@pytest.mark.slow
def test_a_compiled_model_trains_to_the_same_loss(train, finished):
    from torch._dynamo.utils import counters

    torch.compiler.reset()  # what other tests have compiled
    counters.clear()
    compiled = train("compile=true")
    assert counters["stats"]["unique_graphs"] == 1  # validation is not compiled
    assert compiled.loss == pytest.approx(finished.summary["best_val_loss"], abs=1e-4)
    assert isinstance(load_checkpoint(compiled.folder)[0], GPT)


@pytest.mark.parametrize("override", ["~callbacks.checkpoint", "callbacks.checkpoint=null"])
def test_checkpoints_can_be_disabled(train, capsys, override):
    ran = train(override, "max_steps=1")
    assert ran.summary["checkpoint"] is None
    assert not list(ran.folder.glob("checkpoints/*.safetensors"))
    assert "best checkpoint" not in capsys.readouterr().out


def test_a_failing_sample_is_a_warning(train, monkeypatch, capsys):
    def fails(*args, **kwargs):
        raise RuntimeError("no text today")

    monkeypatch.setattr("minigpt.runs.callbacks.samples.stream", fails)
    monkeypatch.setattr("minigpt.extras.interpret.attention_plots.plot_maps", fails)
    run = train(
        "callbacks=attention", "callbacks.samples.max_new_tokens=20", "max_steps=2", "eval_every=1"
    )
    assert run.summary["status"] == "completed"
    output = capsys.readouterr().err
    assert output.count("warning: Samples failed at step") == 2
    assert output.count("warning: the final sample failed: RuntimeError: no text today") == 1
    assert output.count("warning: AttentionMaps failed at step") == 2


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_final_sample_ends_a_run_that_is_complete(
    call, tmp_path, monkeypatch, signum
):
    monkeypatch.setattr(
        "minigpt.runs.fit.sample_text", lambda *_, **__: signal.raise_signal(signum)
    )
    ended = call("train.py", "max_steps=2", "hydra.run.dir=run")
    assert ended.returncode == 128 + signum
    assert ended.stderr.splitlines()[-1] == f"interrupted by {signum.name}"
    assert "resume with" not in ended.stderr
    summary = read_summary(tmp_path / "run")
    assert (summary["status"], summary["steps"], summary["best_step"]) == ("completed", 2, 2)


def test_a_failure_to_load_the_best_checkpoint_for_a_sample_is_a_warning(
    train, monkeypatch, capsys
):
    def fails(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr("minigpt.runs.fit.load_checkpoint", fails)
    assert train("max_steps=2").summary["status"] == "completed"
    assert "warning: the final sample failed: out of memory; " in capsys.readouterr().err


def test_curves_that_cannot_be_written_are_a_warning_after_the_summary(call, tmp_path, curves):
    (tmp_path / "run/curves.png").mkdir(parents=True)
    (tmp_path / "run/.hydra").mkdir()  # of a run, which continues
    ended = call("train.py", "max_steps=2", "hydra.run.dir=run", "resume=auto")
    assert ended.returncode == 0
    (warning,) = (line for line in ended.stderr.splitlines() if "curves.png" in line)
    assert re.fullmatch(
        r"warning: curves\.png was not written: \S+/curves\.png: is a directory; .*", warning
    )
    assert read_summary(tmp_path / "run")["status"] == "completed"


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


def test_a_run_whose_output_nobody_reads_trains_to_the_end(launch, tmp_path):
    ended = launch(
        "train.py",
        "max_steps=4",
        "eval_every=2",
        "hydra.run.dir=run",
        cwd=tmp_path,
        prepare=close_output,
    )
    assert ended.returncode == 0
    assert read_summary(tmp_path / "run")["status"] == "completed"
    assert [
        line.split()[1]
        for line in (tmp_path / "run/log.txt").read_text(encoding="utf-8").splitlines()
        if line[:5] == "step "
    ] == [
        "2/4",
        "4/4",
    ]


def test_a_broken_pipe_of_a_logger_is_an_error(call, tmp_path, monkeypatch):
    def disconnected(*args):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("minigpt.runs.trainer.append_metrics", disconnected)
    ended = call("train.py", "max_steps=2", "hydra.run.dir=run")
    assert ended.returncode == 1
    reason = "BrokenPipeError: [Errno 32] Broken pipe (MINIGPT_TRACEBACK=1 shows where)"
    assert ended.stderr.splitlines()[-1] == f"error: {reason}"
    assert (read_summary(tmp_path / "run")["status"], read_summary(tmp_path / "run")["reason"]) == (
        "failed",
        reason,
    )


def test_callbacks_of_lightning_log_and_write_into_the_run_folder(train, caplog):
    names = ("LearningRateMonitor", "ModelCheckpoint", "ModelSummary")
    run = train(
        *(f"+callbacks.{name}._target_=lightning.pytorch.callbacks.{name}" for name in names),
        "eval_every=20",
    )
    rates = column(run.folder, "lr-AdamW/pg1")
    assert len(rates) == 20
    assert column(run.folder, "learning_rate") == rates[4::5]
    (file,) = set((run.folder / "checkpoints").glob("epoch=*.ckpt"))
    assert read(file)["global_step"] == 20
    assert {path.name for path in run.folder.iterdir() if path.is_dir()} == {
        "checkpoints",
        ".hydra",
    }
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


def test_a_notebook_may_define_a_callback_and_an_optimizer(train, monkeypatch, tmp_path):
    """The module of a notebook, and of a script, is __main__ and has no spec."""
    ended = []

    class Mine(Callback):
        def on_train_end(self, trainer, pl_module):
            ended.append((trainer.global_step, type(trainer.optimizers[0])))

    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "Mine", Mine, raising=False)
    monkeypatch.setattr(
        main, "make", lambda model, **_: torch.optim.SGD(model.parameters(), lr=0.1), raising=False
    )
    monkeypatch.chdir(tmp_path)  # from which modules are imported
    monkeypatch.setattr(sys, "path", [*sys.path])
    train(
        "+callbacks.mine._target_=__main__.Mine", "optimizer._target_=__main__.make", "max_steps=2"
    )
    assert ended == [(2, torch.optim.SGD)]


def test_curves_are_logged_to_tensorboard(train):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = train("logger=tensorboard").folder
    logged = events.EventAccumulator(str(folder / "tensorboard")).Reload()
    for name in ("train_loss", "val_loss", "learning_rate"):
        assert [point.value for point in logged.Scalars(name)] == pytest.approx(
            column(folder, name)
        )
    assert [point.step for point in logged.Scalars("val_loss")] == [10, 20]
    assert "hp_metric" not in logged.Tags()["scalars"]  # a constant -1


def test_settings_that_change_no_loss_reach_what_they_set(train, monkeypatch):
    built, fit = [], "minigpt.runs.fit"
    monkeypatch.setattr(
        f"{fit}.build_trainer", lambda *parts: built.append(build_trainer(*parts)) or built[0]
    )
    monkeypatch.setattr(GPT, "compile", lambda model: setattr(model, "compiled", True))
    train(
        "compile=true",
        "checkpoint_blocks=2",
        "collective_timeout=45",
        "model.vocab_size=128",
        "max_steps=1",
    )
    model = built[0].lightning_module.model
    assert (model.compiled, model.checkpoint_blocks, model.config.vocab_size) == (True, 2, 128)
    (timeout,) = (
        callback.timeout
        for callback in built[0].callbacks
        if isinstance(callback, CollectiveTimeout)
    )
    assert timeout.total_seconds() == 45


CHANGES = {
    "compile it in place: block.compile": (
        "setup",
        lambda model: setattr(model.blocks, "0", torch.compile(model.blocks[0], backend="eager")),
    ),
    "^model.tie_embeddings must be false": (
        "setup",
        lambda model: setattr(
            model.lm_head, "weight", nn.Parameter(model.lm_head.weight.detach().clone())
        ),
    ),
    "model.blocks.0.mlp.forward is replaced": (
        "on_train_batch_end",
        lambda model: setattr(model.blocks[0].mlp, "forward", torch.sin),
    ),
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_run_whose_checkpoints_could_not_be_loaded_ends(train, tmp_path, monkeypatch, message):
    hook, change = CHANGES[message]
    monkeypatch.setattr(LanguageModel, hook, lambda module, *_, **__: change(module.model))
    with pytest.raises(UserError, match=message):
        train(
            f"callbacks.snapshots={'null' if hook == 'setup' else '{}'}",
            "max_steps=4",
            "eval_every=4",
        )
    # Before its first step, it leaves no folder
    files = None if hook == "setup" else ["step-0.safetensors"]
    assert (
        [file.name for file in tmp_path.rglob("*.safetensors")]
        if (tmp_path / "run").exists()
        else None
    ) == files


def test_a_precision_that_a_cpu_lacks_is_replaced_with_a_warning(train, capsys):
    assert train("trainer.precision=16-mixed", "max_steps=1").summary["precision"] == "bf16-mixed"
    assert (
        "trainer.precision=16-mixed needs a GPU; this run is bf16-mixed" in capsys.readouterr().err
    )


@pytest.mark.parametrize(("supported", "precision"), [(True, "bf16-mixed"), (False, "32-true")])
def test_automatic_precision_is_bfloat16_where_the_device_has_it(
    train, monkeypatch, supported, precision
):
    half = torch.bfloat16 if supported else None
    monkeypatch.setattr(
        "minigpt.training.precision.half_dtype",
        lambda device: half if device.type == "cpu" else None,
    )
    run = train(
        "trainer.precision=auto", f"max_steps={40 if supported else 1}", "optimizer.lr=1e-2"
    )
    assert run.summary["precision"] == precision
    assert run.loss < 2.5 or not supported


@pytest.mark.parametrize(
    ("capability", "rocm", "precision"),
    [
        ((6, 1), None, "32-true"),  # GTX 10
        ((7, 0), None, "16-mixed"),  # V100
        ((7, 5), None, "16-mixed"),  # T4, RTX 20
        ((8, 0), None, "bf16-mixed"),  # A100
        ((9, 0), None, "bf16-mixed"),  # H100
        ((9, 4), "6.4", "bf16-mixed"),  # MI300
    ],
)
def test_automatic_precision_of_a_gpu_is_its_faster_16_bit_type(
    monkeypatch, capability, rocm, precision
):
    """With replaced capabilities, of which torch's own functions read whether a GPU has bfloat16."""
    gpu = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device=None: gpu)
    # Emulated on every GPU
    monkeypatch.setattr("torch.cuda._check_bf16_tensor_supported", lambda device: True)
    monkeypatch.setattr("torch.version.hip", rocm)
    monkeypatch.setattr(
        "torch.accelerator.current_accelerator", lambda check_available: torch.device("cuda")
    )
    half_dtype.cache_clear()
    assert training_precision("auto") == precision
    half_dtype.cache_clear()


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
        with pytest.raises(
            UserError, match=rf"^trainer\.{option} is not an option; [^\n]+ eval_batches$"
        ):
            check_run({"trainer": {option: 0}})


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
    for warmup, warned in ((1, False), (2, True)):
        train("max_steps=2", f"schedule.warmup_steps={warmup}", folder=tmp_path / str(warmup))
        assert (
            "schedule.warmup_steps=2 is not below max_steps=2" in capsys.readouterr().err
        ) is warned


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
        "optimizer.betas=[0.9,0.95]",
    ]
    settings += [f"schedule.warmup_steps={warmup}", "seed=7", "callbacks.checkpoint.save_top_k=2"]
    folder = train(*settings, "callbacks.snapshots=null").folder
    err = capsys.readouterr().err
    pattern = (
        r"warning: at step (\d+), ([\d.]+)% of the weights of the blocks have changed, .*=auto\n"
    )
    warned = re.findall(pattern, err)
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


SMALL = {"block_size": 4, "vocab_size": 256, "n_layer": 1, "n_head": 4, "n_embd": 32}


def language_model(recipe, *overrides, **settings):
    """Return a small model with the optimizer of a recipe."""
    make = partial_from_config("optimizer", composed(f"experiment={recipe}", *overrides).optimizer)
    model = GPT(GPTConfig(**SMALL | settings))
    settings = {"optimizer": lambda model: unscale_before_clipping(make(model)), "max_steps": 10}
    return LanguageModel(model, schedule=lambda step, max_steps: 1.0, **settings)


@pytest.mark.parametrize("name", ["adamw", "muon_fast"])
def test_a_step_in_bfloat16_keeps_weights_gradients_and_state_in_float32(name):
    module = language_model("fast_gpu", f"optimizer={name}", position="rope", qk_norm=True)
    model, ids = module.model, torch.zeros(3, 4, dtype=torch.long)
    optimizer = module.make_optimizer(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, ids)
    loss.backward()
    optimizer.step()
    state = [x for values in optimizer.state.values() for x in values.values()]
    assert {x.dtype for p in model.parameters() for x in (p, p.grad, *state)} == {torch.float32}


@pytest.mark.parametrize("name", ["adamw", "muon_fast"])
def test_with_16_mixed_gradients_are_clipped_after_the_loss_scale_is_removed(name):
    """In a fused step, torch would remove it after clipping. Lightning has this precision for GPUs alone."""
    module, ids = language_model("fast_gpu", f"optimizer={name}"), torch.randint(256, (3, 4))
    module.model(ids, ids).backward()
    expected = nn.utils.get_total_norm([p.grad for p in module.model.parameters()])
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = Trainer(
        accelerator="cpu", max_steps=1, plugins=MixedPrecision("16-mixed", "cpu"), **quiet
    )
    trainer.fit(module, DataLoader(TensorDataset(ids, ids), batch_size=3))
    assert float(module.grad_norm) == pytest.approx(float(expected), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "checkpoint_blocks"), [("best_gpu", None), ("nanogpt_gpu", 1)])
def test_a_model_compiles_without_graph_breaks_and_once(monkeypatch, name, checkpoint_blocks):
    """Training and validation of whole and of padded batches, and both again, with the attention of a GPU."""
    monkeypatch.setattr("minigpt.model.attention._MAX_EXPLICIT", 0)
    sizes = SMALL | {"n_layer": 3}  # which layer_repeats divides
    module = language_model(name, **dict(composed(f"experiment={name}").model) | sizes)
    model, ids = module.model, torch.randint(256, (4, 4))
    model.checkpoint_blocks = checkpoint_blocks
    torch._dynamo.reset()
    model.compile(fullgraph=True, backend="aot_eager")
    optimizer, padded = module.make_optimizer(model), ids.where(torch.arange(4) < 2, -100)
    for cycle in range(2):
        with (
            torch._dynamo.config.patch(error_on_recompile=cycle > 0),
            torch.autocast("cpu", torch.bfloat16),
        ):
            module.training_step((ids, ids), 0).backward()
            module.configure_gradient_clipping(optimizer, 1.0)
            optimizer.step()
            module.eval()
            with torch.no_grad():
                for rows in (4, 3):
                    model(ids[:rows], padded[:rows], reduction="sum")
            module.train()
