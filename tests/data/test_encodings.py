"""tiktoken's encodings, against tiktoken and a local server."""

import base64
import errno
import functools
import hashlib
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import tiktoken
import tiktoken.load
import tiktoken.registry
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.data import encodings
from minigpt.data.prepare import load_corpus
from minigpt.data.tokenizer import PATTERNS, SEPARATOR, BPETokenizer, from_dict
from minigpt.runs.config_checks import check_run
from minigpt.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
CACHE = os.environ.get("TIKTOKEN_CACHE_DIR")
TOKENS = [*(bytes([i]) for i in range(256)), b"ab"]
SMALL = b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(TOKENS))
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


def key(url):
    return hashlib.sha1(url.encode()).hexdigest()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    """Bypass proxies for the local server."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture(params=["given", "not given"])
def cache(request, tmp_path, monkeypatch):
    """An empty cache folder, with and without TIKTOKEN_CACHE_DIR."""
    if request.param == "given":
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "given"))
    else:
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    return tmp_path / request.param


@pytest.fixture
def nowhere(monkeypatch):
    """The two files of gpt2 at an unreachable address."""
    urls = [f"http://127.0.0.1:9/gpt-2/{name}" for name in ("vocab.bpe", "encoder.json")]
    monkeypatch.setattr(encodings, "_SHA256", {url: hashlib.sha256(SMALL).hexdigest() for url in urls})
    return urls


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.answer)))
        self.end_headers()
        self.wfile.write(self.server.answer)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    """A small encoding in place of tiktoken's gpt2 and o200k_base, with its one file on a server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.requests, server.answer = [], SMALL
        server.url = f"http://127.0.0.1:{server.server_port}/gpt-2/o200k_base.tiktoken"
        Thread(target=server.serve_forever, daemon=True).start()
        sha256 = hashlib.sha256(SMALL).hexdigest()

        def small():
            ranks = tiktoken.load.load_tiktoken_bpe(server.url, expected_hash=sha256)
            special = {SEPARATOR: 257}
            return {"name": "gpt2", "pat_str": PATTERNS["gpt2"], "mergeable_ranks": ranks, "special_tokens": special}

        monkeypatch.setattr(encodings, "_SHA256", {server.url: sha256})
        monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
        monkeypatch.setattr(tiktoken.registry, "ENCODING_CONSTRUCTORS", {"gpt2": small, "o200k_base": small})
        yield server
        server.shutdown()


@pytest.mark.skipif(not CACHE, reason="TIKTOKEN_CACHE_DIR names no folder with the files of gpt2")
@settings(max_examples=100, deadline=None)
@given(st.one_of(TEXTS, st.text(" \n\r\t'aAsStT1.!é漢", max_size=60)))
def test_gpt2_ids_equal_those_of_tiktoken(text):
    reference = tiktoken.get_encoding("gpt2")
    tokenizer = gpt2()
    ids = tokenizer.encode(text).tolist()
    assert ids == reference.encode_ordinary(text)
    assert tokenizer.decode(ids) == reference.decode(ids) == text


@functools.cache
def gpt2():
    """GPT-2's tokenizer, loaded from its files and rebuilt as from a checkpoint."""
    return from_dict(encodings.load_encoding("gpt2", Path("unused")).to_dict())


@pytest.mark.skipif(not CACHE, reason="TIKTOKEN_CACHE_DIR names no folder with the files of gpt2")
def test_gpt2_has_its_vocabulary_size_and_separator():
    assert gpt2().vocab_size == 50_257
    assert gpt2().separator.tolist() == [50_256]
    assert gpt2().encode(SEPARATOR).tolist() == tiktoken.get_encoding("gpt2").encode_ordinary(SEPARATOR)


