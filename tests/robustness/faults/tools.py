"""What the faults share: runs as processes, waiting for what they write, and comparing run folders bit for bit."""

import csv
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock, RLock
from typing import Any

import torch
from tqdm import tqdm

from minigpt.checkpoints.find import BEST, LAST
from minigpt.checkpoints.format import read
from minigpt.checkpoints.models import load_checkpoint
from minigpt.runs.run_dir import read_summary_or_empty

ROOT = Path(__file__).resolve().parents[3]
TRAIN = str(ROOT / "scripts" / "train.py")
CLOCKED = {"seconds", "wall_seconds", "tokens_per_second", "flops_per_second", "logged_seconds", "command"}
OWN = CLOCKED | {"resume", "logger"}  # no two runs agree in the clock's values, nor in how they began
PROGRESS = ("step ", "model  ", "data  ", "training  ", "device  ", "run folder  ", "resume with: ")

# Wide enough for a checkpoint to take a while to write, with dropout, and with rows that no validation coincides with.
STEPS, EVAL_EVERY = 24, 4
SETTINGS = (
    "trainer=cpu",
    "model.block_size=16",
    "model.n_layer=2",
    "model.n_head=2",
    "model.n_embd=128",
    "model.dropout=0.1",
    "data.batch_size=4",
    "trainer.accumulate_grad_batches=2",
    f"max_steps={STEPS}",
    f"eval_every={EVAL_EVERY}",
    "log_every=3",
    "schedule.warmup_steps=5",
    "ema_decay=0.9",
    "callbacks.samples.max_new_tokens=10",
)

# A run that is forked from a process with its imports done starts in a moment, not in ten seconds of them.
_forking = multiprocessing.get_context("forkserver")
_forking.set_forkserver_preload(
    ["torch._dynamo", "matplotlib.pyplot", "minigpt.runs.callbacks", "minigpt.data.batches"]
)
_HOME = tempfile.TemporaryDirectory(prefix="minigpt-faults-")
_SHARED = Path(_HOME.name)
_making = Lock()


