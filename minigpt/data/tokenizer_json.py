"""Stub."""

from pathlib import Path
from minigpt.data.tokenizer import Tokenizer, BPETokenizer


def load_tokenizer(folder: Path) -> Tokenizer:
    from minigpt.data.encodings import load_encoding

    return load_encoding("gpt2", Path("data"))


def tokenizer_files(tokenizer):
    return {}
