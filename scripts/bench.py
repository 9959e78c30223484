"""Measure minigpt: training speed, start-up, memory, the loss of the baseline recipe, and attention.

Machines are noisy: what is compared runs in turn, several rounds of it, and medians and their ratio are
what to quote. Prints a table and writes the figures as JSON.

  python scripts/bench.py step --against PATH    a bare training loop beside ours, tokens/s
  python scripts/bench.py startup                launch to help, to an error, to the first step
  python scripts/bench.py memory --against PATH  peak memory, also with a corpus of 1 GB
  python scripts/bench.py loss                   experiment=nanogpt_cpu to the end, over seeds
  python scripts/bench.py attention              memory and time of fused and explicit, over lengths

PATH is a script with a bare PyTorch loop of the recipe nanogpt_cpu that takes TEXT, --iters N and
--eval_every N and prints `train-s X`, the seconds that its steps took.
"""

import argparse
import csv
import ctypes
import itertools
import json
import math
import multiprocessing
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
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from minigpt import corpus
from minigpt.errors import RunError, UserError, one_line

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ROOT / "scripts" / "train.py"
TOKENS_PER_STEP = 12 * 64  # of experiment=nanogpt_cpu
HEADS, HEAD_DIM = 2, 64  # of attention: at T = 8192 a matrix of T×T takes 512 MB, explicit four of them with dropout
DROPOUT = 0.1
SIZES = [64, 128, 256, 512, 1024, 2048, 4096, 8192]
SMALLEST = 256  # below, memory is a few pages and says nothing
PATHS = ("fused", "explicit")


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
            own = max(own, _status_mb("RssAnon", process.pid))  # what no file backs
            time.sleep(0.02)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(ended[1])
        output.seek(0)
        said = output.read().decode()
    if bool(process.returncode) != fails:
        raise UserError(f"{' '.join(map(str, command))} ended with exit code {process.returncode}: {said}")
    peak = ended[2].ru_maxrss / (1024 if sys.platform == "linux" else 1 << 20)
    return Ran(said, seen or seconds, peak, own)


def _status_mb(field: str, pid: int | str = "self") -> float:
    """A memory figure of a process; 0 where the system does not tell."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        if found := re.search(rf"{field}:\s+(\d+)", status):
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


def attention(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Peak memory and time of fused and explicit attention, forward and backward, a length a row."""
    import torch
    from tqdm import tqdm

    rows = []
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    cases = list(itertools.product(devices, (0.0, DROPOUT), args.sizes))
    for device, dropout, T in tqdm(cases, desc="attention", leave=False, disable=None):
        row: dict[str, Any] = {"device": device, "dropout": dropout, "T": T}
        for path in PATHS if T >= SMALLEST else ():
            row |= in_fresh_process(attention_mb, device, path, dropout, T)
        rows.append(row | in_fresh_process(attention_ms, device, dropout, T, args.rounds))
    return rows


