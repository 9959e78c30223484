"""Terminals and pipes that are not UTF-8, as on Windows and in containers; files are in UTF-8."""

import io
import json
import sys

import pytest
from processes import Script
from small_runs import SCRIPTS, small_run, table

import minigpt

TEXT = "Où est l’été ? Где же лето? 😀\n" * 400


def test_help_of_every_script_is_shown_in_ascii(tmp_path):
    options = {"cwd": tmp_path, "env": {"PYTHONIOENCODING": "ascii"}}
    files = SCRIPTS.glob("[!_]*.py")
    scripts = [
        Script(file.name, "--help", output=tmp_path / file.stem, **options) for file in files
    ]
    assert len(scripts) > 5
    for script in scripts:
        assert (script.wait(), script.stderr) == (0, "")
        assert "--help" in script.stdout or "usage" in script.stdout
    assert any(r"\u2026" in script.stdout for script in scripts)  # … of the help


@pytest.mark.slow
def test_a_sweep_into_a_terminal_of_ascii_writes_its_files_in_utf_8(launch, tmp_path):
    (tmp_path / "лето.txt").write_text(TEXT, encoding="utf-8")
    swept = ["hydra.mode=MULTIRUN", "hydra/launcher=basic", "seed=1,2", "hydra.sweep.dir=été"]
    env = {"PYTHONIOENCODING": "ascii"}
    ended = launch("train.py", "data.path=лето.txt", "max_steps=2", *swept, cwd=tmp_path, env=env)
    assert ended.returncode == 0, ended.stderr
    assert r"answer   \xe9t\xe9/sweep.md" in ended.stdout
    assert all(byte < 128 for file in tmp_path.glob("process-*") for byte in file.read_bytes())
    folder = tmp_path / "été"
    assert (folder / "sweep.png").stat().st_size > 0
    assert (folder / "sweep.md").read_text(encoding="utf-8").startswith("# été\n")
    runs = [run["folder"] for run in table(folder / "runs.csv")]
    assert runs == [f"{folder}/seed={seed}" for seed in (1, 2)]
    for seed in (1, 2):
        log = (folder / f"seed={seed}" / "log.txt").read_text(encoding="utf-8")
        assert f"run folder  été/seed={seed}\n" in log
        assert "лето.txt" in log


def test_a_program_that_trains_completes_where_stdout_lacks_characters_of_the_sample(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "лето.txt").write_text(TEXT, encoding="utf-8")
    printed = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", printed)
    run = small_run("лето.txt", tmp_path / "data", "max_steps=2", "hydra.run.dir=лето")
    assert minigpt.train(run)["status"] == "completed"
    printed.flush()
    assert rb"run folder       \u043b\u0435\u0442\u043e" in printed.buffer.getvalue()
    assert json.loads((tmp_path / "лето/summary.json").read_text(encoding="utf-8"))["steps"] == 2


def test_a_program_without_standard_streams_trains(tmp_path, monkeypatch, text):
    """As pythonw and services of Windows start one."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    run = small_run(text, tmp_path / "data", "max_steps=2", f"hydra.run.dir={tmp_path}/run")
    assert minigpt.train(run)["steps"] == 2
    assert (sys.stdout, sys.stderr) == (None, None)
