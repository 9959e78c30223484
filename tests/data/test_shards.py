"""Token files in shards, on disk and on real HTTP and S3 servers, against the same tokens in one array."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import test_batches
from corpora import ROOT, corpus_of, serving

from minigpt.data import shards
from minigpt.data.checksums import shards_checksum
from minigpt.data.shards import fetch, find_shards
from minigpt.data.token_files import Tokens
from minigpt.utils.errors import RunError, UserError

IDS = np.random.default_rng(0).integers(0, 256, 6000).astype(np.uint16)
RANGE = "train_{0000..0011}.bin"


def write_shards(folder, ids=IDS, n=12):
    """Write ids to `n` files of different sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = np.sort(np.random.default_rng(n).choice(np.arange(1, len(ids)), n - 1, replace=False))
    for i, part in enumerate(np.split(ids, ends)):
        part.tofile(folder / f"train_{i:04}.bin")
    (folder / "val.bin").write_bytes(ids[:200].tobytes())


def load(folder, place, train="train_*.bin", **changes):
    """Load a corpus of bytes at a place with the data folder `folder`."""
    return corpus_of(None, folder, "byte", train_bin=f"{place}/{train}", val_bin=f"{place}/val.bin", **changes)


def find(folder, place, train="train_*.bin"):
    return find_shards("data.train_bin", f"{place}/{train}", folder)


def batches(tokens, **changes):
    read = test_batches.batches(len(tokens), tokens=tokens, block_size=16, **changes)
    return [[tensor.tolist() for tensor in batch] for batch in read]


# Files on disk.


def test_shards_have_the_batches_of_one_file_with_few_file_descriptors(tmp_path):
    write_shards(tmp_path, n=700)  # many shards are shorter than a window
    tokens = Tokens(find(tmp_path, tmp_path), "uint16", 256)
    assert np.array_equal(tokens[:], IDS)
    for changes in ({}, {"rank": 1, "world_size": 2}, {"first": 17}):
        assert batches(tokens, **changes) == batches(IDS, **changes)
    if os.path.isdir("/proc/self/fd"):
        assert len(os.listdir("/proc/self/fd")) < 600


def test_the_checksum_of_shards_depends_on_their_content_and_not_on_their_place(tmp_path):
    for folder, ids in (("a", IDS), ("b", IDS), ("c", IDS ^ 1)):
        write_shards(tmp_path / folder, ids)
    places = (("a", RANGE), ("b", "train_*.bin"), ("c", RANGE), ("a", "train_000*.bin"))
    first, same, *others = (load(tmp_path, tmp_path / place, train).sha256 for place, train in places)
    assert first == same
    assert first not in others


def test_the_checksum_of_shards_samples_64_of_them_evenly(tmp_path):
    write_shards(tmp_path, n=130)
    train, val = find(tmp_path, tmp_path), find(tmp_path, tmp_path, "val.bin")
    before, sampled = shards_checksum(train, val, None), []
    for number, (file, *_) in enumerate(train):
        content = file.read_bytes()
        file.write_bytes((np.frombuffer(content, np.uint16) ^ 1).tobytes())
        sampled += [number] * (shards_checksum(train, val, None) != before)
        file.write_bytes(content)
    assert len(sampled) == 64
    assert {*np.diff([-1, *sampled, 130])} <= {1, 2, 3}


def test_an_id_outside_the_vocabulary_raises_with_the_shard(tmp_path):
    write_shards(tmp_path)
    np.array([1, 2, 256], dtype=np.uint16).tofile(tmp_path / "train_0005.bin")
    tokens = Tokens(find(tmp_path, tmp_path), "uint16", 256)
    for index in (slice(None), np.arange(len(tokens))[None]):
        with pytest.raises(UserError, match=r"train_0005\.bin has a token id 256, outside the vocabulary of 256"):
            tokens[index]


# An HTTP server.


@pytest.fixture
def http(tmp_path, monkeypatch):
    """A server of twelve shards."""
    monkeypatch.setattr(shards, "_WAITS", (0.01,) * 4)
    write_shards(tmp_path / "server")
    with serving(tmp_path / "server") as server:
        yield server


@pytest.fixture
def shard(http, tmp_path):
    """One of them."""
    return find(tmp_path / "remote", http.url, "train_0003.bin")[0]


def test_shards_over_http_have_the_batches_of_one_file_and_are_fetched_once(http, tmp_path):
    for again in (False, True):
        corpus = load(tmp_path, http.url, RANGE)
        if not again:  # a start fetches no training shard
            assert [file.name[17:] for file in (tmp_path / "remote").glob("*.bin")] == ["val.bin"]
        assert batches(corpus.tokens("train")) == batches(IDS)
        assert np.array_equal(corpus.tokens("val")[:], IDS[:200])
    assert len([*(tmp_path / "remote").glob("*.bin")]) == 13
    assert all(http.gets(f"train_{i:04}.bin") <= 2 for i in range(12))  # the first bytes, and the file
    assert load(tmp_path, tmp_path / "server").sha256 == corpus.sha256  # so a run on copies resumes


