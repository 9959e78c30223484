"""The HTTP application: the page, its API, and that of OpenAI."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from minigpt.serve.api import api_routes
from minigpt.serve.engine import QueueFull
from minigpt.serve.http import ApiError, json_response
from minigpt.serve.models import Models
from minigpt.serve.page import page_routes
from minigpt.utils.errors import UserError


def create_app(models: Models) -> Starlette:
    """Return the application, without the checks of `minigpt.serve.guard`."""

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
