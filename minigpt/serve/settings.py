"""The settings of OpenAI's API, with defaults and rules, and the samples that they ask for."""

import random
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from minigpt.generation_settings import RULES
from minigpt.sampling import Sampling
from minigpt.serve.http import REQUIRED, ApiError, Settings, check
from minigpt.utils.checks import BOOLEAN, NON_NEGATIVE_INT, integer, is_number

MAX_TOKENS = 65_536  # of a prompt, and of a sample
MAX_SAMPLES = 128  # of a request


def read_call(body: dict[str, Any], *, chat: bool) -> SimpleNamespace:
    """Check the body of a request; raise ApiError for a bad setting.

    Returns:
        The settings by name, and for both endpoints `prompts`, `max_tokens`, `stop` as a tuple, `seed`, `echo`,
        `include_usage`, `sampling`, and `n_top`: alternatives per token, or None without log-probabilities.
    """
    given = {name: value for name, value in body.items() if name not in _IGNORED and value != _HARMLESS.get(name)}
    values = check(given, _CHAT if chat else _COMPLETION)
    call = SimpleNamespace(**{"chat": chat, "echo": False, **values})
    if chat:
        contents = (message["content"] for message in call.messages)
        texts = (text if isinstance(text, str) else "".join(part["text"] for part in text) for text in contents)
        call.prompts, call.n_top = ["\n".join(texts)], (call.top_logprobs or 0) if call.logprobs else None
        call.max_tokens = call.max_completion_tokens or call.max_tokens
    else:
        single = isinstance(call.prompt, str) or isinstance(call.prompt[0], int)
        call.prompts, call.n_top = [call.prompt] if single else call.prompt, call.logprobs
    if len(call.prompts) * call.n > MAX_SAMPLES:
        message = f"n × prompts must be at most {MAX_SAMPLES}, got {len(call.prompts) * call.n}"
        raise ApiError(400, message, param="n")
    call.stop = (call.stop,) if isinstance(call.stop, str) else tuple(call.stop)
    call.seed = random.getrandbits(32) if call.seed is None else call.seed
    call.include_usage = call.stream_options.get("include_usage") is True
    call.sampling = Sampling(**{name: values[name] for name in SAMPLING})
    return call


def is_ids(value: Any) -> bool:
    """Return whether a value is a list of integers."""
    return isinstance(value, list) and all(type(i) is int for i in value)


def _is_prompt(value: Any) -> bool:
    listed = isinstance(value, list) and len(value) > 0
    return isinstance(value, str) or (
        listed and (is_ids(value) or all(isinstance(v, str) or (v and is_ids(v)) for v in value))
    )


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in parts)


def _is_stop(value: Any) -> bool:
    listed = [value] if isinstance(value, str) else value
    return isinstance(listed, list) and len(listed) <= 4 and all(isinstance(item, str) and item for item in listed)


SAMPLING: Settings = {
    **{field.name: (field.default, RULES[field.name]) for field in fields(Sampling)},
    "temperature": (1.0, (lambda v: is_number(v) and 0 <= v <= 100, "in [0, 100]")),
}
MODEL: Settings = {"model": (REQUIRED, (lambda v: isinstance(v, str), "a name of GET /v1/models"))}
_COMMON: Settings = {
    **MODEL,
    **SAMPLING,
    "n": (1, integer(1, MAX_SAMPLES)),
    "stop": ((), (_is_stop, "a non-empty string or a list of up to 4")),
    "seed": (None, NON_NEGATIVE_INT),
    "stream": (False, BOOLEAN),
    "stream_options": ({}, (lambda v: isinstance(v, dict) and v.keys() <= {"include_usage"}, "include_usage or null")),
}
_COMPLETION: Settings = {
    **_COMMON,
    "prompt": (REQUIRED, (_is_prompt, "a text, token ids, or a list of them")),
    "max_tokens": (16, integer(0, MAX_TOKENS)),
    "logprobs": (None, integer(0, 20)),
    "echo": (False, BOOLEAN),
}
_CHAT: Settings = {
    **_COMMON,
    "messages": (
        REQUIRED,
        (lambda v: isinstance(v, list) and len(v) > 0 and all(map(_is_message, v)), "a list of messages of text"),
    ),
    "max_tokens": (256, integer(1, MAX_TOKENS)),
    "max_completion_tokens": (None, integer(1, MAX_TOKENS)),
    "logprobs": (False, BOOLEAN),
    "top_logprobs": (None, integer(0, 20)),
}
# Settings that clients send, and the values of others, that change no result; nor do values that are empty or zero.
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_IGNORED |= {"tool_choice", "parallel_tool_calls"}  # without tools
_HARMLESS = {"best_of": 1, "response_format": {"type": "text"}, "modalities": ["text"]}
