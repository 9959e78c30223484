"""A grid: its checks before the first run, its folder and its lock, and how it resumes."""

import contextlib
import errno
import json
import math
import re
import sys
from itertools import chain
from pathlib import Path

import pytest
from engine import Engine
from filelock import FileLock
from refusals import refused
from small_runs import one_line
from sweep_folders import read_table

from minigpt.runs.run_dir import is_locked
from minigpt.sweeps.answer import answer
from minigpt.sweeps.ranking import ranked
from minigpt.sweeps.report import table_of_rows, table_of_runs
from minigpt.sweeps.results import COMPLETED, NATS, SKIPPED, read_plan, read_sweep
from minigpt.sweeps.sweeper import SAME, announced
from minigpt.utils.errors import RunError, UserError


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
    exact = r"^hydra\.sweeper\.max_points must be at least 5976000, the points of the grid, "
    grid = ["seed=range(1,1001)", "model.n_head=range(1,84)", "optimizer.lr=range(1,73)"]
    refused(exact, plan, *grid)
    advice = "got 10000; set it, give fewer values, or search with hydra/sweeper=optuna$"
    refused(advice, plan, "seed=range(1000000000000)", "model.n_head=2,4")
    assert len(plan("seed=1,2", "model.n_head=2,4", "hydra.sweeper.max_points=4.0").points) == 4


def test_impossible_points_are_skipped_with_the_reason_and_the_rest_runs(plan, capsys):
    sweeper = plan("optimizer=adamw,adamv", "model.block_size=16,16000")
    assert [len(batch) for batch in sweeper.engine.batches] == [1]
    ran, *others = sweeper.points
    assert (ran.reason, ran.folder.exists()) == ("", True)
    assert "model.block_size + 1 = 16001" in others[0].reason
    missing = "optimizer=adamv does not exist (did you mean adamw?)"
    assert [missing in point.reason for point in others[1:]] == [True] * 2
    assert capsys.readouterr().err.count("skipped: ") == 3
    read = [(point.status, point.folder.exists()) for point in read_sweep(sweeper.folder)[1:]]
    assert read == [(SKIPPED, False)] * 3
    # An impossible point has no code, which is no other code
    assert "code" not in read_table([sweeper.folder]).short_names


def test_a_sweep_locks_its_folder_until_its_report_is_written(plan, tmp_path, monkeypatch):
    folder = tmp_path / "sweep"
    locked = []

    class Watched(Engine):
        def launch(self, job_overrides, initial_job_idx):
            locked.append(is_locked(folder))
            assert [point.status for point in read_sweep(folder)] == [
                "waiting"
            ] * 2  # others read it meanwhile
            super().launch(job_overrides, initial_job_idx)

    monkeypatch.setattr(
        "minigpt.sweeps.report.report",
        lambda folders: locked.append(is_locked(*folders)) or read_table(folders),
    )
    plan("seed=1,2", engine=Watched())
    with pytest.raises(KeyboardInterrupt):
        plan("seed=1,2,3", "resume=auto", engine=Engine(jobs=0))
    assert (locked, is_locked(folder)) == ([True] * 3, False)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    message = r"^another sweep uses \S+/sweep; wait for it, or choose another folder with hydra\."
    with FileLock(folder / ".lock"), pytest.raises(UserError, match=message):
        plan("seed=1,2,3", "resume=auto")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize("names", [{".lock", "metrics.csv"}, {"metrics.csv"}])
def test_a_refused_sweep_leaves_the_lock_of_a_run_and_none_of_its_own(plan, tmp_path, names):
    (tmp_path / "sweep").mkdir()
    for name in names:
        (tmp_path / "sweep" / name).touch()
    refused("is not empty and holds no sweep", plan, "seed=1,2")
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
    for row in ranked(read_sweep(sweeper.folder)).rows:
        assert [point.seed for point in row.points] == ["6", "5"]
    (row,) = ranked(read_sweep(plan("++seed=1,2", folder=tmp_path / "added").folder)).rows
    assert [point.seed for point in row.points] == ["1", "2"]


@pytest.mark.parametrize(
    "given", ["WANDB_RUN_ID", "+hydra.job.env_set.WANDB_RUN_ID=fox", "+logger.wandb.id=fox"]
)
def test_a_sweep_refuses_an_id_of_weights_and_biases_for_all_its_runs(plan, monkeypatch, given):
    if given == "WANDB_RUN_ID":
        monkeypatch.setenv(given, "fox")
    expected = (
        "^logger.wandb.id or WANDB_RUN_ID must be null in a sweep, whose runs have one each, "
        "got fox"
    )
    with pytest.raises(UserError, match=expected):
        plan("seed=1,2", "logger=wandb", *([given] if "=" in given else []))
    if given == "WANDB_RUN_ID":
        plan("seed=1,2")  # without W&B


