"""The HTTP application and the checks of every request before it; its socket, and its end on
Ctrl-C.
"""

import ipaddress
import logging
import re
import socket
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from hmac import compare_digest

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from minigpt.extras.playground.engine import QueueFull
from minigpt.extras.playground.export_html import PAGE
from minigpt.extras.playground.http import ApiError, json_response
from minigpt.extras.playground.loaded_models import Models
from minigpt.extras.playground.openai_api import api_routes
from minigpt.extras.playground.page_api import page_routes
from minigpt.utils.errors import UserError

# Origins of extensions of the browser and of apps, which the user installed; no web site can have
# one.
_INSTALLED = re.compile(
    r"(chrome-extension|moz-extension|safari-web-extension|app|tauri|capacitor|vscode-webview|vscode-file)://[^/\s]+"
)
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # an update has other scripts
}


def create_app(
    models: Models, *, host: str, key: str | None = None, origins: Collection[str] = ()
) -> ASGIApp:
    """Return the application: the page, its API, and that of OpenAI, behind `check_request`."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await models.close()

    async def health(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def to_response(request: Request, error: Exception) -> Response:
        # No route, and no file of the page
        if isinstance(error, HTTPException) and "endpoint" not in request.scope:
            error = not_found(request.method, request.scope["path"])
        return ApiError.of(error).response()

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = app
        if scope["type"] == "http":
            try:
                check_request(scope, host=host.lower(), key=key, origins=origins)
            except ApiError as error:
                answer = error.response()
        await answer(scope, receive, send)

    routes = [Route("/health", health), *api_routes(models), *page_routes(models)]
    handlers = dict.fromkeys(
        (ApiError, HTTPException, UserError, QueueFull, Exception), to_response
    )
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app.router.default = StaticFiles(directory=PAGE, html=True)
    return CORSMiddleware(
        guarded,
        allow_origins=origins,
        allow_origin_regex=_INSTALLED.pattern,
        allow_methods=("GET", "POST"),
        allow_headers=["*"],
        allow_private_network=True,  # of a web site that is not on this computer
    )


def not_found(method: str, path: str) -> ApiError:
    """Return the error of a path that does not exist, with the address that its client may mean."""
    single = re.sub("/+", "/", path)
    meant = re.search(r"/(chat/completions|completions|models(/.+)?)/?$", single)
    address = f"/v1/{meant[1]}" if meant else single
    advice = "" if address == path else f"; use {address} (the base URL of a client ends with /v1)"
    return ApiError(404, f"{method} {path} does not exist{advice}")


def check_request(scope: Scope, *, host: str, key: str | None, origins: Collection[str]) -> None:
    """Raise ApiError for a request of another web site, or without the key.

    A web site can send requests to servers of the computer on which it is read. They have its
    Origin; after DNS rebinding, its Host. Source: https://en.wikipedia.org/wiki/DNS_rebinding
    Extensions of the browser and apps may use the server.

    Args:
        host: the address or name that the server is bound to.
        key: is required as `Authorization: Bearer KEY` under /v1/ and /api/, if there is one.
        origins: of web sites that may use the server.
    """
    headers = Headers(scope=scope)
    given, origin = headers.get("host", ""), headers.get("origin")
    match = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::\d+)?", given.lower())
    name = (match[1] or match[2]) if match else ""  # without port and brackets
    # On all interfaces, any address is enough: only names are rebound.
    if not (is_loopback(name) or name == host or (host in ("0.0.0.0", "::") and _is_address(name))):
        raise ApiError(403, f"Host must be a loopback address or {host}, got {given}; see --host")
    known = (None, f"{scope['scheme']}://{given}", *origins)
    if origin not in known and not _INSTALLED.fullmatch(origin or ""):
        raise ApiError(
            403,
            f"Origin must be that of the server, got {origin}; allow others with --allow-origin",
        )
    kind, _, sent = headers.get("authorization", "").partition(" ")
    is_known = kind.lower() == "bearer" and compare_digest(
        sent.strip().encode(), (key or "").encode()
    )
    if key and not is_known and scope["path"].startswith(("/v1/", "/api/")):
        raise ApiError(
            401,
            "the key is wrong or missing; send the header Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def is_loopback(name: str) -> bool:
    """Return whether a name or address is that of this computer alone."""
    return name.lower() == "localhost" or (
        _is_address(name) and ipaddress.ip_address(name).is_loopback
    )


def _is_address(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def open_socket(host: str, port: int) -> socket.socket:
    """Open the socket of a server, so that connections wait until it runs; raise UserError if that
    fails.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        opened = socket.create_server((str(address[0]), port), family=family)
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).lower().partition(" (")[0]
        advice = "choose another --port, or 0 for a free one"
        raise UserError(
            f"--host {host} --port {port} cannot be opened ({reason}); {advice}"
        ) from error
    # Else a response waits 40 ms between head and body
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return opened


def new_server(app: ASGIApp, *, access_log: bool) -> uvicorn.Server:
    """Return a server: `run(sockets=[…])` ends with Ctrl-C or SIGTERM; requests then have a second
    to finish.

    The access log on stdout has a line per request, without its text and key.
    """
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        access_log=access_log,
        server_header=False,
        headers=list(_HEADERS.items()),
        timeout_graceful_shutdown=1,
    )
    log = logging.getLogger("uvicorn.error")
    log.setLevel("ERROR")
    # The application prints its errors
    log.addFilter(lambda record: record.msg.startswith("Cancel"))
    return uvicorn.Server(config)
