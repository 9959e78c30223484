"""What the endpoints share: JSON bodies and their checks, errors, streams, and clients that disconnect."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import aclosing
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from minigpt.serve.engine import Engine, QueueFull, TokenStream
from minigpt.serve.models import Models
from minigpt.utils.checks import Rule
from minigpt.utils.cli import error_text
from minigpt.utils.errors import RunError, UserError, require
from minigpt.utils.terminal import log, sanitize_line

Settings = Mapping[str, tuple[Any, Rule]]  # default and rule by name

REQUIRED = object()  # as a default
MAX_BODY_BYTES = 1 << 20
_JSON = "application/json"
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error of a request, with its HTTP status."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}
        self.content = {"error": {"message": sanitize_line(message), "type": kind, "param": param, "code": code}}

    @classmethod
    def of(cls, error: BaseException) -> "ApiError":
        """Return the error that a client gets; the cause of a failure of the server is printed to its terminal."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, HTTPException):  # of the router
            return cls(error.status_code, error.detail.lower(), **(error.headers or {}))
        if isinstance(error, asyncio.CancelledError):
            return cls(503, "the server was stopped")
        if isinstance(error, QueueFull):
            return cls(429, f"too many requests wait: {error}", code="rate_limit_exceeded", retry_after="1")
        if isinstance(error, UserError) and not isinstance(error, RunError):
            return cls(400, str(error))
        if not isinstance(error, ClientDisconnect):
            log(f"error: {error_text(error)}")
        return cls(500, "the server failed; its terminal shows the error")

    def response(self) -> Response:
        """Return the response that OpenAI's clients expect."""
        return json_response(self.content, self.status, self.headers)


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response of ASCII, so that it can hold lone surrogates."""
    return Response(json.dumps(content), status, headers, _JSON)


def post(path: str, work: Callable[[Request, dict[str, Any]], Coroutine[Any, Any, Response]]) -> Route:
    """Return a route for POST; `work` gets the JSON object of the body, and is cancelled if the client disconnects."""

    async def endpoint(request: Request) -> Response:
        working = asyncio.create_task(work(request, await _read_json(request)))
        disconnect = asyncio.ensure_future(request.receive())  # after the body, there is no other message
        disconnect.add_done_callback(lambda _: working.cancel())
        try:
            return await working
        except asyncio.CancelledError:
            if disconnect.done():
                return Response(status_code=499)  # to nobody
            raise
        finally:
            disconnect.cancel()

    return Route(path, endpoint, methods=["POST"])


class Stream(StreamingResponse):
    """A response whose parts are sent as they are made of tokens, several at once if their tokens are there.

    Args:
        last: returns the part that ends the response after an error.
    """

    def __init__(
        self, tokens: TokenStream, parts: AsyncIterator[str], last: Callable[[ApiError], str], media_type: str
    ) -> None:
        super().__init__(self._batches(parts, last), media_type=media_type, headers={"Cache-Control": "no-store"})
        self.tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.tokens):  # also if the client disconnects
            await super().__call__(scope, receive, send)

    async def _batches(self, parts: AsyncIterator[str], last: Callable[[ApiError], str]) -> AsyncIterator[str]:
        ready = ""
        try:
            async for part in parts:
                ready += part
                if not self.tokens.has_more:
                    yield ready
                    ready = ""
        except (Exception, asyncio.CancelledError) as error:  # cancelled at the end of the server
            ready += last(ApiError.of(error))
        yield ready


def check(body: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return the value or default of every setting; null is the default. Other settings must be empty or zero."""
    for name in body.keys() - settings.keys():
        if body[name]:
            message = f"{name} is not supported with this value; leave it out"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    values = {}
    for name, (default, rule) in settings.items():
        values[name] = default if body.get(name) is None else body[name]
        if values[name] is not default or default is REQUIRED:
            try:
                require(name, None if values[name] is REQUIRED else values[name], *rule)
            except UserError as error:
                raise ApiError(400, str(error), param=name) from error
    return values


def check_model(models: Models, name: str) -> str:
    """Return the name of a model; raise ApiError if there is none."""
    if name not in models.names():
        message = f"the model {name!r} does not exist; GET /v1/models lists all"
        raise ApiError(404, message, param="model", code="model_not_found")
    return name


async def find_engine(models: Models, name: str, silenced: Collection[tuple[int, int]] = ()) -> Engine:
    """Return the engine of a model; raise ApiError if there is none, or it cannot be loaded."""
    try:
        engine = await models.engine(check_model(models, name))
    except UserError as error:
        raise ApiError(500, f"{name} cannot be loaded: {error}") from error
    return models.silenced(name, silenced) if silenced else engine


async def _read_json(request: Request) -> dict[str, Any]:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
        raise ApiError(415, f"the Content-Type of a request must be {_JSON}")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body of a request must have at most {MAX_BODY_BYTES:,} bytes", connection="close")
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body of a request must be JSON ({error})") from error
    if not isinstance(values, dict):
        raise ApiError(400, "the body of a request must be a JSON object")
    return values
