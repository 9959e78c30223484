"""Corpora that tests prepare, what is on disk of them, and servers of a text and of a hub."""

import hashlib
import json
import os
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import pytest
import yaml
from small_runs import ROOT

from minigpt.data.prepare import load_corpus
from minigpt.data.tokenizer import SEPARATOR

SHAKESPEARE = Path(os.environ.get("MINIGPT_DATA_DIR", ""), "tinyshakespeare.txt")
needs_shakespeare = pytest.mark.skipif(
    not SHAKESPEARE.is_file(), reason="MINIGPT_DATA_DIR names no folder with tinyshakespeare.txt"
)


def values(name="text", **changes):
    """Return the data group of a file in configs/data/ with changes."""
    read = yaml.safe_load((ROOT / f"configs/data/{name}.yaml").read_text(encoding="utf-8"))
    return read.get("data", read) | changes


def corpus_of(path, folder, tokenizer="char", **changes):
    """Prepare files with the values of configs/data/text.yaml and these changes."""
    tokenizer = tokenizer if isinstance(tokenizer, dict) else {"name": tokenizer}
    return load_corpus(values(path=path and str(path), folder=str(folder)) | changes, tokenizer)


def write_files(folder, files):
    """Write files of a folder, by name, and the folders that they are in."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def prepare(content, folder, tokenizer="char", *, name="mine.txt", **changes):
    write_files(folder, {name: content})
    return corpus_of(folder / name, folder, tokenizer, **changes)


def rows(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def stories(number, seed=0):
    random = np.random.default_rng(seed)
    text = (
        "the quick brown fox jumps over a lazy dog and it's 42 naïve owls, don't they see? yes!\\n"
    )
    words = text.split(" ")
    drawn = (random.choice(words, random.integers(3, 30)) for _ in range(number))
    return [f"{seed}.{i} " + " ".join(choice) for i, choice in enumerate(drawn)]


def random_texts(count, seed=0):
    """Return strings of words, spaces, contractions, scripts, special tokens, lone surrogates."""
    rng = random.Random(seed)
    parts = [
        *" \n\t\r'aZ09é中ſK!/_²½٣\u00a0\u0085\ufeff\u2028\u3000\u1680\u200b",
        "  ",
        "'s",
        "'LL",
        "'ſ",
        "’t",
        "ǅ",
        "123456",
        "\r\n",
        "\n\n ",
        "hello",
        " world",
        "HelloWorld",
        "WE'RE",
        "don't",
        "e\u0301",
        "\u0301",
        "👩\u200d👩\u200d👧",
        "🇩🇪",
        "हिन्दी",
        "العربية",
        "한국어",
        "İstanbul",
        "straße",
        "\ud800",
        "…",
        "aab",
        "-" * 40,
        " " * 30,
        "1" * 30,
        "def f(x):\n\treturn x**2\n",
        "d[0]['k'] != null;\r\n",
        SEPARATOR,
        "<|endofprompt|>",
        "<|",
        "<s>",
        "<0x0A>",
        *map(chr, rng.sample([*range(0x80, 0xD800), *range(0xE000, 0x110000)], 60)),
    ]
    return ["".join(rng.choices(parts, k=rng.randint(1, 30))) for _ in range(count)]


def documents(chunks):
    texts = []
    for text, first in chunks:
        if first:
            texts.append("")
        texts[-1] += text
    return texts


def texts_of(source):
    return documents(source.read())


def folder_of(corpus):
    return corpus.train.files[0].parent


def on_disk(corpus):
    return [
        np.fromfile(folder_of(corpus) / f"{split}.bin", corpus.dtype).tolist()
        for split in ("train", "val")
    ]


def texts_on_disk(corpus):
    return [corpus.tokenizer.decode(ids) for ids in on_disk(corpus)]


def nanogpt(text):
    """Return the ids of both splits as in nanoGPT's prepare.py."""
    stoi = {ch: i for i, ch in enumerate(sorted(set(text)))}
    ids = [stoi[ch] for ch in text]
    n = int(len(text) * 0.9)
    return [ids[:n], ids[n:]]


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@contextmanager
def serving(content, monkeypatch):
    """Serve a content at every address, and each of `faults`, a status or a content, once."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.requests += 1
            answer = server.faults.pop(0) if server.faults else content
            self.send_response(answer if isinstance(answer, int) else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content if isinstance(answer, int) else answer)

        def log_message(self, *args):
            pass

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.faults = []
        server.requests = 0
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


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