@pytest.mark.parametrize("line", ["hydra.sweeper.prune=true", "hydra/sweeper=optuna"])
def test_pruning_and_searches_refuse_points_that_validate_on_different_texts(plan, line):
    message = r"need one validation text for all points, got all .* bytes of text \w+; all "
    refused(message, plan, line, "data.val_fraction=0.1,0.3", "eval_every=10")


def test_a_missing_optional_package_is_an_error_with_the_install_command(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)  # as if it were not installed
    line = one_line(call("train.py", "seed=1,2", "hydra/launcher=submitit_local", "-m"))
    assert 'hydra/launcher=submitit_local needs submitit; pip install -e ".[submitit]"' in line
    assert not Path("runs").exists()


def test_a_sweep_resumes_with_new_points_whatever_the_notation_and_the_logging(plan, tmp_path):
    latest = tmp_path / "latest"
    line = ["max_steps=1e3,2e3,1000", "data.batch_size=4.0"]
    before = plan(*line, folder=tmp_path / "first").points
    assert [point.reason for point in before] == ["", "", SAME]
    assert [point.settings["max_steps"] for point in before] == [1000, 2000, 1000]
    line = ["max_steps=choice(3000,2000)", "data.batch_size=4", "logger=tensorboard"]
    after = plan(*line, "resume=auto", folder=latest)
    assert [ran["max_steps"] for ran in after.engine.ran] == [3000]  # and nothing else
    read = {point.identity: point for point in read_sweep(latest)}
    assert {repr(point.value("max_steps")) for point in read.values()} == {"1000", "2000", "3000"}
    assert {repr(point.value("data.batch_size")) for point in read.values()} == {"4"}
    assert [point.status for point in after.points] == [COMPLETED] * 2
    # Completed points keep their folders
    kept = {(point.identity, point.folder.name) for point in before if not point.reason}
    assert kept < {(identity, point.folder.name) for identity, point in read.items()}
    assert latest.resolve() == tmp_path / "first"


def test_a_sweep_with_names_that_no_file_system_takes_resumes(plan, tmp_path):
    # Older versions planned them, and failed at the first launch
    line = ["data.field=text,other", "seed=1,2"]
    plan(*line)
    file = tmp_path / "sweep/sweep.json"
    content = file.read_text(encoding="utf-8")
    for i, name in enumerate(("field=other,seed=1", "field=other,seed=2")):
        assert name in content
        content = content.replace(name, f"{'訓' * 119}{i}")
    file.write_text(content, encoding="utf-8")
    resumed = plan(*line, "resume=auto")
    assert [ran["seed"] for ran in resumed.engine.ran] == [1, 2]
    assert [point.status for point in read_sweep(tmp_path / "sweep")] == [COMPLETED] * 4
    assert plan(*line, "resume=auto").engine.launches == []


def test_a_sweep_reports_what_its_folder_holds_and_nothing_of_an_earlier_attempt(plan, monkeypatch):
    reported = []
    monkeypatch.setattr(
        "minigpt.sweeps.report.report",
        lambda folders: reported.append(read_table(folders)) or reported[-1],
    )
    line = ["optimizer=adamw,adamv", "seed=1,2", "max_steps=2", "+note=x"]
    for first_loss in (1.0, math.nan):  # of seed 2, which fails at its second step
        losses = {("1", 1): 2.0, ("1", 2): 2.0, ("2", 1): first_loss, ("2", 2): math.nan}
        engine = Engine(lambda settings, step: losses[settings["seed"], step])  # noqa: B023
        with pytest.raises(RunError, match="1 of 4 runs failed"):
            plan(*line, *(["resume=auto"] if reported else []), engine=engine)
        read = ranked(read_sweep(engine.points[0].folder.parent))
        assert table_of_rows(reported[-1]) == table_of_rows(read)
        assert table_of_runs(reported[-1]) == table_of_runs(read)
        assert answer(reported[-1]) == answer(read)
    seed_2 = next(point for point in reported[-1].rows[0].points if point.seed == "2")
    assert (seed_2.status, seed_2.loss(NATS), seed_2.overrides["+note"]) == ("failed", None, "x")


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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("seed=1,2", r"sweep already; resume it with resume=auto, or choose another folder"),
        ("model.n_head=2,4 resume=auto", r"sweep that differs in model\.n_head;"),
        ("seed=1,2 max_steps=9 resume=auto", r"differs in max_steps \(1000 there, 9 now\);"),
    ],
)
def test_another_sweep_does_not_use_the_folder_of_a_sweep(plan, tmp_path, line, message):
    sweeper = plan("seed=1,2")
    Path(sweeper.folder, "seed=2/summary.json").unlink()  # to be run again by the same command
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("sweep/**")}
    refused(message, plan, *line.split())
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("sweep/**")} == before


