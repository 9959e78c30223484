"""Measure minigpt: training speed, start-up, memory, and the loss of the baseline recipe.

Machines are noisy: what is compared runs in turn, several rounds of it, and medians and their ratio are
what to quote. Prints a table and writes the figures as JSON.

  python scripts/bench.py step --against PATH    a bare training loop beside ours, tokens/s
  python scripts/bench.py startup                launch to help, to an error, to the first step
  python scripts/bench.py memory --against PATH  peak memory, also with a corpus of 1 GB
  python scripts/bench.py loss                   experiment=nanogpt_cpu to the end, over seeds

PATH is a script with a bare PyTorch loop of the recipe nanogpt_cpu that takes TEXT, --iters N and
--eval_every N and prints `train-s X`, the seconds that its steps took.
"""

import argparse
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from minigpt import corpus
from minigpt.errors import UserError, one_line

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ROOT / "scripts" / "train.py"
TOKENS_PER_STEP = 12 * 64  # of experiment=nanogpt_cpu


@dataclass(frozen=True)
class Ran:
    """A finished process: what it printed, and what it used."""

    output: str
    seconds: float
    peak_mb: float  # resident memory
    own_mb: float  # of it, without the pages of files, which the system takes back when it needs them


def launch(command: Sequence[object], *, watch: Path | None = None, fails: bool = False) -> Ran:
    """Run a command with a terminal on stderr, so that a progress bar draws; seconds end when `watch` exists."""
    ours, theirs = pty.openpty()
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=theirs, cwd=ROOT)
        os.close(theirs)
        threading.Thread(target=_drain, args=(ours,), daemon=True).start()
        seen, own = None, 0.0
        while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
            if watch is not None and seen is None and watch.exists():
                seen = time.perf_counter() - start
            own = max(own, _own_mb(process.pid))
            time.sleep(0.02)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(ended[1])
        output.seek(0)
        said = output.read().decode()
    if bool(process.returncode) != fails:
        raise UserError(f"{' '.join(map(str, command))} ended with exit code {process.returncode}: {said}")
    peak = ended[2].ru_maxrss / (1024 if sys.platform == "linux" else 1 << 20)
    return Ran(said, seen or seconds, peak, own)


def _own_mb(pid: int) -> float:
    """Resident memory of a process that no file backs; 0 where the system does not tell."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        if found := re.search(r"RssAnon:\s+(\d+)", status):
            return int(found[1]) / 1024
    return 0.0


def _drain(terminal: int) -> None:
    try:
        while os.read(terminal, 1 << 16):
            pass
    except OSError:  # the other end is closed
        os.close(terminal)


def step(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Tokens/s over all training steps of a run, logging and progress bar on, beside a bare loop."""
    rows = []
    for i in range(args.rounds):
        row: dict[str, Any] = {}
        if args.against:
            row["bare tokens/s"] = args.steps * TOKENS_PER_STEP / bare_seconds(run_bare(args))
        run = folder / f"step{i}"
        launch([*ours(run), f"max_steps={args.steps}", f"eval_every={args.steps}"])
        row["minigpt tokens/s"] = summary(run)["tokens_per_second"]
        if args.against:
            row["ratio"] = row["minigpt tokens/s"] / row["bare tokens/s"]
        rows.append(row)
    return rows


