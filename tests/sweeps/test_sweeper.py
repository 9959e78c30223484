"""A grid: its checks before the first run, its folder and its lock."""

import errno
import re
import sys
from pathlib import Path

import pytest
from engine import Engine
from filelock import FileLock
from small_runs import one_line

from minigpt.runs.run_dir import is_locked
from minigpt.sweeps.ranking import ranked
from minigpt.sweeps.results import (
    SKIPPED,
    read_sweep,
)
from minigpt.sweeps.sweeper import announced
from minigpt.utils.errors import UserError


def test_a_large_grid_announces_how_many_points_are_checked_also_when_it_resumes(
    plan, capsys, tmp_path
):
    def announced():
        return [line for line in capsys.readouterr().err.splitlines() if "to check" in line]

    grid = ["seed=range(3)", "optimizer.lr=1,2,3,4,5,6,7"]
    plan(*grid)
    assert announced() == ["21 points to check, about 1 s"]
    plan(*grid, "resume=auto")  # those of the folder, and those of the command
    assert announced() == ["21 points to check, about 1 s"] * 2
    plan("seed=1,2", folder=tmp_path / "small")
    assert announced() == []


def test_how_many_points_are_left_to_check_is_printed_again_and_again(capsys):
    assert [*announced(iter(range(600)), 600)] == [*range(600)]
    lines = [f"{n} points to check, about {s} s" for n, s in ((600, 13), (350, 8), (100, 3))]
    assert capsys.readouterr().err.splitlines() == lines


def test_a_grid_of_too_many_points_is_refused_before_its_values_are_listed(plan):
    with pytest.raises(
        UserError,
        match=r"^hydra\.sweeper\.max_points must be at least 5976000, the points of the grid, ",
    ):
        plan("seed=range(1,1001)", "model.n_head=range(1,84)", "optimizer.lr=range(1,73)")
    with pytest.raises(
        UserError,
        match=r"got 10000; set it, give fewer values, or search with hydra/sweeper=optuna$",
    ):
        plan("seed=range(1000000000000)", "model.n_head=2,4")
    assert len(plan("seed=1,2", "model.n_head=2,4", "hydra.sweeper.max_points=4.0").points) == 4


def test_impossible_points_are_skipped_with_the_reason_and_the_rest_runs(plan, capsys):
    sweeper = plan("optimizer=adamw,adamv", "model.block_size=16,16000")
    ran, *others = sweeper.points
    assert [len(batch) for batch in sweeper.engine.batches] == [1]
    assert (ran.reason, ran.folder.exists()) == ("", True)
    assert "model.block_size + 1 = 16001" in others[0].reason
    assert all(
        "optimizer=adamv does not exist (did you mean adamw?)" in point.reason
        for point in others[1:]
    )
    assert capsys.readouterr().err.count("skipped: ") == 3
    assert [(point.status, point.folder.exists()) for point in read_sweep(sweeper.folder)[1:]] == [
        (SKIPPED, False)
    ] * 3


def test_a_sweep_locks_its_folder_until_its_report_is_written(plan, tmp_path, monkeypatch):
    folder, locked = tmp_path / "sweep", []

    class Watched(Engine):
        def launch(self, job_overrides, initial_job_idx):
            locked.append(is_locked(folder))
            assert [point.status for point in read_sweep(folder)] == [
                "waiting"
            ] * 2  # others read it meanwhile
            super().launch(job_overrides, initial_job_idx)

    monkeypatch.setattr(
        "minigpt.sweeps.report.report", lambda folders, points: locked.append(is_locked(*folders))
    )
    plan("seed=1,2", engine=Watched())
    with pytest.raises(KeyboardInterrupt):
        plan("seed=1,2,3", "resume=auto", engine=Engine(jobs=0))
    assert (locked, is_locked(folder)) == ([True] * 3, False)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    message = r"^another sweep uses \S+/sweep; wait for it, or choose another folder with hydra\.sweep\.dir="
    with FileLock(folder / ".lock"), pytest.raises(UserError, match=message):
        plan("seed=1,2,3", "resume=auto")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize("names", [{".lock", "metrics.csv"}, {"metrics.csv"}])
def test_a_refused_sweep_leaves_the_lock_of_a_run_and_none_of_its_own(plan, tmp_path, names):
    (tmp_path / "sweep").mkdir()
    for name in names:
        (tmp_path / "sweep" / name).touch()
    with pytest.raises(UserError, match="is not empty and holds no sweep"):
        plan("seed=1,2")
    assert {file.name for file in (tmp_path / "sweep").iterdir()} == names


@pytest.mark.parametrize("line", [[], ["seed=1,2", "-m"]], ids=["run", "sweep"])
def test_a_disk_without_locks_is_one_line(call, line, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    key = "hydra.sweep.dir" if line else "hydra.run.dir"
    error = one_line(call("train.py", *line, f"{key}=mine"))
    assert re.fullmatch(r"error: \S*mine/\.lock: no locks available; choose another folder", error)


def test_the_seed_of_a_run_is_its_own_however_it_was_given(plan, tmp_path):
    plan("model.n_head=2,4", "seed=5")
    sweeper = plan("model.n_head=2,4", "seed=6", "resume=auto")
    assert [
        [point.seed for point in row.points] for row in ranked(read_sweep(sweeper.folder)).rows
    ] == [["6", "5"]] * 2
    (row,) = ranked(read_sweep(plan("++seed=1,2", folder=tmp_path / "added").folder)).rows
    assert [point.seed for point in row.points] == ["1", "2"]


@pytest.mark.parametrize(
    "given", ["WANDB_RUN_ID", "+hydra.job.env_set.WANDB_RUN_ID=fox", "+logger.wandb.id=fox"]
)
def test_a_sweep_refuses_an_id_of_weights_and_biases_for_all_its_runs(plan, monkeypatch, given):
    if given == "WANDB_RUN_ID":
        monkeypatch.setenv(given, "fox")
    expected = "^logger.wandb.id or WANDB_RUN_ID must be null in a sweep, whose runs have one each, got fox"
    with pytest.raises(UserError, match=expected):
        plan("seed=1,2", "logger=wandb", *([given] if "=" in given else []))
    if given == "WANDB_RUN_ID":
        plan("seed=1,2")  # without W&B


@pytest.mark.parametrize("line", ["hydra.sweeper.prune=true", "hydra/sweeper=optuna"])
def test_pruning_and_searches_refuse_points_that_validate_on_different_texts(plan, line):
    with pytest.raises(
        UserError,
        match=r"need one validation text for all points, got all .* bytes of text \w+; all .* bytes of",
    ):
        plan(line, "data.val_fraction=0.1,0.3", "eval_every=10")


def test_a_missing_optional_package_is_an_error_with_the_install_command(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)  # as if it were not installed
    line = one_line(call("train.py", "seed=1,2", "hydra/launcher=submitit_local", "-m"))
    assert 'hydra/launcher=submitit_local needs submitit; pip install -e ".[submitit]"' in line
    assert not Path("runs").exists()
