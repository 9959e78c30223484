"""The page on a server and in a file, and a server of a model of bytes and of a GPT-2."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from servers import SlowEngine, make_run, serving
from sites import write_site


# The addresses of the page: `server` has all runs, `file` the first
@pytest.fixture(scope="module")
def site(once: Callable[..., Path]) -> Iterator[SimpleNamespace]:
    folder = once("site", write_site)
    runs = [folder / name for name in ("small", "other", "shifted")]
    file = (folder / "small.html").as_uri()
    with serving(runs, engine=SlowEngine) as server:
        yield SimpleNamespace(folder=folder, server=f"{server.url}/", file=file)


# The folder of a run with a history, whose model is called tiny
@pytest.fixture(scope="session")
def run(once: Callable[..., Path]) -> Path:
    def build(folder: Path) -> None:
        make_run(folder / "tiny")
        (folder / "tiny/metrics.csv").write_text("step,train_loss,val_loss\n1,5.5,\n2,,5.25\n")
        samples = "── step 2, validation loss 5.2500 ──\nROMEO:\n\nhm\n\n"
        (folder / "tiny/samples.txt").write_text(samples, encoding="utf-8")

    return once("served", build) / "tiny"


@pytest.fixture(scope="module")
def http(run: Path, gpt2_folder: Path) -> Iterator[httpx.Client]:
    with (
        serving([run, gpt2_folder]) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client
