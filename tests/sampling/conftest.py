"""Checkpoints of every kind of tokenizer, and calls of `scripts/sample.py`."""

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
from models import make_model
from sampled import BLOCK_SIZE, chain

from minigpt.checkpoints.load import save_checkpoint
from minigpt.data.tokenizer import SEPARATOR, BPETokenizer, ByteTokenizer, CharTokenizer

WHOLE = "é€𝄞"  # characters of two, three and four bytes, no byte of which is in two of them


@pytest.fixture(scope="session")
def saves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("saves")
    char = CharTokenizer("".join(sorted("\n .,abcdefghijklmnopqrstuvwxyzé")))
    byte = ByteTokenizer()
    texts = ["the quick brown fox jumps over the lazy dog. " * 20, "wem gehört der café? " * 20]
    bpe = BPETokenizer.train(texts, 280)
    separated = BPETokenizer.train(texts, 280)
    separated.separated = True
    odd_bytes = [bytes([i]) for i in range(256)] + [b"cde", b"x\xc3"]
    odd = BPETokenizer("bpe", odd_bytes, {SEPARATOR: 258})
    letters = char.encode("\nabcdefghijklmnopqrstuvwxyz")
    documents = [*separated.encode("abc"), *separated.separator]
    drawn = {"std": 0.3, "block_size": BLOCK_SIZE, "n_embd": 32, "tie_embeddings": False}
    models = {
        "char": (make_model(vocab_size=char.vocab_size, **drawn), char),
        "bpe": (make_model(vocab_size=bpe.vocab_size, **drawn), bpe),
        "padded": (make_model(vocab_size=512, **drawn), char),
        "multibyte": (chain(byte, [10, *WHOLE.encode()], again=1), byte),
        "letters": (chain(char, letters), char),
        "separated": (chain(separated, documents), separated),
        "odd": (chain(odd, [ord("a"), 256, ord("b"), 257]), odd),
    }
    paths = {name: folder / f"{name}.safetensors" for name in models}
    for name, both in models.items():
        save_checkpoint(*both, paths[name])
    return {name: str(path) for name, path in paths.items()}


@pytest.fixture
def sample(call: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run `scripts/sample.py`: `sample("--prompt", "a", stdin=b"", terminal="stdout")`."""

    def run(*arguments: Any, stdin: bytes = b"", terminal: str = "") -> Any:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        for name in terminal.split():
            monkeypatch.setattr(getattr(sys, name), "isatty", lambda: True)
        return call("sample.py", "--device", "cpu", *map(str, arguments))

    return run
