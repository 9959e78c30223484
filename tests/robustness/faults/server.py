"""Weights & Biases in trouble, in the middle of a run: a server of our own that stops answering as it should."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

from . import Fault, Trial
from .tools import Run, reference, rows, same

LONGER = ("max_steps=600", "eval_every=150", "log_every=2")  # long enough to be timed
BUCKET = {
    "id": "1",
    "displayName": "run",
    "config": "{}",
    "historyLineCount": 0,
    "project": {"id": "2", "name": "minigpt", "entity": {"id": "3", "name": "me"}},
}
VIEWER = {"id": "3", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}


class Server(ThreadingHTTPServer):
    """As much of the server as the client needs to begin a run; then `trouble` tells what becomes of it."""

    daemon_threads = True
    trouble: str | None = None
    history = 0  # rows that were taken

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a client that went away is meant."""


class Handler(BaseHTTPRequestHandler):
    """Takes what is sent, answers what was asked."""

    protocol_version = "HTTP/1.1"
    server: Server

    def answer(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.trouble == "silent":
            threading.Event().wait(60)
        if self.server.trouble == "slow":
            time.sleep(1)
        asked: dict[str, Any] = {}
        if self.path.endswith(("/graphql", "/file_stream")):  # else it is a file
            asked = json.loads(gzip.decompress(sent) if self.headers.get("Content-Encoding") == "gzip" else sent)
        if self.server.trouble is None:
            self.server.history += len(asked.get("files", {}).get("wandb-history.jsonl", {}).get("content", ()))
        body = json.dumps(self.reply(asked) if self.path == "/graphql" else {}).encode()
        self.send_response(500 if self.server.trouble == "fails" else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = answer  # noqa: N815

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def reply(self, asked: dict[str, Any]) -> dict[str, Any]:
        query, values = asked["query"], asked.get("variables") or {}
        data: dict[str, Any] = {"project": {"artifact": None}}
        if "viewer" in query:
            data["viewer"] = VIEWER
        if "upsertBucket" in query:
            data["upsertBucket"] = {"bucket": {**BUCKET, "name": values.get("name")}, "inserted": True}
        if "createArtifact" in query:
            kept = {"id": "4", "state": "COMMITTED", "artifactSequence": {"id": "5", "latestArtifact": None}}
            data["createArtifact"] = {"artifact": kept}
        if "createRunFiles" in query:
            address = f"http://127.0.0.1:{self.server.server_port}/upload/"
            files = [{"name": name, "uploadUrl": address + name} for name in values["files"]]
            data["createRunFiles"] = {"runID": "1", "uploadHeaders": [], "files": files}
        return {"data": data}

    def log_message(self, *args: Any) -> None:
        """Nothing."""


@contextmanager
def serving() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def in_trouble(trouble: str) -> Trial:
    """A run whose server gets into trouble, beside one whose server is well: how much longer it trained."""

    def trial(place: Path, rng: Random) -> float:
        plain = reference(*LONGER)
        at = rng.randrange(2, 150)
        with serving() as server:
            env = environment(server, place)
            run = Run(place / "run", *LONGER, "logger=wandb", cold=True, env=env)
            assert run.until_step(at), run.stderr
            if trouble == "killed":
                os.kill(client(run), signal.SIGKILL)
            server.trouble = trouble
            assert run.wait() == 0, run.stderr
            if trouble != "killed":
                server.trouble, server.history = None, 0
                (kept,) = (run.folder / "wandb").glob("run-*")
                sync(kept, env)
                assert server.history >= len(rows(plain)), f"{server.history} rows were sent after"
        assert "Traceback" not in run.stderr, run.stderr
        assert len(run.said) <= 1, run.stderr
        same(run.folder, plain)
        if trouble != "killed":
            history = [record for record in records(kept) if record["type"] == "history"]
            assert len(history) >= len(rows(plain)), f"{len(history)} rows were kept for later"
        with serving() as server:
            beside = Run(place / "beside", *LONGER, "logger=wandb", cold=True, env=environment(server, place))
            assert beside.wait() == 0, beside.stderr
        took, expected = (json.loads((one.folder / "summary.json").read_text())["seconds"] for one in (run, beside))
        return float(took / expected)

    return trial


def environment(server: Server, home: Path) -> dict[str, str]:
    """What has the client speak to a server of ours."""
    address = f"http://127.0.0.1:{server.server_port}"
    return {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": address, "HOME": str(home)}


def sync(kept: Path, env: dict[str, str]) -> None:
    """Send what the server of a run did not get, as a user would."""
    command = [sys.executable, "-m", "wandb", "sync", "--include-online", str(kept)]
    env = {**os.environ, **env}
    subprocess.run(command, cwd=kept, env=env, capture_output=True, timeout=120, check=True)


def client(run: Run) -> int:
    """The process of the client that speaks to the server; it has a session of its own, and is told whose it is."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = command.read_bytes().split(b"\0")
            if words[0].endswith(b"wandb-core") and str(run.pid).encode() in words:
                return int(command.parent.name)
    raise AssertionError("the client has no process of its own")


def records(folder: Path) -> list[dict[str, Any]]:
    """What a run kept on disk, read with the client's own inspector."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in shown.splitlines()]


FAULTS = [
    Fault("W&B stops answering", in_trouble("silent"), 4, quick=0, alone=True),
    Fault("W&B takes a second for an answer", in_trouble("slow"), 8, quick=0, alone=True),
    Fault("W&B answers 500", in_trouble("fails"), 4, quick=0, alone=True),
    Fault("W&B's client is killed", in_trouble("killed"), 4, quick=0, alone=True),
]
