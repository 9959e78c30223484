"""The HTTP application, its socket, and its end on Ctrl-C."""

import logging
import socket
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from minigpt.extras.playground.engine import QueueFull
from minigpt.extras.playground.guard import Guard
from minigpt.extras.playground.http import ApiError, json_response
from minigpt.extras.playground.loaded_models import Models
from minigpt.extras.playground.openai_api import api_routes
from minigpt.extras.playground.page_api import page_routes
from minigpt.utils.errors import UserError

_SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def create_app(models: Models, *, host: str, key: str | None = None, origins: Collection[str] = ()) -> ASGIApp:
    """Return the application: the page, its API, and that of OpenAI, behind a `Guard` with the same arguments."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await models.close()

    async def health(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def to_response(request: Request, error: Exception) -> Response:
        return ApiError.of(error).response()

    routes = [Route("/health", health), *api_routes(models), *page_routes(models)]
    handlers = dict.fromkeys((ApiError, HTTPException, UserError, QueueFull, Exception), to_response)
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    return CORSMiddleware(
        Guard(app, host=host, key=key, origins=origins),
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=["*"],
        allow_private_network=True,  # of a web site that is not on this computer
    )


def open_socket(host: str, port: int) -> socket.socket:
    """Open the socket of a server, so that connections wait until it runs; raise UserError if that fails."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        opened = socket.create_server((str(address[0]), port), family=family)
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).lower().partition(" (")[0]
        advice = "choose another --port, or 0 for a free one"
        raise UserError(f"--host {host} --port {port} cannot be opened ({reason}); {advice}") from error
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else a response waits 40 ms between head and body
    return opened


def new_server(app: ASGIApp, *, access_log: bool) -> uvicorn.Server:
    """Return a server: `run(sockets=[…])` ends with Ctrl-C or SIGTERM; requests then have a second to finish.

    The access log on stdout has a line per request, without its text and key.
    """
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        access_log=access_log,
        server_header=False,
        headers=list(_SECURITY_HEADERS.items()),
        timeout_graceful_shutdown=1,
    )
    log = logging.getLogger("uvicorn.error")
    log.setLevel("ERROR")
    log.addFilter(lambda record: record.msg.startswith("Cancel"))  # the application prints its errors
    return uvicorn.Server(config)
