"""The HTTP application: OpenAI's API for completions, chat and models.

Source: https://platform.openai.com/docs/api-reference/completions
"""

import asyncio
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from math import isnan
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from minigpt.data.tokenizer import Tokenizer, encode_prompt
from minigpt.serve.engine import Engine, QueueFull, Token
from minigpt.serve.models import Models
from minigpt.serve.samples import Piece, Samples
from minigpt.serve.settings import MAX_TOKENS, ApiError, Call, Prompt, json_response, read_call
from minigpt.utils.cli import error_text
from minigpt.utils.errors import RunError, UserError
from minigpt.utils.terminal import sanitize_line

T = TypeVar("T")


def create_app(models: Models) -> Starlette:
    """Return the application, without the checks of `minigpt.serve.guard`."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await models.close()

    async def generate(request: Request, *, chat: bool) -> Response:
        call = await read_call(request, chat=chat)
        return await unless_disconnected(request.receive, _respond(models, call)) or Response(status_code=499)

    async def list_models(request: Request) -> Response:
        described = [_describe(models, name) for name in models.sources]
        return json_response({"object": "list", "data": described})

    async def retrieve_model(request: Request) -> Response:
        return json_response(_describe(models, request.path_params["name"]))

    async def health(request: Request) -> Response:
        return json_response({"status": "ok"})

    routes = [
        Route("/health", health),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", retrieve_model),
        Route("/v1/completions", partial(generate, chat=False), methods=["POST"]),
        Route("/v1/chat/completions", partial(generate, chat=True), methods=["POST"]),
    ]
    handlers = dict.fromkeys((ApiError, HTTPException, UserError, QueueFull, Exception), _error_response)
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of a coroutine; cancel it when the client disconnects, and return None."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = working, watching = asyncio.create_task(work), asyncio.create_task(disconnect())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        working.cancel()  # has no effect on a task that is done
        await asyncio.wait(tasks)
    return None if working.cancelled() else working.result()


class EventStream(StreamingResponse):
    """Server-sent events of a call; the samples end with the response."""

    def __init__(self, samples: Samples, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self.samples = samples

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self.stream_response(send))
        finally:
            await self.samples.close()


async def _respond(models: Models, call: Call) -> Response:
    _describe(models, call.model)
    try:
        engine = await models.engine(call.model)
    except UserError as error:
        raise ApiError(500, f"{call.model} cannot be loaded: {error}") from error
    prompts = [await asyncio.to_thread(_encode, engine, prompt) for prompt in call.prompts]
    samples = Samples(engine, call, prompts)
    streaming = False
    try:
        await samples.start()
        if streaming := call.stream:
            return EventStream(samples, _events(samples))
        whole = [Piece() for _ in range(len(prompts) * call.n)]
        async for i, piece in samples.pieces():
            whole[i].text += piece.text
            whole[i].tokens += piece.tokens
            whole[i].reason = piece.reason
        choices = [_choice(call, engine.tokenizer, i, piece, "message") for i, piece in enumerate(whole)]
        return json_response(_envelope(call) | {"choices": choices, "usage": _usage(samples)})
    finally:
        if not streaming:
            await samples.close()


async def _events(samples: Samples) -> AsyncIterator[str]:
    call, tokenizer, envelope = samples.call, samples.engine.tokenizer, _envelope(samples.call)
    if call.include_usage:
        envelope["usage"] = None
    started = set[int]()
    try:
        async for i, piece in samples.pieces():
            first = call.chat and i not in started
            started.add(i)
            if first or piece.text or piece.tokens or piece.reason:
                choice = _choice(call, tokenizer, i, piece, "delta")
                if first:
                    choice["delta"]["role"] = "assistant"
                yield _event(envelope | {"choices": [choice]})
        if call.include_usage:
            yield _event(envelope | {"choices": [], "usage": _usage(samples)})
        yield "data: [DONE]\n\n"
    except Exception as error:
        yield _event(_to_api_error(error).content)


def _event(content: object) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _envelope(call: Call) -> dict[str, Any]:
    prefix, kind = ("chatcmpl-", "chat.completion") if call.chat else ("cmpl-", "text_completion")
    kind += ".chunk" if call.chat and call.stream else ""
    return {"id": prefix + uuid.uuid4().hex, "object": kind, "created": int(time.time()), "model": call.model}


def _usage(samples: Samples) -> dict[str, int]:
    read, generated = sum(map(len, samples.prompts)), samples.n_tokens
    return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated}


def _choice(call: Call, tokenizer: Tokenizer, index: int, piece: Piece, key: str) -> dict[str, Any]:
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


def _encode(engine: Engine, prompt: Prompt) -> list[int]:
    vocab_size = engine.model.config.vocab_size
    try:
        ids = encode_prompt(engine.tokenizer, prompt).tolist() if isinstance(prompt, str) else prompt
    except UserError as error:
        raise ApiError(400, f"prompt: {error}", param="prompt") from error
    if len(ids) > MAX_TOKENS:
        raise ApiError(400, f"prompt must have at most {MAX_TOKENS:,} tokens, got {len(ids):,}", param="prompt")
    if wrong := [i for i in ids if not 0 <= i < vocab_size]:
        raise ApiError(400, f"prompt must have token ids in [0, {vocab_size}), got {wrong[0]}", param="prompt")
    return ids


def _describe(models: Models, name: str) -> dict[str, Any]:
    if name not in models.sources:
        message = f"the model {name!r} does not exist; GET /v1/models lists all"
        raise ApiError(404, message, param="model", code="model_not_found")
    return {"id": name, "object": "model", "created": models.created, "owned_by": "minigpt"}


def _error_response(request: Request, error: Exception) -> Response:
    return _to_api_error(error).response()


def _to_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # of the router
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        return ApiError(error.status_code, error.detail.lower(), **headers)
    if isinstance(error, QueueFull):
        return ApiError(429, f"too many requests wait: {error}", code="rate_limit_exceeded", retry_after="1")
    if isinstance(error, UserError) and not isinstance(error, RunError):
        return ApiError(400, str(error))
    if not isinstance(error, ClientDisconnect):
        print(sanitize_line(f"error: {error_text(error)}"), file=sys.stderr)
    return ApiError(500, "the server failed; its terminal shows the error")