def in_fresh_process(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function of this file in a process of its own, where no earlier call has left anything."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(function, *arguments).result()
        except BrokenProcessPool:
            died = f"{function.__name__}{arguments} was killed, probably for its memory"
            raise RunError(f"{died}; leave the largest lengths out of --sizes") from None


def attention_mb(device: str, path: str, dropout: float, T: int) -> dict[str, float]:
    """Peak memory of forward, and of forward and backward, above what was held before, in MB."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back, and counts no longer
    forward, backward = attention_pass(device, path, dropout, 64)
    backward(forward())  # loads what any call needs
    forward, backward = attention_pass(device, path, dropout, T)
    before = _reset_peak_mb(device)
    out = forward()
    peak_forward = _peak_mb(device)
    backward(out)
    return {f"{path} forward MB": peak_forward - before, f"{path} MB": _peak_mb(device) - before}


def attention_ms(device: str, dropout: float, T: int, rounds: int) -> dict[str, Any]:
    """Medians of the time of either path, run in turn, and of their ratio; and whether SDPA had a fused kernel."""
    import torch

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() * 1e3

    def timed(path: str) -> tuple[float, float]:
        forward, backward = passes[path]
        start = now()
        out = forward()
        middle = now()
        backward(out)
        return middle - start, now() - start

    passes = {path: attention_pass(device, path, dropout, T) for path in PATHS}
    kernel = re.match(r"ScaledDotProduct(\w+?)Attention", passes["fused"][0]().grad_fn.name())
    for path in PATHS:
        timed(path)  # the first is slow
    taken: dict[str, list[tuple[float, float]]] = {path: [] for path in PATHS}
    end = now() + rounds * 1e3  # a second a round where a pair takes less
    while (done := len(taken["fused"])) < rounds or (done < 200 and now() < end):
        for path in PATHS[:: -1 if done % 2 else 1]:
            taken[path].append(timed(path))
    row: dict[str, Any] = {"kernel": kernel[1].lower() if kernel else None, "pairs": done}
    row |= {"shape": [1, HEADS, T, HEAD_DIM], "threads": torch.get_num_threads()}
    for path in PATHS:
        row[f"{path} forward ms"], row[f"{path} ms"] = map(statistics.median, zip(*taken[path], strict=True))
    ratios = (fused[1] / explicit[1] for fused, explicit in zip(*taken.values(), strict=True))
    return row | {"fused/explicit": statistics.median(ratios)}


def attention_pass(device: str, path: str, dropout: float, T: int) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Forward and backward of causal self-attention over T positions, in the dtype that training uses there."""
    import torch

    from minigpt.attention import attend, attend_explicit

    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
    *inputs, gradient = (torch.randn(1, HEADS, T, HEAD_DIM, **options) for _ in range(4))
    inputs = [x.requires_grad_() for x in inputs]

    def forward() -> Any:
        if path == "fused":
            return attend(*inputs, causal=True, dropout=dropout)
        return attend_explicit(*inputs, causal=True, dropout=dropout)[0]

    def backward(out: Any) -> None:
        torch.autograd.grad(out, inputs, gradient)

    return forward, backward


def _reset_peak_mb(device: str) -> float:
    """Have the peak start from the memory held now, and return that."""
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    return _peak_mb(device)


def _peak_mb(device: str) -> float:
    """The most memory that this process held on a device."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / (1 << 20)
    if sys.platform == "linux":  # where a process inherits ru_maxrss from the one that started it
        return _status_mb("VmHWM")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


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


def show_attention(rows: Sequence[dict[str, Any]]) -> None:
    """Print a length a row; then how memory grows, and which path is the faster."""
    print(f"\nattention, {machine()}, {rows[0]['threads']} threads")
    print(f"shape (1, {HEADS}, T, {HEAD_DIM}), causal, forward and backward together; times within 5 % are the same\n")
    heads = ("device", "dropout", "T", "kernel", "fused MB", "explicit MB", "fused ms", "explicit ms", "fused/explicit")
    print("| " + " | ".join(f"{head:>11}" for head in (*heads, "faster")) + " |")
    print("|" + f"{'-' * 12}:|" * (len(heads) + 1))
    for row in rows:
        row = row | {"kernel": row["kernel"] or "T×T formed", "faster": faster(row), "dropout": f"{row['dropout']:g}"}
        figures = [row.get(head, "") for head in (*heads, "faster")]
        cells = (f"{value:11,.2f}" if isinstance(value, float) else f"{value:>11}" for value in figures)
        print("| " + " | ".join(cells) + " |")
    print()
    for (device, dropout), some in by_case(rows).items():
        kernel = some[-1]["kernel"]
        runs = f"SDPA runs its {kernel} kernel" if kernel else "SDPA has no fused kernel and forms the T×T weights"
        slower = ", ".join(str(row["T"]) for row in some if faster(row) == "explicit")
        speed = f"slower than explicit at T = {slower}" if slower else "at least as fast as explicit at every T"
        print(f"{device}, dropout {dropout:g}: {runs}; attend is {speed}")
        for path, (slope, first, last) in slopes(some).items():
            print(f"  {path} memory grows as T^{slope:.2f} from T = {first} to {last}")


def by_case(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, float], list[dict[str, Any]]]:
    """The rows of every device and dropout."""
    return {case: list(some) for case, some in itertools.groupby(rows, lambda row: (row["device"], row["dropout"]))}


def faster(row: dict[str, Any]) -> str:
    """The path that takes less time, or `same`."""
    ratio = row["fused/explicit"]
    return "same" if abs(math.log(ratio)) < math.log(1.05) else "fused" if ratio < 1 else "explicit"


def slopes(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[float, int, int]]:
    """Slope of log memory over log T of every path, fitted to the two upper doublings, and the lengths of the fit."""
    fitted = {}
    for path in PATHS:
        points = [
            (row["T"], row[f"{path} MB"]) for row in rows if row.get(f"{path} MB") and row["T"] * 4 >= rows[-1]["T"]
        ]
        if len(points) > 1:
            x, y = (list(map(math.log, values)) for values in zip(*points, strict=True))
            fitted[path] = statistics.linear_regression(x, y).slope, points[0][0], points[-1][0]
    return fitted


def draw_attention(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw memory and time over length, log-log, beside lines that grow as T and as T²."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    devices = list(dict.fromkeys(row["device"] for row in rows))
    figure, grid = plt.subplots(len(devices), 2, figsize=(11, 4.8 * len(devices)), squeeze=False, layout="constrained")
    for (device, dropout), some in by_case(rows).items():
        for axes, unit in zip(grid[devices.index(device)], ("MB", "ms"), strict=True):
            for path, color, power in zip(PATHS, ("tab:blue", "tab:orange"), (1, 2), strict=True):
                points = [(row["T"], row[f"{path} {unit}"]) for row in some if row.get(f"{path} {unit}")]
                style: dict[str, Any] = (
                    {"marker": "s", "linestyle": "--", "mfc": "white"} if dropout else {"marker": "o"}
                )
                label = f"{path}, dropout {dropout:g}" if dropout else path
                if not points:
                    continue
                axes.plot(*zip(*points, strict=True), color=color, markersize=5, label=label, **style)
                if not dropout and (unit == "MB" or power == 2):
                    T, top = points[-1]
                    beside = [(x, top * (x / T) ** power * (0.5, 2.5)[power - 1]) for x, _ in points]
                    axes.plot(*zip(*beside, strict=True), color="gray", linestyle=":", linewidth=1)
                    where = {"xytext": (0, -16)} if power == 1 else {"xytext": (-14, -2)}
                    text = "∝ T" if power == 1 else "∝ T²"
                    axes.annotate(text, beside[-1], **where, textcoords="offset points", ha="right", color="gray")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            ticks = [row["T"] for row in some if unit == "ms" or row["T"] >= SMALLEST]
            axes.set_xticks(ticks, list(map(str, ticks)))
            axes.set(xlabel="T (tokens)", ylabel={"MB": "peak memory (MB)", "ms": "time (ms)"}[unit])
            axes.set_title(f"{device}: {'peak memory' if unit == 'MB' else 'time'}, forward and backward")
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def lengths(text: str) -> list[int]:
    """The value of --sizes."""
    try:
        sizes = sorted({int(size) for size in text.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        raise UserError(f"--sizes={text} is not possible; it takes lengths from 1 up, as in --sizes 64,256")
    return sizes


def machine() -> str:
    """What it was measured on."""
    return f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}"


@one_line
def main() -> None:
    """Parse, measure, print, write."""
    benchmarks: dict[str, Callable[[argparse.Namespace, Path], list[dict[str, Any]]]] = {
        function.__name__: function for function in (step, startup, memory, loss, attention)
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=benchmarks)
    parser.add_argument("--against", type=Path, metavar="PATH", help="a script with a bare training loop")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is run")
    parser.add_argument("--steps", type=int, default=300, help="training steps of a round")
    parser.add_argument("--sizes", type=lengths, default=SIZES, metavar="T,T,…", help="lengths of attention")
    parser.add_argument("--plot", type=Path, help="PNG file of attention (default: beside the JSON file)")
    parser.add_argument("--out", type=Path, help="JSON file (default: runs/bench/BENCHMARK.json)")
    args = parser.parse_args()
    if args.against and not args.against.is_file():
        raise UserError(f"--against={args.against} is not a file")
    with tempfile.TemporaryDirectory() as folder:
        rows = benchmarks[args.benchmark](args, Path(folder))
    out = args.out or Path("runs/bench") / f"{args.benchmark}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"benchmark": args.benchmark, "machine": machine(), "rows": rows}, indent=1) + "\n")
    if args.benchmark == "attention":
        show_attention(rows)
        plot = args.plot or out.with_suffix(".png")
        draw_attention(rows, plot)
        print(f"\ndrawn to {plot}", end="")
    else:
        show(args.benchmark, rows)
    print(f"\nwritten to {out}")


if __name__ == "__main__":
    main()
