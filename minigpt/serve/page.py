"""The page, and the API that it uses: texts with the probability of every token, samples, attention, history."""

import asyncio
import codecs
import json
from collections.abc import AsyncGenerator
from functools import partial
from importlib.resources import files
from math import isnan
from pathlib import Path
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from minigpt.data.tokenizer import whole_characters
from minigpt.generation import NON_FINITE, check_ids
from minigpt.interpret.attention_maps import layer_attention
from minigpt.model import GPT
from minigpt.sampling import Sampling
from minigpt.serve import engine as engines
from minigpt.serve.engine import Engine, Token, TokenStream
from minigpt.serve.http import (
    REQUIRED,
    ApiError,
    Settings,
    Stream,
    check,
    check_model,
    find_engine,
    json_response,
    post,
)
from minigpt.serve.models import Models
from minigpt.serve.settings import MAX_TOKENS, MODEL, SAMPLING, is_ids
from minigpt.utils.checks import NON_NEGATIVE_INT, integer, or_null
from minigpt.utils.errors import RunError, require

MAX_SCORED = 32768  # tokens of a text
N_TOP = 10  # likeliest alternatives of a token
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page_routes(models: Models) -> list[Route]:
    """Return the routes of the page and its API."""

    async def names(request: Request) -> Response:
        return json_response({"models": models.names()})

    async def describe(request: Request) -> Response:
        return json_response(await asyncio.to_thread(models.describe, check_model(models, request.path_params["name"])))

    async def history(request: Request) -> Response:
        return json_response(await asyncio.to_thread(models.history, check_model(models, request.path_params["name"])))

    async def file(request: Request) -> Response:
        path = Path(str(folder), request.url.path.lstrip("/") or "index.html")
        headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}
        return FileResponse(path, headers=headers, media_type=_TYPES[path.suffix])

    folder = files("minigpt.page")
    paths = ["/", *(f"/{entry.name}" for entry in folder.iterdir() if Path(entry.name).suffix in _TYPES)]
    return [
        *(Route(path, file) for path in paths),
        Route("/api/models", names),
        Route("/api/models/{name:path}", describe),
        Route("/api/history/{name:path}", history),
        post("/api/score", partial(_score, models)),
        post("/api/generate", partial(_generate, models)),
        post("/api/attention", partial(_attention, models)),
    ]


async def _score(models: Models, request: Request, body: dict[str, Any]) -> Response:
    values = check(body, _SCORE)
    engine = await find_engine(models, values["model"], values["silenced"])
    ids = values["ids"]
    if values["text"] is not None:
        ids = (await asyncio.to_thread(engine.tokenizer.encode, whole_characters(values["text"]))).tolist()
    require("the text", f"{len(ids):,} tokens", lambda _: len(ids) <= MAX_SCORED, f"at most {MAX_SCORED:,} tokens long")
    tokens = await engine.score(ids, n_top=N_TOP) if ids else []
    if any(isnan(token.logprob) for token in tokens[1:]):
        raise RunError(NON_FINITE)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    last = len(tokens) - 1
    return json_response({"tokens": [_to_json(engine, decoder, t, final=i == last) for i, t in enumerate(tokens)]})


async def _generate(models: Models, request: Request, body: dict[str, Any]) -> Response:
    values = check(body, _GENERATE)
    engine = await find_engine(models, values["model"], values["silenced"])
    tokenizer, sampling = engine.tokenizer, Sampling(**{name: values[name] for name in SAMPLING})
    prompt = values["ids"] or tokenizer.start.tolist()
    stop = tuple(tokenizer.separator.tolist()) if tokenizer.separated else ()
    tokens = engine.generate(engines.Request(prompt, values["max_tokens"], sampling, stop, values["seed"], N_TOP))
    request.scope["tokens"] = tokens  # for the log
    return Stream(tokens, _lines(engine, values["ids"], tokens), "application/x-ndjson")


async def _lines(engine: Engine, prompt: list[int], tokens: TokenStream) -> AsyncGenerator[str]:
    """Yield a line per token, several at once if their tokens are there, and one for an error."""
    decoder, ready = codecs.getincrementaldecoder("utf-8")(errors="replace"), ""
    decoder.decode(engine.tokenizer.decode_bytes(prompt))  # may end within a character
    try:
        async for token in tokens:
            if token.reason != "stop":  # the end-of-text token
                ready += json.dumps(_to_json(engine, decoder, token, final=token.reason is not None)) + "\n"
            if ready and not tokens.has_more:
                yield ready
                ready = ""
    except (Exception, asyncio.CancelledError) as error:  # cancelled at the end of the server
        yield ready + json.dumps({"error": str(ApiError.of(error))}) + "\n"


async def _attention(models: Models, request: Request, body: dict[str, Any]) -> Response:
    """Return the weights (T, T) of one head, or their mean over the heads, as float32 in little-endian order."""
    values = check(body, _ATTENTION)
    engine = await find_engine(models, values["model"], values["silenced"])
    config, layer, head = engine.model.config, values["layer"], values["head"]
    require("layer", layer, *integer(0, config.n_layer - 1))
    require("head", head, *or_null(integer(0, config.n_head - 1)))
    ids = check_ids(values["ids"], config.vocab_size)[-config.block_size :]

    def compute(model: GPT) -> bytes:
        weights = layer_attention(model, torch.tensor(ids, device=model.wte.weight.device), layer)  # (H, T, T)
        shown = weights.mean(dim=0) if head is None else weights[head]  # (T, T)
        return shown.numpy().astype("<f4").tobytes()

    return Response(await engine.run(compute), media_type="application/octet-stream")


def _to_json(engine: Engine, decoder: codecs.IncrementalDecoder, token: Token, *, final: bool) -> dict[str, Any]:
    """Return a token with the characters that it completes."""
    tokenizer = engine.tokenizer
    return {
        "id": token.id,
        "text": decoder.decode(tokenizer.decode_bytes([token.id]), final),
        "logprob": None if isnan(token.logprob) else token.logprob,
        "rank": token.rank,
        "top": [{"id": i, "text": tokenizer.decode([i]), "logprob": logprob} for i, logprob in token.top],
    }


def _is_silenced(value: Any) -> bool:
    return isinstance(value, list) and all(is_ids(pair) and len(pair) == 2 for pair in value)


_COMMON: Settings = {**MODEL, "silenced": ([], (_is_silenced, "a list of [layer, head], from 0"))}
_IDS = (is_ids, "a list of token ids")
_SCORE: Settings = {**_COMMON, "text": (None, (lambda v: isinstance(v, str), "a text")), "ids": ([], _IDS)}
_GENERATE: Settings = {
    **_COMMON,
    **SAMPLING,
    "ids": ([], _IDS),
    "max_tokens": (256, integer(1, MAX_TOKENS)),
    "seed": (0, NON_NEGATIVE_INT),
}
_ATTENTION: Settings = {
    **_COMMON,
    "ids": (REQUIRED, _IDS),
    "layer": (REQUIRED, NON_NEGATIVE_INT),
    "head": (None, NON_NEGATIVE_INT),
}
