"""Benchmarks: training, startup, memory, time to loss, attention, data, checkpoints, sampling, server, sweeps.

Variants run alternately for several rounds, because machines are noisy; report medians and their ratio.
Prints a table and writes the measurements as JSON.

  python scripts/bench step --recipes fast_cpu,nanogpt_cpu
                                     tokens/s of recipes and of bare training loops
  python scripts/bench startup       launch to --help, to a configuration error, to the first step
  python scripts/bench memory        peak memory, also with a corpus of 1 GB
  python scripts/bench loss          final loss of experiment=nanogpt_cpu, several seeds
  python scripts/bench time_to_loss  steps and seconds to each loss: the table of README.md
  python scripts/bench time_to_loss --recipes "baseline max_steps=500,sprint_cpu eval_every=5" --losses 2.1
                                     the same for other recipes, losses and settings
  python scripts/bench data          tokenization, startup with 1 GB, batches from 1 TB
  python scripts/bench shards        a step on 5,000 shards whose reads are slow, compared with tokens in memory
  python scripts/bench saving        checkpoint time of model=baby, relative to the steps between two checkpoints
  python scripts/bench sampling      decoding speed, compared with a loop without a KV cache and with transformers
  python scripts/bench serve         1, 4, 16 and 64 clients of the server, compared with scripts/sample.py
  python scripts/bench sweep         nine runs in parallel, sequentially, and as separate processes
  python scripts/bench widths        loss over learning rate at several widths
  python scripts/bench muon          a step of Muon on 2 and 4 ranks, alone and divided
  python scripts/bench diloco --steps 4000
                                     loss, time and bytes of DiLoCo on a slow link, compared with DDP (root)
  python scripts/bench forecast      memory, bytes and time of training steps, compared with scripts/forecast.py (root)
  python scripts/bench attention     memory and time of fused and explicit attention over sequence lengths

The baseline is nanoGPT's CPU recipe in plain PyTorch (scripts/bench/bare_nanogpt.py). `gpu.py` is for a GPU.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attention import SIZES, attention, draw_attention, lengths, show_attention
from common import (
    BARE_MINIGPT,
    TOKENS_PER_STEP,
    TRAIN,
    bare_nanogpt,
    launch,
    machine,
    metrics,
    ours,
    summary,
    table,
    write_gigabyte,
)
from diloco import diloco
from forecast import forecast
from muon import muon
from sampling import bandwidth, sampling
from saving import saving
from serve import serve
from shards import shards
from sweep import sweep
from time_to_loss import LOSSES, plot_time_to_loss, show_time_to_loss, time_to_loss
from widths import plot_widths, show_widths, widths

from data import data
from minigpt.utils.cli import cli_entrypoint


def step(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure tokens/s of whole runs, with logging and progress bar, and of a bare training loop of the same recipe.

    For nanogpt_cpu also of the baseline. Utilization is the fraction of the FLOP/s of a large matrix product, and the
    memory time, of all reads and writes of a step at the memory bandwidth, a fraction of the bare step.
    """
    rows = []
    for i in range(args.rounds):
        row: dict[str, Any] = {}
        recipes = args.recipes or ["nanogpt_cpu"]
        for recipe in recipes:
            run = folder / f"{recipe.replace('/', '_')}{i}"
            settings = [f"experiment={recipe}", f"max_steps={args.steps}", *args.overrides]
            bare = json.loads(launch([sys.executable, BARE_MINIGPT, *settings]).output.splitlines()[-1])
            launch([sys.executable, TRAIN, *settings, f"eval_every={args.steps}", f"hydra.run.dir={run}"])
            bare_speed, speed = bare["tokens"] / bare["seconds"], summary(run)["tokens_per_second"]
            utilization = bare["flops_per_token"] / bare["matrix_flops"]  # per token/s
            row |= {
                f"{recipe}: bare tokens/s": bare_speed,
                f"{recipe}: minigpt tokens/s": speed,
                f"{recipe}: ratio": speed / bare_speed,
                f"{recipe}: bare utilization": bare_speed * utilization,
                f"{recipe}: minigpt utilization": speed * utilization,
            }
            if "bytes_per_step" in bare:  # on a CPU
                gb, bare_step = bare["bytes_per_step"] / 1e9, bare["seconds"] / args.steps
                row |= {
                    f"{recipe}: memory traffic MB": 1e3 * gb,
                    f"{recipe}: memory time of the bare step": gb / bandwidth() / bare_step,
                }
        if "nanogpt_cpu" in recipes:
            result = bare_nanogpt([*args.overrides, f"max_steps={args.steps}", f"eval_every={args.steps}"])
            seconds = float(re.findall(r"train-s ([\d.]+)", result.output)[-1])
            baseline = args.steps * TOKENS_PER_STEP / seconds
            row |= {
                "nanogpt_cpu: baseline tokens/s": baseline,
                "nanogpt_cpu: ratio to baseline": row["nanogpt_cpu: minigpt tokens/s"] / baseline,
            }
        rows.append(row)
    return rows


