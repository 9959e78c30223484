"""What callbacks add to the end of a run, the earlier spelling of one, and runs without extras."""

import re
import sys
from contextlib import nullcontext
from importlib.abc import MetaPathFinder

import pytest
import yaml
from omegaconf import OmegaConf
from small_runs import CONFIGS, ROOT, composed

from minigpt import generate, load_checkpoint
from minigpt.extras.report_callback import ReportCallback
from minigpt.runs.overrides import complete_overrides
from minigpt.runs.run_config import check_run
from minigpt.sweeps.point_settings import relevant_settings
from minigpt.utils.errors import UserError


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


def with_earlier(cfg, characters):
    """Return a configuration with a setting that a file of the user has."""
    cfg = cfg.copy()
    OmegaConf.update(cfg, "originality", characters, force_add=True)
    return cfg


def test_the_comparison_with_the_text_has_its_earlier_spelling_too(tmp_path):
    """On the command line, and in a file of the user."""
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment/mine.yaml"
    file.write_text("# @package _global_\noriginality: 7.0\n", encoding="utf-8")
    search = f"hydra.searchpath=[file://{tmp_path}]"
    for line in (["originality=7e0"], [search, "experiment=mine"]):
        cfg = composed(*complete_overrides(line))
        check_run(cfg)
        assert "originality" not in cfg
        assert repr(cfg.callbacks.originality.characters) == "7"
    check = {None: "", 0: "characters must be an integer ≥ 1, or null, got 0", 7: ""}
    without = composed("callbacks=none")
    for characters, refused in check.items():
        settings = with_earlier(cfg, characters)
        with pytest.raises(UserError, match=refused) if refused else nullcontext():
            check_run(settings)
            assert settings.callbacks.originality.characters == characters
        # Where nothing is compared, only null has an effect
        settings = with_earlier(without, characters)
        lost = "originality is callbacks.originality.characters, but this run is without callbacks"
        with nullcontext() if characters is None else pytest.raises(UserError, match=lost):
            check_run(settings)
            assert settings == without


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
    """Without the nodes of a configuration that name one, which are the two of interpret."""
    default = yaml.safe_load((CONFIGS / "callbacks/default.yaml").read_text(encoding="utf-8"))
    extras = [name for name, node in default.items() if ".extras." in node["_target_"]]
    assert extras == ["snapshots", "originality"]
    core = {name: node for name, node in default.items() if name not in extras}
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
