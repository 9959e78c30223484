"""Fixtures of all tests: a small text, runs on it, what workers share, scripts, and a browser."""

import os

# Tests compare runs bitwise, and results depend on the number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hashlib
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import quick  # noqa: F401
import torch
from filelock import FileLock
from models import save_tokenizer
from processes import Script
from small_runs import SCRIPTS, TEST_DEVICE, small_run, wait_until

import minigpt
from minigpt.data.token_files import load
from minigpt.runs.code_version import code_in_place
from minigpt.runs.curves import plot_curves
from minigpt.runs.run_dir import read_summary
from minigpt.utils.signals import END_SIGNALS

Once = Callable[[str, Callable[[Path], Any]], Path]

# Which a process in the background inherits as ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # … and a process under nohup
# tiktoken's cache may be beside the folder of texts.
if (texts := os.environ.get("MINIGPT_DATA_DIR")) and (
    beside := Path(texts, "../tiktoken_cache")
).is_dir():
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(beside.resolve()))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and TEST_DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that share a fixture of their module, or fork, in one worker each, and first."""
    for item in items:
        found: Any = item
        fixtures = chain.from_iterable(found._fixtureinfo.name2fixturedefs.values())
        if any(fixture.scope == "module" for fixture in fixtures):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        elif "launch" in found.fixturenames or item.path.stem == "test_faults":
            item.add_marker(pytest.mark.xdist_group("processes"))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Build a folder once for all workers, which only read it: `once("name", build)`."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder(name: str, build: Callable[[Path], Any]) -> Path:
        path = base / name
        with FileLock(f"{path}.lock"):
            if not (built := path.with_suffix(".built")).exists():
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir()
                build(path)
                built.write_text(contents(path), encoding="utf-8")
        assert built.read_text(encoding="utf-8") == contents(path), (
            f"a test changed {path}, which is shared"
        )
        return path

    def contents(path: Path) -> str:
        return "".join(
            f"{file} {file.stat().st_mtime_ns}\n"
            for file in sorted(path.rglob("*"))
            if file.is_file()
        )

    return folder


@pytest.fixture(scope="session")
def text(once: Once) -> Path:
    """A text of 20,000 characters with patterns that a tiny model learns."""
    lines = [
        f"{i}: the quick brown fox jumps over the lazy dog number {i * i % 97}.\n"
        for i in range(400)
    ]
    return (
        once(
            "text",
            lambda folder: (folder / "fox.txt").write_bytes("".join(lines)[:20_000].encode()),
        )
        / "fox.txt"
    )


@pytest.fixture(scope="session")
def trained(once: Once, text: Path) -> Callable[..., Path]:
    """Return the folder of a small run with these overrides, trained once for all workers."""

    def run(*overrides: str) -> Path:
        def build(folder: Path) -> None:
            given = [*small_run(text, folder / "data", *overrides), f"hydra.run.dir={folder}/run"]
            with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
                minigpt.train(given)
            for name, stream in (("out", out), ("err", err)):
                (folder / name).write_text(stream.getvalue(), encoding="utf-8")

        return (
            once("trained-" + hashlib.sha256(" ".join(overrides).encode()).hexdigest()[:12], build)
            / "run"
        )

    return run


@pytest.fixture(scope="session", autouse=True)
def _no_curves() -> Iterator[None]:
    """Plot no curves.png but in tests with the fixture `curves`."""
    with patch("minigpt.runs.fit.plot_curves"):
        yield


@pytest.fixture
def curves() -> Iterator[None]:
    with patch("minigpt.runs.fit.plot_curves", plot_curves):
        yield


# What browsers of 2022 lack, Firefox 102 among them; pages must work without it.
NEWER_THAN_2022 = """
    for (const [object, names] of [
        [Array.prototype, ["findLast", "findLastIndex", "group"]],
        [Array.prototype, ["toReversed", "toSorted", "toSpliced", "with"]],
        [Object.getPrototypeOf(Int8Array.prototype), ["findLast", "findLastIndex"]],
        [Object.getPrototypeOf(Int8Array.prototype), ["toReversed", "toSorted", "with"]],
        [Object.getPrototypeOf(Object.getPrototypeOf([].values())),
            ["drop", "filter", "flatMap", "map", "take"]],
        [String.prototype, ["isWellFormed", "toWellFormed"]],
        [Element.prototype, Object.keys(Element.prototype).filter(name => /^aria[A-Z]/.test(name))],
        [HTMLElement.prototype, ["inert", "popover"]],
        [HTMLElement.prototype, ["showPopover", "hidePopover", "togglePopover"]],
        [Set.prototype, ["union", "intersection", "difference"]],
        [Set.prototype, ["isSubsetOf", "isSupersetOf", "isDisjointFrom"]],
        [AbortSignal, ["any", "timeout"]], [Array, ["fromAsync"]],
        [Map, ["groupBy"]], [Object, ["groupBy"]],
        [Promise, ["try", "withResolvers"]], [Response.prototype, ["bytes"]],
        [Uint8Array, ["fromBase64", "fromHex"]],
        [URL, ["canParse", "parse"]],
        [window, ["CompressionStream", "DecompressionStream"]],
        [window, ["TextDecoderStream", "TextEncoderStream"]],
        [window, ["Float16Array", "Highlight", "Iterator", "navigation", "scheduler"]],
    ]) for (const name of names) delete object[name];
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, of selenium, with the functions of a browser of 2022."""
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="no selenium: pip install selenium"
    )
    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no Chromium or no chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
    browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": NEWER_THAN_2022})
    yield browser
    browser.quit()


@pytest.fixture(params=["server", "file"])
def reader(request: Any, browser: Any, site: Any) -> Iterator[Any]:
    """A reader of the page of a server, and of that in a file; `site` has the addresses."""
    from readers import open_at

    yield from open_at(browser, getattr(site, request.param))


@pytest.fixture
def at_server(browser: Any, site: Any) -> Iterator[Any]:
    from readers import open_at

    yield from open_at(browser, site.server)


@pytest.fixture
def in_file(browser: Any, site: Any) -> Iterator[Any]:
    from readers import open_at

    yield from open_at(browser, site.file)


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[[Path], Callable[..., Any]]]:
    """Return a function that opens a page without errors, and returns one that runs scripts."""

    def open_(file: Path) -> Callable[..., Any]:
        ready = """return location.href === arguments[0] &&
            ('backend' in globalThis || 'ready' in document.body.dataset)"""
        browser.get(file.as_uri())
        # A busy browser may return earlier
        wait_until(lambda: browser.execute_script(ready, file.as_uri()))
        return browser.execute_script

    browser.get_log("browser")
    yield open_
    assert browser.get_log("browser") == []  # no error, nothing blocked


@pytest.fixture(scope="session")
def gpt2_folder(once: Once) -> Path:
    """A small GPT-2 with random weights and its tokenizer, as transformers saves them."""

    def build(folder: Path) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        text = "the quick brown fox jumps over the lazy dog number " * 20
        size = len(save_tokenizer(folder, text, ["<|endoftext|>"], eos_token="<|endoftext|>"))
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=size + 3, n_positions=32, n_embd=32, n_layer=2, n_head=2, eos_token_id=0
        )
        GPT2LMHeadModel(config).save_pretrained(folder)

    return once("gpt2", build)


@pytest.fixture
def small(text: Path, tmp_path: Path) -> list[str]:
    """Overrides that make a run small, with all files in the temporary folder of the test."""
    return small_run(text, tmp_path / "data")


@pytest.fixture(scope="session")
def finished(trained: Callable[..., Path]) -> SimpleNamespace:
    """A small run with samples, which is read only: folder, summary, output, validation tokens."""
    with patch("minigpt.runs.fit.plot_curves", plot_curves):
        folder = trained("log_every=5", "callbacks.samples.max_new_tokens=20")  # with curves
    (tokens,) = folder.glob("../data/tokens/*/meta.json")
    val = torch.from_numpy(load(tokens.parent).tokens("val")[:].astype("int64"))
    output = {
        "stdout": (folder / "../out").read_text(encoding="utf-8"),
        "stderr": (folder / "../err").read_text(encoding="utf-8"),
    }
    return SimpleNamespace(folder=folder, summary=read_summary(folder), val=val, **output)


@pytest.fixture
def train(text: Path, tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """Train in this process: `train("max_steps=5")` returns folder, loss and summary."""

    def run(*overrides: str, folder: Path = tmp_path / "run") -> SimpleNamespace:
        summary = minigpt.train(
            [*small_run(text, tmp_path / "data", *overrides), f"hydra.run.dir={folder}"]
        )
        return SimpleNamespace(folder=folder, loss=summary["best_val_loss"], summary=summary)

    return run


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A clone of the project with a git history of its own, from which this process takes code."""
    from clones import clone_in

    yield clone_in(tmp_path / "clone", monkeypatch)
    code_in_place.cache_clear()


@pytest.fixture
def launch(text: Path, tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """Run a script in a forked process and wait; options are those of `Script`."""

    def run(script: str, *arguments: str, **options: Any) -> SimpleNamespace:
        arguments = (
            (*small_run(text, tmp_path / "data", *arguments),)
            if script == "train.py"
            else arguments
        )
        process = Script(
            script, *arguments, output=tmp_path / f"process-{time.monotonic_ns()}", **options
        )
        return SimpleNamespace(
            returncode=process.wait(), stdout=process.stdout, stderr=process.stderr
        )

    return run


@pytest.fixture
def call(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., SimpleNamespace]:
    """Run a script as `launch` does, but in this process and in the temporary folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a run adds its working folder

    def run(script: str, *arguments: str, small: bool = True) -> SimpleNamespace:
        if script == "train.py" and small:
            arguments = (*small_run(text, tmp_path / "data", *arguments),)
        monkeypatch.setattr(sys, "argv", [str(SCRIPTS / script), *arguments])
        handlers = {signum: signal.getsignal(signum) for signum in END_SIGNALS}
        code: Any = 0
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as ended:
            code = ended.code or 0
        finally:
            for handler in handlers.items():
                signal.signal(*handler)
        out, err = capfd.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return run