def startup(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Seconds from launch to the help, to a configuration error, and to the end of the first step."""
    rows = []
    run_once = [*ours(folder / "warm"), "max_steps=1"]
    launch(run_once)  # token files are cached from here on
    for i in range(args.rounds):
        run = folder / f"startup{i}"
        imports = launch([sys.executable, "-c", "import torch, lightning"]).seconds
        first = launch([*ours(run), "max_steps=1", "log_every=1"], watch=run / "metrics.csv").seconds
        rows.append(
            {
                "help s": launch([sys.executable, TRAIN, "--help"]).seconds,
                "wrong value s": launch([sys.executable, TRAIN, "optimizer.lr=-1"], fails=True).seconds,
                "unknown setting s": launch([sys.executable, TRAIN, "max_stepz=1"], fails=True).seconds,
                "import torch, lightning s": imports,
                "first step s": first,
                "first step beyond imports s": first - imports,
            }
        )
    return rows


def memory(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Peak memory, MB: a bare loop and ours; ours on tiny shakespeare and on a corpus of 1 GB."""
    rows = []
    large = folder / "large.txt"
    text = text_file().read_bytes()
    with open(large, "wb") as file:
        for _ in range((1 << 30) // len(text)):
            file.write(text)
    options = [f"max_steps={args.steps}", f"eval_every={args.steps}"]
    from_large = [f"data.path={large}", f"data.folder={folder}", "data.val_fraction=0.0001"]
    for i in range(args.rounds):
        row: dict[str, Any] = {"bare MB": run_bare(args).peak_mb} if args.against else {}
        small = launch([*ours(folder / f"memory{i}"), *options])
        row["minigpt MB"] = small.peak_mb
        if args.against:
            row["ratio"] = row["minigpt MB"] / row["bare MB"]
        prepared = launch([*ours(folder / f"large{i}"), *options, *from_large])
        row["own memory MB"] = small.own_mb
        row["own memory, 1 GB corpus MB"] = prepared.own_mb
        rows.append(row)
    return rows


def loss(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Validation loss and training seconds of experiment=nanogpt_cpu, a seed a row."""
    rows = []
    for seed in range(1337, 1337 + args.rounds):
        run = folder / f"seed{seed}"
        launch([*ours(run), f"seed={seed}"])
        rows.append({"last val loss": last_val_loss(run), "seconds": summary(run)["seconds"], "seed": seed})
    return rows


def ours(run: Path) -> list[object]:
    """The command of a run of the baseline recipe."""
    return [sys.executable, TRAIN, "experiment=nanogpt_cpu", f"hydra.run.dir={run}"]


def run_bare(args: argparse.Namespace) -> Ran:
    """The bare loop, for as many steps as ours."""
    return launch([sys.executable, args.against, text_file(), "--iters", args.steps, "--eval_every", args.steps])


def bare_seconds(ran: Ran) -> float:
    """The seconds of training that a bare loop prints."""
    if not (found := re.search(r"train-s +([\d.]+)", ran.output)):
        raise UserError("the script given with --against did not print `train-s X`")
    return float(found[1])


def text_file() -> Path:
    """Tiny shakespeare, from where a run would take it."""
    data = yaml.safe_load((ROOT / "configs" / "data" / "shakespeare_char.yaml").read_text(encoding="utf-8"))
    source = {key: data[key] for key in ("name", "url", "sha256", "characters")}
    return corpus.find(**source, folder=ROOT / data["folder"]).path.resolve()


def last_val_loss(run: Path) -> float:
    """The validation loss after the last step."""
    with open(run / "metrics.csv", newline="", encoding="utf-8") as file:
        return float([row["val_loss"] for row in csv.DictReader(file) if row["val_loss"]][-1])


def summary(run: Path) -> dict[str, Any]:
    """What a run came to."""
    told: dict[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return told


def show(name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print every figure's median and range."""
    print(f"\n{name}, {len(rows)} rounds, {machine()}\n")
    print(f"| {'figure':28} | {'median':>10} | {'min':>10} | {'max':>10} |")
    print(f"|{'-' * 30}|{'-' * 11}:|{'-' * 11}:|{'-' * 11}:|")
    for figure in rows[0]:
        values = [row[figure] for row in rows]
        cells = (f"{value:10,.3f}" for value in (statistics.median(values), min(values), max(values)))
        print(f"| {figure:28} | {' | '.join(cells)} |")


def machine() -> str:
    """What it was measured on."""
    return f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}"


@one_line
def main() -> None:
    """Parse, measure, print, write."""
    benchmarks: dict[str, Callable[[argparse.Namespace, Path], list[dict[str, Any]]]] = {
        function.__name__: function for function in (step, startup, memory, loss)
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=benchmarks)
    parser.add_argument("--against", type=Path, metavar="PATH", help="a script with a bare training loop")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is run")
    parser.add_argument("--steps", type=int, default=300, help="training steps of a round")
    parser.add_argument("--out", type=Path, help="JSON file (default: runs/bench/BENCHMARK.json)")
    args = parser.parse_args()
    if args.against and not args.against.is_file():
        raise UserError(f"--against={args.against} is not a file")
    with tempfile.TemporaryDirectory() as folder:
        rows = benchmarks[args.benchmark](args, Path(folder))
    show(args.benchmark, rows)
    out = args.out or Path("runs/bench") / f"{args.benchmark}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"benchmark": args.benchmark, "machine": machine(), "rows": rows}, indent=1) + "\n")
    print(f"\nwritten to {out}")


if __name__ == "__main__":
    main()
