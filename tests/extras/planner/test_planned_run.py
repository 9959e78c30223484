"""A planned run: its plan is overrides, kept in `plan.json`, shared in a sweep, read to resume."""

import json
import math

import pytest
from omegaconf import OmegaConf
from small_runs import column

import minigpt
from minigpt.extras.planner import plan as planning
from minigpt.extras.planner import planned_run
from minigpt.training.language_model import LanguageModel
from minigpt.utils.errors import UserError

QUIET = ["callbacks.samples=null", "callbacks.originality=null", "callbacks.snapshots=null"]


class Lost(LanguageModel):
    def training_step(self, batch, batch_idx):
        return 1 / 0 if batch_idx == 7 else super().training_step(batch, batch_idx)


def test_a_planned_run_is_a_run_with_the_settings_of_its_plan_also_if_it_resumes(
    mine, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(planning, "LEAST_STEPS", 10)  # so that a loss is expected
    # 30 is no multiple of the n_head of nano
    short = [*mine, *QUIET, "model.n_layer=1", "model.n_embd=30", "max_steps=10", "eval_every=5"]
    command = [*short, "minutes=0.2", f"hydra.run.dir={tmp_path}/planned"]
    file = tmp_path / "planned/plan.json"
    with monkeypatch.context() as patch:
        patch.setattr("minigpt.runs.fit.LanguageModel", Lost)
        with pytest.raises(ZeroDivisionError):
            minigpt.train(command)
    # The plan is in a file, in the log and in the configuration
    before = file.read_text(encoding="utf-8")
    plan = json.loads(before)
    assert list(plan) == ["settings", "expected_val_loss", "lines"]
    printed = capsys.readouterr().err
    assert all(line in printed for line in plan["lines"])
    config = OmegaConf.load(tmp_path / "planned/.hydra/config.yaml")
    assert {key: OmegaConf.select(config, key) for key in plan["settings"]} == plan["settings"]
    # The run resumes with it, and reports the loss that it expects
    summary = minigpt.train([*command, "resume=auto"])
    assert file.read_text(encoding="utf-8") == before
    assert (summary["steps"], summary["expected_val_loss"]) == (10, plan["expected_val_loss"])
    loss, margin = plan["expected_val_loss"]
    assert 0 < margin < loss
    reached = f"{loss:.2f} ± {margin:.2f}, reached {summary['best_val_loss']:.3f}"
    assert f"\nexpected         {reached}\ntime " in capsys.readouterr().out
    # It is the run that has these settings without a plan
    settings = [f"{key}={value}".replace("None", "null") for key, value in plan["settings"].items()]
    groups = ["minutes=null", "model=planned", "optimizer=muon_fast"]
    minigpt.train([*short, *groups, *settings, f"hydra.run.dir={tmp_path}/plain"])
    for name in ("train_loss", "val_loss"):
        assert column(tmp_path / "planned", name) == column(tmp_path / "plain", name)
    # A setting that is given takes the place of the planned one
    file.write_text(json.dumps({**plan, "expected_val_loss": None}), encoding="utf-8")
    summary = minigpt.train([*command, "resume=auto", "max_steps=11", "ema_decay=0.5"])
    assert "expected_val_loss" not in summary
    assert OmegaConf.load(tmp_path / "planned/.hydra/config.yaml").ema_decay == 0.5
    file.write_text(before[:-9], encoding="utf-8")
    with pytest.raises(UserError, match=r"plan\.json is damaged .*remove it to plan again"):
        minigpt.train([*command, "resume=auto", "max_steps=22"])


@pytest.fixture
def sweep(tmp_path):
    """The folder of a run in a sweep."""
    (tmp_path / "sweep/0").mkdir(parents=True)
    (tmp_path / "sweep/sweep.json").write_text("{}")
    return tmp_path / "sweep/0"


def test_runs_of_a_sweep_that_differ_in_their_seed_alone_share_a_plan(
    mine, planned, sweep, monkeypatch
):
    made = iter(range(100, 200))

    def make_plan(*args, deadline):
        settings = {"max_steps": next(made)}
        return {"settings": settings, "expected_val_loss": [2.0, 0.5], "lines": []}

    monkeypatch.setattr(planning, "make_plan", make_plan)
    for line, steps in {
        "seed=1": 100,
        "seed=2": 100,
        "seed=2 model.dropout=0.1": 101,
        "seed=3 callbacks.originality.characters=500": 102,  # whose drawing takes time
        "seed=1 resume=auto": 100,
    }.items():
        folder = sweep.with_name(line[:6])
        folder.mkdir(exist_ok=True)
        cfg = planned(*mine, *line.split())
        settings, _ = planned_run.plan_overrides(cfg, folder, line.split(), 0.0)
        assert settings["max_steps"] == steps
        assert settings["callbacks.expectation"]["loss"] == 2.0


def test_a_sweep_finds_the_plan_that_it_made_when_settings_had_other_names(
    mine, planned, monkeypatch
):
    """The name of a shared plan is a checksum of settings, as earlier versions named them."""
    hashed = []
    monkeypatch.setattr(planned_run, "sha256_json", hashed.append)
    for line in ([], ["callbacks.originality.characters=500"], ["callbacks=none"]):
        planned_run._checksum(planned(*mine, *line))
    for settings in hashed:
        assert settings["optimizer._target_"] == "minigpt.optim.muon"
        assert settings["schedule._target_"].startswith("minigpt.schedules.")
        assert not [key for key in settings if key.startswith("callbacks.originality")]
    assert [settings["originality"] for settings in hashed] == [20_000, 500, None]


def test_a_plan_that_is_refused_is_not_written_for_the_runs_that_share_it(mine, sweep, monkeypatch):
    planned_length = planning.length
    wrong = {}
    monkeypatch.setattr(planning, "step_seconds", lambda *_, **__: 0.01)
    monkeypatch.setattr(planning, "length", lambda *args: planned_length(*args) | wrong)
    for key, value, message in (
        ("ema_decay", 1.0, r"^ema_decay must be .*, got 1\.0"),
        ("model.n_embd", 33, r"^model\.head_dim must be even with model\.position=rope, got 33"),
        ("model.block_size", 10**6, "^the training split has 18000 tokens, but a window needs"),
    ):
        wrong.clear()
        wrong[key] = value
        with pytest.raises(UserError, match=message):
            minigpt.train([*mine, "model.n_layer=1", "model.n_head=1", f"hydra.run.dir={sweep}"])
        assert [*sweep.parent.glob(".plan-*.json")] == []


def test_several_processes_have_no_plan(mine, tmp_path, monkeypatch):
    monkeypatch.setattr(planned_run, "launcher_sizes", lambda: (1, 2))
    with pytest.raises(UserError, match="minutes plans for one process; set max_steps instead"):
        minigpt.train([*mine, f"hydra.run.dir={tmp_path}/run"])


@pytest.mark.slow
def test_a_run_that_is_planned_for_two_characters_trains(mine, text, tmp_path):
    (tmp_path / "mine.txt").write_text("ox")
    texts = [f"data.path={tmp_path}/mine.txt", f"data.val_path={text}"]
    size = ["model.n_layer=1", "model.n_embd=32", "max_steps=2"]
    summary = minigpt.train([*mine, *texts, *size, *QUIET, f"hydra.run.dir={tmp_path}/run"])
    assert (summary["status"], summary["steps"]) == ("completed", 2)
    assert 0 < summary["best_val_loss"] < math.inf
