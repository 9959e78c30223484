"""scripts/serve.py: its start, its end, and bad input."""

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from processes import Script
from servers import make_run
from small_runs import one_line, wait_until

from minigpt.checkpoints.find import BEST
from minigpt.extras.playground.loaded_models import find_models
from minigpt.utils.errors import UserError


# Run the script in this process with the run `mine`
@pytest.fixture
def serve(
    call: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., SimpleNamespace]:
    monkeypatch.delenv("MINIGPT_API_KEY", raising=False)
    make_run(Path("mine"))
    return lambda *arguments: call("serve.py", "mine", *arguments)


@pytest.mark.xdist_group("processes")
def test_all_runs_are_served_until_ctrl_c(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "mine")
    server = Script("serve.py", "--port", "0", output=tmp_path / "server", cwd=tmp_path)
    try:
        assert server.wait_for(lambda: "is the page" in server.stderr), server.stderr
        serving, page = server.stderr.splitlines()
        assert serving == "serving mine"
        (model,) = httpx.get(f"{page.split()[0]}/v1/models").json()["data"]
        assert model["id"] == "mine"
        server.signal(signal.SIGINT)
        assert server.wait() == 130, server.stderr
        assert server.stderr.splitlines()[2:] == ["interrupted"]
        assert re.fullmatch(r'INFO: .* "GET /v1/models HTTP/1.1" 200 OK\n', server.stdout)
    finally:
        server.kill()


def test_the_page_is_opened_with_the_key_or_a_line_says_that_there_is_no_browser(
    serve: Callable[..., SimpleNamespace],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    asked: list[str] = []
    printed: list[str] = []

    def is_printed() -> bool:
        printed.append(capfd.readouterr().err)
        return "found no browser" in "".join(printed)

    server = SimpleNamespace(run=lambda sockets: wait_until(is_printed))
    monkeypatch.setattr("webbrowser.open", asked.append)  # returns None: there is no browser
    new_server = "minigpt.extras.playground.server.new_server"
    monkeypatch.setattr(new_server, lambda app, access_log: server)
    serve("--quiet", "--open", "--api-key", "a%b#c", "--host", "0.0.0.0", "--port", "0")
    line = r"^found no browser; open (http://127\.0\.0\.1:\d+) in one$"
    (url,) = re.findall(line, "".join(printed), re.MULTILINE)
    assert asked == [f"{url}/#key=a%25b%23c"]


def test_a_taken_port_a_host_without_a_key_and_a_missing_extra_are_refused(
    serve: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        reason = f"{port} cannot be opened (address already in use); choose another --port"
        assert f"--host 127.0.0.1 --port {reason}" in one_line(serve("--port", port))
    for _ in range(2):
        refused = one_line(serve("--host", "0.0.0.0"))
        assert "without a key, got 0.0.0.0; set MINIGPT_API_KEY" in refused
        monkeypatch.setenv("MINIGPT_API_KEY", "")  # counts as not set
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert 'needs starlette and uvicorn; pip install -e ".[serve]" -c con' in one_line(serve())


def test_models_have_the_names_of_their_run_folders_made_unique(
    tmp_path: Path, gpt2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run with a checkpoint in"):
        find_models([])
    runs = tmp_path / "runs"
    older = make_run(runs / "older")
    newer = make_run(runs / "newer")
    jobs = [make_run(runs / "sweeps" / job) for job in ("a/0", "a/1", "b/0", "b/1")]
    (runs / "latest").symlink_to(newer)
    for i, run in enumerate([older, *jobs, newer]):
        os.utime(run / BEST, (time.time() + i,) * 2)
    assert list(find_models([])) == ["newer", "b/1", "b/0", "a/1", "a/0", "older"]
    other = make_run(tmp_path / "other" / "newer")
    sources = [runs / "latest", other, newer / BEST, newer, gpt2_folder]
    named = find_models([str(source) for source in sources])
    expected = {"newer": newer, "other/newer": other, "runs/newer": newer / BEST}
    expected |= {gpt2_folder.name: gpt2_folder}
    assert named == {name: str(path) for name, path in expected.items()}
    for name in ("sweep.json", "1/summary.json"):  # a sweep is its best run
        (runs / "sweeps/a" / name).write_text('{"best_val_bits_per_byte": 2.0}')
    assert find_models([str(runs / "sweeps/a")]) == {"a/1": str(jobs[1])}
