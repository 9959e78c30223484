"""Measure minigpt: training speed, start-up, memory, the baseline's loss, attention, data, sampling, sweeps.

Machines are noisy: what is compared runs in turn, several rounds of it, and medians and their ratio are
what to quote. Prints a table and writes the figures as JSON.

  python scripts/bench step --recipes fast_cpu,nanogpt_cpu
                                                 tokens/s beside bare training loops
  python scripts/bench startup                launch to help, to an error, to the first step
  python scripts/bench memory                 peak memory, also with a corpus of 1 GB
  python scripts/bench loss                   experiment=nanogpt_cpu to the end, over seeds
  python scripts/bench time_to_loss           steps and seconds to each loss: the table of README.md
  python scripts/bench time_to_loss --recipes "baseline max_steps=500,sprint_cpu eval_every=5" --losses 2.1
                                                 others, with settings of their own
  python scripts/bench data                   tokenizing, starting on 1 GB, batches of 1 TB
  python scripts/bench saving                 a checkpoint of model=baby, beside the steps between two
  python scripts/bench sampling               decoding beside a loop without a cache, and transformers
  python scripts/bench sweep                  nine runs side by side, after one another, and apart
  python scripts/bench widths                 loss over learning rate at several widths
  python scripts/bench gpu                    the recipes for a GPU, and GPT-2's use of the chip
  python scripts/bench attention              memory and time of fused and explicit, over lengths

The baseline is nanoGPT's recipe for a CPU in plain PyTorch (scripts/bench/bare_nanogpt.py).
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
    text_file,
)
from gpu import gpu
from sampling import sampling
from saving import saving
from sweep import sweep
from time_to_loss import LOSSES, draw_time_to_loss, show_time_to_loss, time_to_loss
from widths import plot_widths, show_widths, widths

from data import data
from minigpt.utils.cli import cli_entrypoint


def step(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Tokens/s over all training steps of a run, logging and progress bar on, beside a bare loop of the recipe.

    For nanogpt_cpu also beside the baseline. The shares are of what a large matrix product reaches in operations a
    second.
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
            share = bare["flops_per_token"] / bare["matrix_flops"]
            row |= {
                f"{recipe}: bare tokens/s": bare_speed,
                f"{recipe}: minigpt tokens/s": speed,
                f"{recipe}: ratio": speed / bare_speed,
                f"{recipe}: bare share": bare_speed * share,
                f"{recipe}: minigpt share": speed * share,
            }
        if "nanogpt_cpu" in recipes:
            ran = bare_nanogpt([*args.overrides, f"max_steps={args.steps}", f"eval_every={args.steps}"])
            seconds = float(re.findall(r"train-s ([\d.]+)", ran.output)[-1])
            row["nanogpt_cpu: baseline tokens/s"] = args.steps * TOKENS_PER_STEP / seconds
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
    """Peak memory, MB: the baseline and ours; ours on tiny shakespeare and on a corpus of 1 GB."""
    rows = []
    large = folder / "large.txt"
    text = text_file().read_bytes()
    with open(large, "wb") as file:
        for _ in range((1 << 30) // len(text)):
            file.write(text)
    options = [f"max_steps={args.steps}", f"eval_every={args.steps}"]
    from_large = [f"data.path={large}", f"data.folder={folder}", "data.val_fraction=0.0001"]
    for i in range(args.rounds):
        bare = bare_nanogpt(options)
        small = launch([*ours(folder / f"memory{i}"), *options])
        prepared = launch([*ours(folder / f"large{i}"), *options, *from_large])
        rows.append(
            {
                "baseline MB": bare.peak_mb,
                "minigpt MB": small.peak_mb,
                "ratio": small.peak_mb / bare.peak_mb,
                "own memory MB": small.own_mb,
                "own memory, 1 GB corpus MB": prepared.own_mb,
            }
        )
    return rows


def loss(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Validation loss and training seconds of experiment=nanogpt_cpu, a seed a row."""
    rows = []
    for seed in range(1337, 1337 + args.rounds):
        run = folder / f"seed{seed}"
        launch([*ours(run), f"seed={seed}"])
        losses = [float(row["val_loss"]) for row in metrics(run) if row["val_loss"]]
        rows.append({"last val loss": losses[-1], "seconds": summary(run)["seconds"], "seed": seed})
    return rows


def show(name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print every figure's median and range."""
    print(f"\n{name}, {len(rows)} rounds, {machine()}\n")
    width = max(map(len, rows[0]))
    print(f"| {'figure':{width}} | {'median':>10} | {'min':>10} | {'max':>10} |")
    print(f"|{'-' * (width + 2)}|{'-' * 11}:|{'-' * 11}:|{'-' * 11}:|")
    for figure in rows[0]:
        values = [row[figure] for row in rows if figure in row]
        cells = (
            f"{value:10,.{3 if value < 1000 else 0}f}"
            for value in (statistics.median(values), min(values), max(values))
        )
        print(f"| {figure:{width}} | {' | '.join(cells)} |")


@cli_entrypoint
def main() -> None:
    """Parse, measure, print, write."""
    benchmarks: dict[str, Callable[[argparse.Namespace, Path], list[dict[str, Any]]]] = {
        function.__name__: function
        for function in (
            step,
            startup,
            memory,
            loss,
            time_to_loss,
            attention,
            data,
            gpu,
            saving,
            sampling,
            sweep,
            widths,
        )
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=benchmarks)
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is run")
    parser.add_argument("--steps", type=int, default=300, help="training steps of a round")
    parser.add_argument("--sizes", type=lengths, default=SIZES, metavar="T,T,…", help="lengths of attention")
    parser.add_argument("--widths", type=lengths, metavar="C,C,…", help="of widths and sweep")
    parser.add_argument("--recipes", type=lambda s: s.split(","), metavar="NAME,NAME,…")
    parser.add_argument("--losses", type=lambda s: [float(x) for x in s.split(",")], default=LOSSES, metavar="X,X,…")
    parser.add_argument("--overrides", nargs="*", default=[], help="settings of every recipe, as for train.py")
    parser.add_argument("--plot", type=Path, help="PNG file of a drawn one (default: beside the JSON)")
    parser.add_argument("--out", type=Path, help="JSON file (default: runs/bench/BENCHMARK.json)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = benchmarks[args.benchmark](args, Path(folder))
    out = args.out or Path("runs/bench") / f"{args.benchmark}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"benchmark": args.benchmark, "machine": machine(), "rows": rows}, indent=1) + "\n")
    drawn: dict[str, tuple[Callable[..., None], Callable[..., None], list[Any]]] = {
        "attention": (show_attention, draw_attention, []),
        "time_to_loss": (show_time_to_loss, draw_time_to_loss, [args.losses]),
        "widths": (show_widths, plot_widths, []),
    }
    if args.benchmark in drawn:
        plot = args.plot or out.with_suffix(".png")
        say, draw, more = drawn[args.benchmark]
        say(rows, *more)
        draw(rows, *more, plot)
        print(f"\ndrawn to {plot}", end="")
    else:
        show(args.benchmark, rows)
    print(f"\nwritten to {out}")


if __name__ == "__main__":
    main()
