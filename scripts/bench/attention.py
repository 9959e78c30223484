"""Benchmark of fused and explicit attention: peak memory and time over sequence length, as a table and a plot."""

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

from common import machine, status_mb, table

from minigpt.utils.errors import RunError, UserError

HEADS, HEAD_DIM = 2, 64  # at T = 8192 the T×T weights take 512 MB; explicit with dropout stores four such tensors
DROPOUT = 0.1
SIZES = [64, 128, 256, 512, 1024, 2048, 4096, 8192]
MIN_T_FOR_MEMORY = 256  # below, peak memory is a few pages
BACKENDS = ("fused", "explicit")


def attention(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure peak memory and time of fused and explicit attention, forward and backward, one row per length."""
    import torch
    from tqdm import tqdm

    rows = []
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    cases = list(itertools.product(devices, (0.0, DROPOUT), args.sizes))
    for device, dropout, T in tqdm(cases, desc="attention", leave=False, disable=None):
        row: dict[str, Any] = {"device": device, "dropout": dropout, "T": T}
        for backend in BACKENDS if T >= MIN_T_FOR_MEMORY else ():
            row |= run_in_new_process(attention_mb, device, backend, dropout, T)
        rows.append(row | run_in_new_process(attention_ms, device, dropout, T, args.rounds))
    return rows


def run_in_new_process(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function of this file in a new process, without memory that earlier calls allocated."""
    # Fork from a process that has only imported torch: the import takes longer than most calls.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "minigpt.attention"])
    with ProcessPoolExecutor(1, mp_context=context) as process:
        try:
            return process.submit(function, *arguments).result()
        except BrokenProcessPool:
            call = f"{function.__name__}{arguments}"
            raise RunError(f"{call} was killed, probably out of memory; remove the largest --sizes") from None


def attention_mb(device: str, backend: str, dropout: float, T: int) -> dict[str, float]:
    """Measure peak memory of forward, and of forward and backward, above the memory allocated before, in MB."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: freed memory is returned to the system
    forward, backward = attention_pass(device, backend, dropout, 64)
    backward(forward())  # warm-up: one-time allocations
    forward, backward = attention_pass(device, backend, dropout, T)
    before = _reset_peak_mb(device)
    out = forward()
    peak_forward = _peak_mb(device)
    backward(out)
    return {f"{backend} forward MB": peak_forward - before, f"{backend} MB": _peak_mb(device) - before}


def attention_ms(device: str, dropout: float, T: int, rounds: int) -> dict[str, Any]:
    """Measure the median time of each backend, run alternately, and of their ratio; and read the kernel of SDPA."""
    import torch

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() * 1e3

    def timed(backend: str) -> tuple[float, float]:
        forward, backward = passes[backend]
        start = now()
        out = forward()
        middle = now()
        backward(out)
        return middle - start, now() - start

    passes = {backend: attention_pass(device, backend, dropout, T) for backend in BACKENDS}
    kernel = re.match(r"ScaledDotProduct(\w+?)Attention", passes["fused"][0]().grad_fn.name())
    for backend in BACKENDS:
        timed(backend)  # warm-up
    times: dict[str, list[tuple[float, float]]] = {backend: [] for backend in BACKENDS}
    end = now() + rounds * 1e3  # repeat short pairs for up to one second per round
    while (done := len(times["fused"])) < rounds or (done < 200 and now() < end):
        for backend in BACKENDS[:: -1 if done % 2 else 1]:
            times[backend].append(timed(backend))
    row: dict[str, Any] = {"kernel": kernel[1].lower() if kernel else None, "pairs": done}
    row |= {"shape": [1, HEADS, T, HEAD_DIM], "threads": torch.get_num_threads()}
    for backend in BACKENDS:
        row[f"{backend} forward ms"], row[f"{backend} ms"] = map(statistics.median, zip(*times[backend], strict=True))
    ratios = (fused[1] / explicit[1] for fused, explicit in zip(*times.values(), strict=True))
    return row | {"fused/explicit": statistics.median(ratios)}


def attention_pass(
    device: str, backend: str, dropout: float, T: int
) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return forward and backward of causal self-attention over T positions, in the training dtype of the device."""
    import torch

    from minigpt.attention import attend, attend_explicit

    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
    *inputs, gradient = (torch.randn(1, HEADS, T, HEAD_DIM, **options) for _ in range(4))
    inputs = [x.requires_grad_() for x in inputs]

    def forward() -> Any:
        if backend == "fused":
            return attend(*inputs, causal=True, dropout=dropout)
        return attend_explicit(*inputs, causal=True, dropout=dropout)[0]

    def backward(out: Any) -> None:
        torch.autograd.grad(out, inputs, gradient)

    return forward, backward


def _reset_peak_mb(device: str) -> float:
    """Reset the peak to the memory allocated now, and return it in MB."""
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    return _peak_mb(device)


def _peak_mb(device: str) -> float:
    """Return the peak memory of this process on a device, in MB."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / (1 << 20)
    if sys.platform == "linux":  # ru_maxrss is inherited from the parent process
        return status_mb("VmHWM")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


def show_attention(rows: Sequence[dict[str, Any]]) -> None:
    """Print one row per length, then the growth of memory and the faster backend."""
    print(f"\nattention, {machine()}, {rows[0]['threads']} threads")
    print(f"shape (1, {HEADS}, T, {HEAD_DIM}), causal, forward and backward together; times within 5 % are the same\n")
    columns = ["device", "dropout", "T", "kernel", "fused MB", "explicit MB", "fused ms", "explicit ms"]
    columns += ["fused/explicit", "faster"]
    lines = []
    for row in rows:
        row = row | {"kernel": row["kernel"] or "T×T stored", "faster": faster(row), "dropout": f"{row['dropout']:g}"}
        figures = [row.get(column, "") for column in columns]
        lines.append([f"{value:,.2f}" if isinstance(value, float) else value for value in figures])
    print(table(columns, lines) + "\n")
    for (device, dropout), some in by_case(rows).items():
        kernel = some[-1]["kernel"]
        runs = f"SDPA runs its {kernel} kernel" if kernel else "SDPA has no fused kernel and stores the T×T weights"
        slower = ", ".join(str(row["T"]) for row in some if faster(row) == "explicit")
        speed = f"slower than explicit at T = {slower}" if slower else "at least as fast as explicit at every T"
        print(f"{device}, dropout {dropout:g}: {runs}; attend is {speed}")
        for backend, (slope, first, last) in slopes(some).items():
            print(f"  {backend} memory grows as T^{slope:.2f} from T = {first} to {last}")


def by_case(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, float], list[dict[str, Any]]]:
    """Group the rows by device and dropout."""
    return {case: list(some) for case, some in itertools.groupby(rows, lambda row: (row["device"], row["dropout"]))}


def faster(row: dict[str, Any]) -> str:
    """Return the backend that takes less time, or `same` within 5 %."""
    ratio = row["fused/explicit"]
    return "same" if abs(math.log(ratio)) < math.log(1.05) else "fused" if ratio < 1 else "explicit"


def slopes(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[float, int, int]]:
    """Fit the slope of log memory over log T to the last two doublings; per backend: slope, first T, last T."""
    fitted = {}
    for backend in BACKENDS:
        points = [
            (row["T"], row[f"{backend} MB"])
            for row in rows
            if row.get(f"{backend} MB") and row["T"] * 4 >= rows[-1]["T"]
        ]
        if len(points) > 1:
            x, y = (list(map(math.log, values)) for values in zip(*points, strict=True))
            fitted[backend] = statistics.linear_regression(x, y).slope, points[0][0], points[-1][0]
    return fitted


def draw_attention(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Plot memory and time over length, log-log, with reference lines for T and T²."""
    from matplotlib.figure import Figure

    devices = list(dict.fromkeys(row["device"] for row in rows))
    figure = Figure(figsize=(11, 4.8 * len(devices)), layout="constrained")
    grid = figure.subplots(len(devices), 2, squeeze=False)
    for (device, dropout), some in by_case(rows).items():
        for axes, unit in zip(grid[devices.index(device)], ("MB", "ms"), strict=True):
            for backend, color, power in zip(BACKENDS, ("tab:blue", "tab:orange"), (1, 2), strict=True):
                points = [(row["T"], row[f"{backend} {unit}"]) for row in some if row.get(f"{backend} {unit}")]
                style: dict[str, Any] = (
                    {"marker": "s", "linestyle": "--", "mfc": "white"} if dropout else {"marker": "o"}
                )
                label = f"{backend}, dropout {dropout:g}" if dropout else backend
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
            ticks = [row["T"] for row in some if unit == "ms" or row["T"] >= MIN_T_FOR_MEMORY]
            axes.set_xticks(ticks, list(map(str, ticks)))
            axes.set(xlabel="T (tokens)", ylabel={"MB": "peak memory (MB)", "ms": "time (ms)"}[unit])
            axes.set_title(f"{device}: {'peak memory' if unit == 'MB' else 'time'}, forward and backward")
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def lengths(text: str) -> list[int]:
    """Parse the comma-separated lengths of --sizes."""
    try:
        sizes = sorted({int(size) for size in text.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        raise UserError(f"--sizes must be integers ≥ 1 such as 64,256, got {text}")
    return sizes
