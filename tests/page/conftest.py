"""Readers of the page of a server and of the page in a file; the module of a test defines `site`, their addresses."""

from collections.abc import Iterator
from typing import Any

import pytest
from readers import Reader, open_at


@pytest.fixture(params=["server", "file"])
def reader(request: Any, browser: Any, site: Any) -> Iterator[Reader]:
    yield from open_at(browser, getattr(site, request.param))


@pytest.fixture
def at_server(browser: Any, site: Any) -> Iterator[Reader]:
    yield from open_at(browser, site.server)


@pytest.fixture
def in_file(browser: Any, site: Any) -> Iterator[Reader]:
    yield from open_at(browser, site.file)
