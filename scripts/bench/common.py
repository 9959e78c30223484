"""Shared by the benchmarks: launch a process, measure its time and memory, read its results."""

import csv
import json
import os
import platform
import pty
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from minigpt.data.sources import find_text
from minigpt.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "scripts" / "train.py"
BARE_MINIGPT = ROOT / "scripts/bench/bare_minigpt.py"
BARE_NANOGPT = ROOT / "scripts/bench/bare_nanogpt.py"
# A run does no more than train: no samples, no snapshots, whose weights ranks would gather, and no text at its end.
ONLY_TRAINING = ["callbacks.samples.max_new_tokens=1", "callbacks.snapshots=null", "originality=null"]
TOKENS_PER_STEP = 12 * 64  # of experiment=nanogpt_cpu


@dataclass(frozen=True)
class ProcessResult:
    """Output, time and memory of a finished process."""

    output: str
    seconds: float
    peak_mb: float  # resident memory
    own_mb: float  # peak anonymous memory of the process tree, without file-backed pages


def launch(command: Sequence[object], *, watch: Path | None = None, fails: bool = False) -> ProcessResult:
    """Run a command with a pseudo-terminal on stderr, so that the progress bar is shown.

    Args:
        watch: measure the seconds until this file exists, not until the process exits.
        fails: the command is expected to fail.
    """
    controller, terminal = pty.openpty()
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=terminal, cwd=ROOT)
        os.close(terminal)
        tail = bytearray()  # of stderr
        drain = threading.Thread(target=_drain, args=(controller, tail), daemon=True)
        drain.start()
        seen, own = None, 0.0
        while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
            if watch is not None and seen is None and watch.exists():
                seen = time.perf_counter() - start
            own = max(own, sum(status_mb("RssAnon", pid) for pid in process_tree(process.pid)))
            time.sleep(0.02)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(ended[1])
        output.seek(0)
        stdout = output.read().decode()
    if bool(process.returncode) != fails:
        drain.join(timeout=1)  # until the terminal is closed
        *_, reason = [stdout, *tail.decode(errors="replace").strip().splitlines()]
        raise UserError(f"{' '.join(map(str, command))} exited with code {process.returncode}: {reason}")
    peak = ended[2].ru_maxrss / (1024 if sys.platform == "linux" else 1 << 20)
    return ProcessResult(stdout, seen or seconds, peak, own)


def _drain(controller: int, tail: bytearray) -> None:
    try:
        while read := os.read(controller, 1 << 16):
            tail += read
            del tail[:-4096]
    except OSError:  # the terminal is closed
        os.close(controller)


def ours(run: Path) -> list[object]:
    """The command that trains experiment=nanogpt_cpu."""
    return [sys.executable, TRAIN, "experiment=nanogpt_cpu", f"hydra.run.dir={run}"]


def bare_nanogpt(settings: Sequence[str]) -> ProcessResult:
    """Run the baseline with those settings that it supports: data.path, max_steps, eval_every, seed and device."""
    values = dict(setting.split("=", 1) for setting in settings)
    text = Path(values["data.path"]).resolve() if "data.path" in values else text_file()
    options = [f"--{name}={values[name]}" for name in ("max_steps", "eval_every", "seed", "device") if name in values]
    return launch([sys.executable, BARE_NANOGPT, text, *options])


def text_file() -> Path:
    """Tiny shakespeare, from the folder that a run reads it from."""
    data = yaml.safe_load((ROOT / "configs" / "data" / "shakespeare_char.yaml").read_text(encoding="utf-8"))["data"]
    return find_text(data | {"folder": ROOT / "data"}).resolve()


def write_gigabyte(file: Path) -> None:
    """Write 1 GB of repeated tiny shakespeare."""
    text = text_file().read_bytes()
    with open(file, "wb") as output:
        for _ in range((1 << 30) // len(text)):
            output.write(text)


def seconds(work: Callable[[], object], times: int = 1) -> float:
    """Return the median seconds of calling `work`."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, aligned: bool = True) -> str:
    """Format a table in Markdown; with `aligned`, pad the cells to the width of their column."""
    lines = [list(map(str, cells)) for cells in (heads, *rows)]
    widths = [max(map(len, column)) if aligned else 1 for column in zip(*lines, strict=True)]
    first, *others = (f"| {' | '.join(map(str.ljust, cells, widths))} |" for cells in lines)
    return "\n".join([first, f"|{'|'.join('-' * (width + 2) for width in widths)}|", *others])


def metrics(run: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv."""
    with open(run / "metrics.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def summary(run: Path) -> dict[str, Any]:
    """The contents of summary.json."""
    values: dict[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return values


def status_mb(field: str, pid: int | str = "self") -> float:
    """A field of /proc/PID/status in MB; 0 where there is no /proc."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        if found := re.search(rf"{field}:\s+(\d+)", status):
            return int(found[1]) / 1024
    return 0.0


def process_tree(pid: int) -> list[int]:
    """A process and its descendants; the process alone where there is no /proc."""
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *(other for child in children for other in process_tree(int(child)))]
    return [pid]


def machine() -> str:
    """The machine and the Python version of a measurement."""
    return f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}"
