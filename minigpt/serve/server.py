"""The server process: its socket, and its end on Ctrl-C."""

import socket

import uvicorn
from starlette.types import ASGIApp

from minigpt.utils.errors import UserError

_SHUTDOWN_SECONDS = 1  # for requests in progress


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


def new_server(app: ASGIApp) -> uvicorn.Server:
    """Return a server: `run(sockets=[…])` ends with Ctrl-C or SIGTERM; requests then have a second to finish."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="critical",  # the application prints its errors
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    return uvicorn.Server(config)
