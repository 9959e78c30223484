"""The JSON bodies of OpenAI's API: their settings with defaults and rules, and the errors for bad ones."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from minigpt.data.tokenizer import whole_characters
from minigpt.sampling import Sampling
from minigpt.utils.checks import BOOLEAN, CLOSED_FRACTION, NON_NEGATIVE_INT, POSITIVE_INT, Rule, integer, is_number
from minigpt.utils.errors import UserError, require
from minigpt.utils.terminal import sanitize_line

MAX_BODY_BYTES = 1 << 20
MAX_TOKENS = 65_536  # of a prompt, and of a sample
MAX_SAMPLES = 128  # of a request
_JSON = "application/json"
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

Prompt = str | list[int]


class ApiError(Exception):
    """An error of a request, with its HTTP status."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}
        self.content = {"error": {"message": sanitize_line(message), "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        """Return the response that OpenAI's clients expect."""
        return json_response(self.content, self.status, self.headers)


@dataclass(frozen=True)
class Call:
    """A valid request: settings of one or several samples per prompt.

    Args:
        n_top: number of likeliest alternatives per token; None if no log-probabilities are requested.
    """

    chat: bool
    model: str
    prompts: list[Prompt]
    max_tokens: int
    n: int
    seed: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    n_top: int | None
    echo: bool
    sampling: Sampling


async def read_call(request: Request, *, chat: bool) -> Call:
    """Read and check the body of a request; raise ApiError if it is too large, not JSON, or has a bad setting."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
        raise ApiError(415, f"the Content-Type of a request must be {_JSON}")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body of a request must have at most {MAX_BODY_BYTES:,} bytes", connection="close")
    try:
        values = json.loads(body, parse_constant=_refuse_constant)
        if not isinstance(values, dict):
            raise ApiError(400, "the body of a request must be a JSON object")
        return _to_call(_check(values, _CHAT if chat else _COMPLETION), chat)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body of a request must be JSON ({error})") from error


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response of ASCII, so that it can hold lone surrogates."""
    return Response(json.dumps(content), status, headers, _JSON)


def _check(body: dict[str, Any], settings: Mapping[str, tuple[Any, Rule]]) -> dict[str, Any]:
    """Return the value or default of every setting; null is the default."""
    for name in body.keys() - settings.keys():
        if body[name] is not None and name not in _IGNORED and body[name] not in _HARMLESS.get(name, ()):
            message = f"{name} is not supported with this value; leave it out"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    values = {}
    for name, (default, rule) in settings.items():
        values[name] = default if body.get(name) is None else body[name]
        if values[name] is not default or default is _REQUIRED:
            try:
                require(name, None if values[name] is _REQUIRED else values[name], *rule)
            except UserError as error:
                raise ApiError(400, str(error), param=name) from error
    return values


def _to_call(values: dict[str, Any], chat: bool) -> Call:
    if chat:
        contents = (message["content"] for message in values["messages"])
        prompts: list[Prompt] = [
            "\n".join(text if isinstance(text, str) else "".join(part["text"] for part in text) for text in contents)
        ]
        n_top = (values["top_logprobs"] or 0) if values["logprobs"] else None
        max_tokens = values["max_completion_tokens"] or values["max_tokens"]
    else:
        prompt, n_top, max_tokens = values["prompt"], values["logprobs"], values["max_tokens"]
        prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    if len(prompts) * values["n"] > MAX_SAMPLES:
        message = f"n × prompts must be at most {MAX_SAMPLES}, got {len(prompts) * values['n']}"
        raise ApiError(400, message, param="n")
    stop = (values["stop"],) if isinstance(values["stop"], str) else tuple(values["stop"])
    return Call(
        chat=chat,
        model=values["model"],
        prompts=[whole_characters(prompt) if isinstance(prompt, str) else prompt for prompt in prompts],
        max_tokens=max_tokens,
        n=values["n"],
        seed=random.getrandbits(32) if values["seed"] is None else values["seed"],
        stop=stop,
        stream=values["stream"],
        include_usage=values["stream_options"].get("include_usage") is True,
        n_top=n_top,
        echo=values.get("echo", False),
        sampling=Sampling(**{name: values[name] for name in _SAMPLING}),
    )


def _is_prompt(value: Any) -> bool:
    def is_ids(value: Any) -> bool:
        return isinstance(value, list) and len(value) > 0 and all(type(i) is int for i in value)

    listed = isinstance(value, list) and len(value) > 0
    return isinstance(value, str) or is_ids(value) or (listed and all(isinstance(v, str) or is_ids(v) for v in value))


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in parts)


def _is_stop(value: Any) -> bool:
    listed = [value] if isinstance(value, str) else value
    return isinstance(listed, list) and len(listed) <= 4 and all(isinstance(item, str) and item for item in listed)


def _between(least: float, most: float) -> Rule:
    return lambda v: is_number(v) and least <= v <= most, f"in [{least}, {most}]"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


_REQUIRED = object()
_SAMPLING: dict[str, tuple[Any, Rule]] = {
    "temperature": (1.0, _between(0, 100)),
    "top_k": (None, POSITIVE_INT),
    "top_p": (None, (lambda v: is_number(v) and 0 < v <= 1, "in (0, 1]")),
    "min_p": (None, CLOSED_FRACTION),
    "repetition_penalty": (1.0, _between(0.01, 100)),
}
_SETTINGS: dict[str, tuple[Any, Rule]] = _SAMPLING | {
    "model": (_REQUIRED, (lambda v: isinstance(v, str), "a name of GET /v1/models")),
    "n": (1, integer(1, MAX_SAMPLES)),
    "stop": ((), (_is_stop, "a non-empty string or a list of up to 4")),
    "seed": (None, NON_NEGATIVE_INT),
    "stream": (False, BOOLEAN),
    "stream_options": ({}, (lambda v: isinstance(v, dict) and v.keys() <= {"include_usage"}, "include_usage or null")),
}
_COMPLETION: dict[str, tuple[Any, Rule]] = _SETTINGS | {
    "prompt": (_REQUIRED, (_is_prompt, "a text, token ids, or a list of them")),
    "max_tokens": (16, integer(0, MAX_TOKENS)),
    "logprobs": (None, integer(0, 20)),
    "echo": (False, BOOLEAN),
}
_CHAT: dict[str, tuple[Any, Rule]] = _SETTINGS | {
    "messages": (
        _REQUIRED,
        (lambda v: isinstance(v, list) and len(v) > 0 and all(map(_is_message, v)), "a list of messages of text"),
    ),
    "max_tokens": (256, integer(1, MAX_TOKENS)),
    "max_completion_tokens": (None, integer(1, MAX_TOKENS)),
    "logprobs": (False, BOOLEAN),
    "top_logprobs": (None, integer(0, 20)),
}
# Settings that clients send, and the values of others, that change no result.
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "suffix": ("",),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
