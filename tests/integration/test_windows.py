"""Runs, sweeps and scripts under the imitation of Windows of tests/windows/sitecustomize.py."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from processes import PRELOADED, Script
from refusals import refused
from small_runs import ROOT, one_line, small_run, table

from minigpt.checkpoints.find import LAST, find_checkpoint, follow_latest
from minigpt.runs.overrides import literal, quote_override, quote_path
from minigpt.runs.run_dir import read_summary
from minigpt.utils.scripts import shell_join

SIGBREAK = 21  # Ctrl-Break in the imitation
HOLD = "+callbacks.hold._target_=hold.Hold"


@pytest.fixture
def on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Let processes that start from here imitate Windows in a folder, which is returned
    folder = tmp_path / "work"
    folder.mkdir()
    paths = [ROOT / "tests/windows", ROOT / "tests/sweeps"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    monkeypatch.setenv("IMITATED_FOLDER", str(folder))
    monkeypatch.setenv("PYTHONIOENCODING", "cp1252")
    return folder


@pytest.fixture
def start(
    on_windows: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Script]]:
    # Start a script in a process that is forked from one that imitates Windows
    server: Any = forkserver.ForkServer()
    server.set_forkserver_preload(PRELOADED)
    monkeypatch.setattr(forkserver, "connect_to_new_process", server.connect_to_new_process)
    started = []

    def run(script: str, *arguments: str) -> Script:
        if script == "train.py":
            arguments = (*small_run(text, Path("data"), *arguments),)
        output = on_windows.parent / f"out{len(started)}"
        started.append(Script(script, *arguments, output=output, cwd=on_windows))
        return started[-1]

    yield run
    for script in started:
        script.kill()
    server._stop()


def run_to_end(script: Script, code: int = 0) -> SimpleNamespace:
    assert script.wait() == code, script.stderr
    assert "Traceback" not in script.stdout + script.stderr
    return SimpleNamespace(stdout=script.stdout, stderr=script.stderr)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.xdist_group("processes")
def test_runs_sweeps_and_scripts_work_on_an_imitated_windows(
    start: Callable[..., Script], on_windows: Path
) -> None:
    # A run, Ctrl-C, its resume, and samples of it: there is no link, but it is the newest.
    trained = start("train.py", "max_steps=100000")
    assert trained.wait_for(lambda: [*on_windows.glob(f"runs/*/{LAST}")]), trained.stderr
    os.killpg(trained.pid, signal.SIGINT)
    run_to_end(trained, 128 + signal.SIGINT)
    (run,) = (on_windows / "runs").iterdir()
    steps = read_summary(run)["steps"]
    assert steps >= 10
    same_run = ["hydra.run.dir=runs/latest", "resume=auto", "callbacks.samples.max_new_tokens=5"]
    resumed = run_to_end(start("train.py", f"max_steps={steps + 10}", *same_run))
    assert "step 10/" not in resumed.stderr
    assert (read_summary(run)["status"], read_summary(run)["steps"]) == ("completed", steps + 10)
    for named in ([], ["runs/latest"]):
        options = ("--prompt", "7: ", "--max-new-tokens", "5", "--seed", "1")
        assert run_to_end(start("sample.py", *named, *options)).stdout.startswith("7: ")

    # A sweep of two seeds in a worker process, Ctrl-Break, its resume without a new worker, and its
    # report.
    (on_windows / "runs/sweeps").mkdir()
    (on_windows / "runs/sweeps/hold").write_text("seed=2", encoding="utf-8")
    swept = ["-m", "seed=1,2", HOLD]
    stopped = start("train.py", *swept, "hydra.launcher.n_jobs=1")
    assert stopped.wait_for((on_windows / "runs/sweeps/held").exists), stopped.stderr
    os.killpg(stopped.pid, SIGBREAK)  # on Windows, too, it goes to the workers of the same console
    run_to_end(stopped, 128 + SIGBREAK)
    (sweep,) = (each for each in (on_windows / "runs/sweeps").iterdir() if each.is_dir())
    ends = [read_summary(sweep / f"seed={seed}") for seed in (1, 2)]
    found = [(end["status"], end["steps"]) for end in ends]
    assert found == [("completed", 20), ("interrupted", 12)]
    (on_windows / "runs/sweeps/hold").unlink()
    swept += ["hydra/launcher=basic", "hydra.sweep.dir=runs/sweeps/latest", "resume=auto"]
    assert "completed" in run_to_end(start("train.py", *swept)).stdout
    # The worker ignored Ctrl-Break, until its parent ended it: a second signal would have cost the
    # checkpoint.
    log = (sweep / "seed=2/log.txt").read_text(encoding="utf-8")
    assert "interrupted by SIGTERM" in log
    assert "8 steps from step 12 at" in log
    (sweep / "sweep.csv").unlink()
    run_to_end(start("sweep_report.py"))
    (row,) = table(sweep / "sweep.csv")
    assert (row["seeds"], row["status"]) == ("2", "completed")

    # A run that is refused while its lock is held, exports, and the server.
    refused = run_to_end(start("train.py", "data.path=missing.txt"), 2)
    line = one_line(SimpleNamespace(returncode=2, **vars(refused)))
    assert line.startswith("error: data.path=missing.txt does not")
    files = (on_windows / "runs").glob("*/*")
    left = [file.name for file in files if not {run, sweep.parent} & {*file.parents}]
    assert left == [".lock"]  # which filelock removes on Windows
    run_to_end(start("export.py", str(run), "--to", "html", "--out", "page.html"))
    run_to_end(start("export.py", str(sweep), "--to", "huggingface", "--out", "hf"))
    assert (on_windows / "hf/config.json").exists()
    server = start("serve.py", "runs/latest", "--port", "0")
    assert server.wait_for(lambda: "is the page" in server.stderr), server.stderr
    url = re.findall(r"http://\S+", server.stderr)[0]
    assert [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]] == [run.name]
    os.killpg(server.pid, signal.SIGINT)
    run_to_end(server, 128 + signal.SIGINT)
    assert not [
        file for file in on_windows.rglob("*") if file.is_symlink() or ".partial" in file.name
    ]


def test_printed_commands_are_quoted_for_cmd_and_powershell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    plain = [r".venv\Scripts\python.exe", "scripts/train.py", r"data.path=C:\a\b.txt"]
    plain += ["max_steps=5", "--seed", "-1.5e-3"]
    assert shell_join(*plain) == " ".join(plain)
    # A comma makes an array in PowerShell, and & ends a command in cmd.
    for word in ("seed=1,2", r"hydra.run.dir='runs\a b'", "a&b", "", "(x)", "a;b"):
        assert shell_join(word) == f'"{word}"'
    assert shell_join('say "hi"') == subprocess.list2cmdline(['say "hi"']) == r'"say \"hi\""'


def test_paths_of_windows_are_overrides_of_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = OverridesParser.create().parse_override
    paths = [r"C:\Users\x y\runs", r"runs\2026", "C:\\a\\", r"D:\it's\$x"]
    for path in [*paths, r"\\server\share\a,b"]:
        assert parse(f"hydra.run.dir={quote_path(path)}").value() == path
        assert parse(f"hydra.run.dir={quote_override(path)}").value() == path
        assert parse(literal(f"data.path={path}", sweeps=False)).value() == path
    monkeypatch.setenv("HOME", r"C:\Users\x")
    assert literal("data.path=['~/a',b]", sweeps=False) == "data.path=['~/a',b]"
    assert literal("data.path=[~/a,~/b]", sweeps=False) == r"data.path=[C:\Users\x/a,C:\Users\x/b]"


def test_latest_is_the_newest_run_or_sweep_where_there_is_no_link(tmp_path: Path) -> None:
    assert follow_latest(f"{tmp_path}/latest") == f"{tmp_path}/latest"
    files = ("new/.hydra/overrides.yaml", "swept/sweep.json", "old/.hydra/overrides.yaml")
    for age, file in enumerate(files):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
        os.utime(tmp_path / file, (1e9 - age,) * 2)
    (tmp_path / "mine").mkdir()  # of the user, and the newest
    for given in (f"{tmp_path}/latest", f"{tmp_path}/latest/"):
        assert follow_latest(given) == f"{tmp_path}/new"
    assert follow_latest(f"{tmp_path}/old") == f"{tmp_path}/old"
    (tmp_path / "new/.hydra/overrides.yaml").unlink()
    assert follow_latest(f"{tmp_path}/latest") == f"{tmp_path}/swept"
    (tmp_path / "swept/seed=1/.hydra").mkdir(parents=True)
    (tmp_path / "swept/seed=1/.hydra/overrides.yaml").touch()
    # Which is no job of the sweep
    assert follow_latest(f"{tmp_path}/swept/latest") == f"{tmp_path}/swept/latest"
    (tmp_path / "latest").symlink_to("removed")
    missing = "latest does not exist; give a run folder or a checkpoint file"
    refused(missing, find_checkpoint, tmp_path / "latest")


FORBIDDEN = {
    "os.symlink('file', 'link')": "PermissionError",
    "open('a:b', 'w')": "OSError",
    "open('file'), os.remove('file')": "PermissionError",
    "open('file'), os.replace('other', 'file')": "PermissionError",
    "open('file'), shutil.rmtree('.')": "PermissionError",
    "mapped('file'), os.rename('file', 'new')": "PermissionError",
    "mapped('file'), open('file', 'w')": "PermissionError",
    "os.rename('other', 'file')": "FileExistsError",
    "os.replace('other', 'file'), os.remove('file'), open('a,b=c.d', 'w')": "",
}


def test_the_imitation_of_windows_refuses_what_windows_refuses(on_windows: Path) -> None:
    program = f"""
import mmap, os, shutil, signal, sys
def mapped(name):
    with open(name) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
for command in {[*FORBIDDEN]}:
    for name in ("file", "other"):
        with open(name, "w") as file:
            file.write(name)
    try:
        kept = eval(command)
        print()
    except OSError as error:
        print(type(error).__name__)
    kept = None
import minigpt.utils.signals as ours
assert hasattr(signal, "SIGUSR1") and sys.platform == "linux"
assert not hasattr(ours.signal, "SIGUSR1") and not hasattr(ours.os, "EX_TEMPFAIL")
assert ours.signal.SIGBREAK
exec("from os import getpgid", vars(ours))
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(
        command, cwd=on_windows, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert result.stdout.splitlines() == [*FORBIDDEN.values()], result.stderr
    assert "ImportError: cannot import name 'getpgid'" in result.stderr
