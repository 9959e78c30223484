"""Tokenizers of Hugging Face, run by their package tokenizers."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from minigpt.data.tokenizer import PATTERNS, Ids, Tokenizer, token_dtype, whole_characters
from minigpt.utils.errors import UserError
from minigpt.utils.scripts import import_extra
from minigpt.utils.signals import Interrupted

# The character that stands for each byte in a byte-level tokenizer.json, as in GPT-2: the same if it is visible.
_VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))
BYTE_CHARACTERS = dict(zip(_VISIBLE, map(chr, _VISIBLE), strict=True))
BYTE_CHARACTERS |= {byte: chr(256 + i) for i, byte in enumerate(sorted(set(range(256)) - set(_VISIBLE)))}

# PATTERNS for Oniguruma, which the package tokenizers uses: there `$` also matches before a line break, and `{1,3}+`
# repeats. Its classes and its upper and lower case equal those of tiktoken for every code point.
ONIGURUMA = {name: pattern.replace("$", r"\z").replace("{1,3}+", "{1,3}") for name, pattern in PATTERNS.items()}
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json of Hugging Face, run by their package tokenizers: the ids of transformers for the text alone.

    Ids are decoded one by one. So where the file puts a space before a text and its decoder takes it away (Llama 2),
    the decoded text begins with that space. Decoders other than ByteLevel, ByteFallback and Fuse raise UserError.

    Args:
        content: the text of tokenizer.json.
        separator: id of the end of a text; None if there is none.
    """

    name = "huggingface"

    def __init__(self, content: str, separator: int | None = None) -> None:
        tokenizers = import_extra("tokenizers", "tokenizer.json", "huggingface")
        with _one_line_errors("damaged tokenizer.json"):
            values = json.loads(content)
            self.json = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
            if values["model"].get("continuing_subword_prefix"):  # merges with one can abort the process
                raise UserError("tokenizer.json must have no continuing_subword_prefix")
            self.backend = tokenizers.Tokenizer.from_str(self.json)
            self.backend.encode_special_tokens = True  # as ordinary text
            self.backend.no_truncation()
            self.backend.no_padding()
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # we have threads of our own
            to_bytes = _token_decoder(values["decoder"])
            self.token_bytes = {i: to_bytes(token) for token, i in self.backend.get_vocab().items()}
            added = self.backend.get_added_tokens_decoder()
            self.special = {token.content: i for i, token in added.items() if token.special}
            for i, token in added.items():
                self.token_bytes[i] = b"" if token.special else token.content.encode()
            self.vocab_size = max(self.token_bytes) + 1
        if self.vocab_size > len(self.token_bytes) + (1 << 16):  # lists of all ids would not fit in memory
            raise UserError(f"the ids of tokenizer.json must be consecutive, got {self.vocab_size - 1} as the largest")
        if separator is not None and separator not in self.token_bytes:
            raise UserError(f"the separator must be an id of tokenizer.json, got {separator!r:.80}")
        self.separator = np.array([] if separator is None else [separator], dtype=token_dtype(self.vocab_size))
        self.separated = separator is not None

    def encode(self, text: str) -> Ids:
        with _one_line_errors("tokenizer.json does not encode this text"):
            # `encode` would not release the GIL.
            (encoding,) = self.backend.encode_batch_fast([whole_characters(text)], add_special_tokens=False)
        return np.array(encoding.ids, dtype=self.separator.dtype)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "json": self.json, "separator": next(iter(self.separator.tolist()), None)}

    @property
    def splits_at_cuts(self) -> bool:  # type: ignore[override]
        content = json.loads(self.json)
        first, added = content["pre_tokenizer"] or {"type": None}, content["added_tokens"]
        steps = first.get("pretokenizers", [first])
        known = [split_step(pattern) for pattern in (*ONIGURUMA.values(), QWEN2, QWEN2.replace("N}|", "N}{1,3}|"))]
        local = all(step in known or step["type"] in ("ByteLevel", "Digits") for step in steps)
        return (
            content["normalizer"] in (None, {"type": "NFC"})
            and local
            and any(step in known or step.get("use_regex") for step in steps)
            and not any(step.get("add_prefix_space") for step in steps)
            and not any(
                token["lstrip"] or token["rstrip"] or re.search(r"\s\S|\S\s", token["content"]) for token in added
            )
        )


def split_step(pattern: str) -> dict[str, Any]:
    """Return the step of a tokenizer.json that splits a text by a pattern."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _token_decoder(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """Return the function from a token to its bytes that the decoder of a tokenizer.json describes."""
    parts: list[Any] = decoder.get("decoders", [decoder]) if decoder else [{"type": None}]  # joins with spaces
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        byte_of = {character: byte for byte, character in BYTE_CHARACTERS.items()}
        return lambda token: bytes(map(byte_of.__getitem__, token)) if byte_of.keys() >= set(token) else token.encode()
    if not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        raise UserError(f"the decoder of tokenizer.json must be ByteLevel, ByteFallback or Fuse, got {kinds!s:.80}")
    replaced = [(part["pattern"]["String"], part["content"]) for part in parts if part["type"] == "Replace"]

    def to_bytes(token: str) -> bytes:
        if "ByteFallback" in kinds and (byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)):
            return bytes.fromhex(byte[1])
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode()

    return to_bytes


@contextmanager
def _one_line_errors(problem: str) -> Iterator[None]:
    """Raise UserError for errors and panics of the package tokenizers."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, Interrupted):
        raise
    except BaseException as error:  # a panic of pyo3 is no Exception
        raise UserError(f"{problem} ({error!r:.200})") from error
