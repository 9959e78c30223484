"""OpenAI's API: completions, chat and models.

Source: https://platform.openai.com/docs/api-reference/completions
"""

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from minigpt.data.tokenizer import Tokenizer, encode_prompt, whole_characters
from minigpt.extras.conversations.encoding import encode_chat
from minigpt.extras.interpret.token_pieces import token_pieces
from minigpt.extras.playground import http
from minigpt.extras.playground.engine import Engine, SampleRequest, Token, TokenStream
from minigpt.extras.playground.loaded_models import Models
from minigpt.sampling.generation import check_ids
from minigpt.utils.checks import BOOLEAN, integer
from minigpt.utils.errors import UserError

MAX_SAMPLES = 128  # of a request


@dataclass
class Part:
    """A part of a sample that can be sent: text, and tokens with their offsets in the text of the
    sample.
    """

    text: str = ""
    tokens: list[tuple[Token, int]] = field(default_factory=list)
    reason: str | None = None  # "stop" or "length" in the last part


def api_routes(models: Models) -> list[Route]:
    """Return the routes of the API."""

    async def list_models(request: Request) -> Response:
        return http.json_response(
            {"object": "list", "data": [describe(name) for name in models.names()]}
        )

    async def retrieve_model(request: Request) -> Response:
        models.find(name := request.path_params["name"])
        return http.json_response(describe(name))

    def describe(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": models.created, "owned_by": "minigpt"}

    return [
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", retrieve_model),
        http.post("/v1/completions", models, _COMPLETION, partial(_generate, chat=False)),
        http.post("/v1/chat/completions", models, _CHAT, partial(_generate, chat=True)),
    ]


async def _generate(engine: Engine, values: dict[str, Any], *, chat: bool) -> Response:
    call = _read_call(engine, values, chat=chat)
    prompts = [await _read_prompt(engine, call, prompt) for prompt in call.prompts]
    call.n_read = sum(len(ids) for ids, _ in prompts)
    common = (call.max_tokens, call.sampling, call.stop)
    requests = [
        SampleRequest(ids, *common, call.seed + i, call.n_top)
        for ids, _ in prompts
        for i in range(call.n)
    ]
    tokens = engine.generate(*(requests if call.max_tokens else ()))
    samples = [
        Part(begin.text, [*begin.tokens], begin.reason)
        for _, begin in prompts
        for _ in range(call.n)
    ]
    if call.stream:
        return http.stream(
            tokens,
            _events(call, samples, tokens),
            lambda error: _event(error.content()),
            "text/event-stream",
        )
    async for i, part in _parts(samples, tokens):
        samples[i].text += part.text
        samples[i].tokens += part.tokens
        samples[i].reason = part.reason
    choices = [_choice(call, i, sample) for i, sample in enumerate(samples)]
    return http.json_response(_envelope(call) | {"choices": choices, "usage": _usage(call, tokens)})


def _read_call(engine: Engine, values: dict[str, Any], *, chat: bool) -> SimpleNamespace:
    """Return the settings of a request by name.

    Both endpoints have `prompts`, `max_tokens`, `stop` as a tuple, `seed`, `echo`, `include_usage`,
    `sampling`, and
    `n_top`: alternatives per token, or None without log-probabilities.
    """
    call = SimpleNamespace(**{"tokenizer": engine.tokenizer, "chat": chat, "echo": False} | values)
    if chat:
        contents = (message.get("content") or "" for message in call.messages)
        texts = [
            text if isinstance(text, str) else "".join(part["text"] for part in text)
            for text in contents
        ]
        messages = [
            {"role": m["role"], "content": text}
            for m, text in zip(call.messages, texts, strict=True)
        ]
        call.prompts = [messages if engine.tokenizer.chat else "\n".join(texts)]
        call.n_top = (call.top_logprobs or 0) if call.logprobs else None
        call.max_tokens = call.max_completion_tokens or call.max_tokens
    else:
        single = isinstance(call.prompt, str) or isinstance(call.prompt[0], int)
        call.prompts = [call.prompt] if single else call.prompt
        call.n_top = None if call.logprobs is False else call.logprobs
    if len(call.prompts) * call.n > MAX_SAMPLES:
        raise http.ApiError(
            400,
            f"n × prompts must be at most {MAX_SAMPLES}, got {len(call.prompts) * call.n}",
            param="n",
        )
    stops, special = (
        [call.stop] if isinstance(call.stop, str) else call.stop,
        engine.tokenizer.special,
    )
    # Where any special token ends a turn
    in_chat = chat and engine.tokenizer.chat is not None
    ends = special.values() if in_chat else [special[text] for text in stops if text in special]
    call.stop = (*stops, *ends, *engine.tokenizer.end_ids)
    call.seed = random.getrandbits(32) if call.seed in (None, -1) else call.seed
    call.include_usage = call.stream_options.get("include_usage") is True
    call.sampling = http.sampling(values)
    return call


async def _read_prompt(
    engine: Engine, call: SimpleNamespace, prompt: Any
) -> tuple[list[int], Part]:
    """Return the ids of a prompt (a text, ids, or messages), and the part with which its samples
    begin.
    """
    ids, begin = prompt, Part(reason=None if call.max_tokens else "length")
    try:
        if call.tokenizer.chat and call.chat:
            ids = await asyncio.to_thread(encode_chat, call.tokenizer, prompt)
        elif isinstance(prompt, str):
            ids = (
                await asyncio.to_thread(encode_prompt, engine.tokenizer, whole_characters(prompt))
            ).tolist()
        ids = check_ids(ids, engine.model.config.vocab_size)
    except UserError as error:
        raise http.ApiError(400, f"prompt: {error}", param="prompt") from error
    if len(ids) > http.MAX_TOKENS:
        raise http.ApiError(
            400,
            f"prompt must have at most {http.MAX_TOKENS:,} tokens, got {len(ids):,}",
            param="prompt",
        )
    if call.echo and prompt:  # without the start token of an empty prompt
        names = {i: name for name, i in engine.tokenizer.special.items()}
        pieces = token_pieces(engine.tokenizer, ids, complete=not call.max_tokens)
        texts = [names.get(i, piece) for i, piece in zip(ids, pieces, strict=True)]
        if isinstance(prompt, str):  # without what the tokenizer put before it
            texts = [
                "" if i < len(engine.tokenizer.prefix) else text for i, text in enumerate(texts)
            ]
        tokens = (
            [Token(i) for i in ids]
            if call.n_top is None
            else await engine.score(ids, n_top=call.n_top)
        )
        begin.text = "".join(texts)
        begin.tokens = list(zip(tokens, accumulate(map(len, texts), initial=0), strict=False))
    return ids, begin


async def _parts(begins: list[Part], tokens: TokenStream) -> AsyncIterator[tuple[int, Part]]:
    """Yield the index of a sample and its next part, which may be empty; the last one has a reason.

    A text that may become a stop string is held back, with its tokens, until that is decided.
    """
    held = [Part() for _ in begins]
    n_sent = [len(begin.text) for begin in begins]  # characters
    async for token in tokens:
        i = token.sample
        waiting = [*held[i].tokens, (token, n_sent[i] + len(held[i].text))]
        text = held[i].text + token.text
        end = len(text) - token.n_held
        n_sent[i] += end
        n_tokens = sum(token.reason == "length" or offset < n_sent[i] for _, offset in waiting)
        held[i] = Part(text[end:], waiting[n_tokens:])
        yield i, Part(text[:end], waiting[:n_tokens], token.reason)


async def _events(
    call: SimpleNamespace, begins: list[Part], tokens: TokenStream
) -> AsyncIterator[str]:
    """Yield server-sent events."""
    envelope = _envelope(call) | ({"usage": None} if call.include_usage else {})
    head = json.dumps(envelope)[:-1]  # of every event: it is encoded once

    def event(i: int, part: Part, *, first: bool = False) -> str:
        return f'data: {head}, "choices": [{json.dumps(_choice(call, i, part, first=first))}]}}\n\n'

    for i, begin in enumerate(begins):
        if call.chat or begin.tokens or begin.reason:
            yield event(i, begin, first=True)
    async for i, part in _parts(begins, tokens):
        if part.text or part.tokens or part.reason:
            yield event(i, part)
    if call.include_usage:
        yield _event(envelope | {"choices": [], "usage": _usage(call, tokens)})
    yield "data: [DONE]\n\n"


def _event(content: object) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _envelope(call: SimpleNamespace) -> dict[str, Any]:
    prefix, kind = ("chatcmpl-", "chat.completion") if call.chat else ("cmpl-", "text_completion")
    kind += ".chunk" if call.chat and call.stream else ""
    return {
        "id": prefix + uuid.uuid4().hex,
        "object": kind,
        "created": int(time.time()),
        "model": call.model,
    }


def _usage(call: SimpleNamespace, tokens: TokenStream) -> dict[str, int]:
    read, generated = call.n_read, sum(job.n_tokens for job in tokens.jobs)
    return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated}