def startup(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure seconds from launch to the help, to a configuration error, and to the end of the first step."""
    rows = []
    run_once = [*ours(folder / "warm"), "max_steps=1"]
    launch(run_once)  # caches the token files
    for i in range(args.rounds):
        run = folder / f"startup{i}"
        imports = launch([sys.executable, "-c", "import torch, lightning"]).seconds
        first = launch([*ours(run), "max_steps=1", "log_every=1"], watch=run / "metrics.csv").seconds
        rows.append(
            {
                "help s": launch([sys.executable, TRAIN, "--help"]).seconds,
                "invalid value s": launch([sys.executable, TRAIN, "optimizer.lr=-1"], fails=True).seconds,
                "unknown setting s": launch([sys.executable, TRAIN, "max_stepz=1"], fails=True).seconds,
                "import torch, lightning s": imports,
                "first step s": first,
                "first step without imports s": first - imports,
            }
        )
    return rows


def memory(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure peak memory in MB of the baseline and of minigpt, on tiny shakespeare and on a corpus of 1 GB."""
    rows = []
    large = folder / "large.txt"
    write_gigabyte(large)
    options = [f"max_steps={args.steps}", f"eval_every={args.steps}"]
    from_large = [f"data.path={large}", f"data.folder={folder}", "data.val_fraction=0.0001"]
    for i in range(args.rounds):
        bare = bare_nanogpt(options)
        small = launch([*ours(folder / f"memory{i}"), *options])
        large_run = launch([*ours(folder / f"large{i}"), *options, *from_large])
        rows.append(
            {
                "baseline MB": bare.peak_mb,
                "minigpt MB": small.peak_mb,
                "ratio": small.peak_mb / bare.peak_mb,
                "anonymous memory MB": small.own_mb,
                "anonymous memory, 1 GB corpus MB": large_run.own_mb,
            }
        )
    return rows


def loss(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure validation loss and training time of experiment=nanogpt_cpu, one row per seed."""
    rows = []
    for seed in range(1337, 1337 + args.rounds):
        run = folder / f"seed{seed}"
        launch([*ours(run), f"seed={seed}"])
        losses = [float(row["val_loss"]) for row in metrics(run) if row["val_loss"]]
        rows.append({"last val loss": losses[-1], "seconds": summary(run)["seconds"], "seed": seed})
    return rows


def show(name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print median and range of every measurement."""
    print(f"\n{name}, {len(rows)} rounds, {machine()}\n")
    lines = []
    for measurement in rows[0]:
        values = [row[measurement] for row in rows if measurement in row]
        figures = statistics.median(values), min(values), max(values)
        lines.append([measurement, *(f"{value:,.{3 if value < 1000 else 0}f}" for value in figures)])
    print(table(["measurement", "median", "min", "max"], lines))


@cli_entrypoint
def main() -> None:
    """Parse the command line, run a benchmark, print and write the results."""
    functions: list[Callable[[argparse.Namespace, Path], list[dict[str, Any]]]]
    functions = [step, startup, memory, loss, time_to_loss, attention, data, diloco, forecast, muon, saving, sampling]
    benchmarks = {function.__name__: function for function in [*functions, serve, shards, sweep, widths]}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=benchmarks)
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="training steps per round (default: %(default)s)")
    parser.add_argument("--sizes", type=lengths, default=SIZES, metavar="T,T,…", help="sequence lengths; for attention")
    parser.add_argument("--widths", type=lengths, metavar="C,C,…", help="embedding sizes; for widths and sweep")
    parser.add_argument(
        "--recipes", type=lambda s: s.split(","), metavar="NAME,NAME,…", help="for step and time_to_loss"
    )
    parser.add_argument(
        "--losses",
        type=lambda s: [float(x) for x in s.split(",")],
        default=LOSSES,
        metavar="X,X,…",
        help="validation losses; for time_to_loss",
    )
    parser.add_argument("--overrides", nargs="*", default=[], help="overrides of train.py for every recipe")
    parser.add_argument("--plot", type=Path, help="PNG file of a plot (default: next to the JSON file)")
    parser.add_argument("--out", type=Path, help="JSON file (default: runs/bench/BENCHMARK.json)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = benchmarks[args.benchmark](args, Path(folder))
    out = args.out or Path("runs/bench") / f"{args.benchmark}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"benchmark": args.benchmark, "machine": machine(), "rows": rows}, indent=1) + "\n")
    plotted: dict[str, tuple[Callable[..., None], Callable[..., None], list[Any]]] = {
        "attention": (show_attention, draw_attention, []),
        "time_to_loss": (show_time_to_loss, plot_time_to_loss, [args.losses]),
        "widths": (show_widths, plot_widths, []),
    }
    if args.benchmark in plotted:
        plot = args.plot or out.with_suffix(".png")
        show_table, plot_rows, more = plotted[args.benchmark]
        show_table(rows, *more)
        plot_rows(rows, *more, plot)
        print(f"\nwrote {plot}", end="")
    else:
        show(args.benchmark, rows)
    print(f"\nwrote {out}")


if __name__ == "__main__":
    main()
