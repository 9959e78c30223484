"""Fixtures of all tests: a small text, and functions that train on it with the real Hydra and Trainer."""

import csv
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

import minigpt
from minigpt.data.token_files import load
from minigpt.utils.signals import END_SIGNALS

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS, CONFIGS = ROOT / "scripts", ROOT / "configs"
TEST_DEVICE = os.environ.get("MINIGPT_TEST_DEVICE", "cuda")  # of tests marked gpu; cpu rehearses them

# Tests compare runs bitwise, and results depend on the number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# tiktoken's cache may be beside the folder of texts.
if (texts := os.environ.get("MINIGPT_DATA_DIR")) and (beside := Path(texts, "../tiktoken_cache")).is_dir():
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(beside.resolve()))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and TEST_DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


def pytest_xdist_auto_num_workers() -> int:
    """Return one worker more than cores, because many tests wait for a process or a timeout."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 20,000 characters with patterns that a tiny model learns."""
    lines = [f"{i}: the quick brown fox jumps over the lazy dog number {i * i % 97}.\n" for i in range(400)]
    file = tmp_path_factory.mktemp("text") / "fox.txt"
    file.write_text("".join(lines)[:20_000], encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, of selenium."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install selenium")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no Chromium or no chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield browser
    browser.quit()


@pytest.fixture(params=["server", "file"])
def reader(request: Any, browser: Any, site: Any) -> Iterator[Any]:
    """A reader of the page of a server, and of the page in a file: addresses in `site` of the test's module."""
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
    """Return a function that opens a page and returns one that runs a script in it; the page logs no error."""

    def open_(file: Path) -> Callable[..., Any]:
        ready = "return location.href === arguments[0] && ('backend' in globalThis || 'ready' in document.body.dataset)"
        browser.get(file.as_uri())
        wait_until(lambda: browser.execute_script(ready, file.as_uri()))  # a busy browser may return earlier
        return browser.execute_script

    browser.get_log("browser")
    yield open_
    assert browser.get_log("browser") == []  # no error, nothing blocked


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-2 with random weights, its configuration and its tokenizer, as transformers saves them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog number " * 20], trainer)
    size = tokenizer.get_vocab_size()
    folder = tmp_path_factory.mktemp("gpt2")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=size + 3, n_positions=32, n_embd=32, n_layer=2, n_head=2, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def small_run(text: Path, data: Path) -> list[str]:
    """Overrides that make a run small."""
    return f"""
        data.path={text} data.folder={data} data.batch_size=8
        trainer=cpu trainer.precision=32-true
        model.block_size=16 model.n_layer=2 model.n_head=2 model.n_embd=32
        max_steps=20 eval_every=10 log_every=5 callbacks.samples.max_new_tokens=20
        originality=null
    """.split()


def wait_until(condition: Callable[[], Any], seconds: float = 300) -> None:
    """Wait until a condition holds, which may fail an assertion itself."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timeout after {seconds:g} s"
        time.sleep(0.1)


def composed(*overrides: str) -> DictConfig:
    """Compose the configuration of a run."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", list(overrides))


def column(folder: Path, name: str) -> list[float]:
    """The numbers in a column of the metrics.csv of a run."""
    with open(folder / "metrics.csv", newline="", encoding="utf-8") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


def wandb_records(run: Path, index: int = 0) -> list[dict[str, Any]]:
    """The records of an offline run of Weights & Biases in a run folder, the first by default."""
    from robustness.faults.server import read_records

    return read_records(sorted((run / "wandb").glob("offline-run-*"))[index])


@pytest.fixture
def small(text: Path, tmp_path: Path) -> list[str]:
    """Overrides that make a run small, with all files in the temporary folder of the test."""
    return small_run(text, tmp_path / "data")


@pytest.fixture(scope="session")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A small run that tests only read: its folder, summary, output and validation tokens; its data is removed."""
    base = tmp_path_factory.mktemp("finished")
    overrides = [*small_run(text, base / "data"), f"hydra.run.dir={base}/run"]
    with redirect_stdout(StringIO()) as stdout, redirect_stderr(StringIO()) as stderr:
        summary = minigpt.train(overrides)
    (tokens,) = (base / "data/tokens").glob("*/meta.json")
    val = torch.from_numpy(load(tokens.parent).tokens("val")[:].astype("int64"))
    shutil.rmtree(base / "data")
    output = {"stdout": stdout.getvalue(), "stderr": stderr.getvalue()}
    return SimpleNamespace(folder=base / "run", summary=summary, overrides=overrides, val=val, **output)


@pytest.fixture
def train(small: list[str], tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """Train in this process: `train("max_steps=5", folder=...)` returns the folder, the loss, the summary."""

    def run(*overrides: str, folder: Path = tmp_path / "run") -> SimpleNamespace:
        summary = minigpt.train([*small, *overrides, f"hydra.run.dir={folder}"])
        return SimpleNamespace(folder=folder, loss=summary["best_val_loss"], summary=summary)

    return run


@pytest.fixture
def launch(small: list[str]) -> Callable[..., Any]:
    """Run a script in a new process and wait: `launch("train.py", "max_steps=5")`."""

    def run(script: str, *arguments: str, **options: Any) -> Any:
        command = [sys.executable, str(SCRIPTS / script), *(small if script == "train.py" else []), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)

    return run


@pytest.fixture
def call(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., SimpleNamespace]:
    """Run a script as `launch` does, but in this process, which has imported torch, and in the temporary folder."""
    monkeypatch.chdir(tmp_path)

    def run(script: str, *arguments: str, small_run: bool = True) -> SimpleNamespace:
        overrides = small if script == "train.py" and small_run else []
        monkeypatch.setattr(sys, "argv", [str(SCRIPTS / script), *overrides, *arguments])
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