@pytest.mark.parametrize("name", PATTERNS)
def test_files_checksums_and_patterns_equal_those_of_tiktoken(name, cache, monkeypatch):
    import tiktoken_ext.openai_public as public

    asked, downloaded = {}, {}

    def bpe(file, expected_hash=None):
        asked[file] = expected_hash
        return {}

    def gym(vocab_bpe_file, encoder_json_file, vocab_bpe_hash=None, encoder_json_hash=None, **_):
        asked.update({vocab_bpe_file: vocab_bpe_hash, encoder_json_file: encoder_json_hash})
        return {}

    monkeypatch.setattr(public, "load_tiktoken_bpe", bpe)
    monkeypatch.setattr(public, "data_gym_to_mergeable_bpe_ranks", gym)
    described = public.ENCODING_CONSTRUCTORS[name]()
    assert described["pat_str"] == PATTERNS[name]
    monkeypatch.setattr(encodings, "download", lambda url, sha256, file: downloaded.update({url: sha256}) or True)
    monkeypatch.setattr(BPETokenizer, "from_tiktoken", lambda name: None)
    encodings.load_encoding(name, cache)
    assert downloaded == asked


@pytest.mark.parametrize("cache", ["given"], indirect=True)
def test_without_a_network_the_error_lists_both_files_and_their_paths(cache, nowhere):
    with pytest.raises(UserError) as error:
        encodings.load_encoding("gpt2", cache)
    for url in nowhere:
        assert f"{url} as {cache / key(url)}" in str(error.value)
    assert "TIKTOKEN_CACHE_DIR" in str(error.value)
    assert not cache.exists() or list(cache.iterdir()) == []


@pytest.mark.parametrize("cache", ["not given"], indirect=True)  # takes three seconds of retries
def test_the_error_lists_only_the_missing_file(cache, nowhere):
    cache.mkdir()
    (cache / key(nowhere[0])).write_bytes(SMALL)
    with pytest.raises(UserError) as error:
        encodings.load_encoding("gpt2", cache)
    assert nowhere[0] not in str(error.value)
    assert nowhere[1] in str(error.value)
    assert [file.name for file in cache.iterdir()] == [key(nowhere[0])]


def test_a_missing_file_is_downloaded_once(cache, server):
    for _ in range(2):
        tokenizer = encodings.load_encoding("gpt2", cache)
        assert tokenizer.encode("cab").tolist() == [99, 256]
        assert tokenizer.vocab_size == 258
    assert server.requests == ["/gpt-2/o200k_base.tiktoken"]
    assert (cache / key(server.url)).read_bytes() == SMALL
    assert [file.name for file in cache.iterdir()] == [key(server.url)]


@pytest.mark.parametrize("damage", [b"", SMALL[:100], SMALL.replace(b"256", b"255"), SMALL + b"\n"])
def test_a_damaged_file_is_downloaded_again(cache, server, damage):
    cache.mkdir()
    (cache / key(server.url)).write_bytes(damage)
    assert encodings.load_encoding("gpt2", cache).encode("cab").tolist() == [99, 256]
    assert server.requests == ["/gpt-2/o200k_base.tiktoken"]
    assert (cache / key(server.url)).read_bytes() == SMALL


@pytest.mark.parametrize("cache", ["not given"], indirect=True)  # takes three seconds of retries
def test_a_download_with_a_wrong_checksum_is_not_kept(cache, server):
    server.answer = b"<html>Please log in to this network</html>"
    with pytest.raises(UserError) as error:
        encodings.load_encoding("gpt2", cache)
    assert f"{server.url} as {cache / key(server.url)}" in str(error.value)
    assert list(cache.iterdir()) == []


def test_the_error_names_a_cache_folder_that_is_not_writable(cache, server):
    cache.write_text("a file")
    with pytest.raises(UserError) as error:
        encodings.load_encoding("gpt2", cache)
    assert str(cache) in str(error.value)
    assert os.strerror(errno.EEXIST) in str(error.value)


@pytest.mark.parametrize("cache", ["not given"], indirect=True)
def test_an_encoding_is_selected_by_its_name(cache, server, tmp_path):
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("prepare", overrides=["tokenizer=gpt2", "tokenizer.name=o200k_base"])
    check_run(cfg)
    (tmp_path / "a.txt").write_text("cab")
    data = dict(cfg.data) | {"folder": str(tmp_path), "path": str(tmp_path / "a.txt")}
    corpus = load_corpus(data, cfg.tokenizer)
    assert corpus.tokenizer.name == "o200k_base"
    assert corpus.tokenizer.encode("cab").tolist() == [99, 256]
    assert server.requests == ["/gpt-2/o200k_base.tiktoken"]
