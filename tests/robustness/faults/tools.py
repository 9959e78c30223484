"""Training runs as processes, waits for files that they write, comparison of run folders."""

import atexit
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from sys import addaudithook
from typing import Any

import torch
from filelock import FileLock
from processes import Script, wait_for_imports
from small_runs import TIMES, rows
from torch.utils._pytree import keystr, tree_flatten_with_path

from minigpt.checkpoints.find import BEST, LAST
from minigpt.checkpoints.format import read
from minigpt.checkpoints.load import load_checkpoint
from minigpt.runs.run_dir import read_summary

# Which differ when a run resumes
IGNORED_KEYS = TIMES | {"logged_seconds", "command", "resume", "logger", "commit", "dirty"}
TABLE = [f"{key}  " for key in ("model", "data", "training", "device", "run folder", "sampling")]
PROGRESS = ("step ", "resume with: ", *TABLE)

# Wide enough that writing a checkpoint takes measurable time; with dropout, and rows between
# validations.
STEPS = 24
EVAL_EVERY = 4
SETTINGS = f"""
    trainer={os.environ.get("MINIGPT_FAULTS_TRAINER", "cpu")} trainer.accumulate_grad_batches=2
    model.block_size=16 model.n_layer=2 model.n_head=2 model.n_embd=128 model.dropout=0.1
    data.batch_size=4 max_steps={STEPS} eval_every={EVAL_EVERY} log_every=3
    schedule.warmup_steps=5 ema_decay=0.9 callbacks.samples.max_new_tokens=10
    callbacks.originality.characters=100
""".split()

Trial = Callable[[Path, Random], str | float | None]


class Skipped(Exception):
    """This machine cannot inject the fault."""


@dataclass(frozen=True)
class Fault:
    """One row of the table.

    Attributes:
        trial: returns a note, the training time relative to a run without the fault, or None.
        trials: their number in `make faults`.
        suite: the test suite that runs one trial: fast, slow, ci (a slow one of each kind) or none.
        exclusive: run one trial at a time, because the trial measures time.
    """

    name: str
    trial: Trial
    trials: int
    suite: str = "none"
    exclusive: bool = False

    def __call__(self, workdir: Path, seed: object) -> str | float | None:
        """Run one trial in a folder; its random choices depend on name and seed alone."""
        return self.trial(workdir, Random(f"{self.name} {seed}"))


class Run(Script):
    """A process of `scripts/train.py`.

    Args:
        signal_at: (n, signum): send the signal right before the n-th file operation in the run
            folder.
        terminal: path of a terminal for its output; closing its other side closes it.
        options: those of `Script`.
    """

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        signal_at: tuple[int, int] = (0, 0),
        terminal: str = "",
        **options: Any,
    ) -> None:
        self.folder = folder
        text = [f"data.path={shared()}/fox.txt", f"data.folder={shared()}/data"]
        arguments = [*SETTINGS, *text, *overrides, f"hydra.run.dir={folder}"]
        output = shared() / f"{time.monotonic_ns()}"
        operations = output.with_suffix(".operations")
        prepared = partial(prepare, terminal, folder, operations, *signal_at)
        super().__init__("train.py", *arguments, output=output, prepare=prepared, **options)

    @property
    def messages(self) -> list[str]:
        """The lines on stderr other than progress: warnings and errors."""
        lines = filter(str.strip, self.stderr.splitlines())
        return [line for line in lines if not line.startswith(PROGRESS)]

    def wait_for_step(self, step: int) -> bool:
        """Wait for a row of `step` or later in metrics.csv, which may be written at that time."""
        file = self.folder / "metrics.csv"

        def logged() -> bool:
            if not file.exists():
                return False
            _, *rows = file.read_text(encoding="utf-8").split("\n")[:-1] or [""]
            return any(int(row.split(",", 1)[0]) >= step for row in rows)

        return self.wait_for(logged, poll_seconds=0.002)

    def end(self, code: int = 0) -> None:
        found = self.wait()
        assert found == code, f"exit code {found}; stderr: {self.stderr}"


def prepare(terminal: str, *counted: Any) -> None:
    """Prepare a process before its script: its terminal, and the count of its file operations."""
    if terminal:
        # The controlling terminal of the session, which this process leads
        opened = os.open(terminal, os.O_RDWR)
        for stream in range(3):
            os.dup2(opened, stream)
        os.close(opened)
    count_operations(*counted)