def _choice(call: SimpleNamespace, index: int, part: Part, *, first: bool = True) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": part.reason}
    if call.n_top is not None:
        choice["logprobs"] = (_chat_logprobs if call.chat else _completion_logprobs)(
            call.tokenizer, part.tokens
        )
    if not call.chat:
        return choice | {"text": part.text}
    role = {"role": "assistant"} if first else {}
    return choice | {"delta" if call.stream else "message": role | {"content": part.text}}


def _completion_logprobs(tokenizer: Tokenizer, tokens: list[tuple[Token, int]]) -> dict[str, Any]:
    def top(token: Token) -> dict[str, Any] | None:
        listed = [*token.top, (token.id, token.logprob)]  # the token itself is always one of them
        # The likeliest of equal names
        named = {_name(tokenizer, i): logprob for i, logprob in reversed(listed)}
        return None if token.logprob is None else named

    return {
        "tokens": [_name(tokenizer, token.id) for token, _ in tokens],
        "token_logprobs": [token.logprob for token, _ in tokens],
        "top_logprobs": [top(token) for token, _ in tokens],
        "text_offset": [offset for _, offset in tokens],
    }


def _chat_logprobs(tokenizer: Tokenizer, tokens: list[tuple[Token, int]]) -> dict[str, Any]:
    def entry(i: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": _name(tokenizer, i),
            "logprob": logprob,
            "bytes": list(tokenizer.decode_bytes([i])),
        }

    listed = [
        entry(t.id, t.logprob) | {"top_logprobs": [entry(*top) for top in t.top]} for t, _ in tokens
    ]
    return {"content": listed, "refusal": None}


