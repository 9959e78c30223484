"""Sweeps in processes of their own: failures, kills, signals."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from processes import Script, live_processes
from small_runs import one_line, rows, small_run, table, wait_until, wandb_records

from minigpt.runs.run_dir import read_summary
from minigpt.sweeps.results import (
    COMPLETED,
    read_sweep,
)


@pytest.fixture
def start(text, tmp_path):
    """Start a sweep in `sweep`: `start("seed=1,2", held="seed=1")`; `hold.Hold` holds the run."""
    sweeps = []

    def run(*arguments, held=""):
        (tmp_path / "held").unlink(missing_ok=True)
        (tmp_path / "hold").write_text(held, encoding="utf-8")
        env = {
            "WANDB_MODE": "offline",
            "HOME": str(tmp_path),
            "PYTHONPATH": str(Path(__file__).parent),
        }
        line = [
            *small_run(text, tmp_path / "data", *arguments),
            "+callbacks.hold._target_=hold.Hold",
        ]
        line += ["hydra.mode=MULTIRUN", "hydra.sweep.dir=sweep"]
        sweeps.append(Script("train.py", *line, output=tmp_path / "out", cwd=tmp_path, env=env))
        if held:
            assert sweeps[-1].wait_for((tmp_path / "held").exists), sweeps[-1].stderr
        return sweeps[-1]

    yield run
    for sweep in sweeps:
        sweep.kill()


def ended(sweep):
    """Wait until a sweep and all its processes have ended."""
    code = sweep.wait()
    wait_until(lambda: not live_processes(sweep.pid))
    return code


@pytest.mark.slow
def test_a_sweep_reports_every_point_when_runs_fail_and_a_worker_is_killed(start, tmp_path, train):
    folder = tmp_path / "sweep"
    rates = ("0.001", "1e+30")
    good, bad = ([f"n_embd=32,lr={rate},seed={seed}" for seed in (1, 2)] for rate in rates)
    line = ["model.n_embd=31,32", "optimizer.lr=1e-3,1e30", "seed=1,2", "hydra.launcher.n_jobs=2"]
    sweep = start(*line, held=good[0])
    os.kill(int((tmp_path / "held").read_text(encoding="utf-8")), signal.SIGKILL)
    assert ended(sweep) == 1, sweep.stderr
    killed = "its process was killed (SIGKILL), possibly out of memory"
    files = {f"sweep.{ending}" for ending in ("csv", "json", "md", "png")} | {"runs.csv", ".lock"}
    assert {path.name for path in folder.iterdir()} == {*good, *bad, *files}
    assert read_summary(folder / good[0]) == {"status": "failed", "reason": killed}
    points = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["points"]
    assert [point["status"] for point in points] == ["skipped"] * 4 + [
        "failed",
        "completed",
        "failed",
        "failed",
    ]

    # stderr has skipped points, the number of runs, one line per run, the failure, and no output of
    # jobs.
    lines = sweep.stderr.splitlines()
    assert lines[4:6] == ["4 of 8 to run", "2 at a time with OMP_NUM_THREADS=1"]
    results = dict(re.fullmatch(r"\d/4 (\S+) (.*)", line).groups() for line in lines[6:10])
    assert re.fullmatch(
        rf"failed, val loss \d\.\d{{4}} after \d+ s of training: {re.escape(killed)}",
        results[good[0]],
    )
    assert re.fullmatch(r"completed, val loss \d\.\d{4} after \d+ s of training", results[good[1]])
    assert all(results[name].startswith("failed: the loss is nan at step") for name in bad)
    assert lines[10:] == ["error: 3 of 8 runs failed; the table has the reasons"]

    # The output of a job is in its log, and a run of a sweep equals the same run outside of it.
    assert (folder / good[1] / "log.txt").read_text(encoding="utf-8").count("step 20/20") == 1
    assert rows(folder / good[1]) == rows(train("optimizer.lr=1e-3", "seed=2").folder)


@pytest.mark.slow
def test_a_second_sweep_is_refused_and_a_run_that_is_trained_by_hand_meanwhile_is_kept(
    start, launch, tmp_path, train
):
    folder = tmp_path / "sweep"
    line = ["seed=1,2,3", "hydra.launcher.n_jobs=1"]
    sweep = start(*line, held="seed=1")
    for more in ([], ["resume=auto"]):
        second = launch(
            "train.py", *line, *more, "hydra.mode=MULTIRUN", "hydra.sweep.dir=sweep", cwd=tmp_path
        )
        assert one_line(second).startswith(
            "error: another sweep uses sweep; wait for it, or choose another folder"
        )
    reported = launch("sweep_report.py", "sweep", cwd=tmp_path)
    assert (reported.returncode, reported.stderr) == (0, "")
    by_hand = train("seed=2", folder=folder / "seed=2").summary
    os.kill(int((tmp_path / "held").read_text(encoding="utf-8")), signal.SIGTERM)
    assert ended(sweep) == 1, sweep.stderr
    assert [point.status for point in read_sweep(folder)] == ["interrupted", COMPLETED, COMPLETED]
    assert read_summary(folder / "seed=2").items() <= by_hand.items()
    assert [row["status"] for row in table(folder / "runs.csv")] == [
        "interrupted",
        COMPLETED,
        COMPLETED,
    ]


@pytest.mark.slow
@pytest.mark.ci
def test_a_killed_and_an_interrupted_sweep_resume_and_complete(start, tmp_path, train):
    folder = tmp_path / "sweep"
    line = ["hydra.launcher.n_jobs=1", "resume=auto"]
    killed = start("seed=1,2", *line, held="seed=2")
    killed.signal(signal.SIGKILL)  # as when out of memory; workers save and exit
    assert ended(killed) == 128 + signal.SIGKILL
    assert [point.status for point in read_sweep(folder)] == [COMPLETED, "interrupted"]
    files = {
        path: path.stat().st_mtime_ns for path in (folder / "seed=1").rglob("*") if path.is_file()
    }

    interrupted = start("seed=range(1,4)", *line, held="seed=2")
    os.killpg(interrupted.pid, signal.SIGINT)  # Ctrl-C in a terminal
    assert ended(interrupted) == 128 + signal.SIGINT
    resume = "to resume, run the same command with hydra.sweep.dir=sweep resume=auto"
    assert interrupted.stderr.splitlines()[-2:] == [resume, "interrupted by SIGINT"]
    assert [point.status for point in read_sweep(folder)] == [COMPLETED, "interrupted", "waiting"]
    assert "interrupted" in interrupted.stdout  # the table is shown all the same

    wandb = ["logger=wandb", "logger.wandb.tags=[fox]", "+logger.wandb.config={host:mine}"]
    sweep = start("seed=range(1,4)", *line, *wandb)
    assert ended(sweep) == 0, sweep.stderr
    assert {
        path: path.stat().st_mtime_ns for path in files
    } == files  # completed runs are not touched
    assert [(row["seeds"], row["status"]) for row in table(folder / "sweep.csv")] == [
        ("3", COMPLETED)
    ]
    # A resumed run equals an uninterrupted one
    assert rows(folder / "seed=2") == rows(train("seed=2").folder)
    assert (folder / "seed=2" / "log.txt").read_text(encoding="utf-8").count(
        "step 10/20"
    ) == 1  # and did not begin anew

    # Weights & Biases has a run per job, and one for the summary.
    for name, tags in {"seed=2": [], "seed=3": [], "": ["summary"]}.items():
        (started,) = (
            record["run"] for record in wandb_records(folder / name) if record["type"] == "run"
        )
        assert (started["display_name"], started["run_group"]) == (name or "sweep summary", "sweep")
        assert set(started["tags"]) == {"fox", "sweep", *tags}
    # The answer, in its summary
    assert "The lowest mean loss is" in json.dumps(wandb_records(folder))
    assert "upload later with: wandb sync sweep/wandb sweep/*/wandb" in sweep.stderr
    logged = [
        json.loads(file.read_text(encoding="utf-8"))
        for file in (folder / "wandb").rglob("*.table.json")
    ]
    rows_of, runs_of = sorted(logged, key=lambda each: "folder" in each["columns"])
    seeds = rows_of["columns"].index("seeds")
    of_run = [runs_of["columns"].index(name) for name in ("seed", "val_loss")]
    losses = [[seed, read_summary(folder / f"seed={seed}")["best_val_loss"]] for seed in (1, 2, 3)]
    assert [[line[i] for i in of_run] for line in runs_of["data"]] == losses  # numbers
    assert rows_of["data"][0][seeds] == 3