def count_operations(folder: Path, file: Path, at: int, signum: int) -> None:
    """Count the file operations in a folder, and send the signal at one; write their number."""
    operations = 0
    changes = {f"os.{name}" for name in ("rename", "link", "remove", "mkdir", "symlink")}

    def audit(event: str, details: tuple[Any, ...]) -> None:
        nonlocal operations
        flags = details[2] if event == "open" else 0
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in changes) and str(details[0]).startswith(f"{folder}/"):
            operations += 1
            if operations == at:
                os.kill(os.getpid(), signum)

    addaudithook(audit)
    atexit.register(lambda: file.write_text(str(operations), encoding="utf-8"))


@cache
def shared() -> Path:
    """A folder with a text that a small model can learn; its runs import this module, too."""
    folder = Path(tempfile.mkdtemp(prefix="minigpt-faults-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    fox = "the quick brown fox jumps over the lazy dog number"
    lines = (f"{i}: {fox} {i * i % 97}.\n" for i in range(320))
    (folder / "fox.txt").write_text("".join(lines), encoding="utf-8")
    return folder


def reference(*overrides: str) -> Path:
    """The folder of a run without a fault; runs once per set of overrides."""
    folder = shared() / hashlib.sha256(" ".join(overrides).encode()).hexdigest()
    with FileLock(f"{folder}.lock"):  # trials are threads
        if not (folder / "summary.json").exists():
            wait_for_imports()
            run = Run(folder, *overrides, cold_start="trainer=ddp" in overrides)
            run.end()
            if (operations := run.files[0].with_suffix(".operations")).exists():
                operations.rename(folder / "operations")
    return folder


def assert_resumes(
    folder: Path, *overrides: str, cold_start: bool = False, warning: str = ""
) -> None:
    """Resume a run after a fault, and compare its final state to that of a run without the fault.

    Args:
        warning: part of the one warning that is expected on stderr; empty: expect no warning, but
            that a run has no checkpoint if it ended before its first one.
    """
    if (folder / LAST).exists() and not warning:
        load_checkpoint(folder / LAST)
    if not [*folder.glob("checkpoints/*.safetensors")]:
        table = folder / "metrics.csv"
        lines = table.read_text(encoding="utf-8").splitlines()[1:] if table.exists() else []
        assert all(int(line.split(",")[0]) <= EVAL_EVERY for line in lines), "it lost a checkpoint"
        warning = warning or "holds no checkpoint to resume from"
    summary = folder / "summary.json"
    written = summary.read_text("utf-8", errors="replace") if summary.exists() else ""
    if '"status": "completed"' not in written:
        run = Run(folder, *overrides, "resume=auto", cold_start=cold_start)
        run.end()
        assert not run.messages or warning, run.stderr
        expected = [line.startswith("warning: ") and warning in line for line in run.messages]
        assert all(expected), run.stderr
    assert_same_run(folder, reference(*overrides))
    left = [*folder.rglob("*partial*"), *folder.rglob(".tmp*")]
    assert not left, f"partial files are left: {left}"


def assert_same_run(folder: Path, reference: Path) -> None:
    for name in (LAST, BEST):
        different = different_leaves(reference / name, folder / name)
        assert not different, f"{name} differs in {different}"
    assert rows(folder) == rows(reference), "metrics.csv differs"
    texts = [(run / "samples.txt").read_text(encoding="utf-8") for run in (folder, reference)]
    assert texts[0] == texts[1], f"samples.txt differs: {texts}"
    summary, expected = map(read_summary, (folder, reference))
    keys = expected.keys() - IGNORED_KEYS
    different = [key for key in keys if summary.get(key) != expected[key]]
    assert not different, f"summary.json differs in {different}: {summary}"


def different_leaves(*files: Path) -> list[str]:
    one, other = map(_leaves, files)
    same = {key for key in one.keys() & other.keys() if _equal(one[key], other[key])}
    return sorted((one.keys() | other.keys()) - same)


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def _leaves(file: Path) -> dict[str, Any]:
    """The leaves of a checkpoint by path.

    Those of Lightning's loop counters are left out, and strings, because they hold folders.
    """
    content = {key: value for key, value in read(file).items() if key != "loops"}
    found = {}
    for path, leaf in tree_flatten_with_path(content)[0]:
        keys = {getattr(key, "key", None) for key in path}
        if not isinstance(leaf, str) and not IGNORED_KEYS & keys:
            found[keystr(path).replace(str(file.parents[1]), "FOLDER")] = leaf
    return found
