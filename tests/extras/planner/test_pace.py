"""A training whose steps become slower or faster ends in time, and resumes as it was."""

import json
import time
from fractions import Fraction
from functools import partial
from itertools import pairwise

import lightning.pytorch as L
import numpy as np
import pytest
from small_runs import column, composed, rows, small_run

import minigpt
from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.format import read
from minigpt.extras.planner import pace
from minigpt.extras.planner.pace import planned_step
from minigpt.extras.planner.planned_run import plan_overrides
from minigpt.extras.planner.timed_recipe import steps_within
from minigpt.training.schedules import cosine, linear

MEASURED = pace.MEASURED  # before conftest.py keeps other tests from changing their plans


class Clock:
    """A clock in place of that of the machine, which only `Work` moves."""

    seconds = 0.0

    def __call__(self):
        return self.seconds


CLOCK = Clock()


class Work(L.Callback):
    """Let a step take `first` seconds, and `then` after the step `change`; fail at a step."""

    def __init__(self, first, then, change, fails=None):
        self.first = first
        self.then = then
        self.change = change
        self.fails = fails

    def on_train_batch_start(self, trainer, *args):
        step = trainer.global_step
        if step == self.fails:
            raise OSError("the power fails")
        CLOCK.seconds += self.first if step < self.change else self.then


@pytest.fixture
def run(text, tmp_path, monkeypatch):
    """Train by the clock above: `run(NAME, planned, then=…)` returns what `train` does.

    A second is planned per step, and `validation` steps per validation.
    """
    monkeypatch.setattr(time, "perf_counter", CLOCK)
    monkeypatch.setattr(pace, "MEASURED", MEASURED)

    def trained(name, planned, *overrides, first=1.0, then, change, fails="null", most=None):
        folder = tmp_path / name
        (folder / ".hydra").mkdir(parents=True, exist_ok=True)  # of a run that made a plan
        seconds = planned + 0.5
        settings = {"max_steps": planned, "eval_every": 25, "schedule.warmup_steps": 5}
        paced = {"planned_steps": planned, "most_steps": most, "validation": 0.0}
        plan = {
            "settings": settings,
            "expected_val_loss": None,
            "lines": [],
            "pace": {**paced, "seconds": seconds, "until": seconds},
        }
        if not (folder / "plan.json").exists():
            (folder / "plan.json").write_text(json.dumps(plan))
        work = f"_target_:test_pace.Work,first:{first},then:{then},change:{change},fails:{fails}"
        command = small_run(
            text,
            tmp_path / "data",
            "minutes=1",
            "resume=auto",
            "callbacks.samples.max_new_tokens=9",
            "eval_batches=1",
            "optimizer=adamw",
            "model=nano",
            f"+callbacks.work={{{work}}}",
            f"hydra.run.dir={folder}",
            *overrides,
        )
        of_plan = ("max_steps=20", "eval_every=10")
        began = CLOCK.seconds
        summary = minigpt.train([each for each in command if each not in of_plan])
        return {**summary, "virtual": CLOCK.seconds - began}

    return trained


def changes(folder):
    return json.loads((folder / "plan.json").read_text())["pace"].get("changes", [])


@pytest.mark.parametrize(
    ("planned", "then", "change", "steps"),
    [(100, 2.0, 50, 75), (100, 3.0, 70, 80), (100, 0.5, 50, 150), (100, 1.02, 25, 100)],
)
def test_a_training_with_a_neighbor_from_its_middle_on_takes_the_planned_time(
    run, tmp_path, capsys, planned, then, change, steps
):
    summary = run("run", planned, then=then, change=change)
    assert summary["steps"] == pytest.approx(steps, rel=0.04)
    assert summary["virtual"] == pytest.approx(planned, rel=0.05)
    assert (summary["status"], summary["reason"]) == ("completed", "")
    recorded = changes(tmp_path / "run")
    assert [summary["steps"]] == [each[-1] for each in recorded[-1:]] or steps == planned
    # The lines of the run, and the learning rates of its steps
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("plan ")]
    assert len(lines) == len(recorded) <= 4
    assert bool(recorded) == (steps != planned)
    rate = column(tmp_path / "run", "learning_rate")
    peak = max(rate)
    assert rate[-1] == pytest.approx(0, abs=0.1 * peak)
    assert max(a - b for a, b in pairwise(rate)) < 0.25 * peak
    # Validations at the planned steps, and at the end
    validated = [int(row["step"]) for row in rows(tmp_path / "run") if row["val_loss"]]
    assert validated == [*range(25, summary["steps"], 25), summary["steps"]]


def test_a_faster_training_ends_before_it_overfits(run, tmp_path):
    assert run("run", 60, then=0.5, change=20, most=70)["steps"] == 70
    assert changes(tmp_path / "run")[-1][-1] == 70


def test_a_short_hiccup_changes_nothing(run, tmp_path, monkeypatch):
    monkeypatch.setattr(Work, "on_train_batch_start", hiccup)
    assert run("run", 60, then=1.0, change=0)["steps"] == 60
    assert changes(tmp_path / "run") == []


def hiccup(self, trainer, *args):
    CLOCK.seconds += 2.5 if trainer.global_step == 40 else 1.0


