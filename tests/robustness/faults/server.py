"""Faults of Weights & Biases in a run: a local test server hangs or fails, a client is killed."""

import gzip
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

from small_runs import rows, wandb_records

from minigpt.runs.run_dir import read_summary

from .tools import Fault, Run, assert_same_run, reference

LONG_RUN = ("max_steps=600", "eval_every=150", "log_every=2")  # long enough to measure its time
BUCKET: dict[str, Any] = {
    "id": "1",
    "displayName": "run",
    "config": "{}",
    "historyLineCount": 0,
    "project": {"id": "2", "name": "minigpt", "entity": {"id": "3", "name": "me"}},
}
VIEWER = {"id": "3", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}


class Server(ThreadingHTTPServer):
    """The part of the W&B API that a client needs to log a run; `fault` makes it hang or fail."""

    daemon_threads = True
    fault: str | None = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore disconnected clients."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.fault == "hang":
            threading.Event().wait(60)
        answer: dict[str, Any] = {}
        if self.path == "/graphql":
            packed = self.headers.get("Content-Encoding") == "gzip"
            answer = self.graphql(json.loads(gzip.decompress(body) if packed else body))
        response = json.dumps(answer).encode()
        self.send_response(500 if self.server.fault == "error" else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(response)))
        self.end_headers()
        self.wfile.write(response)

    do_GET = do_POST = do_PUT = answer  # noqa: N815

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def graphql(self, request: dict[str, Any]) -> dict[str, Any]:
        query = request["query"]
        variables = request.get("variables") or {}
        data: dict[str, Any] = {"project": {"artifact": None}}
        if "viewer" in query:
            data["viewer"] = VIEWER
        if "upsertBucket" in query:
            bucket = {**BUCKET, "name": variables.get("name")}
            data["upsertBucket"] = {"bucket": bucket, "inserted": True}
        if "createArtifact" in query:
            sequence = {"artifactSequence": {"id": "5", "latestArtifact": None}}
            data["createArtifact"] = {"artifact": {"id": "4", "state": "COMMITTED", **sequence}}
        if "createRunFiles" in query:
            address = f"http://127.0.0.1:{self.server.server_port}/upload/"
            files = [{"name": name, "uploadUrl": address + name} for name in variables["files"]]
            data["createRunFiles"] = {"runID": "1", "uploadHeaders": [], "files": files}
        return {"data": data}

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@contextmanager
def serve() -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def wandb_fault(fault: str, workdir: Path, rng: Random) -> float:
    """Inject a fault into the W&B logging of a run.

    Returns its training time relative to that of a run without the fault.
    """
    unlogged = reference(*LONG_RUN)
    seconds = []
    step = rng.randrange(2, 150)
    for injected in (fault, None):
        with serve() as server:
            address = f"http://127.0.0.1:{server.server_port}"
            env = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": address, "HOME": str(workdir)}
            run = Run(workdir / f"{injected}", *LONG_RUN, "logger=wandb", cold_start=True, env=env)
            assert run.wait_for_step(step), run.stderr
            if injected == "kill client":
                os.kill(client_pid(run), signal.SIGKILL)
            server.fault = injected
            run.end()
        assert "Traceback" not in run.stderr, run.stderr
        assert len(run.messages) <= bool(injected), run.stderr
        assert_same_run(run.folder, unlogged)
        if injected != "kill client":
            (part,) = (run.folder / "wandb").glob("run-*")
            records = wandb_records(run.folder, parts=part.name)
            history = [record for record in records if record["type"] == "history"]
            assert len(history) >= len(rows(unlogged)), f"{len(history)} rows are on disk"
        seconds.append(read_summary(run.folder)["seconds"])
    return float(seconds[0] / seconds[1])


def client_pid(run: Run) -> int:
    """The client process of a run, in a session of its own, with its parent's id as an argument."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            arguments = command.read_bytes().split(b"\0")
            if arguments[0].endswith(b"wandb-core") and str(run.pid).encode() in arguments:
                return int(command.parent.name)
    raise AssertionError("found no client process")


FAULTS = [
    Fault("W&B server hangs", partial(wandb_fault, "hang"), 4, exclusive=True),
    Fault("W&B server returns HTTP 500", partial(wandb_fault, "error"), 4, exclusive=True),
    Fault("W&B client killed", partial(wandb_fault, "kill client"), 4, exclusive=True),
]
