"""What callbacks add to the end of a run, runs without extras, and what fails beside a training."""

import errno
import re
import signal
import sys
from importlib.abc import MetaPathFinder

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from processes import close_output
from refusals import refused
from small_runs import CONFIGS, ROOT, composed
from torch import nn

from minigpt import generate, load_checkpoint
from minigpt.extras.report_callback import ReportCallback
from minigpt.runs.overrides import complete_overrides
from minigpt.runs.run_config import check_run
from minigpt.runs.run_dir import read_summary
from minigpt.sweeps.point_settings import relevant_settings
from minigpt.training.language_model import LanguageModel


class Noting(ReportCallback):
    draws = "three cards"
    noted = None

    def on_sampled(self, model, corpus, sample, folder, seconds):
        best, tokenizer = load_checkpoint(folder)
        assert all(map(bool, map(lambda a, b: a.equal(b), model.parameters(), best.parameters())))
        assert corpus.tokenizer.to_dict() == tokenizer.to_dict()
        assert 0 < seconds < 10
        self.noted = len(sample)

    def results(self):
        return {"noted": self.noted}

    def lines(self, summary):
        return [("noted", f"{summary['noted']} of {summary['status']}")]


class Failing(ReportCallback):
    def on_sampled(self, *args):
        raise OSError("no cards")


def test_callbacks_report_at_the_end_of_a_run_in_their_order(train, tmp_path, capsys):
    mine = [f"+callbacks.{name}._target_=test_reports.{name}" for name in ("Failing", "Noting")]
    short = ["max_steps=4", "eval_every=2", "callbacks.originality.characters=50", *mine]
    folder = tmp_path / "run"
    paused = train(*short, "pause_at=2", folder=folder).summary
    assert (paused["noted"], paused["originality"]) == (None, None)
    capsys.readouterr()
    summary = train(*short, "resume=auto", folder=folder).summary
    out, err = capsys.readouterr()
    assert 15 <= summary["noted"] <= 21  # of 20 tokens
    printed = rf"\nvalidation loss .*\nlongest copy .*\nnoted            {summary['noted']} of "
    assert re.search(printed + r"completed\ntime ", out)
    copied = "50 characters, to see how much is copied"
    assert f"sampling    20 tokens and {copied} and three cards; at most 10 s\n" in err
    assert "warning: Failing failed: OSError: no cards" in err


def test_the_comparison_with_the_text_has_its_earlier_spelling_too(tmp_path):
    # On the command line, and in a file of the user
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment/mine.yaml"
    file.write_text("# @package _global_\noriginality: 7.0\n", encoding="utf-8")
    search = f"hydra.searchpath=[file://{tmp_path}]"
    for line in (["originality=7e0"], [search, "experiment=mine"]):
        cfg = composed(*complete_overrides(line))
        check_run(cfg)
        assert "originality" not in cfg
        assert repr(cfg.callbacks.originality.characters) == "7"


LOST = "warning: originality is callbacks.originality.characters now, and has no effect without"


@pytest.mark.parametrize(
    ("callbacks", "characters", "message"),
    [("default", None, ""), ("none", None, ""), ("none", 7, LOST)],
)
def test_a_file_with_the_earlier_spelling_acts_or_says_that_it_does_not(
    callbacks, characters, message, capsys
):
    cfg = composed(f"callbacks={callbacks}")
    expected = cfg.copy()
    OmegaConf.update(cfg, "originality", characters, force_add=True)
    check_run(cfg)
    assert capsys.readouterr().err.startswith(message)
    if callbacks == "default":
        expected.callbacks.originality.characters = characters
    assert cfg == expected


def test_the_earlier_spelling_is_checked():
    cfg = composed()
    OmegaConf.update(cfg, "originality", 0, force_add=True)
    refused("characters must be an integer ≥ 1, or null, got 0", check_run, cfg)


def test_the_settings_of_a_comparison_with_the_text_make_no_other_run():
    present = composed("callbacks.originality.characters=5")
    none = composed("callbacks.originality=null")
    before = relevant_settings(present) | {"originality": 20000}
    assert relevant_settings(present) == relevant_settings(none) == relevant_settings(before)
    assert "callbacks.snapshots.count" in relevant_settings(present)


class NoExtras(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("minigpt.extras"):
            raise ModuleNotFoundError(name)


def test_a_run_and_its_samples_need_no_extra(train, call, tmp_path, monkeypatch):
    # Without the nodes of a configuration that name one, which are the two of interpret
    core = yaml.safe_load((CONFIGS / "callbacks/default.yaml").read_text(encoding="utf-8"))
    for name in ("snapshots", "originality"):
        assert ".extras." in core.pop(name)["_target_"]
    (tmp_path / "mine/callbacks").mkdir(parents=True)
    (tmp_path / "mine/callbacks/default.yaml").write_text(yaml.safe_dump(core), encoding="utf-8")
    for name in [name for name in sys.modules if name.startswith("minigpt.extras")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NoExtras(), *sys.meta_path])
    small = ["max_steps=2", "eval_every=1", "callbacks.samples.max_new_tokens=5"]
    line = [*small, "++callbacks.originality=null", f"hydra.searchpath=['file://{tmp_path}/mine']"]
    folder = train(*line).folder
    train(*line, "max_steps=4", "resume=auto")
    sampled = call("sample.py", str(folder), "--max-new-tokens", "3")
    assert sampled.returncode == 0, sampled.stderr
    model, _ = load_checkpoint(folder)
    assert len(generate(model, [1], max_new_tokens=3)[0].tokens) == 3


def test_the_core_names_the_setting_of_a_plan_in_two_files_at_most():
    package = ROOT / "minigpt"
    core = [file for file in package.rglob("*.py") if "extras" not in file.parts]
    named = [file.name for file in core if "minutes" in file.read_text(encoding="utf-8")]
    assert len(named) <= 2, named


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
