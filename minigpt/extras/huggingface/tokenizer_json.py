"""Tokenizers of Hugging Face: `tokenizer.json`, run by their package tokenizers, and chat templates."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from minigpt.data.tokenizer import (
    PATTERNS,
    SEPARATOR,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    EncodeChat,
    Ids,
    Tokenizer,
    token_dtype,
    whole_characters,
)
from minigpt.utils.errors import UserError
from minigpt.utils.files import read_json
from minigpt.utils.scripts import import_extra
from minigpt.utils.signals import Interrupted

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"

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
_BYTE_LEVEL: Any = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
_SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json of Hugging Face, run by their package tokenizers: the ids of transformers for the text alone.

    A dropout of merges, which gives other ids at each call, is removed from it; its truncation and padding are off.
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
            if values["model"].get("dropout"):  # of merges, at random: an augmentation
                values["model"]["dropout"] = None
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


def load_tokenizer(folder: Path) -> HuggingFaceTokenizer:
    """Load `tokenizer.json`, with the end of text in the files beside it; raise UserError if one is damaged."""
    file = folder / TOKENIZER
    if not file.is_file():
        raise UserError(f"{file} is missing; write it with AutoTokenizer.from_pretrained(…).save_pretrained({folder})")
    try:
        tokenizer = HuggingFaceTokenizer(file.read_text(encoding="utf-8"))
        others = (folder / TOKENIZER_CONFIG, folder / "config.json")
        config, model = (read_json(other) if other.is_file() else {} for other in others)
        token, ids = config.get("eos_token") or "", model.get("eos_token_id")
        end = tokenizer.backend.token_to_id(token["content"] if isinstance(token, dict) else token)
        if end is None:
            end = ids[0] if isinstance(ids, list) else ids
        if end in tokenizer.token_bytes:
            tokenizer.separator = np.array([end], dtype=tokenizer.separator.dtype)
            tokenizer.separated = True
        tokenizer.encode_chat = _load_chat(folder, config, tokenizer.json)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"the tokenizer in {folder} is damaged ({error!r:.200})") from error
    return tokenizer


def _load_chat(folder: Path, config: Mapping[str, Any], content: str) -> EncodeChat | None:
    """Return `encode_chat` with the chat template of a folder, if there is one."""
    file = folder / "chat_template.jinja"
    text = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    tokens = {name: token for name, token in config.items() if name.endswith("_token") and token}
    tokens = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
    return partial(encode_chat, text, tokens, content) if text else None


def encode_chat(template: str, tokens: Mapping[str, str], content: str, messages: list[dict[str, str]]) -> list[int]:
    """Return the ids of messages, each with a role and a content, up to the start of the answer.

    Special tokens become their ids, also in a message. The template, which reads `tokens`, runs in Jinja's sandbox;
    `content` is the text of tokenizer.json. Raise UserError if the template does not take the messages.

    Source: https://huggingface.co/docs/transformers/chat_templating
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # jinja2 is a dependency of torch

    def refuse(message: str) -> None:
        raise UserError(message)

    options: Any = {"trim_blocks": True, "lstrip_blocks": True, "extensions": ["jinja2.ext.loopcontrols"]}
    environment = ImmutableSandboxedEnvironment(**options)  # as transformers
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    try:
        text = environment.from_string(template).render(messages=messages, add_generation_prompt=True, **tokens)
    except Exception as error:  # of any kind: the template is foreign code
        raise UserError(f"the chat template does not take these messages: {error!s:.200}") from error
    ids: list[int] = _parsing_tokenizer(content).encode(text).tolist()
    return ids


@lru_cache(maxsize=4)
def _parsing_tokenizer(content: str) -> HuggingFaceTokenizer:
    tokenizer = HuggingFaceTokenizer(content)
    tokenizer.backend.encode_special_tokens = False  # they become their ids
    return tokenizer


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """Return the contents of `tokenizer.json` and `tokenizer_config.json`, by file name.

    `AutoTokenizer` of transformers gives our ids, also for texts that look like special tokens, and our text for ids;
    a character without an id is an error in both. A `HuggingFaceTokenizer` is written as it is: with AutoTokenizer it
    recognizes special tokens and adds those of its post-processor. `eos_token` is its separator.
    """
    end = SEPARATOR if isinstance(tokenizer, BPETokenizer) else None
    if isinstance(tokenizer, HuggingFaceTokenizer) and len(tokenizer.separator):
        end = tokenizer.backend.id_to_token(tokenizer.separator[0])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": not isinstance(tokenizer, HuggingFaceTokenizer),  # as ordinary text
        "eos_token": end,
    }
    return {TOKENIZER: _content(tokenizer), TOKENIZER_CONFIG: config}


def equals_qwen2(tokenizer: Tokenizer) -> bool:
    """Whether `Qwen2Tokenizer`, which transformers takes for every model of type qwen2, has the steps of a tokenizer.

    Source: https://github.com/huggingface/transformers/blob/main/src/transformers/models/qwen2/tokenization_qwen2.py
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return False
    content = json.loads(tokenizer.json.replace('"trim_offsets":true', '"trim_offsets":false'))
    model = {key: value for key, value in content["model"].items() if value and key not in ("vocab", "merges")}
    special = [token["content"] for token in content["added_tokens"] if token["special"]]
    steps = (content["normalizer"], content["pre_tokenizer"], content["decoder"]["type"])
    theirs = ({"type": "NFC"}, {"type": "Sequence", "pretokenizers": [split_step(QWEN2), _BYTE_LEVEL]}, "ByteLevel")
    return (steps, model) == (theirs, {"type": "BPE"}) and SEPARATOR in special


def _content(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a byte-pair encoding that merges as tiktoken: neighbors that are a token together, the lowest id first."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return json.loads(tokenizer.json)
    if type(tokenizer) not in (CharTokenizer, ByteTokenizer, BPETokenizer):
        raise UserError(f"a tokenizer.json cannot describe a {type(tokenizer).__name__}; use --to safetensors")
    pattern, special = "(?m:.)", tokenizer.special
    if isinstance(tokenizer, BPETokenizer):
        pattern = ONIGURUMA.get(tokenizer.name, ONIGURUMA["gpt2"])
    ids = {token: i for i, token in tokenizer.token_bytes.items() if token}
    if isinstance(tokenizer, CharTokenizer):
        steps, decoder, texts = [], {"type": "Fuse"}, {token: token.decode() for token in ids}
    else:
        steps, decoder = [_BYTE_LEVEL], _BYTE_LEVEL
        texts = {token: token.decode("latin-1").translate(BYTE_CHARACTERS) for token in ids}
    splits = ((token[:i], token[i:]) for token in ids for i in range(1, len(token)))
    merges = sorted((ids[a + b], ids[a], ids[b], a, b) for a, b in splits if a in ids and b in ids)
    return {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": [{"id": i, "content": token} | _SPECIAL for token, i in special.items()],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split_step(pattern), *steps]},
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "vocab": {texts[token]: i for token, i in ids.items()} | {**special},  # all, so that ids may have gaps
            "merges": [f"{texts[a]} {texts[b]}" for *_, a, b in merges],
            "ignore_merges": True,  # for a piece that is a token
            "unk_token": "",  # without an id: a character that has none is an error
        },
    }


def split_step(pattern: str) -> dict[str, Any]:
    """Return the step of a tokenizer.json that splits a text by a pattern."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
