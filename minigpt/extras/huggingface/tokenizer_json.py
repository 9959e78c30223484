"""The tokenizers of Hugging Face: `tokenizer.json`, run by their package tokenizers."""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from minigpt.data.tokenizer import (
    PATTERNS,
    SEPARATOR,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Ids,
    Tokenizer,
    token_dtype,
    whole_characters,
)
from minigpt.extras.conversations.encoding import add_chat
from minigpt.extras.huggingface.chat_template import find_template
from minigpt.extras.packages import import_extra
from minigpt.utils.errors import UserError
from minigpt.utils.files import read_json
from minigpt.utils.signals import Interrupted

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS, GENERATION = "special_tokens_map.json", "generation_config.json"

# The character that stands for each byte in a byte-level tokenizer.json, as in GPT-2: the same if
# it is visible.
_VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))
BYTE_CHARACTERS = dict(zip(_VISIBLE, map(chr, _VISIBLE), strict=True))
BYTE_CHARACTERS |= {
    byte: chr(256 + i) for i, byte in enumerate(sorted(set(range(256)) - set(_VISIBLE)))
}

# PATTERNS for Oniguruma, which the package tokenizers uses: there `$` also matches before a line
# break, and `{1,3}+` repeats. Its classes and its upper and lower case equal those of tiktoken for
# every code point.
ONIGURUMA = {
    name: pattern.replace("$", r"\z").replace("{1,3}+", "{1,3}")
    for name, pattern in PATTERNS.items()
}
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_LEVEL: Any = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": False,
}
# In transformers' order
_NAMES = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
_SPECIAL = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json of Hugging Face, run by their package tokenizers, with the ids of
    transformers.

    `encode` gives those of the text alone, for training; `prefix`, `parse` and `suffix` together
    those of a call of
    their tokenizer: the post-processor adds tokens, and special tokens in the text are these
    tokens.

    A dropout of merges, which gives other ids at each call, is removed from it; its truncation and
    padding are off. Ids are decoded one by one. So where the file puts a space before a text and
    its decoder takes it away (Llama 2), the decoded text begins with that space. Decoders other
    than ByteLevel, ByteFallback and Fuse raise UserError.

    Args:
        content: the text of tokenizer.json.
        separator: id of the end of a text; None if there is none.
        bos: id that an empty prompt starts from if the post-processor adds none; empty if there is
            none.
        ends: ids that end a text too.
        split_special: special tokens in a text are ordinary text in `parse` too.
    """

    name = "huggingface"
    reads_special = True

    def __init__(
        self,
        content: str,
        separator: int | None = None,
        *,
        bos: Sequence[int] = (),
        ends: Sequence[int] = (),
        split_special: bool = False,
    ) -> None:
        tokenizers = import_extra("tokenizers", "tokenizer.json", "huggingface")
        with _one_line_errors("damaged tokenizer.json"):
            values = json.loads(content)
            if values["model"].get("dropout"):  # of merges, at random: an augmentation
                values["model"]["dropout"] = None
            self.json = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
            # Merges with a prefix can abort the process
            if values["model"].get("continuing_subword_prefix"):
                raise UserError("tokenizer.json must have no continuing_subword_prefix")
            self.backend = tokenizers.Tokenizer.from_str(self.json)
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
            probe = self.backend.encode(next(iter(self.special), "a"))
            inside = [
                i for i, of_processor in enumerate(probe.special_tokens_mask) if not of_processor
            ]
            if inside:
                self.prefix, self.suffix = probe.ids[: inside[0]], probe.ids[inside[-1] + 1 :]
            self.backend.encode_special_tokens = True  # as ordinary text
        # Lists of all ids would not fit in memory
        if self.vocab_size > len(self.token_bytes) + (1 << 16):
            raise UserError(
                f"the ids of tokenizer.json must be consecutive, got {self.vocab_size - 1} as "
                "the largest"
            )
        for i in (separator, *bos, *ends):
            if i is not None and i not in self.token_bytes:
                raise UserError(f"the separator must be an id of tokenizer.json, got {i!r:.80}")
        self.separator = np.array(
            [] if separator is None else [separator], dtype=token_dtype(self.vocab_size)
        )
        self.separated = separator is not None
        self.bos, self.ends, self.split_special = list(bos), list(ends), split_special

    @property
    def end_ids(self) -> list[int]:
        return [*super().end_ids, *self.ends]

    @property
    def start(self) -> Ids:
        ids = [*self.prefix] or self.bos
        return np.array(ids, dtype=self.separator.dtype) if ids else super().start

    def encode(self, text: str) -> Ids:
        with _one_line_errors("tokenizer.json does not encode this text"):
            # `encode` would not release the GIL.
            (encoding,) = self.backend.encode_batch_fast(
                [whole_characters(text)], add_special_tokens=False
            )
        return np.array(encoding.ids, dtype=self.separator.dtype)

    def parse(self, text: str) -> Ids:
        return (
            self.encode(text) if self.split_special else _parsing_tokenizer(self.json).encode(text)
        )

    def locate(self, text: str) -> tuple[Ids, Ids, Ids]:
        """Return the ids of `parse`, and where each starts and stops in the text, (N,) each."""
        backend = (self if self.split_special else _parsing_tokenizer(self.json)).backend
        with _one_line_errors("tokenizer.json does not encode this text"):
            (encoding,) = backend.encode_batch([text], add_special_tokens=False)
        places = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)  # of characters
        return np.array(encoding.ids, dtype=self.separator.dtype), places[:, 0], places[:, 1]

    def _values(self) -> dict[str, Any]:
        values = {"json": self.json, "separator": next(iter(self.separator.tolist()), None)}
        options = {"bos": self.bos, "ends": self.ends, "split_special": self.split_special}
        # Without options that are off, as in older checkpoints
        return values | ({"options": options} if any(options.values()) else {})

    @property
    def splits_at_cuts(self) -> bool:  # type: ignore[override]
        content = json.loads(self.json)
        first, added = content["pre_tokenizer"] or {"type": None}, content["added_tokens"]
        steps = first.get("pretokenizers", [first])
        known = [
            split_step(pattern)
            for pattern in (*ONIGURUMA.values(), QWEN2, QWEN2.replace("N}|", "N}{1,3}|"))
        ]
        local = all(step in known or step["type"] in ("ByteLevel", "Digits") for step in steps)
        return (
            content["normalizer"] in (None, {"type": "NFC"})
            and local
            and any(step in known or step.get("use_regex") for step in steps)
            and not any(step.get("add_prefix_space") for step in steps)
            and not any(
                token["lstrip"] or token["rstrip"] or re.search(r"\s\S|\S\s", token["content"])
                for token in added
            )
        )


def _token_decoder(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """Return the function from a token to its bytes that the decoder of a tokenizer.json
    describes.
    """
    # Without a decoder, tokens are joined by spaces
    parts: list[Any] = decoder.get("decoders", [decoder]) if decoder else [{"type": None}]
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        byte_of = {character: byte for byte, character in BYTE_CHARACTERS.items()}
        return lambda token: (
            bytes(map(byte_of.__getitem__, token))
            if byte_of.keys() >= set(token)
            else token.encode()
        )
    if not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        raise UserError(
            "the decoder of tokenizer.json must be ByteLevel, ByteFallback or Fuse, got "
            f"{kinds!s:.80}"
        )
    replaced = [
        (part["pattern"]["String"], part["content"]) for part in parts if part["type"] == "Replace"
    ]

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


def load_tokenizer(folder: Path, vocab_size: int | None = None) -> HuggingFaceTokenizer:
    """Load `tokenizer.json`, with the special tokens and the chat template in the files beside it.

    Args:
        vocab_size: of the model; special tokens beyond it, which have no embedding, are left out.

    Raises:
        UserError: a file is missing or damaged.
    """
    file = folder / TOKENIZER
    if not file.is_file():
        raise UserError(
            f"{file} is missing; write it with "
            f"AutoTokenizer.from_pretrained(…).save_pretrained({folder})"
        )
    try:
        tokenizer = HuggingFaceTokenizer(file.read_text(encoding="utf-8"))
        others = [
            folder / name for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS, "config.json", GENERATION)
        ]
        config, older, model, generation = (
            read_json(other) if other.is_file() else {} for other in others
        )
        if "added_tokens_decoder" not in config:
            config |= older
        tokenizer = _complete(tokenizer, config, vocab_size)
        tokenizer.split_special = bool(config.get("split_special_tokens"))
        tokens = {
            name: _fields(token)["content"]
            for name, token in config.items()
            if name.endswith("_token")
        }
        # Missing tokens are undefined in a template
        tokens = {name: content for name, content in tokens.items() if content}
        id_of = tokenizer.backend.token_to_id
        # The tokens of the tokenizer come before the ids of generation, and these before those of
        # the model.
        settings = model | generation
        begins = [id_of(tokens.get("bos_token", "")), settings.get("bos_token_id")]
        tokenizer.bos = [i for i in begins if i in tokenizer.token_bytes][:1]
        listed = settings.get("eos_token_id")
        listed = listed if isinstance(listed, list) else [listed]
        ends = dict.fromkeys([id_of(tokens.get("eos_token", "")), listed[0], *listed])
        separator, *tokenizer.ends = [i for i in ends if i in tokenizer.token_bytes] or [None]
        if separator is not None:
            tokenizer.separator = np.array([separator], dtype=tokenizer.separator.dtype)
            tokenizer.separated = True
        if template := find_template(folder, config):
            add_chat(tokenizer, {"template": template, "tokens": tokens, "marks": []})
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"the tokenizer in {folder} is damaged ({error!r:.200})") from error
    return tokenizer


def _complete(
    tokenizer: HuggingFaceTokenizer, config: Mapping[str, Any], vocab_size: int | None
) -> HuggingFaceTokenizer:
    """Return a tokenizer with the tokens of tokenizer_config.json that tokenizer.json lacks, as
    transformers adds them.

    Special tokens beyond `vocab_size` are left out; without it, tokens that have no id in
    tokenizer.json.
    """
    tokenizers = import_extra("tokenizers", TOKENIZER, "huggingface")
    backend, limit = tokenizer.backend, vocab_size or math.inf
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    listed = [*(named.pop(name, None) for name in _NAMES), *named.values()]
    listed += extra.values() if isinstance(extra, dict) else extra
    tokens = [
        tokenizers.AddedToken(**_fields(token))
        for token in config.get("added_tokens_decoder", {}).values()
    ]
    # A token that is named keeps the flags that it has.
    known = {token.content for token in (*backend.get_added_tokens_decoder().values(), *tokens)}
    tokens += [
        tokenizers.AddedToken(**each)
        for each in map(_fields, listed)
        if each["content"] not in known
    ]
    usable = [
        token for token in tokens if vocab_size or backend.token_to_id(token.content) is not None
    ]
    n_added = backend.add_tokens(usable)  # those that it has are not added, nor is an empty one
    if not n_added and tokenizer.vocab_size <= limit:
        return tokenizer
    content = json.loads(backend.to_str())
    ordinary = [
        each
        for each in content["added_tokens"]
        if not each["special"] and each["id"] in tokenizer.token_bytes
    ]
    added = [each for each in content["added_tokens"] if each["id"] < limit or each in ordinary]
    return HuggingFaceTokenizer(json.dumps(content | {"added_tokens": added}))


def _fields(token: Any) -> dict[str, Any]:
    """Return the content and the flags of a token in a tokenizer_config.json, which may be its
    content alone.
    """
    fields = (
        token if isinstance(token, dict) else {"content": token if isinstance(token, str) else ""}
    )
    return {"content": fields["content"]} | {
        flag: fields.get(flag, value) for flag, value in _SPECIAL.items()
    }


@lru_cache(maxsize=4)
def _parsing_tokenizer(content: str) -> HuggingFaceTokenizer:
    tokenizer = HuggingFaceTokenizer(content)
    tokenizer.backend.encode_special_tokens = False  # they become their ids
    return tokenizer


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """Return the contents of `tokenizer.json` and `tokenizer_config.json`, by file name.

    `AutoTokenizer` of transformers gives our ids, also for texts that look like special tokens, and
    our text for ids; a character without an id is an error in both. A `HuggingFaceTokenizer` is
    written as it is: with AutoTokenizer it recognizes special tokens and adds those of its
    post-processor. `eos_token` is its separator. With a chat template, AutoTokenizer recognizes
    special tokens.
    """
    end = SEPARATOR if isinstance(tokenizer, BPETokenizer) else None
    if tokenizer.chat and tokenizer.end_token is not None:
        end = tokenizer.names([tokenizer.end_token])
    if isinstance(tokenizer, HuggingFaceTokenizer) and len(tokenizer.separator):
        end = tokenizer.backend.id_to_token(tokenizer.separator[0])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": tokenizer.chat is None,  # as ordinary text
        "eos_token": end,
    }
    if isinstance(tokenizer, HuggingFaceTokenizer):
        config["split_special_tokens"] = tokenizer.split_special
        # transformers would take an ordinary token that is named here out of every text.
        config["bos_token"] = next(
            (name for name, i in tokenizer.special.items() if [i] == tokenizer.bos), None
        )
    if tokenizer.chat:
        config = tokenizer.chat["tokens"] | {"chat_template": tokenizer.chat["template"]} | config
    return {TOKENIZER: _content(tokenizer), TOKENIZER_CONFIG: config}


def equals_qwen2(tokenizer: Tokenizer) -> bool:
    """Whether `Qwen2Tokenizer`, which transformers takes for every model of type qwen2, has the
    steps of a tokenizer.

    Source:
    https://github.com/huggingface/transformers/blob/main/src/transformers/models/qwen2/tokenization_qwen2.py
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return False
    content = json.loads(tokenizer.json.replace('"trim_offsets":true', '"trim_offsets":false'))
    model = {
        key: value
        for key, value in content["model"].items()
        if value and key not in ("vocab", "merges")
    }
    special = [token["content"] for token in content["added_tokens"] if token["special"]]
    steps = (content["normalizer"], content["pre_tokenizer"], content["decoder"]["type"])
    theirs = (
        {"type": "NFC"},
        {"type": "Sequence", "pretokenizers": [split_step(QWEN2), _BYTE_LEVEL]},
        "ByteLevel",
    )
    return (steps, model) == (theirs, {"type": "BPE"}) and SEPARATOR in special


def _content(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a byte-pair encoding that merges as tiktoken: neighbors that are a token together, the
    lowest id first.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return json.loads(tokenizer.json)
    if type(tokenizer) not in (CharTokenizer, ByteTokenizer, BPETokenizer):
        raise UserError(
            f"a tokenizer.json cannot describe a {type(tokenizer).__name__}; use --to safetensors"
        )
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
            "vocab": {texts[token]: i for token, i in ids.items()}
            | {**special},  # all, so that ids may have gaps
            "merges": [f"{texts[a]} {texts[b]}" for *_, a, b in merges],
            "ignore_merges": True,  # for a piece that is a token
            "unk_token": "",  # without an id: a character that has none is an error
        },
    }


def split_step(pattern: str) -> dict[str, Any]:
    """Return the step of a tokenizer.json that splits a text by a pattern."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
