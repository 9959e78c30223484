"""Token files in shards, on disk and on real HTTP and S3 servers, against the same tokens in one array."""

import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT

from minigpt.data import prepare, shards
from minigpt.data.batches import Batches, ValidationBatches, WindowOrder
from minigpt.data.shards import fetch, find_shards
from minigpt.data.token_files import Tokens
from minigpt.utils.errors import RunError, UserError

PAUSE = 2.0  # seconds
IDS = np.random.default_rng(0).integers(0, 256, 6000).astype(np.uint16)


def write_shards(folder, ids=IDS, n=12):
    """Write ids to `n` files of different sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = np.sort(np.random.default_rng(n).choice(np.arange(1, len(ids)), n - 1, replace=False))
    for i, part in enumerate(np.split(ids, ends)):
        part.tofile(folder / f"train_{i:04}.bin")
    (folder / "val.bin").write_bytes(ids[:200].tobytes())


def load(folder, train_bin, val_bin, **changes):
    """Load a corpus of bytes with the data folder `folder`."""
    data = yaml.safe_load((ROOT / "configs/data/text.yaml").read_text()) | {"folder": str(folder), **changes}
    return prepare.load_corpus(data | {"train_bin": train_bin, "val_bin": val_bin}, {"name": "byte"})


def batches(tokens, rank=0, world_size=1, first=0, block_size=16):
    read = Batches(
        tokens,
        WindowOrder(len(tokens), block_size, seed=1),
        batch_size=4,
        rank=rank,
        world_size=world_size,
        first=lambda: first,
        stop=60,
        repeat=0,
        device=torch.device("cpu"),
    )
    return [[tensor.tolist() for tensor in batch] for batch in read]


# Files on disk.


@pytest.mark.parametrize(("rank", "world_size", "first"), [(0, 1, 0), (1, 2, 0), (0, 1, 17)])
def test_shards_have_the_batches_of_one_file(tmp_path, rank, world_size, first):
    write_shards(tmp_path, n=700)  # many shards are shorter than a window
    tokens = Tokens(find_shards("", f"{tmp_path}/train_*.bin", tmp_path), "uint16", 256)
    assert np.array_equal(tokens[:], IDS)
    assert np.array_equal(tokens[1234:4321:3], IDS[1234:4321:3])
    assert batches(tokens, rank, world_size, first) == batches(IDS, rank, world_size, first)


def test_five_thousand_shards_have_the_batches_of_one_file_with_few_file_descriptors(tmp_path):
    ids = np.arange(5000 * 30, dtype=np.uint32).astype(np.uint16)
    write_shards(tmp_path, ids, n=5000)
    tokens = Tokens(find_shards("", f"{tmp_path}/train_*.bin", tmp_path), "uint16", 1 << 16)
    for starts in np.random.default_rng(0).permutation(len(ids) - 17)[:20_000].reshape(-1, 1000):
        index = starts[:, None] + np.arange(17)
        assert np.array_equal(tokens[index], ids[index])
    assert len({*tokens.shards}) == 5000
    if os.path.isdir("/proc/self/fd"):
        assert len(os.listdir("/proc/self/fd")) < 600
    assert batches(tokens) == batches(ids)


def test_validation_of_shards_has_the_batches_of_one_file(tmp_path):
    write_shards(tmp_path)
    tokens = Tokens(find_shards("", f"{tmp_path}/train_*.bin", tmp_path), "uint16", 256)
    options = {"block_size": 64, "batch_size": 6, "rank": 1, "world_size": 4, "device": torch.device("cpu")}
    ours, expected = (list(ValidationBatches(source, **options)) for source in (tokens, IDS))
    assert len(ours) == len(expected) == 16
    for mine, theirs in zip(ours, expected, strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_a_range_a_list_and_a_pattern_name_the_same_shards(tmp_path):
    write_shards(tmp_path)
    files = [tmp_path / f"train_{i:04}.bin" for i in range(12)]
    for value in (f"{tmp_path}/train_*.bin", f"{tmp_path}/train_{{0000..0011}}.bin", [str(file) for file in files]):
        assert [shard.file for shard in find_shards("", value, tmp_path)] == files


def test_the_checksum_of_shards_depends_on_their_content_and_not_on_their_place(tmp_path):
    for folder, ids in (("a", IDS), ("b", IDS), ("c", IDS ^ 1)):
        write_shards(tmp_path / folder, ids)
    read = [load(tmp_path, f"{tmp_path}/{name}/train_*.bin", f"{tmp_path}/{name}/val.bin").sha256 for name in "abc"]
    assert read[0] == read[1] != read[2]
    part = load(tmp_path, f"{tmp_path}/a/train_000*.bin", f"{tmp_path}/a/val.bin")
    assert part.sha256 != read[0]


def test_an_id_outside_the_vocabulary_raises_with_the_shard(tmp_path):
    write_shards(tmp_path)
    np.array([1, 2, 256], dtype=np.uint16).tofile(tmp_path / "train_0005.bin")
    tokens = Tokens(find_shards("", f"{tmp_path}/train_*.bin", tmp_path), "uint16", 256)
    for index in (slice(None), np.arange(len(tokens))[None]):
        with pytest.raises(UserError, match=r"train_0005\.bin has a token id 256, outside the vocabulary of 256"):
            tokens[index]


# An HTTP server.


class Handler(SimpleHTTPRequestHandler):
    """Serve files, also parts of them; per GET a fault of the server's `faults`: a status, "cut" or "pause"."""

    def do_HEAD(self):
        self.answer(with_content=False)

    def do_GET(self):
        self.answer(with_content=True)

    def answer(self, with_content):
        server, name = self.server, self.path.rpartition("/")[2]
        with server.lock:
            server.requests[self.command, name] += 1
            fault = server.faults.pop(0) if server.faults and with_content else None
        file = server.folder / name
        if isinstance(fault, int) or not file.is_file():
            return self.send_error(fault or 404)
        content, asked = file.read_bytes(), re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        self.send_response(206 if asked else 200)
        if asked:
            content = content[int(asked[1]) : int(asked[2]) + 1]
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{file.stat().st_mtime_ns}"')
        self.end_headers()
        if with_content:
            half = len(content) // 2
            self.wfile.write(content[:half])
            if fault == "pause":
                time.sleep(PAUSE)
            with suppress(OSError):  # the client may have closed the connection
                self.wfile.write(b"" if fault == "cut" else content[half:])
        self.close_connection = True
        return None

    def log_message(self, *args):
        pass


