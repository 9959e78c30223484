"""Benchmarks: training, time to loss, sampling.

Variants run alternately for several rounds, because machines are noisy; report medians and their
ratio. Prints a table and writes the measurements as JSON.

  python scripts/bench step --recipes fast_cpu,nanogpt_cpu
      tokens/s of recipes and of bare training loops
  python scripts/bench time_to_loss
      steps and seconds to each loss: the table of README.md
  python scripts/bench time_to_loss --recipes "baseline max_steps=500,sprint_cpu" --losses 2.1
      the same for other recipes, settings and losses
  python scripts/bench sampling
      decoding speed, compared with a loop without a KV cache and with transformers

The baseline is nanoGPT's CPU recipe in plain PyTorch (scripts/bench/bare_nanogpt.py). `gpu.py` is
for a GPU.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import TRAIN, launch, machine, run_bare, summary, table
from sampling import sampling
from time_to_loss import (
    BASELINE,
    LOSSES,
    plot_time_to_loss,
    run_baseline,
    show_time_to_loss,
    time_to_loss,
)

from minigpt.utils.cli import cli_entrypoint


def step(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure tokens/s of whole runs, of a bare loop of the same recipe and, for nanogpt_cpu, of
    the baseline.
    """
    rows = []
    for i in range(args.rounds):
        row: dict[str, Any] = {}
        for recipe in args.recipes or ["nanogpt_cpu"]:
            run = folder / f"{recipe.replace('/', '_')}{i}"
            settings = [f"experiment={recipe}", f"max_steps={args.steps}", *args.overrides]
            bare = run_bare(*settings)
            launch(
                [
                    sys.executable,
                    TRAIN,
                    *settings,
                    f"eval_every={args.steps}",
                    f"hydra.run.dir={run}",
                ]
            )
            bare_speed, speed = bare["tokens"] / bare["seconds"], summary(run)["tokens_per_second"]
            row |= {
                f"{recipe}: bare tokens/s": bare_speed,
                f"{recipe}: minigpt tokens/s": speed,
                f"{recipe}: ratio": speed / bare_speed,
            }
            if recipe == "nanogpt_cpu":
                result = run_baseline(BASELINE, 1337, [*args.overrides, *settings[1:2]])
                baseline = result["tokens"] / result["train s"]
                row |= {
                    "nanogpt_cpu: baseline tokens/s": baseline,
                    "nanogpt_cpu: ratio to baseline": speed / baseline,
                }
        rows.append(row)
    return rows


def show(name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print median and range of every measurement."""
    print(f"\n{name}, {len(rows)} rounds, {machine()}\n")
    lines = []
    for measurement in rows[0]:
        values = [row[measurement] for row in rows]
        figures = statistics.median(values), min(values), max(values)
        lines.append(
            [measurement, *(f"{value:,.{3 if value < 1000 else 0}f}" for value in figures)]
        )
    print(table(["measurement", "median", "min", "max"], lines))


@cli_entrypoint
def main() -> None:
    """Parse the command line, run a benchmark, print and write the results."""
    benchmarks = {function.__name__: function for function in (step, time_to_loss, sampling)}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmark", choices=benchmarks)
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=300, help="training steps of step (default: %(default)s)"
    )
    parser.add_argument(
        "--recipes", type=lambda s: s.split(","), metavar="NAME,…", help="for step and time_to_loss"
    )
    parser.add_argument(
        "--losses",
        type=lambda s: [float(x) for x in s.split(",")],
        default=LOSSES,
        metavar="X,X,…",
        help="validation losses; for time_to_loss",
    )
    parser.add_argument(
        "--overrides", nargs="*", default=[], help="overrides of train.py for every recipe"
    )
    parser.add_argument("--out", type=Path, help="JSON file (default: runs/bench/BENCHMARK.json)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = benchmarks[args.benchmark](args, Path(folder))
    out = args.out or Path("runs/bench") / f"{args.benchmark}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        json.dumps({"benchmark": args.benchmark, "machine": machine(), "rows": rows}, indent=1)
        + "\n",
        encoding="utf-8",
    )
    if args.benchmark == "time_to_loss":
        plot_time_to_loss(rows, args.losses, out.with_suffix(".png"))
        show_time_to_loss(rows, args.losses)
    else:
        show(args.benchmark, rows)
    print(f"\nwrote {out}")


if __name__ == "__main__":
    main()