def test_a_sweep_with_a_rate_of_the_environment_resumes_at_this_rate_alone(plan, monkeypatch):
    line = ["optimizer.lr='${oc.decode:${oc.env:LR}}'", "resume=auto"]
    monkeypatch.setenv("LR", "0.002")
    plan(*line, "seed=1,2")
    sweeper = plan(*line, "seed=1,2,3")
    (ran,) = sweeper.engine.ran
    assert (ran["seed"], ran["optimizer.lr"]) == (3, 0.002)
    (row,) = ranked(read_sweep(sweeper.folder)).rows
    assert [point.value("optimizer.lr") for point in row.points] == [0.002] * 3
    monkeypatch.setenv("LR", "0.2")
    differs = r"sweep that differs in optimizer\.lr \(0\.002 there, 0\.2 now\); choose"
    refused(differs, plan, *line, "seed=1,2,3,4")
    # A plan of an older version
    monkeypatch.setenv("LR", "0.002")
    file = sweeper.folder / "sweep.json"
    old = json.loads(file.read_text(encoding="utf-8"))
    old["settings"]["optimizer.lr"] = "${oc.decode:${oc.env:LR}}"
    file.write_text(json.dumps(old), encoding="utf-8")
    differs = r"differs in optimizer\.lr \(\$\{oc\.decode:\S+ there, 0\.002 now"
    refused(differs, plan, *line, "seed=1,2,3,4")


def test_another_text_under_the_same_name_is_not_resumed(plan, text, tmp_path):
    line = ["seed=1,2", f"data.path={tmp_path}/mine.txt"]
    words = text.read_text(encoding="utf-8")
    (tmp_path / "mine.txt").write_text(words, encoding="utf-8")
    plan(*line)
    (tmp_path / "mine.txt").write_text(words.replace("fox", "cat"), encoding="utf-8")
    message = "seed=1 was trained on another text or from other weights; choose another"
    refused(message, plan, *line, "resume=auto")


def test_runs_that_begin_from_different_checkpoints_are_different_points_also_if_they_resume(
    plan, tmp_path
):
    def lines(*arguments, jobs=9):
        engine = Engine(jobs=jobs)
        with contextlib.suppress(KeyboardInterrupt):  # of the job after these
            plan("resume=a,b,c", *arguments, engine=engine)
        return [list(filter(re.compile("resume=").match, job)) for job in engine.batches[0]]

    assert lines(jobs=1) == [["resume=a"], ["resume=b"], ["resume=c"]]
    checkpoints = tmp_path / "sweep/resume=b/checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "last.safetensors").touch()
    assert lines("resume=auto") == [["resume=b", "resume=auto"], ["resume=c"]]
    rows = ranked(read_sweep(tmp_path / "sweep")).rows
    assert [row.overrides for row in rows] == [{"resume": "a"}, {"resume": "b"}, {"resume": "c"}]


def test_runs_of_equal_minutes_are_trained_seed_by_seed(plan):
    line = ["optimizer.lr=1e-3,3e-3", "seed=5,4"]
    planned = plan(*line, "minutes=1", engine=Engine())
    assert [settings["seed"] for settings in planned.engine.ran] == [5, 5, 4, 4]


def test_the_plans_of_a_sweep_validate_on_the_same_text_and_resume_with_settings_in_their_order(
    plan, tmp_path
):
    line = ["seed=1,2", "minutes=1", "model.n_embd=32", "model={n_embd:64}"]
    sweeper = plan(*line)
    given = plan(*line, "eval_batches=3", folder=tmp_path / "given")
    for (jobs,), expected in ((sweeper.engine.batches, "null"), (given.engine.batches, "3")):
        found = [text for text in chain(*jobs) if "eval_batches" in text]
        assert found == [f"eval_batches={expected}"] * 2
    plan(*line, "resume=auto")
    assert "eval_batches=null" not in read_plan(sweeper.folder)[0]  # which was not typed
    differs = r"holds a sweep that differs in model\.n_embd \(64 there, 32 now\); choose"
    refused(differs, plan, *line[:2], *line[:1:-1], "resume=auto")
