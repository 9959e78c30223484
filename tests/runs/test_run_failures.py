"""What fails beside a training: samples, curves, output and signals; and what must end it."""

import errno
import re
import signal

import pytest
import torch
from processes import close_output
from refusals import refused
from torch import nn

from minigpt.runs.run_dir import read_summary
from minigpt.training.language_model import LanguageModel


def fail(error):
    def raise_it(*args, **kwargs):
        raise error

    return raise_it


def test_a_failing_sample_is_a_warning(train, monkeypatch, capsys):
    fails = fail(RuntimeError("no text today"))
    monkeypatch.setattr("minigpt.runs.callbacks.samples.stream", fails)
    monkeypatch.setattr("minigpt.extras.interpret.attention_plots.plot_maps", fails)
    own = ["callbacks=attention", "callbacks.samples.max_new_tokens=20"]
    assert train(*own, "max_steps=2", "eval_every=1").summary["status"] == "completed"
    output = capsys.readouterr().err
    assert output.count("warning: Samples failed at step") == 2
    assert output.count("warning: the final sample failed: RuntimeError: no text today") == 1
    assert output.count("warning: AttentionMaps failed at step") == 2


def test_a_failure_to_load_the_best_checkpoint_for_a_sample_is_a_warning(
    train, monkeypatch, capsys
):
    monkeypatch.setattr("minigpt.runs.fit.load_checkpoint", fail(MemoryError()))
    assert train("max_steps=2").summary["status"] == "completed"
    assert "warning: the final sample failed: out of memory; " in capsys.readouterr().err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_final_sample_ends_a_run_that_is_complete(
    call, tmp_path, monkeypatch, signum
):
    def interrupt(*args, **kwargs):
        signal.raise_signal(signum)

    monkeypatch.setattr("minigpt.runs.fit.sample_text", interrupt)
    ended = call("train.py", "max_steps=2", "hydra.run.dir=run")
    assert ended.returncode == 128 + signum
    assert ended.stderr.splitlines()[-1] == f"interrupted by {signum.name}"
    assert "resume with" not in ended.stderr
    summary = read_summary(tmp_path / "run")
    assert (summary["status"], summary["steps"], summary["best_step"]) == ("completed", 2, 2)


def test_curves_that_cannot_be_written_are_a_warning_after_the_summary(call, tmp_path, curves):
    (tmp_path / "run/curves.png").mkdir(parents=True)
    (tmp_path / "run/.hydra").mkdir()  # of a run, which continues
    ended = call("train.py", "max_steps=2", "hydra.run.dir=run", "resume=auto")
    assert ended.returncode == 0
    (warning,) = (line for line in ended.stderr.splitlines() if "curves.png" in line)
    expected = r"warning: curves\.png was not written: \S+/curves\.png: is a directory; .*"
    assert re.fullmatch(expected, warning)
    assert read_summary(tmp_path / "run")["status"] == "completed"


def test_a_run_whose_output_nobody_reads_trains_to_the_end(launch, tmp_path):
    short = ["max_steps=4", "eval_every=2", "hydra.run.dir=run"]
    assert launch("train.py", *short, cwd=tmp_path, prepare=close_output).returncode == 0
    assert read_summary(tmp_path / "run")["status"] == "completed"
    log = (tmp_path / "run/log.txt").read_text(encoding="utf-8")
    assert re.findall(r"^step +(\S+)", log, re.MULTILINE) == ["2/4", "4/4"]


def test_a_broken_pipe_of_a_logger_is_an_error(call, tmp_path, monkeypatch):
    fails = fail(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    monkeypatch.setattr("minigpt.runs.trainer.append_metrics", fails)
    ended = call("train.py", "max_steps=2", "hydra.run.dir=run")
    assert ended.returncode == 1
    reason = "BrokenPipeError: [Errno 32] Broken pipe (MINIGPT_TRACEBACK=1 shows where)"
    assert ended.stderr.splitlines()[-1] == f"error: {reason}"
    summary = read_summary(tmp_path / "run")
    assert (summary["status"], summary["reason"]) == ("failed", reason)


def compile_block(model):
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")


def untie(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def replace_forward(model):
    model.blocks[0].mlp.forward = torch.sin


CHANGES = {
    "compile it in place: block.compile": ("setup", compile_block),
    "^model.tie_embeddings must be false": ("setup", untie),
    "model.blocks.0.mlp.forward is replaced": ("on_train_batch_end", replace_forward),
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_run_whose_checkpoints_could_not_be_loaded_ends(train, tmp_path, monkeypatch, message):
    hook, change = CHANGES[message]
    monkeypatch.setattr(LanguageModel, hook, lambda module, *_, **__: change(module.model))
    before = hook == "setup"
    snapshots = f"callbacks.snapshots={'null' if before else '{}'}"
    refused(message, train, snapshots, "max_steps=4", "eval_every=4")
    # Before its first step, it leaves no folder
    assert (tmp_path / "run").exists() == (not before)
    saved = [file.name for file in tmp_path.rglob("*.safetensors")]
    assert saved == ([] if before else ["step-0.safetensors"])
