"""Shared by the benchmarks: launch a process, measure its time, read its results."""

import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from minigpt.data.sources import find_text
from minigpt.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "scripts" / "train.py"
BARE_MINIGPT = ROOT / "scripts/bench/bare_minigpt.py"
BARE_NANOGPT = ROOT / "scripts/bench/bare_nanogpt.py"


def launch(
    command: Sequence[object], *, watch: Path | None = None, env: Mapping[str, str] | None = None
) -> tuple[str, float]:
    """Run a command; return what it prints, and its seconds.

    Args:
        watch: measure the seconds until this file exists, not until the process exits.
        env: variables that are added to the environment.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        variables = {**os.environ, **(env or {})}
        process = subprocess.Popen(
            list(map(str, command)), stdout=output, stderr=errors, cwd=ROOT, env=variables
        )
        seen = None
        while process.poll() is None:
            if watch is not None and seen is None and watch.exists():
                seen = time.perf_counter() - start
            time.sleep(0.02)
        seconds = time.perf_counter() - start
        for file in (output, errors):
            file.seek(0)
        stdout, stderr = (file.read().decode(errors="replace") for file in (output, errors))
    if process.returncode:
        sys.stderr.write(stderr)
        *_, reason = [stdout, *stderr.strip().splitlines()]
        raise UserError(
            f"{' '.join(map(str, command))} exited with code {process.returncode}: {reason}"
        )
    return stdout, seen or seconds


def run_bare(*settings: str) -> dict[str, Any]:
    """Run the bare loop over minigpt's model; return its measurements."""
    results: dict[str, Any] = json.loads(
        launch([sys.executable, BARE_MINIGPT, *settings])[0].splitlines()[-1]
    )
    return results


def bare_nanogpt(settings: Sequence[str]) -> tuple[str, float]:
    """Run the baseline with those settings that it supports: data.path, max_steps, eval_every, seed
    and device.
    """
    values = dict(setting.split("=", 1) for setting in settings)
    text = Path(values["data.path"]).resolve() if "data.path" in values else text_file()
    options = [
        f"--{name}={values[name]}"
        for name in ("max_steps", "eval_every", "seed", "device")
        if name in values
    ]
    return launch([sys.executable, BARE_NANOGPT, text, *options])


def text_file() -> Path:
    """Tiny shakespeare, from the folder that a run reads it from; raise UserError if there is only
    the stand-in.
    """
    data = yaml.safe_load(
        (ROOT / "configs" / "data" / "shakespeare_char.yaml").read_text(encoding="utf-8")
    )["data"]
    file = find_text(data | {"folder": ROOT / "data"}).resolve()
    if file.stem not in (data["name"], f"{data['name']}-{data['sha256'][:12]}"):
        raise UserError(
            f"{file.name} is not {data['name']}; set MINIGPT_DATA_DIR to a folder with "
            f"{data['name']}.txt"
        )
    return file


def seconds(work: Callable[[], object], times: int = 1) -> float:
    """Return the median seconds of calling `work`."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a table in Markdown, whose cells are padded to the width of their column."""
    lines = [list(map(str, cells)) for cells in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
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


def machine() -> str:
    """The machine and the Python version of a measurement."""
    return f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}"
