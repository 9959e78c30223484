"""Runs as processes, waiting for the files that they write, and bitwise comparison of run folders."""

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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from threading import Lock, RLock
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path
from tqdm import tqdm

from minigpt.checkpoints.find import BEST, LAST
from minigpt.checkpoints.format import read
from minigpt.checkpoints.load import load_checkpoint

ROOT = Path(__file__).resolve().parents[3]
TRAIN = str(ROOT / "scripts" / "train.py")
TIME_KEYS = {"seconds", "wall_seconds", "tokens_per_second", "flops_per_second", "logged_seconds", "command"}
IGNORED_KEYS = TIME_KEYS | {"resume", "logger", "commit", "dirty"}  # differ between a run and its resumed copy
PROGRESS = ("step ", "model  ", "data  ", "training  ", "device  ", "run folder  ", "resume with: ")

# Wide enough that writing a checkpoint takes measurable time; with dropout, and rows between validations.
STEPS, EVAL_EVERY = 24, 4
SETTINGS = (
    f"trainer={os.environ.get('MINIGPT_FAULTS_TRAINER', 'cpu')}",  # or gpu
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

# The fork server must not initialize CUDA, or its forks could not.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# A run forked from a process that has imported torch starts immediately; a new interpreter takes ten seconds.
_forkserver = multiprocessing.get_context("forkserver")
_IMPORTS = ["torch._dynamo", "matplotlib.pyplot", "hydra.main", "minigpt.training", "minigpt.optim", "minigpt.ema"]
_forkserver.set_forkserver_preload([*_IMPORTS, "minigpt.runs.train", "minigpt.runs.samples_and_attention"])
_TEMPORARY = tempfile.TemporaryDirectory(prefix="minigpt-faults-")
_SHARED = Path(_TEMPORARY.name)
_reference_lock = Lock()


Trial = Callable[[Path, Random], str | float | None]


class Skipped(Exception):
    """This machine cannot inject the fault."""


@dataclass(frozen=True)
class Fault:
    """One row of the table. `trial` returns a note, the training time relative to a run without the fault, or None."""

    name: str
    trial: Trial
    trials: int  # of `make faults`
    suite: str = "fast"  # fast, slow or none: the test suite that runs one trial
    exclusive: bool = False  # run one trial at a time, because the trial measures time

    def __call__(self, workdir: Path, seed: object) -> str | float | None:
        """Run one trial in a folder; its random choices depend on name and seed alone."""
        return self.trial(workdir, Random(f"{self.name} {seed}"))


class Run:
    """A process of `scripts/train.py` in its own session.

    Args:
        cold_start: start a new interpreter, as a user does, instead of a fork of one with all imports done.
        signal_at: (n, signum): send the signal right before the n-th file operation in the run folder.
        env: additional environment variables; with cold_start.
    """

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        cold_start: bool = False,
        signal_at: tuple[int, int] | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.folder, self.stderr_file = folder, _SHARED / f"{time.monotonic_ns()}.err"
        arguments = [TRAIN, *SETTINGS, f"data.path={training_text()}", f"data.folder={_SHARED}/data", *overrides]
        arguments.append(f"hydra.run.dir={folder}")
        self.start = time.monotonic()
        if cold_start:
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
            options = (arguments, self.stderr_file, folder, signal_at)
            self._process = _forkserver.Process(target=_run_forked, args=options)
            self._process.start()
            self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code as in a shell, 128 + signal if killed; None while the run is alive."""
        code = self._process.exitcode if self._process else self._popen.poll()
        return code if code is None or code >= 0 else 128 - code

    def wait(self, seconds: float = 120) -> int:
        """Wait for the exit code; on timeout kill the run and fail the trial."""
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"the run did not exit within {seconds:g} s; stderr: {self.stderr}")
            time.sleep(0.01)
        return code

    def signal(self, signum: int) -> None:
        """Send a signal to the run if it is alive."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """Kill the run and all processes that it started."""
        for pid in [self.pid, *self.live_processes()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()

    def live_processes(self) -> list[int]:
        """Processes of the run's session, without zombies."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            except OSError:  # the process has exited
                continue
            if int(session) == self.pid and state not in "ZX":
                found.append(int(stat.parent.name))
        return found

    @property
    def stderr(self) -> str:
        return self.stderr_file.read_text(errors="replace") if self.stderr_file.exists() else ""

    @property
    def messages(self) -> list[str]:
        """The lines on stderr other than progress: warnings and errors."""
        return [line for line in self.stderr.splitlines() if line.strip() and not line.startswith(PROGRESS)]

    def wait_for(self, condition: Callable[[], bool], *, poll_seconds: float = 0.002) -> bool:
        """Wait for a condition; returns False if the run exited first."""
        deadline = time.monotonic() + 120
        while not condition():
            if self.poll() is not None:
                return False
            assert time.monotonic() < deadline, "timeout after 120 s"
            time.sleep(poll_seconds)
        return True

    def wait_for_step(self, step: int) -> bool:
        """Wait for a row of `step` or a later one in metrics.csv."""
        return self.wait_for(lambda: max(logged_steps(self.folder), default=0) >= step)


def _run_forked(arguments: list[str], stderr: Path, folder: Path, signal_at: tuple[int, int] | None) -> None:
    """Run the script in a forked process, with the session, streams and arguments that a shell would set up."""
    os.setsid()
    tqdm.set_lock(RLock())  # the default lock is shared between processes; a killed process leaves warnings
    for stream in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.argv = arguments
    at, signum = signal_at or (0, 0)
    operations = 0

    def audit(event: str, details: tuple[Any, ...]) -> None:
        nonlocal operations
        writes = event == "open" and isinstance(details[2], int) and details[2] & (os.O_WRONLY | os.O_RDWR)
        if not (writes or event in ("os.rename", "os.link", "os.remove", "os.mkdir", "os.symlink")):
            return
        if str(details[0]).startswith(f"{folder}/"):
            operations += 1
            if operations == at:
                os.kill(os.getpid(), signum)

    sys.addaudithook(audit)
    try:
        runpy.run_path(TRAIN, run_name="__main__")
    finally:
        stderr.with_suffix(".operations").write_text(str(operations))


@cache
def training_text() -> Path:
    """A small text that a small model can learn."""
    file = _SHARED / "fox.txt"
    lines = (f"{i}: the quick brown fox jumps over the lazy dog number {i * i % 97}.\n" for i in range(320))
    file.write_text("".join(lines))
    return file


def reference(*overrides: str) -> Path:
    """The folder of a run without a fault; runs once per set of overrides."""
    with _reference_lock:
        return _reference(*overrides)


@cache
def _reference(*overrides: str) -> Path:
    folder = _SHARED / f"reference-{len(list(_SHARED.iterdir()))}"
    imports = _forkserver.Process(target=int)  # waits for the imports of the fork server
    imports.start()
    imports.join()
    run = Run(folder, *overrides, cold_start="trainer=ddp" in overrides)
    assert run.wait() == 0, run.stderr
    (folder / "wall_seconds").write_text(str(time.monotonic() - run.start))
    if (operations := run.stderr_file.with_suffix(".operations")).exists():
        operations.rename(folder / "operations")
    return folder


def count_file_operations() -> int:
    """Number of file operations of a run without a fault in its folder."""
    return int((reference() / "operations").read_text())


def assert_resumes(folder: Path, *overrides: str, cold_start: bool = False, warning: str = "") -> None:
    """Resume a run after a fault, and compare its final state to that of a run without the fault.

    Args:
        warning: part of the one warning that is expected on stderr; empty: expect no warning.
    """
    if (folder / LAST).exists() and not warning:
        load_checkpoint(folder / LAST)
    summary = folder / "summary.json"
    if not summary.exists() or '"status": "completed"' not in summary.read_text(errors="replace"):
        run = Run(folder, *overrides, "resume=auto", cold_start=cold_start)
        code = run.wait()
        assert code == 0, f"resume=auto exited with code {code}: {run.stderr}"
        assert all(line.startswith("warning: ") and warning and warning in line for line in run.messages), run.stderr
    assert_same_run(folder, reference(*overrides))
    partial = [str(file) for pattern in ("*partial*", ".tmp*") for file in folder.rglob(pattern)]
    assert not partial, f"partial files are left: {partial}"


def assert_same_run(folder: Path, reference: Path) -> None:
    """Compare two run folders bitwise: weights, optimizer state, RNG state, metrics, samples and summary."""
    for name in (LAST, BEST):
        expected, actual = (_leaves(run, name) for run in (reference, folder))
        assert expected.keys() == actual.keys(), f"{name} differs in its keys: {expected.keys() ^ actual.keys()}"
        for key, value in expected.items():
            other = actual[key]
            equal = torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
            assert equal, f"{name} differs in {key}"
    assert metric_rows(folder) == metric_rows(reference), "metrics.csv differs"
    assert (folder / "samples.txt").read_bytes() == (reference / "samples.txt").read_bytes(), "samples.txt differs"
    summary, expected = (json.loads((run / "summary.json").read_text()) for run in (folder, reference))
    different = {key for key in expected if key not in IGNORED_KEYS and summary.get(key) != expected[key]}
    assert not different, f"summary.json differs in {different}: {summary}"


def _leaves(folder: Path, name: str) -> dict[str, Any]:
    """The leaves of a checkpoint by path, without Lightning's loop counters, and without strings: they hold folders."""
    leaves, _ = tree_flatten_with_path({key: value for key, value in read(folder / name).items() if key != "loops"})
    return {
        keystr(path).replace(str(folder), "FOLDER"): leaf
        for path, leaf in leaves
        if not isinstance(leaf, str) and not IGNORED_KEYS & {getattr(key, "key", None) for key in path}
    }


def metric_rows(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv without the columns that measure time."""
    with open(folder / "metrics.csv", newline="") as file:
        return [{name: value for name, value in row.items() if name not in TIME_KEYS} for row in csv.DictReader(file)]


def logged_steps(folder: Path) -> list[int]:
    """The steps of the complete rows of metrics.csv, which may be written at the same time."""
    try:
        lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)[1:]
    except FileNotFoundError:
        return []
    return [int(line.split(",", 1)[0]) for line in lines if line.endswith("\n")]