@contextmanager
def serving(folder):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.folder, server.faults, server.requests, server.lock = folder, [], Counter(), threading.Lock()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_address[1]}", server=server)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def http(tmp_path, monkeypatch):
    """A server of twelve shards."""
    monkeypatch.setattr(shards, "_WAITS", (0.01,) * 4)
    write_shards(tmp_path / "server")
    with serving(tmp_path / "server") as served:
        yield served


def gets(http, name):
    return http.server.requests["GET", name]


def test_shards_over_http_have_the_batches_of_one_file_and_are_fetched_once(http, tmp_path):
    for _ in range(2):
        corpus = load(tmp_path, f"{http.url}/train_{{0000..0011}}.bin", f"{http.url}/val.bin")
        assert batches(corpus.tokens("train")) == batches(IDS)
        assert np.array_equal(corpus.tokens("val")[:], IDS[:200])
    fetched = [file for file in (tmp_path / "remote").iterdir() if not file.name.endswith(".lock")]
    assert len(fetched) == 13
    assert all(gets(http, f"train_{i:04}.bin") <= 2 for i in range(12))  # the first bytes, and the file
    local = load(tmp_path, f"{tmp_path}/server/train_*.bin", f"{tmp_path}/server/val.bin")
    assert local.sha256 == corpus.sha256  # so a run on copies resumes


def test_a_start_fetches_no_training_shard(http, tmp_path):
    load(tmp_path, f"{http.url}/train_{{0000..0011}}.bin", f"{http.url}/val.bin")
    assert [file.name[17:] for file in (tmp_path / "remote").iterdir()].count("val.bin") == 1
    assert not [*(tmp_path / "remote").glob("*train*")]


@pytest.mark.parametrize("faults", [[500, 500, 503], ["cut"], ["cut", 500, "cut", 429]])
def test_a_shard_arrives_after_errors_and_cut_connections(http, tmp_path, faults):
    (shard,) = find_shards("", f"{http.url}/train_0003.bin", tmp_path / "remote")
    http.server.faults += faults
    assert fetch(shard).read_bytes() == (tmp_path / "server/train_0003.bin").read_bytes()
    assert gets(http, "train_0003.bin") == len(faults) + 1


def test_a_slow_answer_is_awaited_and_a_silent_server_is_asked_again(http, tmp_path, monkeypatch):
    for silent_seconds, attempts in ((60, 1), (PAUSE / 4, 2)):
        monkeypatch.setattr(shards, "_SILENT_SECONDS", silent_seconds)
        (shard,) = find_shards("", f"{http.url}/train_000{attempts}.bin", tmp_path / "remote")
        http.server.faults += ["pause"]
        assert fetch(shard).read_bytes() == (tmp_path / f"server/train_000{attempts}.bin").read_bytes()
        assert gets(http, f"train_000{attempts}.bin") >= attempts


@pytest.mark.parametrize(("fault", "reason"), [(500, "500"), ("cut", "61 of 122 bytes")])
def test_a_server_that_keeps_failing_raises_one_line_with_the_url_and_leaves_no_file(http, tmp_path, fault, reason):
    (shard,) = find_shards("", f"{http.url}/train_0003.bin", tmp_path / "remote")
    http.server.faults += [fault] * 99
    with pytest.raises(RunError, match=rf"{http.url}/train_0003\.bin cannot be read .*{reason}.*try again"):
        fetch(shard)
    assert gets(http, "train_0003.bin") == 5
    assert {file.suffix for file in (tmp_path / "remote").iterdir()} == {".lock"}


