"""What the endpoints share: JSON bodies and their settings, errors, streams, and clients that
disconnect.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, fields
from typing import Any

from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from minigpt.extras.playground.engine import Engine, QueueFull, TokenStream
from minigpt.extras.playground.loaded_models import LoadError, Models, UnknownModel
from minigpt.sampling.settings import RULES, SamplingSettings
from minigpt.utils.checks import CLOSED_FRACTION, Rule, as_integer, integer, is_number
from minigpt.utils.cli import error_text
from minigpt.utils.errors import RunError, UserError, require
from minigpt.utils.terminal import log, sanitize_line

Settings = Mapping[str, tuple[Any, Rule]]  # default and rule by name
Answer = Callable[[Engine, dict[str, Any]], Coroutine[Any, Any, Response]]

MAX_BODY_BYTES = 1 << 20
MAX_TOKENS = 65_536  # of a prompt, and of a sample
_JSON = "application/json"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


@dataclass(eq=False)
class ApiError(Exception):
    """An error of a request, with its HTTP status."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    @classmethod
    def of(cls, error: BaseException) -> "ApiError":
        """Return the error that a client gets; the cause of a failure of the server is printed to
        its terminal.
        """
        match error:
            case ApiError():
                return error
            case HTTPException():  # of the router
                return cls(error.status_code, error.detail.lower(), headers=error.headers)
            case asyncio.CancelledError():
                return cls(503, "the server was stopped")
            case QueueFull():
                return cls(
                    429,
                    f"too many requests wait: {error}",
                    code="rate_limit_exceeded",
                    headers={"Retry-After": "1"},
                )
            case UnknownModel():
                return cls(404, str(error), param="model", code="model_not_found")
            case LoadError():
                return cls(500, str(error))
            case UserError() if not isinstance(error, RunError):
                return cls(400, str(error))
        if not isinstance(error, ClientDisconnect):
            log(f"error: {error_text(error)}")
        return cls(500, "the server failed; its terminal shows the error")

    def content(self) -> dict[str, Any]:
        """Return what OpenAI's clients expect."""
        kind = _TYPES.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return {
            "error": {
                "message": sanitize_line(self.message),
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """Return the response to the request."""
        return json_response(self.content(), self.status, self.headers)


def json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response of ASCII, so that it can hold lone surrogates."""
    return Response(json.dumps(content), status, headers, _JSON)


def post(path: str, models: Models, settings: Settings, answer: Answer) -> Route:
    """Return a route for POST; `answer` gets the engine and the settings of a request.

    It is cancelled if the client disconnects, or when the server ends.
    """

    async def work(body: dict[str, Any]) -> Response:
        values = check(body, settings)
        return await answer(await models.engine(values["model"]), values)

    async def endpoint(request: Request) -> Response:
        working = asyncio.create_task(work(await _read_json(request)))
        # After the body, the only message is the end of the connection
        disconnect = asyncio.ensure_future(request.receive())
        disconnect.add_done_callback(lambda _: working.cancel())
        try:
            return await working
        except asyncio.CancelledError as error:
            return ApiError.of(error).response()
        finally:
            disconnect.cancel()

    return Route(path, endpoint, methods=["POST"])


def stream(
    tokens: TokenStream, parts: AsyncIterator[str], last: Callable[[ApiError], str], media_type: str
) -> StreamingResponse:
    """Return a response whose parts are sent as they are made of tokens, several at once if their
    tokens are there.

    `last` returns the part that ends the response after an error.
    """

    async def batches() -> AsyncIterator[str]:
        ready = ""
        try:
            async for part in parts:
                ready += part
                if tokens.empty():
                    yield ready
                    ready = ""
        except (Exception, asyncio.CancelledError) as error:  # cancelled at the end of the server
            ready += last(ApiError.of(error))
        yield ready

    close = BackgroundTask(tokens.aclose)  # runs also if the client disconnects
    return StreamingResponse(batches(), media_type=media_type, background=close)


def check(body: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return the value or default of every setting; null is the default. Other settings must be
    empty or zero.
    """
    for name in body.keys() - settings.keys():
        if body[name]:
            raise ApiError(
                400,
                f"{name} is not supported with this value; leave it out",
                param=name,
                code="unsupported_parameter",
            )
    values = {}
    for name, (default, (accepts, expected)) in settings.items():
        given = body.get(name)
        if given is not None or default is REQUIRED:
            try:
                require(name, given, accepts, expected)
            except UserError as error:
                raise ApiError(400, str(error), param=name) from error
        values[name] = default if given is None else given
    return values


def sampling(values: Mapping[str, Any]) -> SamplingSettings:
    """Return the filters of a request; a top_k of 0 or -1 and a top_p of 0 are none, as in vLLM and
    llama.cpp.
    """
    off = {"top_k": max(0, values["top_k"] or 0) or None, "top_p": values["top_p"] or None}
    return SamplingSettings(**{name: values[name] for name in SAMPLING} | off)


def is_ids(value: Any) -> bool:
    """Return whether a value is a list of integers."""
    return isinstance(value, list) and all(type(i) is int for i in value)


async def _read_json(request: Request) -> dict[str, Any]:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
        raise ApiError(415, f"the Content-Type of a request must be {_JSON}")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(
                413,
                f"the body of a request must have at most {MAX_BODY_BYTES:,} bytes",
                headers={"Connection": "close"},
            )
    try:
        values = json.loads(body, parse_float=_parse_number)
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(";")[0]  # without advice for programmers
        raise ApiError(400, f"the body of a request must be JSON ({reason})") from error
    if not isinstance(values, dict):
        raise ApiError(400, "the body of a request must be a JSON object")
    return values


def _parse_number(text: str) -> float:
    """Return a whole number as an integer: some clients send all numbers as floats, such as
    max_tokens 8.0.
    """
    number = float(text)
    return as_integer(number) if abs(number) < 1 << 53 else number


REQUIRED = object()  # as a default
MODEL: Settings = {"model": (REQUIRED, (lambda v: isinstance(v, str), "a name of GET /v1/models"))}
SAMPLING: Settings = {
    **{field.name: (field.default, RULES[field.name]) for field in fields(SamplingSettings)},
    "top_k": (None, integer(-1)),
    "top_p": (None, CLOSED_FRACTION),
    "temperature": (1.0, (lambda v: is_number(v) and 0 <= v <= 100, "in [0, 100]")),
}
