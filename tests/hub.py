"""A local server with the interface of the Hugging Face hub, with one data set, `me/plays`."""

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Answer = tuple[int, bytes, dict[str, str]]
API = "/api/datasets/me/plays"
FILES = "/datasets/me/plays/resolve"


class Hub:
    """Commits of the data set, by their hash, and branches."""

    url = ""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit with these files; return its hash."""
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def answer(self, path: str, body: bytes) -> Answer:
        """Return status, content and headers."""
        pattern = rf"({API}|{FILES})(?:/(revision|tree|paths-info))?(?:/([^/]+))?(?:/(.+))?"
        found = re.fullmatch(pattern, path)
        if not found:
            return self.error("RepoNotFound")
        kind = found[2]
        revision = found[3] or "main"
        name = found[4] or ""
        sha = self.branches.get(revision, revision)
        if sha not in self.commits:
            return self.error("RevisionNotFound")
        files = self.commits[sha]
        if found[1] == FILES and name not in files:
            return self.error("EntryNotFound", {"X-Repo-Commit": sha})
        if found[1] == FILES:
            content = files[name]
            tag = hashlib.sha1(content).hexdigest()
            return 200, content, {"X-Repo-Commit": sha, "ETag": f'"{tag}"'}
        siblings = [{"rfilename": file} for file in files]
        value: Any = {"id": "me/plays", "sha": sha, "siblings": siblings}
        if kind == "paths-info":
            value = self.listed(files, parse_qs(body.decode()).get("paths", []))
        elif kind == "tree":
            value = self.listed(files, [file for file in files if os.path.dirname(file) == name])
            folders = {os.path.dirname(file) for file in files} - {"", name}
            directory = {"type": "directory", "oid": "0" * 40}
            value += [{**directory, "path": folder} for folder in folders if not name]
        return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}

    def listed(self, files: dict[str, bytes], names: list[str]) -> list[dict[str, Any]]:
        shas = {name: hashlib.sha1(files[name]).hexdigest() for name in names if name in files}
        return [
            {"type": "file", "oid": sha, "size": len(files[name]), "path": name}
            for name, sha in shas.items()
        ]

    def error(self, code: str, headers: dict[str, str] | None = None) -> Answer:
        return 404, b"{}", {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})}

    @contextmanager
    def serve(self) -> Iterator[None]:
        """Serve the hub at `url`."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                """Print nothing."""

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, content, headers = hub.answer(unquote(urlsplit(self.path).path), body)
                size = len(content)
                wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
                if status == 200 and wanted:
                    start = int(wanted[1])
                    end = min(int(wanted[2] or size), size - 1)
                    content = content[start : end + 1]
                    status = 206
                    headers["Content-Range"] = f"bytes {start}-{end}/{size}"
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_HEAD = do_POST = do_GET  # noqa: N815

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.url = f"http://127.0.0.1:{server.server_port}"
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield
            server.shutdown()
