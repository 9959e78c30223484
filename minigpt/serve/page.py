"""The page, and the API that it uses: texts with the probability of every token, samples, attention, history."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from importlib.resources import files
from math import isnan
from pathlib import Path
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from minigpt.checkpoints.find import run_folder
from minigpt.data.pieces import piece_decoder, token_pieces
from minigpt.data.tokenizer import whole_characters
from minigpt.generation import NON_FINITE, check_ids
from minigpt.interpret.heads import attention_maps
from minigpt.interpret.page import N_TOP, describe_token
from minigpt.model import GPT
from minigpt.page.render import MAX_MAP_TOKENS, describe
from minigpt.runs.history import read_history
from minigpt.sampling import Sampling
from minigpt.serve import engine as engines
from minigpt.serve.engine import Engine, Token, TokenStream
from minigpt.serve.http import REQUIRED, Settings, Stream, check, check_model, find_engine, json_response, post
from minigpt.serve.models import Models
from minigpt.serve.settings import MAX_TOKENS, MODEL, SAMPLING, is_ids
from minigpt.utils.checks import NON_NEGATIVE_INT, integer, or_null
from minigpt.utils.errors import RunError, require

MAX_SCORED = 32768  # tokens of a text
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


def page_routes(models: Models) -> list[Route]:
    """Return the routes of the page and its API."""

    async def names(request: Request) -> Response:
        return json_response({"models": models.names()})

    async def description(request: Request) -> Response:
        name = request.path_params["name"]
        engine = await find_engine(models, name)
        return json_response(describe(name, engine.model.config, engine.tokenizer.name))

    async def history(request: Request) -> Response:
        path = Path(models.sources[check_model(models, request.path_params["name"])])
        return json_response(await asyncio.to_thread(read_history, run_folder(path) if path.is_file() else path))

    async def file(request: Request) -> Response:
        path = folder / (request.scope["path"].lstrip("/") or "index.html")
        return FileResponse(path, headers={"Cache-Control": "no-cache"}, media_type=_TYPES[path.suffix])

    folder = Path(str(files("minigpt.page")))
    paths = ["/", *(f"/{path.name}" for path in folder.iterdir() if path.suffix in _TYPES)]
    return [
        *(Route(path, file) for path in paths),
        Route("/api/models", names),
        Route("/api/models/{name:path}", description),
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
    pieces = token_pieces(engine.tokenizer, ids)
    return json_response({"tokens": [_to_json(engine, *pair) for pair in zip(tokens, pieces, strict=True)]})


async def _generate(models: Models, request: Request, body: dict[str, Any]) -> Response:
    values = check(body, _GENERATE)
    engine = await find_engine(models, values["model"], values["silenced"])
    tokenizer, sampling = engine.tokenizer, Sampling(**{name: values[name] for name in SAMPLING})
    prompt = values["ids"] or tokenizer.start.tolist()
    stop = tuple(tokenizer.separator.tolist()) if tokenizer.separated else ()
    tokens = engine.generate(engines.Request(prompt, values["max_tokens"], sampling, stop, values["seed"], N_TOP))
    lines = _lines(engine, values["ids"], tokens)
    return Stream(tokens, lines, lambda error: _line({"error": str(error)}), "application/x-ndjson")


async def _lines(engine: Engine, prompt: list[int], tokens: TokenStream) -> AsyncIterator[str]:
    """Yield a line per token."""
    decode = piece_decoder(engine.tokenizer)
    decode(prompt)  # may end within a character
    async for token in tokens:
        if token.reason != "stop":  # the end-of-text token
            yield _line(_to_json(engine, token, decode([token.id], token.reason is not None)))


def _line(content: object) -> str:
    return json.dumps(content) + "\n"


async def _attention(models: Models, request: Request, body: dict[str, Any]) -> Response:
    """Return the weights (T, T) of one head, or their mean over the heads, as float32 in little-endian order."""
    values = check(body, _ATTENTION)
    engine = await find_engine(models, values["model"], values["silenced"])
    config, layer, head = engine.model.config, values["layer"], values["head"]
    require("layer", layer, *integer(0, config.n_layer - 1))
    require("head", head, *or_null(integer(0, config.n_head - 1)))
    ids = check_ids(values["ids"], config.vocab_size)[-min(config.block_size, MAX_MAP_TOKENS) :]

    def compute(model: GPT) -> bytes:
        tokens = torch.tensor(ids, device=model.wte.weight.device)
        weights = attention_maps(model, tokens, slice(layer, layer + 1))[0]  # (H, T, T)
        shown = weights.mean(dim=0) if head is None else weights[head]  # (T, T)
        return shown.numpy().astype("<f4").tobytes()

    return Response(await engine.run(compute), media_type="application/octet-stream")


def _to_json(engine: Engine, token: Token, text: str) -> dict[str, Any]:
    logprob = None if isnan(token.logprob) else token.logprob
    return describe_token(engine.tokenizer, token.id, text, logprob, token.rank, token.top)


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
