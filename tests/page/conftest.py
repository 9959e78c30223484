"""The page on a server and in a file."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from servers import SlowEngine, serving
from sites import write_site


@pytest.fixture(scope="module")
def site(once: Callable[..., Path]) -> Iterator[SimpleNamespace]:
    """The addresses of the page: `server` has all runs, `file` the first."""
    folder = once("site", write_site)
    with serving([folder / name for name in ("small", "other", "shifted")], engine=SlowEngine) as server:
        yield SimpleNamespace(folder=folder, server=f"{server.url}/", file=(folder / "small.html").as_uri())