@pytest.mark.parametrize("faults", [[500], ["cut", 503, "cut", 429]])
def test_a_shard_arrives_after_errors_and_cut_connections(http, shard, faults):
    http.faults += faults
    assert fetch(shard).read_bytes() == (http.folder / "train_0003.bin").read_bytes()
    assert http.gets("train_0003.bin") == len(faults) + 1


def test_a_slow_answer_is_awaited_and_a_silent_server_is_asked_again(http, tmp_path, monkeypatch):
    http.pause = 1
    for silent_seconds, attempts in ((60, 1), (0.25, 2)):
        monkeypatch.setattr(shards, "_SILENT_SECONDS", silent_seconds)
        (shard,) = find(tmp_path / "remote", http.url, f"train_000{attempts}.bin")
        http.faults += ["pause"]
        assert fetch(shard).read_bytes() == (http.folder / f"train_000{attempts}.bin").read_bytes()
        assert http.gets(f"train_000{attempts}.bin") >= attempts


@pytest.mark.parametrize(
    ("fault", "kind", "requests", "reason"),
    [(500, RunError, 5, "500.*try again"), ("cut", RunError, 5, "61 of 122 bytes.*try again")]
    + [(status, UserError, 1, "check the URL and the credentials") for status in (401, 403, 404, 410)],
)
def test_a_server_that_fails_is_asked_five_times_and_one_that_refuses_once(http, shard, fault, kind, requests, reason):
    http.faults += [fault] * 99
    with pytest.raises(UserError, match=rf"{http.url}/train_0003\.bin cannot be read .*{reason}") as error:
        fetch(shard)
    assert error.type is kind
    assert http.gets("train_0003.bin") == requests
    assert {file.suffix for file in shard.file.parent.iterdir()} == {".lock"}


@pytest.mark.parametrize("name", ["missing.bin", "train_*.bin"])
def test_a_missing_file_raises_at_once(http, tmp_path, name):
    with pytest.raises(UserError, match=rf"{re.escape(http.url)}.*cannot be read.*check the URL"):
        find(tmp_path, http.url, name)
    assert sum(http.requests.values()) <= 5  # for a pattern also those of a listing


def test_a_server_that_does_not_listen_raises_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_WAITS", (0.01,))
    with pytest.raises(RunError, match=r"http://127\.0\.0\.1:9/a\.bin cannot be read .*Connect"):
        find(tmp_path, "http://127.0.0.1:9", "a.bin")


@pytest.mark.parametrize("dated", [False, True], ids=["ETag", "Last-Modified"])
def test_a_partial_or_changed_shard_is_fetched_again(http, tmp_path, dated):
    http.dated, file = dated, http.folder / "train_0003.bin"
    (shard,) = find(tmp_path / "remote", http.url, file.name)
    copy = fetch(shard)
    copy.write_bytes(copy.read_bytes()[:-2])
    assert fetch(shard).read_bytes() == file.read_bytes()
    file.write_bytes(file.read_bytes()[::-1])
    os.utime(file, (0, 0))
    (shard,) = find(tmp_path / "remote", http.url, file.name)
    assert fetch(shard).read_bytes() == file.read_bytes()


def test_a_corpus_larger_than_the_cache_raises_before_it_is_fetched(http, tmp_path):
    with pytest.raises(UserError, match=r"data\.cache_gb must be at least .* GB of data\.train_bin .*, got 1e-06"):
        load(tmp_path, http.url, RANGE, cache_gb=1e-6)
    assert not {method for method, _ in http.requests} - {"HEAD"}


def test_processes_and_threads_fetch_a_shard_once(http, shard):
    program = (
        "import sys; from pathlib import Path; from concurrent.futures import ThreadPoolExecutor;"
        "from minigpt.data.shards import *; shard, = find_shards('', sys.argv[1], Path(sys.argv[2]));"
        "print(*{len(file.read_bytes()) for file in ThreadPoolExecutor(4).map(fetch, [shard] * 8)})"
    )
    command = [sys.executable, "-c", program, shard.url, str(shard.file.parent)]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(2)]
    assert {int(process.communicate(timeout=300)[0]) for process in processes} == {shard.bytes}
    assert http.gets("train_0003.bin") == 1


def test_a_run_trains_on_remote_shards(http, tmp_path, train):
    place = [f"data.train_bin='{http.url}/{RANGE}'", f"data.val_bin={http.url}/val.bin", f"data.folder={tmp_path}"]
    run = train("data.path=null", "tokenizer=byte", "max_steps=4", "eval_every=4", *place)
    assert abs(run.loss - np.log(256)) < 0.5  # random ids
    assert 1 < len([*(tmp_path / "remote").glob("*.bin")]) <= 13


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
    for train in ("train_*.bin", RANGE):
        corpus = load(tmp_path, s3, train)
        assert batches(corpus.tokens("train")) == batches(IDS)
        assert np.array_equal(corpus.tokens("val")[:], IDS[:200])
        assert corpus.sha256 == load(tmp_path, tmp_path / "server").sha256
    listed = find_shards("data.train_bin", [f"{s3}/train_0003.bin", f"{s3}/val.bin"], tmp_path)
    assert [shard.url for shard in listed] == [f"{s3}/train_0003.bin", f"{s3}/val.bin"]
    with pytest.raises(UserError, match=rf"{s3}/missing\.bin cannot be read"):
        find(tmp_path, s3, "missing.bin")
