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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from servers import make_run
from small_runs import ROOT

from minigpt.serve.loaded_models import find_models
from minigpt.utils.errors import UserError

SCRIPT = str(ROOT / "scripts" / "serve.py")


@pytest.fixture
def serve(call: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """Run the script in this process."""
    monkeypatch.delenv("MINIGPT_API_KEY", raising=False)
    return partial(call, "serve.py")


def test_the_command_of_the_readme_serves_all_runs_until_ctrl_c(tmp_path: Path) -> None:
    (line,) = re.findall(r"^(python scripts/serve\.py)(?: *#.*)?$", (ROOT / "README.md").read_text(), re.MULTILINE)
    make_run(tmp_path / "runs" / "mine")
    with serve_in_process(tmp_path, str(ROOT / shlex.split(line)[1])) as (process, url, lines):
        assert [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]] == ["mine"]
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert lines[0] == "serving mine\n"
        assert process.stderr.read() == "interrupted\n"
        assert re.fullmatch(r'INFO: .* "GET /v1/models HTTP/1.1" 200 OK\n', process.stdout.read())


def test_the_page_is_opened_with_the_key_or_a_line_says_that_there_is_no_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("webbrowser.open", asked.append)  # returns None: there is no browser
    monkeypatch.setattr(
        "minigpt.serve.server.new_server", lambda app, access_log: SimpleNamespace(run=lambda sockets: None)
    )
    options = ["--quiet", "--open", "--api-key", "a%b#c", "--host", "0.0.0.0", "--port", "0"]
    monkeypatch.setattr(sys, "argv", [SCRIPT, str(make_run(tmp_path / "mine")), *options])
    printed, deadline = "", time.monotonic() + 10
    runpy.run_path(SCRIPT, run_name="__main__")
    while "found no browser" not in printed and time.monotonic() < deadline:
        printed += capsys.readouterr().err
    (url,) = re.findall(r"^found no browser; open (http://127\.0\.0\.1:\d+) in one$", printed, re.MULTILINE)
    assert asked == [f"{url}/#key=a%25b%23c"]


@contextmanager
def serve_in_process(folder: Path, script: str) -> Iterator[tuple[Any, str, list[str]]]:
    """Serve on a free port; yield the process, the URL of the page, and the lines that the script printed."""
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder}
    options["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background process may ignore it
    with subprocess.Popen([sys.executable, script, "--port", "0"], **options) as process:
        assert process.stderr
        try:
            lines = [process.stderr.readline(), process.stderr.readline()]
            yield process, lines[1].split()[0], lines
        finally:
            process.kill()


def test_bad_input_is_one_line(tmp_path: Path, serve: Callable[..., SimpleNamespace]) -> None:
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
            result = serve(*map(str, arguments))
            assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
            assert message in result.stderr


def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Callable[..., SimpleNamespace]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = serve(str(make_run(tmp_path / "mine")))
    assert result.returncode == 2
    needed = 'the server needs starlette and uvicorn; pip install -e ".[serve]" -c constraints.txt'
    assert result.stderr == f"error: {needed}\n"


def test_models_have_the_names_of_their_run_folders_made_unique(
    tmp_path: Path, gpt2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run with a checkpoint in"):
        find_models([])
    runs = tmp_path / "runs"
    older, newer = make_run(runs / "older"), make_run(runs / "newer")
    jobs = [make_run(runs / "sweeps" / sweep / job) for sweep in ("a", "b") for job in ("0", "1")]
    (runs / "latest").symlink_to(newer)
    for i, run in enumerate([older, *jobs, newer]):
        os.utime(run / "checkpoints" / "best.safetensors", (time.time() + i,) * 2)
    assert list(find_models([])) == ["newer", "b/1", "b/0", "a/1", "a/0", "older"]
    other = make_run(tmp_path / "other" / "newer")
    best = newer / "checkpoints" / "best.safetensors"
    named = find_models([str(runs / "latest"), str(other), str(best), str(newer), str(gpt2_folder)])
    assert named == {
        "newer": str(newer),
        "other/newer": str(other),
        "runs/newer": str(best),
        gpt2_folder.name: str(gpt2_folder),
    }
