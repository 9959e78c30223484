"""scripts/serve.py: its start, its end, and bad input."""

import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import make_run

from minigpt.serve.models import find_models
from minigpt.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "scripts" / "serve.py")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, str]]:
    """Run the script in this process; return its exit code and stderr."""
    monkeypatch.delenv("MINIGPT_API_KEY", raising=False)

    def run(*arguments: object) -> tuple[Any, str]:
        monkeypatch.setattr(sys, "argv", [SCRIPT, *map(str, arguments)])
        with pytest.raises(SystemExit) as raised:
            runpy.run_path(SCRIPT, run_name="__main__")
        return raised.value.code, capsys.readouterr().err

    return run


def test_the_command_of_the_readme_serves_all_runs_until_ctrl_c(tmp_path: Path) -> None:
    (line,) = re.findall(r"^(python scripts/serve\.py)(?: *#.*)?$", (ROOT / "README.md").read_text(), re.MULTILINE)
    make_run(tmp_path / "runs" / "mine")
    command = [sys.executable, str(ROOT / shlex.split(line)[1]), "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        assert process.stderr.readline() == "serving mine\n"
        url = process.stderr.readline().split()[0]
        assert [model["id"] for model in httpx.get(f"{url}/models").json()["data"]] == ["mine"]
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=10)[1] == "interrupted\n"
    assert process.returncode == 130


def test_bad_input_is_one_line(tmp_path: Path, serve: Callable[..., tuple[Any, str]]) -> None:
    run = make_run(tmp_path / "mine")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, message in [
            ([tmp_path], "holds no checkpoints/best.safetensors; give a run folder or a checkpoint file"),
            (["runs/none"], "runs/none does not exist; give a run folder, a checkpoint, or a folder or id of"),
            (
                [run, "--port", port],
                f"--host 127.0.0.1 --port {port} cannot be opened (address already in use); choose",
            ),
            ([run, "--port", -1], "--port must be an integer in [0, 65535], got -1"),
            ([run, "--host", "no.invalid", "--port", 0, "--api-key", "k"], "--host no.invalid --port 0 cannot be"),
            (
                [run, "--host", "0.0.0.0"],
                "--host must be a loopback address without a key, got 0.0.0.0; set MINIGPT_API_",
            ),
            ([run, "--api-key", ""], "--api-key must be printable ASCII without spaces"),
            ([run, "--allow-origin", "*"], "--allow-origin must be http(s)://HOST:PORT, got *"),
            ([run, "--port", 0, "--device", "tpu"], "--device must be one of auto, "),
        ]:
            code, error = serve(*arguments)
            assert (code, error.count("\n")) == (2, 1), error
            assert message in error


def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Callable[..., tuple[Any, str]]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, error = serve(make_run(tmp_path / "mine"))
    assert (code, error) == (
        2,
        'error: the server needs starlette and uvicorn; pip install -e ".[serve]" -c constraints.txt\n',
    )


def test_models_have_the_names_of_their_run_folders_made_unique(tmp_path: Path, gpt2_folder: Path) -> None:
    runs = tmp_path / "runs"
    older, newer = make_run(runs / "older"), make_run(runs / "newer")
    jobs = [make_run(runs / "sweeps" / sweep / job) for sweep in ("a", "b") for job in ("0", "1")]
    (runs / "latest").symlink_to(newer)
    for i, run in enumerate([older, *jobs, newer]):
        os.utime(run / "checkpoints" / "best.safetensors", (time.time() + i,) * 2)
    assert list(find_models([], runs)) == ["newer", "b/1", "b/0", "a/1", "a/0", "older"]
    other = make_run(tmp_path / "other" / "newer")
    best = newer / "checkpoints" / "best.safetensors"
    named = find_models([str(runs / "latest"), str(other), str(best), str(newer), str(gpt2_folder)])
    assert named == {
        "newer": str(newer),
        "other/newer": str(other),
        "runs/newer": str(best),
        gpt2_folder.name: str(gpt2_folder),
    }
    with pytest.raises(UserError, match="no run with a checkpoint in"):
        find_models([], tmp_path / "none")
