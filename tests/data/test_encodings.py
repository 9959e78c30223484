"""tiktoken's encodings, against tiktoken and a local server."""

import base64
import hashlib

import pytest
import tiktoken.load
import tiktoken.registry
import tiktoken_ext.openai_public as public
from corpora import serving, sha256
from refusals import refused

from minigpt.data import tokenizer as tokenizers
from minigpt.data.tokenizer import PATTERNS, SEPARATOR, BPETokenizer

TOKENS = [*(bytes([i]) for i in range(256)), b"ab"]
SMALL = b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(TOKENS))


@pytest.fixture
def server(monkeypatch):
    """A small encoding in place of tiktoken's gpt2, with its one file on a server."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    with serving(SMALL, monkeypatch) as server:
        server.url += "/gpt-2/small.tiktoken"

        def small():
            ranks = tiktoken.load.load_tiktoken_bpe(server.url, expected_hash=sha256(SMALL))
            options = {"pat_str": PATTERNS["gpt2"], "special_tokens": {SEPARATOR: 257}}
            return {"name": "gpt2", "mergeable_ranks": ranks, **options}

        monkeypatch.setattr(tokenizers, "_SHA256", {server.url: sha256(SMALL)})
        monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
        monkeypatch.setattr(tiktoken.registry, "ENCODING_CONSTRUCTORS", {"gpt2": small})
        yield server


def test_files_checksums_and_patterns_equal_those_of_tiktoken(monkeypatch):
    asked = {}

    def gym(vocab_bpe_file, encoder_json_file, vocab_bpe_hash, encoder_json_hash):
        asked.update({vocab_bpe_file: vocab_bpe_hash, encoder_json_file: encoder_json_hash})

    monkeypatch.setattr(
        public, "load_tiktoken_bpe", lambda file, expected_hash: asked.update({file: expected_hash})
    )
    monkeypatch.setattr(public, "data_gym_to_mergeable_bpe_ranks", gym)
    patterns = {name: public.ENCODING_CONSTRUCTORS[name]()["pat_str"] for name in PATTERNS}
    assert (patterns, asked) == (PATTERNS, tokenizers._SHA256)


def test_a_missing_or_damaged_file_is_downloaded_once_or_else_named(tmp_path, server, monkeypatch):
    missing = "http://127.0.0.1:9/gpt-2/encoder.json"  # nothing listens there
    cache = tmp_path / "cache"
    keys = [hashlib.sha1(url.encode()).hexdigest() for url in (server.url, missing)]
    for present, requests in ((None, 1), (SMALL, 1), (SMALL + b"\n", 2)):
        if present:
            (cache / keys[0]).write_bytes(present)
        tokenizer = BPETokenizer.from_tiktoken("gpt2", cache)
        assert (tokenizer.encode("cab").tolist(), tokenizer.vocab_size) == ([99, 256], 258)
        assert server.requests == requests
        assert {file.name: file.read_bytes() for file in cache.iterdir()} == {keys[0]: SMALL}
    monkeypatch.setattr(tokenizers, "_SHA256", dict.fromkeys([server.url, missing], sha256(SMALL)))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    pattern = f"{missing} as {cache / keys[1]}, or set TIKTOKEN_CACHE_DIR"
    error = refused(pattern, BPETokenizer.from_tiktoken, "gpt2", tmp_path / "another")
    assert server.url not in str(error)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "file/cache"))
    pattern = r"cannot be written to .*file/cache .*set TIKTOKEN_CACHE_DIR to a writable"
    refused(pattern, BPETokenizer.from_tiktoken, "gpt2", tmp_path)