@pytest.mark.parametrize(("then", "fails"), [(2.0, 48), (0.5, 48), (0.5, 60)])
def test_a_run_that_is_killed_after_a_change_resumes_as_if_it_was_not(
    run, tmp_path, capsys, then, fails
):
    slow = {"then": then, "change": 30}
    callbacks = ["ema_decay=0.9", "schedule=cosine", "model.dropout=0.1"]
    whole = run("whole", 100, *callbacks, **slow)
    made = changes(tmp_path / "whole")
    # The last change is after the checkpoint of step 25, and before that of step 50
    assert 30 < made[0][0] <= made[-1][0] < 48
    with pytest.raises(OSError, match="the power fails"):
        run("killed", 100, *callbacks, fails=fails, **slow)
    assert read(tmp_path / "killed" / LAST)["global_step"] == fails // 25 * 25
    CLOCK.seconds += 1e6  # a pause is no part of the time
    resumed = run("killed", 100, *callbacks, **slow)
    assert changes(tmp_path / "killed") == made
    assert resumed["steps"] == whole["steps"] == made[-1][-1]
    assert "max_steps changed" not in capsys.readouterr().err
    one, other = (tmp_path / name for name in ("whole", "killed"))
    assert rows(one) == rows(other)
    assert (one / "samples.txt").read_bytes() == (other / "samples.txt").read_bytes()
    tensors = [read(folder / LAST)["state_dict"] for folder in (one, other)]
    assert all((tensors[0][name] == tensors[1][name]).all() for name in tensors[0])
    # It is complete
    again = run("killed", 100, *callbacks, **slow)
    assert (again["steps"], again["virtual"]) == (whole["steps"], 0)
    out = capsys.readouterr().out
    assert f"is complete at step {whole['steps']} of {whole['steps']}" in out


def test_a_resumed_run_changes_its_steps_after_those_that_are_recorded(run, tmp_path):
    with pytest.raises(OSError, match="the power fails"):
        run("run", 100, then=2.0, change=30, fails=48)
    before = changes(tmp_path / "run")
    resumed = run("run", 100, then=1.0, change=0)  # at full speed from step 25 on
    after = changes(tmp_path / "run")
    assert after[: len(before)] == before
    assert after[-1][0] > before[-1][0] > 25
    assert resumed["steps"] == after[-1][-1] == pytest.approx(100, rel=0.04)


def test_given_steps_are_not_changed(run, tmp_path):
    summary = run("run", 100, "max_steps=40", then=2.0, change=20)
    assert (summary["steps"], changes(tmp_path / "run")) == (40, [])


def test_a_plan_of_an_earlier_version_keeps_its_steps(text, tmp_path):
    plan = {"settings": {"max_steps": 30}, "expected_val_loss": None, "lines": []}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    overrides = ["minutes=1", "resume=auto", f"data.path={text}", f"data.folder={tmp_path}/data"]
    settings, _ = plan_overrides(composed(*overrides), tmp_path, overrides, 0.0)
    assert settings == {"max_steps": 30}


def test_a_schedule_keeps_its_progress_at_a_change_and_ends_at_its_end():
    random = np.random.default_rng(0)
    for _ in range(100):
        planned = int(random.integers(2, 300))
        # Changes at increasing steps; the run is longer than the step of each
        made = []
        at = 0
        end = planned
        points = [(Fraction(0), Fraction(0))]  # steps of the run, and progress from 0 to 1
        while end - at > 2 and len(made) < 5:
            step = int(random.integers(at + 1, end))
            progress = points[-1][1] + (step - at) * (1 - points[-1][1]) / (end - at)
            points.append((Fraction(step), progress))
            at = step
            end = step + int(random.integers(1, 300))
            made.append([step, planned_step(planned, made, step), end])
        points.append((Fraction(end), Fraction(1)))
        steps, progress = np.array(points, dtype=float).T
        expected = planned * np.interp(np.arange(end + 1), steps, progress)
        found = [planned_step(planned, made, step) for step in range(end + 1)]
        assert found == pytest.approx(expected)
        for schedule in (cosine, linear):
            plain = partial(schedule, max_steps=planned, warmup_steps=1, final_lr_frac=0.1)
            factors = [plain(planned_step(planned, made, step)) for step in range(end + 1)]
            assert factors[-1] == pytest.approx(0.1)
            assert factors[:1] == [plain(0)]
            # Not changed until the first change, bit for bit
            same = made[0][0] + 1 if made else planned + 1
            assert factors[:same] == [plain(step) for step in range(same)]


def test_as_many_steps_as_fit_between_validations_are_left():
    random = np.random.default_rng(0)
    for _ in range(300):
        every = int(random.integers(1, 20))
        done = int(random.integers(0, every))
        validation, seconds = random.uniform(0.1, 30), random.uniform(0, 200)

        def cost(more, every=every, done=done, validation=validation):
            validations = sum((done + i) % every == 0 for i in range(1, more + 1))
            return more + validation * (validations + ((done + more) % every != 0))

        fitting = [more for more in range(1, 250) if cost(more) <= seconds]
        found = steps_within(seconds, 1, validation, every, done=done)
        assert max(0, found) == max(fitting, default=0)
