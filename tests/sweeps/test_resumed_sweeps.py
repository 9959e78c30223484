"""Sweeps that resume: what they run again, what they add, what they refuse."""

import contextlib
import json
import re
from pathlib import Path

import pytest
from engine import Engine

from minigpt.sweeps.ranking import ranked
from minigpt.sweeps.results import (
    COMPLETED,
    read_plan,
    read_sweep,
)
from minigpt.sweeps.sweeper import SAME
from minigpt.utils.errors import UserError


def test_a_sweep_resumes_with_new_points_whatever_the_notation_and_the_logging(plan, tmp_path):
    first, latest = tmp_path / "first", tmp_path / "latest"
    before = plan("optimizer.lr=0.001,1e-3,0.01", folder=first).points
    assert [point.reason for point in before] == ["", "same configuration as another point", ""]
    after = plan(
        "optimizer.lr=choice(0.1,1e-2,1e-3)", "logger=tensorboard", "resume=auto", folder=latest
    )
    assert [ran["optimizer.lr"] for ran in after.engine.ran] == [0.1]  # and nothing else
    kept = {(point.identity, point.folder.name) for point in after.points}
    assert {(point.identity, point.folder.name) for point in before if not point.reason} < kept
    assert [point.status for point in after.points] == [COMPLETED] * 3
    assert latest.resolve() == first


def test_a_number_in_another_notation_is_the_same_point(plan):
    before = plan("max_steps=1e3,2e3,1000", "data.batch_size=4.0").points
    assert [point.reason for point in before] == ["", "", SAME]
    assert [point.settings["max_steps"] for point in before] == [1000, 2000, 1000]
    after = plan("max_steps=2000,3000", "data.batch_size=4", "resume=auto")
    # The other point is completed
    assert [ran["max_steps"] for ran in after.engine.ran] == [3000]
    read = read_sweep(after.folder)
    assert {repr(point.value("max_steps")) for point in read if point.status == COMPLETED} == {
        "1000",
        "2000",
        "3000",
    }
    assert {repr(point.value("data.batch_size")) for point in read} == {"4"}


def test_a_sweep_is_extended_by_some_of_its_values_and_other_seeds(plan):
    plan("model.n_head=2,4", "model.n_embd=32,64")
    further = plan("model.n_head=2", "model.n_embd=64,128", "seed=1337,1338", "resume=auto")
    longest_first = [(128, 1337), (128, 1338), (64, 1338)]
    assert [(ran["model.n_embd"], ran["seed"]) for ran in further.engine.ran] == longest_first
    points = [[*point.overrides.values()] for point in read_plan(further.folder)[1]]
    ran_before = [["2", "32"], ["2", "64", "1337"], ["4", "32"], ["4", "64"]]
    assert sorted(points) == sorted(
        [["2", "128", "1337"], ["2", "128", "1338"], ["2", "64", "1338"], *ran_before]
    )


def test_another_sweep_does_not_use_the_folder_of_a_sweep(plan, tmp_path):
    sweeper = plan("seed=1,2")
    Path(sweeper.folder, "seed=2/summary.json").unlink()  # to be run again by the same command
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("sweep/**")}
    for arguments, expected in (
        (
            ["seed=1,2"],
            "holds a sweep already; resume it with resume=auto, or choose another folder",
        ),
        (["model.n_head=2,4", "resume=auto"], "holds a sweep that differs in model.n_head;"),
        (
            ["seed=1,2", "max_steps=9", "resume=auto"],
            "holds a sweep that differs in max_steps (1000 there, 9 now);",
        ),
    ):
        with pytest.raises(UserError, match=re.escape(expected)):
            plan(*arguments)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("sweep/**")} == before