@pytest.mark.parametrize("name", ["missing.bin", "train_*.bin"])
def test_a_missing_file_raises_at_once(http, tmp_path, name):
    with pytest.raises(UserError, match=rf"{re.escape(http.url)}.*cannot be read.*check the URL"):
        find_shards("data.train_bin", f"{http.url}/{name}", tmp_path)
    assert sum(http.server.requests.values()) <= 5  # for a pattern also those of a listing


def test_a_server_that_does_not_listen_raises_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_WAITS", (0.01,))
    with pytest.raises(RunError, match=r"http://127\.0\.0\.1:9/a\.bin cannot be read .*Connect"):
        find_shards("data.train_bin", "http://127.0.0.1:9/a.bin", tmp_path)


def test_a_partial_or_changed_shard_is_fetched_again(http, tmp_path):
    file = tmp_path / "server/train_0003.bin"
    (shard,) = find_shards("", f"{http.url}/{file.name}", tmp_path / "remote")
    copy = fetch(shard)
    copy.write_bytes(copy.read_bytes()[:-2])
    assert fetch(shard).read_bytes() == file.read_bytes()
    file.write_bytes(file.read_bytes()[::-1])
    (shard,) = find_shards("", f"{http.url}/{file.name}", tmp_path / "remote")
    assert fetch(shard).read_bytes() == file.read_bytes()


def test_a_corpus_larger_than_the_cache_raises_before_it_is_fetched(http, tmp_path):
    with pytest.raises(UserError, match=r"data\.cache_gb must be at least .* GB of data\.train_bin .*, got 1e-06"):
        load(tmp_path, f"{http.url}/train_{{0000..0011}}.bin", f"{http.url}/val.bin", cache_gb=1e-6)
    assert not {method for method, _ in http.server.requests} - {"HEAD"}


def test_processes_and_threads_fetch_a_shard_once(http, tmp_path):
    url = f"{http.url}/train_0003.bin"
    program = (
        "import sys; from pathlib import Path; from concurrent.futures import ThreadPoolExecutor;"
        "from minigpt.data.shards import *; shard, = find_shards('', sys.argv[1], Path(sys.argv[2]));"
        "print(*{len(file.read_bytes()) for file in ThreadPoolExecutor(4).map(fetch, [shard] * 8)})"
    )
    command = [sys.executable, "-c", program, url, str(tmp_path / "remote")]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(2)]
    sizes = {process.communicate(timeout=300)[0].decode().strip() for process in processes}
    assert sizes == {str((tmp_path / "server/train_0003.bin").stat().st_size)}
    assert gets(http, "train_0003.bin") == 1


def test_a_run_on_remote_shards_equals_one_on_the_local_files(http, tmp_path, train):
    local, remote = (
        train(
            "data.path=null",
            "tokenizer=byte",
            f"data.folder={tmp_path}/{name}",
            f"data.train_bin='{place}/train_{{0000..0011}}.bin'",
            f"data.val_bin={place}/val.bin",
            folder=tmp_path / name,
        )
        for name, place in (("local", tmp_path / "server"), ("http", http.url))
    )
    assert remote.loss == local.loss


@pytest.mark.parametrize("url", ["nowhere://host/a.bin", "gs://bucket/a.bin"])
def test_a_url_without_its_package_raises_one_line(tmp_path, url):
    with pytest.raises(UserError, match=rf"{url} cannot be read .*\[remote\]"):
        find_shards("data.train_bin", url, tmp_path)


# An S3 server.


@pytest.fixture
def s3(tmp_path, monkeypatch):
    """A bucket of twelve shards on a real server, moto's."""
    pytest.importorskip("s3fs", reason='pip install -e ".[remote]"')
    moto = pytest.importorskip("moto.server", reason='pip install "moto[s3]" flask flask-cors')
    import fsspec

    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(shards, "_WAITS", (0.01,))
    write_shards(tmp_path / "server")
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    files.mkdir("corpus")
    files.put(f"{tmp_path}/server/", "corpus/bytes/", recursive=True)
    yield "s3://corpus/bytes"
    fsspec.filesystem("s3").clear_instance_cache()
    server.stop()


def test_shards_on_s3_have_the_batches_of_one_file(s3, tmp_path):
    corpora = [
        load(tmp_path, f"{s3}/{shards}", f"{s3}/val.bin") for shards in ("train_*.bin", "train_{0000..0011}.bin")
    ]
    for corpus in corpora:
        assert batches(corpus.tokens("train")) == batches(IDS)
        assert np.array_equal(corpus.tokens("val")[:], IDS[:200])
    local = load(tmp_path, f"{tmp_path}/server/train_*.bin", f"{tmp_path}/server/val.bin")
    assert {corpus.sha256 for corpus in corpora} == {local.sha256}
    with pytest.raises(UserError, match=rf"{s3}/missing\.bin cannot be read"):
        find_shards("data.train_bin", f"{s3}/missing.bin", tmp_path)
