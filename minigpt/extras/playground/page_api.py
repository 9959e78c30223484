"""The API that the page uses: texts with the probability of every token, samples, attention,
history.
"""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from minigpt.checkpoints.find import find_checkpoint, find_snapshots, run_folder
from minigpt.data.tokenizer import Tokenizer, whole_characters
from minigpt.extras.conversations.encoding import encode_chat
from minigpt.extras.interpret.heads import attention_maps
from minigpt.extras.interpret.learning import learning_curves
from minigpt.extras.interpret.originality import compare
from minigpt.extras.interpret.token_pieces import token_pieces
from minigpt.extras.playground import http
from minigpt.extras.playground.engine import Engine, SampleRequest, Token
from minigpt.extras.playground.export_html import MAX_MAP_TOKENS, describe
from minigpt.extras.playground.history import read_history, run_status
from minigpt.extras.playground.loaded_models import Models
from minigpt.model.gpt import GPT
from minigpt.sampling.generation import check_ids
from minigpt.utils.checks import BOOLEAN, NON_NEGATIVE_INT, integer, or_null
from minigpt.utils.errors import require

MAX_SCORED = 32768  # tokens of a text
MAX_COMPARED = 20_000  # characters
N_TOP = 10  # alternatives of a token


def page_routes(models: Models) -> list[Route]:
    """Return the routes of the API."""
    # One index is built at a time, and a request that waits for it takes no thread of other
    # endpoints.
    comparing = ThreadPoolExecutor(1, "originality")

    async def description(request: Request) -> Response:
        name = request.path_params["name"]
        engine = await models.engine(name)
        return http.json_response(describe(name, engine.model.config, engine.tokenizer))

    async def history(request: Request) -> Response:
        return http.json_response(await asyncio.to_thread(_history, folder_of(request)))

    async def learning(request: Request) -> Response:
        return http.json_response(await asyncio.to_thread(learning_curves, folder_of(request)))

    async def originality(engine: Engine, values: dict[str, Any]) -> Response:
        path = find_checkpoint(models.sources[models.find(values["model"])[0]])
        found = asyncio.get_running_loop().run_in_executor(
            comparing, compare, path, whole_characters(values["text"])
        )
        return http.json_response(await found)

    def folder_of(request: Request) -> Path:
        path = Path(models.sources[models.find(request.path_params["name"])[0]])
        return run_folder(path) if path.is_file() else path

    return [
        Route("/api/models/{name:path}", description),
        Route("/api/history/{name:path}", history),
        Route("/api/learning/{name:path}", learning),
        http.post("/api/score", models, _SCORE, _score),
        http.post("/api/chat", models, _CHAT, _chat),
        http.post("/api/generate", models, _GENERATE, _generate),
        http.post("/api/attention", models, _ATTENTION, _attention),
        http.post("/api/originality", models, _ORIGINALITY, originality),
    ]


def _history(folder: Path) -> dict[str, Any]:
    """Return what is known of a run, which may be training: its curves, its samples, its snapshots,
    its status.
    """
    return {
        **(read_history(folder) or {}),
        "steps": list(find_snapshots(folder)),
        "status": run_status(folder),
    }


async def _score(engine: Engine, values: dict[str, Any]) -> Response:
    ids, tokenizer = values["ids"], engine.tokenizer
    if values["text"]:
        parsed = (
            await asyncio.to_thread(tokenizer.parse, whole_characters(values["text"]))
        ).tolist()
        ids = [*tokenizer.prefix, *parsed]
    return await _scored(engine, ids)


async def _chat(engine: Engine, values: dict[str, Any]) -> Response:
    tokenizer = engine.tokenizer
    expected = "one with a chat template"
    require("model", values["model"], lambda _: tokenizer.chat is not None, expected)
    messages = [{"role": "user", "content": whole_characters(values["text"])}]
    return await _scored(engine, await asyncio.to_thread(encode_chat, tokenizer, messages))


async def _scored(engine: Engine, ids: list[int]) -> Response:
    tokenizer = engine.tokenizer
    require(
        "the text",
        f"{len(ids):,} tokens",
        lambda _: len(ids) <= MAX_SCORED,
        f"at most {MAX_SCORED:,} tokens long",
    )
    tokens = await engine.score(ids, n_top=N_TOP) if ids else []
    texts = token_pieces(tokenizer, ids)
    # A text is shown without the prefix, which is put before it again
    begin = len(tokenizer.prefix) if ids[: len(tokenizer.prefix)] == [*tokenizer.prefix] else 0
    names = _read_names(tokenizer)
    texts[begin:] = [names.get(i, text) for i, text in zip(ids[begin:], texts[begin:], strict=True)]
    return http.json_response(
        {"tokens": [_to_json(engine, *pair) for pair in zip(tokens, texts, strict=True)]}
    )


async def _generate(engine: Engine, values: dict[str, Any]) -> Response:
    sampling = http.sampling(values)
    tokenizer = engine.tokenizer
    prompt = values["ids"] or tokenizer.start.tolist()
    # Any special token ends an answer
    stop = (*tokenizer.end_ids, *(tokenizer.special.values() if values["chat"] else ()))
    names = _read_names(tokenizer)
    tokens = engine.generate(
        SampleRequest(prompt, values["max_tokens"], sampling, stop, values["seed"], N_TOP)
    )
    lines = (
        _line(_to_json(engine, token, names.get(token.id, token.text)))
        async for token in tokens
        if token.reason != "stop"
    )
    return http.stream(
        tokens, lines, lambda error: _line({"error": error.message}), "application/x-ndjson"
    )


def _read_names(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the names of special tokens that are these tokens in a text, by id."""
    return {i: name for name, i in tokenizer.special.items()} if tokenizer.reads_special else {}


def _line(content: object) -> str:
    return json.dumps(content) + "\n"


async def _attention(engine: Engine, values: dict[str, Any]) -> Response:
    """Return the weights (T, T) of one head, or their mean over the heads, as float32 in
    little-endian order.
    """
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
    """Return a token for the page, with the characters that it completes and the most likely
    alternatives.
    """
    top = [
        {"id": i, "text": engine.tokenizer.decode([i]), "logprob": value} for i, value in token.top
    ]
    return {"id": token.id, "text": text, "logprob": token.logprob, "rank": token.rank, "top": top}


_SHORT = (
    lambda v: isinstance(v, str) and len(v) <= MAX_COMPARED,
    f"a text of at most {MAX_COMPARED:,} characters",
)
_ORIGINALITY: http.Settings = {**http.MODEL, "text": (http.REQUIRED, _SHORT)}
_IDS = (http.is_ids, "a list of token ids")
_SCORE: http.Settings = {
    **http.MODEL,
    "text": (None, (lambda v: isinstance(v, str), "a text")),
    "ids": ([], _IDS),
}
_CHAT: http.Settings = {
    **http.MODEL,
    "text": (http.REQUIRED, (lambda v: isinstance(v, str), "a text")),
}
_GENERATE: http.Settings = {
    **http.MODEL,
    **http.SAMPLING,
    "chat": (False, BOOLEAN),  # whether it is an answer
    "ids": ([], _IDS),
    "max_tokens": (256, integer(1, http.MAX_TOKENS)),
    "seed": (0, NON_NEGATIVE_INT),
}
_ATTENTION: http.Settings = {
    **http.MODEL,
    "ids": (http.REQUIRED, _IDS),
    "layer": (http.REQUIRED, NON_NEGATIVE_INT),
    "head": (None, NON_NEGATIVE_INT),
}