def _name(tokenizer: Tokenizer, token: int) -> str:
    """Return a token as text; bytes that are no characters as `bytes:\\xe2`, special tokens as
    `token_id:5`.
    """
    content = tokenizer.decode_bytes([token])
    try:
        return content.decode() or f"token_id:{token}"
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _is_prompt(value: Any) -> bool:
    prompts = value if isinstance(value, list) and value and not http.is_ids(value) else [value]
    return all(isinstance(prompt, str) or (prompt and http.is_ids(prompt)) for prompt in prompts)


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    if content is None:
        return value["role"] == "assistant" and not (
            value.get("tool_calls") or value.get("function_call")
        )
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return all(
        isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str)
        for p in parts
    )


def _is_stop(value: Any) -> bool:
    listed = [value] if isinstance(value, str) else value
    return (
        isinstance(listed, list)
        and len(listed) <= 4
        and all(isinstance(item, str) and item for item in listed)
    )


# Settings that clients send and that change no result:
_IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "cache_prompt"),
    *("tool_choice", "function_call", "parallel_tool_calls"),  # without tools
)
_STREAM_OPTIONS = {
    "include_usage",
    "include_obfuscation",
}  # the second has no effect: it pads events in their length
_COMMON: http.Settings = {
    **http.MODEL,
    **http.SAMPLING,
    **dict.fromkeys(_IGNORED, (None, (lambda v: True, ""))),
    "n": (1, integer(1, MAX_SAMPLES)),
    "stop": ((), (_is_stop, "a non-empty string or a list of up to 4")),
    "seed": (None, integer(-1)),  # -1 is random, as in vLLM and llama.cpp
    "stream": (False, BOOLEAN),
    "stream_options": (
        {},
        (
            lambda v: (
                isinstance(v, dict)
                and v.keys() <= _STREAM_OPTIONS
                and all(isinstance(flag, bool | None) for flag in v.values())
            ),
            "include_usage, include_obfuscation or null, with values true or false",
        ),
    ),
    # Settings with one supported value:
    "best_of": (1, (lambda v: v == 1, "1")),
    "modalities": (None, (lambda v: v == ["text"], '["text"]')),
    "response_format": (None, (lambda v: v == {"type": "text"}, '{"type": "text"}')),
    "reasoning_effort": (None, (lambda v: v == "none", '"none"')),
    "verbosity": (None, (lambda v: v == "medium", '"medium"')),
    **dict.fromkeys(
        ("repeat_penalty", "typical_p", "length_penalty"), (None, (lambda v: v == 1, "1"))
    ),
    **dict.fromkeys(
        ("skip_special_tokens", "spaces_between_special_tokens"),
        (None, (lambda v: v is True, "true")),
    ),
}
_COMPLETION: http.Settings = {
    **_COMMON,
    "prompt": (http.REQUIRED, (_is_prompt, "a text, token ids, or a list of them")),
    "max_tokens": (16, integer(0, http.MAX_TOKENS)),
    "logprobs": (None, (lambda v: v is False or integer(0, 20)[0](v), integer(0, 20)[1])),
    "echo": (False, BOOLEAN),
}
_CHAT: http.Settings = {
    **_COMMON,
    "messages": (
        http.REQUIRED,
        (
            lambda v: isinstance(v, list) and len(v) > 0 and all(map(_is_message, v)),
            "a list of messages of text",
        ),
    ),
    "max_tokens": (256, integer(1, http.MAX_TOKENS)),
    "max_completion_tokens": (None, integer(1, http.MAX_TOKENS)),
    "logprobs": (False, BOOLEAN),
    "top_logprobs": (None, integer(0, 20)),
}
