"""The HTTP application, its socket, and its end on Ctrl-C."""

import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from minigpt.serve.api import api_routes
from minigpt.serve.engine import QueueFull
from minigpt.serve.http import ApiError, json_response
from minigpt.serve.models import Models
from minigpt.serve.page import page_routes
from minigpt.utils.errors import UserError


def create_app(models: Models) -> Starlette:
    """Return the application: the page, its API, and that of OpenAI, without the checks of `minigpt.serve.guard`."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await models.close()

    async def health(request: Request) -> Response:
        return json_response({"status": "ok"})

    def to_response(request: Request, error: Exception) -> Response:
        return ApiError.of(error).response()

    routes = [Route("/health", health), *api_routes(models), *page_routes(models)]
    handlers = dict.fromkeys((ApiError, HTTPException, UserError, QueueFull, Exception), to_response)
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)


def open_socket(host: str, port: int) -> socket.socket:
    """Open the socket of a server, so that connections wait until it runs.

    Raises:
        UserError: the port is taken, or the host is not of this computer.
    """
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
        app, http="h11", ws="none", access_log=access_log, server_header=False, timeout_graceful_shutdown=1
    )
    logging.getLogger("uvicorn.error").setLevel("CRITICAL")  # the application prints its errors
    return uvicorn.Server(config)
