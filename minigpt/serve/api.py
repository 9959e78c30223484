"""OpenAI's API: completions, chat and models.

Source: https://platform.openai.com/docs/api-reference/completions
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from functools import partial
from math import isnan
from types import SimpleNamespace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from minigpt.data.tokenizer import Tokenizer, encode_prompt, whole_characters
from minigpt.generation import check_ids
from minigpt.serve import engine as engines
from minigpt.serve.engine import Engine, Token, TokenStream
from minigpt.serve.http import ApiError, Stream, check_model, find_engine, json_response, post
from minigpt.serve.models import Models
from minigpt.serve.samples import Piece, pieces
from minigpt.serve.settings import MAX_TOKENS, read_call
from minigpt.utils.errors import UserError


def api_routes(models: Models) -> list[Route]:
    """Return the routes of the API."""

    async def list_models(request: Request) -> Response:
        return json_response({"object": "list", "data": [describe(name) for name in models.names()]})

    async def retrieve_model(request: Request) -> Response:
        return json_response(describe(check_model(models, request.path_params["name"])))

    def describe(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": models.created, "owned_by": "minigpt"}

    return [
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", retrieve_model),
        post("/v1/completions", partial(_generate, models, chat=False)),
        post("/v1/chat/completions", partial(_generate, models, chat=True)),
    ]


async def _generate(models: Models, request: Request, body: dict[str, Any], *, chat: bool) -> Response:
    call = read_call(body, chat=chat)
    engine = await find_engine(models, call.model)
    prompts = [await asyncio.to_thread(_encode, engine, prompt) for prompt in call.prompts]
    echoed = [await _echo(engine, call, *given) for given in zip(call.prompts, prompts, strict=True)]
    end = engine.tokenizer.separator.tolist() if engine.tokenizer.separated else []
    tokens = engine.generate(
        *(
            engines.Request(ids, call.max_tokens, call.sampling, (*call.stop, *end), call.seed + i, call.n_top)
            for ids in (prompts if call.max_tokens else ())
            for i in range(call.n)
        )
    )
    n_read = sum(map(len, prompts))
    if call.stream:
        events = _events(engine.tokenizer, call, echoed, tokens, n_read)
        return Stream(tokens, events, lambda error: _event(error.content), "text/event-stream")
    whole = [Piece() for _ in range(len(prompts) * call.n)]
    async for i, piece in pieces(engine.tokenizer, call, echoed, tokens):
        whole[i].text += piece.text
        whole[i].tokens += piece.tokens
        whole[i].reason = piece.reason
    choices = [_choice(call, engine.tokenizer, i, piece, "message") for i, piece in enumerate(whole)]
    return json_response(_envelope(call) | {"choices": choices, "usage": _usage(n_read, tokens.n_tokens)})


async def _echo(engine: Engine, call: SimpleNamespace, prompt: str | list[int], ids: list[int]) -> list[Token]:
    """Return the tokens of a prompt that begin its samples."""
    if not call.echo or not prompt:  # without the start token of an empty prompt
        return []
    return [Token(i) for i in ids] if call.n_top is None else await engine.score(ids, n_top=call.n_top)


async def _events(
    tokenizer: Tokenizer, call: SimpleNamespace, echoed: list[list[Token]], tokens: TokenStream, n_read: int
) -> AsyncIterator[str]:
    """Yield server-sent events."""
    envelope = _envelope(call) | ({"usage": None} if call.include_usage else {})
    begin = json.dumps(envelope)[:-1]  # of every event: it is encoded once
    started = set[int]()
    async for i, piece in pieces(tokenizer, call, echoed, tokens):
        first = call.chat and i not in started
        started.add(i)
        if first or piece.text or piece.tokens or piece.reason:
            choice = _choice(call, tokenizer, i, piece, "delta")
            if first:
                choice["delta"]["role"] = "assistant"
            yield f'data: {begin}, "choices": [{json.dumps(choice)}]}}\n\n'
    if call.include_usage:
        yield _event(envelope | {"choices": [], "usage": _usage(n_read, tokens.n_tokens)})
    yield "data: [DONE]\n\n"


def _event(content: object) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _envelope(call: SimpleNamespace) -> dict[str, Any]:
    prefix, kind = ("chatcmpl-", "chat.completion") if call.chat else ("cmpl-", "text_completion")
    kind += ".chunk" if call.chat and call.stream else ""
    return {"id": prefix + uuid.uuid4().hex, "object": kind, "created": int(time.time()), "model": call.model}


def _usage(read: int, generated: int) -> dict[str, int]:
    return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated}


def _choice(call: SimpleNamespace, tokenizer: Tokenizer, index: int, piece: Piece, key: str) -> dict[str, Any]:
    """Return a choice of a response; `key` is "message" or "delta"."""
    logprobs = None
    if call.n_top is not None:
        logprobs = (_chat_logprobs if call.chat else _completion_logprobs)(tokenizer, piece.tokens)
    text: dict[str, Any] = {"text": piece.text}
    if call.chat:
        text = {key: {"role": "assistant", "content": piece.text} if key == "message" else {"content": piece.text}}
    return {"index": index, **text, "logprobs": logprobs, "finish_reason": piece.reason}


def _completion_logprobs(tokenizer: Tokenizer, tokens: list[tuple[Token, int]]) -> dict[str, Any]:
    tops: list[dict[str, float] | None] = []
    for token, _ in tokens:
        top: dict[str, float] = {}
        for i, logprob in (*token.top, (token.id, token.logprob)):  # the token itself is always one of them
            top.setdefault(_name(tokenizer, i), logprob)
        tops.append(None if isnan(token.logprob) else top)
    return {
        "tokens": [_name(tokenizer, token.id) for token, _ in tokens],
        "token_logprobs": [None if isnan(token.logprob) else token.logprob for token, _ in tokens],
        "top_logprobs": tops,
        "text_offset": [offset for _, offset in tokens],
    }


def _chat_logprobs(tokenizer: Tokenizer, tokens: list[tuple[Token, int]]) -> dict[str, Any]:
    def entry(i: int, logprob: float) -> dict[str, Any]:
        return {"token": _name(tokenizer, i), "logprob": logprob, "bytes": list(tokenizer.decode_bytes([i]))}

    listed = [entry(t.id, t.logprob) | {"top_logprobs": [entry(*top) for top in t.top]} for t, _ in tokens]
    return {"content": listed, "refusal": None}


def _name(tokenizer: Tokenizer, token: int) -> str:
    """Return a token as text; bytes that are no characters as `bytes:\\xe2`, special tokens as `token_id:5`."""
    content = tokenizer.decode_bytes([token])
    try:
        return content.decode() or f"token_id:{token}"
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _encode(engine: Engine, prompt: str | list[int]) -> list[int]:
    try:
        ids = prompt if isinstance(prompt, list) else encode_prompt(engine.tokenizer, whole_characters(prompt)).tolist()
        check_ids(ids, engine.model.config.vocab_size)
    except UserError as error:
        raise ApiError(400, f"prompt: {error}", param="prompt") from error
    if len(ids) > MAX_TOKENS:
        raise ApiError(400, f"prompt must have at most {MAX_TOKENS:,} tokens, got {len(ids):,}", param="prompt")
    return ids