class Run:
    """A run of `scripts/train.py` in a session of its own.

    Args:
        cold: a new interpreter, as a user starts it, instead of a fork of one that has done its imports.
        struck: gets a signal right before the so manieth file operation in its folder.
    """

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        cold: bool = False,
        struck: tuple[int, int] | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.folder, self.stderr_file = folder, _SHARED / f"{time.monotonic_ns()}.err"
        arguments = [TRAIN, *SETTINGS, f"data.path={text()}", f"data.folder={_SHARED}/data", *overrides]
        arguments.append(f"hydra.run.dir={folder}")
        self.began = time.monotonic()
        if cold:
            with open(self.stderr_file, "wb") as stderr:
                self._popen = subprocess.Popen(
                    [sys.executable, *arguments],
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
                    start_new_session=True,
                )
            self.pid, self._process = self._popen.pid, None
        else:
            self._process = _forking.Process(target=_forked, args=(arguments, self.stderr_file, folder, struck))
            self._process.start()
            self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, as a shell tells it; None while it runs."""
        code = self._process.exitcode if self._process else self._popen.poll()
        return code if code is None or code >= 0 else 128 - code

    def wait(self, seconds: float = 120) -> int:
        """Wait for the end; a run that does not end in time is killed, and the trial is lost."""
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"the run went on for more than {seconds:g} s; it said: {self.stderr}")
            time.sleep(0.01)
        return code

    def signal(self, signum: int) -> None:
        """Send a signal to the run, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """End the run and every process that it started, at once."""
        for pid in [self.pid, *self.survivors()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()

    def survivors(self) -> list[int]:
        """Processes of the run's session, but for those that only wait to be reaped."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            except OSError:  # it has just ended
                continue
            if int(session) == self.pid and state not in "ZX":
                found.append(int(stat.parent.name))
        return found

    @property
    def stderr(self) -> str:
        return self.stderr_file.read_text(errors="replace") if self.stderr_file.exists() else ""

    @property
    def said(self) -> list[str]:
        """The lines on stderr that do not only tell of progress."""
        return [line for line in self.stderr.splitlines() if line.strip() and not line.startswith(PROGRESS)]

    def until(self, happened: Callable[[], bool], *, every: float = 0.002) -> bool:
        """Wait for something to happen; False if the run ended before it did."""
        deadline = time.monotonic() + 120
        while not happened():
            if self.poll() is not None:
                return False
            assert time.monotonic() < deadline, "nothing happened for two minutes"
            time.sleep(every)
        return True

    def until_step(self, step: int) -> bool:
        """Wait for a row of a step at or after `step` in metrics.csv."""
        return self.until(lambda: max(steps(self.folder), default=0) >= step)


def _forked(arguments: list[str], stderr: Path, folder: Path, struck: tuple[int, int] | None) -> None:
    """What a forked process does: become what a shell would have started."""
    os.setsid()
    tqdm.set_lock(RLock())  # its own is one between processes, of which a killed one leaves warnings
    for stream in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.argv = arguments
    at, signum = struck or (0, 0)
    operations = 0

    def watch(event: str, details: tuple[Any, ...]) -> None:
        nonlocal operations
        writes = event == "open" and isinstance(details[2], int) and details[2] & (os.O_WRONLY | os.O_RDWR)
        if not (writes or event in ("os.rename", "os.link", "os.remove", "os.mkdir", "os.symlink")):
            return
        if str(details[0]).startswith(f"{folder}/"):
            operations += 1
            if operations == at:
                os.kill(os.getpid(), signum)

    sys.addaudithook(watch)
    try:
        runpy.run_path(TRAIN, run_name="__main__")
    finally:
        stderr.with_suffix(".operations").write_text(str(operations))


@cache
def text() -> Path:
    """A text that a small model can learn something of."""
    file = _SHARED / "fox.txt"
    lines = (f"{i}: the quick brown fox jumps over the lazy dog number {i * i % 97}.\n" for i in range(320))
    file.write_text("".join(lines))
    return file


def reference(*overrides: str) -> Path:
    """The folder of a run to which nothing happened, made once."""
    with _making:
        return _reference(*overrides)


@cache
def _reference(*overrides: str) -> Path:
    folder = _SHARED / f"reference-{len(list(_SHARED.iterdir()))}"
    imported = _forking.Process(target=int)  # waits for the imports, so that they count for no run
    imported.start()
    imported.join()
    run = Run(folder, *overrides, cold="trainer=ddp" in overrides)
    assert run.wait() == 0, run.stderr
    (folder / "took").write_text(str(time.monotonic() - run.began))  # seconds
    if (counted := run.stderr_file.with_suffix(".operations")).exists():
        counted.rename(folder / "operations")
    return folder


def operations() -> int:
    """File operations that an undisturbed run makes in its folder."""
    return int((reference() / "operations").read_text())


def goes_on(folder: Path, *overrides: str, cold: bool = False, warns: str = "") -> None:
    """Have a harmed run go on by itself, and compare its end to that of a run that nothing happened to.

    Args:
        warns: what the one warning on stderr must contain; without it there must be none.
    """
    if (folder / LAST).exists() and not warns:
        load_checkpoint(folder / LAST)
    if read_summary_or_empty(folder).get("status") != "completed":
        run = Run(folder, *overrides, "resume=auto", cold=cold)
        code = run.wait()
        assert code == 0, f"resume=auto ended with exit code {code}: {run.stderr}"
        assert all(line.startswith("warning: ") and warns and warns in line for line in run.said), run.stderr
    same(folder, reference(*overrides))
    left = [str(file) for pattern in ("*partial*", ".tmp*") for file in folder.rglob(pattern)]
    assert not left, f"half a file stays for ever: {left}"


def same(folder: Path, reference: Path) -> None:
    """Compare two run folders: weights, optimizer, random state, curves, samples and summary are equal to the bit."""
    for name in (LAST, BEST):
        there, here = (dict(_leaves(_state(place / name), place)) for place in (reference, folder))
        assert there.keys() == here.keys(), f"{name} holds other things: {there.keys() ^ here.keys()}"
        for key, value in there.items():
            other = here[key]
            equal = torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
            assert equal, f"{name} differs in {key}"
    assert rows(folder) == rows(reference), "metrics.csv differs"
    assert (folder / "samples.txt").read_bytes() == (reference / "samples.txt").read_bytes(), "samples.txt differs"
    told, expected = (json.loads((place / "summary.json").read_text()) for place in (folder, reference))
    differs = {key for key in expected if key not in CLOCKED and told.get(key) != expected[key]}
    assert not differs, f"summary.json differs in {differs}: {told}"


def _state(file: Path) -> dict[str, Any]:
    """What a checkpoint holds, but for how Lightning counts the loops that led there."""
    return {key: value for key, value in read(file).items() if key != "loops"}


def _leaves(content: Any, folder: Path, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a checkpoint by where it stands, without texts, which name folders."""
    if isinstance(content, dict | list | tuple):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in items:
            if key not in OWN:
                yield from _leaves(value, folder, f"{at}/{key}".replace(str(folder), "FOLDER"))
    elif not isinstance(content, str):
        yield at, content


def rows(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv without what a clock measured."""
    with open(folder / "metrics.csv", newline="") as file:
        return [{name: value for name, value in row.items() if name not in CLOCKED} for row in csv.DictReader(file)]


def steps(folder: Path) -> list[int]:
    """The steps of the whole rows of metrics.csv, while it is being written."""
    try:
        lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)[1:]
    except FileNotFoundError:
        return []
    return [int(line.split(",", 1)[0]) for line in lines if line.endswith("\n")]
