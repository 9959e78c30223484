"""What the benchmarks share: launching what is measured, and reading what it says."""

import csv
import json
import os
import platform
import pty
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from minigpt.data import shakespeare
from minigpt.data.sources import CHECKSUM_CACHE
from minigpt.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "scripts" / "train.py"
BARE_MINIGPT = ROOT / "scripts/bench/bare_minigpt.py"
BARE_NANOGPT = ROOT / "scripts/bench/bare_nanogpt.py"
TOKENS_PER_STEP = 12 * 64  # of experiment=nanogpt_cpu


@dataclass(frozen=True)
class Ran:
    """A finished process: what it printed, and what it used."""

    output: str
    seconds: float
    peak_mb: float  # resident memory
    own_mb: float  # of all its processes, without the pages of files, which the system takes back when it needs them


def launch(command: Sequence[object], *, watch: Path | None = None, fails: bool = False) -> Ran:
    """Run a command with a terminal on stderr, so that a progress bar draws; seconds end when `watch` exists."""
    ours, theirs = pty.openpty()
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=theirs, cwd=ROOT)
        os.close(theirs)
        told = bytearray()  # the end of stderr
        drain = threading.Thread(target=_drain, args=(ours, told), daemon=True)
        drain.start()
        seen, own = None, 0.0
        while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
            if watch is not None and seen is None and watch.exists():
                seen = time.perf_counter() - start
            own = max(own, sum(status_mb("RssAnon", pid) for pid in family(process.pid)))  # what no file backs
            time.sleep(0.02)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(ended[1])
        output.seek(0)
        said = output.read().decode()
    if bool(process.returncode) != fails:
        drain.join(timeout=1)  # until the other end is closed
        *_, reason = [said, *told.decode(errors="replace").strip().splitlines()]
        raise UserError(f"{' '.join(map(str, command))} ended with exit code {process.returncode}: {reason}")
    peak = ended[2].ru_maxrss / (1024 if sys.platform == "linux" else 1 << 20)
    return Ran(said, seen or seconds, peak, own)


def _drain(terminal: int, told: bytearray) -> None:
    try:
        while read := os.read(terminal, 1 << 16):
            told += read
            del told[:-4096]
    except OSError:  # the other end is closed
        os.close(terminal)


def ours(run: Path) -> list[object]:
    """The command of a run of the baseline recipe."""
    return [sys.executable, TRAIN, "experiment=nanogpt_cpu", f"hydra.run.dir={run}"]


def bare_nanogpt(settings: Sequence[str]) -> Ran:
    """Run the baseline with those settings of a run that it has: data.path, max_steps, eval_every and seed."""
    values = dict(setting.split("=", 1) for setting in settings)
    text = Path(values["data.path"]).resolve() if "data.path" in values else text_file()
    options = [f"--{name}={values[name]}" for name in ("max_steps", "eval_every", "seed") if name in values]
    return launch([sys.executable, BARE_NANOGPT, text, *options])


def text_file() -> Path:
    """Tiny shakespeare, from where a run would take it."""
    data = yaml.safe_load((ROOT / "configs" / "data" / "shakespeare_char.yaml").read_text(encoding="utf-8"))["data"]
    named = {key: data[key] for key in ("name", "url", "sha256", "characters")}
    folder = ROOT / "data"
    return shakespeare.find_text(**named, folder=folder, checksum_cache=folder / CHECKSUM_CACHE)[0].resolve()


def metrics(run: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv."""
    with open(run / "metrics.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def summary(run: Path) -> dict[str, Any]:
    """What a run came to."""
    told: dict[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return told


def status_mb(field: str, pid: int | str = "self") -> float:
    """A memory figure of a process; 0 where the system does not tell."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        if found := re.search(rf"{field}:\s+(\d+)", status):
            return int(found[1]) / 1024
    return 0.0


def family(pid: int) -> list[int]:
    """A process and its descendants; itself alone where the system does not tell."""
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *(other for child in children for other in family(int(child)))]
    return [pid]


def machine() -> str:
    """What it was measured on."""
    return f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}"
