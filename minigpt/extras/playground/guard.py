"""Checks of every request before the application: the Host, the Origin and the key."""

import ipaddress
import re
from collections.abc import Collection
from hmac import compare_digest

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from minigpt.extras.playground.http import ApiError


class Guard:
    """Refuse requests of other web sites and those without the key.

    A web site can send requests to servers of the computer on which it is read. They have its Origin; after DNS
    rebinding, its Host. Source: https://en.wikipedia.org/wiki/DNS_rebinding

    Args:
        host: the address or name that the server is bound to.
        key: is required as `Authorization: Bearer KEY` under /v1/ and /api/, if there is one.
        origins: of web sites that may use the server.
    """

    def __init__(self, app: ASGIApp, *, host: str, key: str | None = None, origins: Collection[str] = ()) -> None:
        self.app, self.host, self.key, self.origins = app, host.lower(), key, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http":
            try:
                self._check(scope, Headers(scope=scope))
            except ApiError as error:
                app = error.response()
        await app(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_own(host):
            raise ApiError(403, f"Host must be a loopback address or {self.host}, got {host}; see --host")
        if origin is not None and origin not in (f"{scope['scheme']}://{host}", *self.origins):
            raise ApiError(403, f"Origin must be that of the server, got {origin}; allow others with --allow-origin")
        given = headers.get("authorization", "").encode()
        private = scope["path"].startswith(("/v1/", "/api/"))
        if self.key and private and not compare_digest(given, f"Bearer {self.key}".encode()):
            message = "the key is wrong or missing; send the header Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _is_own(self, host: str) -> bool:
        """Return whether a Host header has the loopback or bound name; on all interfaces, any address is enough."""
        match = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::\d+)?", host.lower())
        name = (match[1] or match[2]) if match else ""  # without port and brackets
        return is_loopback(name) or name == self.host or (self.host in ("0.0.0.0", "::") and _is_address(name))


def is_loopback(name: str) -> bool:
    """Return whether a name or address is that of this computer alone."""
    return name.lower() == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def _is_address(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False