def test_a_sweep_with_a_rate_of_the_environment_resumes_at_this_rate_alone(
    plan, tmp_path, monkeypatch
):
    line = ["optimizer.lr='${oc.decode:${oc.env:LR}}'", "resume=auto"]
    monkeypatch.setenv("LR", "0.002")
    plan(*line, "seed=1,2")
    sweeper = plan(*line, "seed=1,2,3")
    (ran,) = sweeper.engine.ran
    assert (ran["seed"], ran["optimizer.lr"]) == (3, 0.002)
    (row,) = ranked(read_sweep(sweeper.folder)).rows
    assert [point.value("optimizer.lr") for point in row.points] == [0.002] * 3
    monkeypatch.setenv("LR", "0.2")
    with pytest.raises(
        UserError, match=r"sweep that differs in optimizer\.lr \(0\.002 there, 0\.2 now\); choose"
    ):
        plan(*line, "seed=1,2,3,4")
    monkeypatch.setenv("LR", "0.002")
    old = json.loads((plan_file := sweeper.folder / "sweep.json").read_text(encoding="utf-8"))
    old["settings"]["optimizer.lr"] = "${oc.decode:${oc.env:LR}}"  # of an older version
    plan_file.write_text(json.dumps(old), encoding="utf-8")
    with pytest.raises(
        UserError, match=r"differs in optimizer\.lr \(\$\{oc\.decode:\S+ there, 0\.002 now"
    ):
        plan(*line, "seed=1,2,3,4")


def test_another_text_under_the_same_name_is_not_resumed(plan, text, tmp_path):
    line = ["seed=1,2", f"data.path={tmp_path}/mine.txt"]
    (tmp_path / "mine.txt").write_text(text.read_text(encoding="utf-8"), encoding="utf-8")
    plan(*line)
    (tmp_path / "mine.txt").write_text(
        text.read_text(encoding="utf-8").replace("fox", "cat"), encoding="utf-8"
    )
    with pytest.raises(
        UserError, match=r"seed=1 was trained on another text or from other weights; choose another"
    ):
        plan(*line, "resume=auto")


def test_runs_that_begin_from_different_checkpoints_are_different_points_also_if_they_resume(
    plan, tmp_path
):
    def lines(*arguments, jobs=9):
        with contextlib.suppress(KeyboardInterrupt):  # of the job after these
            plan("resume=a,b,c", *arguments, engine=(engine := Engine(jobs=jobs)))
        return [[text for text in job if text.startswith("resume=")] for job in engine.batches[0]]

    assert lines(jobs=1) == [["resume=a"], ["resume=b"], ["resume=c"]]
    (checkpoints := tmp_path / "sweep/resume=b/checkpoints").mkdir(parents=True)
    (checkpoints / "last.safetensors").touch()
    assert lines("resume=auto") == [["resume=b", "resume=auto"], ["resume=c"]]
    rows = ranked(read_sweep(tmp_path / "sweep")).rows
    assert [row.overrides for row in rows] == [{"resume": "a"}, {"resume": "b"}, {"resume": "c"}]


def test_a_sweep_with_names_that_no_file_system_takes_resumes(plan, tmp_path):
    """Older versions planned them, and failed at the first launch."""
    line = ["data.field=text,other", "seed=1,2"]
    plan(*line)
    file, long = tmp_path / "sweep/sweep.json", "訓" * 119
    for i, name in enumerate(("field=other,seed=1", "field=other,seed=2")):
        file.write_text(
            file.read_text(encoding="utf-8").replace(name, f"{long}{i}"), encoding="utf-8"
        )
    resumed = plan(*line, "resume=auto")
    assert [ran["seed"] for ran in resumed.engine.ran] == [1, 2]
    assert [point.status for point in read_sweep(tmp_path / "sweep")] == [COMPLETED] * 4
    assert plan(*line, "resume=auto").engine.launches == []


def test_the_plans_of_a_sweep_validate_on_the_same_text_and_resume_with_settings_in_their_order(
    plan, tmp_path
):
    line = ["seed=1,2", "minutes=1", "model.n_embd=32", "model={n_embd:64}"]
    sweeper, given = plan(*line), plan(*line, "eval_batches=3", folder=tmp_path / "given")
    for (jobs,), expected in ((sweeper.engine.batches, "null"), (given.engine.batches, "3")):
        assert [[text for text in job if "eval_batches" in text] for job in jobs] == [
            [f"eval_batches={expected}"]
        ] * 2
    plan(*line, "resume=auto")
    assert "eval_batches=null" not in read_plan(sweeper.folder)[0]  # which was not typed
    with pytest.raises(
        UserError, match=r"holds a sweep that differs in model\.n_embd \(64 there, 32 now\); choose"
    ):
        plan(*line[:2], *line[:1:-1], "resume=auto")
