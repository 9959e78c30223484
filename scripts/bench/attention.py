"""Attention, fused and explicit: peak memory and time over the length of the text, in a table and a picture."""

import argparse
import ctypes
import itertools
import math
import multiprocessing
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import machine, status_mb

from minigpt.utils.errors import RunError, UserError

HEADS, HEAD_DIM = 2, 64  # at T = 8192 a matrix of T×T takes 512 MB, explicit four of them with dropout
DROPOUT = 0.1
SIZES = [64, 128, 256, 512, 1024, 2048, 4096, 8192]
SMALLEST = 256  # below, memory is a few pages and says nothing
PATHS = ("fused", "explicit")


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
    # Forked from a process that has imported torch and computed nothing: importing takes longer than most calls.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "minigpt.attention"])
    with ProcessPoolExecutor(1, mp_context=context) as process:
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
        return status_mb("VmHWM")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


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
