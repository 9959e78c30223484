"""Tokenizers from and to folders of Hugging Face: `tokenizer.json`, `tokenizer_config.json`, chat templates."""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from minigpt.data.tokenizer import SEPARATOR, BPETokenizer, CharTokenizer, EncodeChat, Tokenizer
from minigpt.extras.huggingface.huggingface_tokenizer import (
    BYTE_CHARACTERS,
    ONIGURUMA,
    QWEN2,
    HuggingFaceTokenizer,
    split_step,
)
from minigpt.utils.errors import UserError
from minigpt.utils.files import read_json

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"

_BYTE_LEVEL: Any = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
_SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


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
    a character without an id is an error in both. A `HuggingFaceTokenizer` is written unchanged: with AutoTokenizer it
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
