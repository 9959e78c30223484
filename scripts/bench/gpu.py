"""Measure minigpt on a CUDA GPU, part by part. A row that fails is printed, and the others are measured all the same.

  python scripts/bench/gpu.py                   all parts
  python scripts/bench/gpu.py gpt2 graphs       two parts; the rows of the others in FOLDER stay
  python scripts/bench/gpu.py --rehearse        the same code with tiny models on a CPU, in a few minutes

Parts, and the minutes that they may take on an H200 (estimates):

  check     4  recipes for 50 steps, resumed and compared bit for bit; sampling, plots, export, a sweep
  recipes   6  fast_gpu and best_gpu per seed: time to nanoGPT's loss, best loss; the speed of nanoGPT's recipe
  gpt2      6  tokens/s and MFU of GPT-2 over batch sizes, beside a bare loop; its kernels
  graphs    4  small models: eager, compiled, with CUDA graphs
  sampling  3  GPT-2 in bfloat16: share of the memory bound, beside transformers with a static cache
  memory    2  peak memory of GPT-2's sizes, compared with the forecast, with and without activation checkpointing
  faults    4  fault injection on the device

FOLDER gets results.json and tables.md after every row, and loss.png and mfu.png. Exit code 1 if a row failed. Without a
network set MINIGPT_DATA_DIR to a folder with tinyshakespeare.txt.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_parts import LOSS, PARTS, TABLES
from session import Session
from time_to_loss import plot_time_to_loss

from minigpt.utils.checks import POSITIVE_INT, one_of
from minigpt.utils.cli import cli_entrypoint
from minigpt.utils.errors import UserError, require


@cli_entrypoint
def main() -> None:
    """Measure the parts, write tables and plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on a CPU, to test this script")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="of the recipes (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="results (default: runs/bench/gpu)")
    args = parser.parse_args()
    for part in args.parts:
        require("PART", part, *one_of(PARTS))
    require("--seeds", args.seeds, *POSITIVE_INT)
    if not args.rehearse and not torch.cuda.is_available():
        raise UserError("found no CUDA GPU; set --rehearse to test the benchmark on a CPU")
    parts, rehearsal = args.parts or list(PARTS), "-rehearsal" if args.rehearse else ""
    out = (args.out or Path(f"runs/bench/gpu{rehearsal}")).absolute()
    with tempfile.TemporaryDirectory() as folder:
        session = Session(out, Path(folder), parts, TABLES, seeds=args.seeds, rehearse=args.rehearse)
        for part in parts:
            try:
                PARTS[part](session)
                plot(session)
            except Exception as error:  # outside of a row
                session.fail(part, error)
    print((out / "tables.md").read_text(encoding="utf-8"))
    print(f"wrote {out}")
    sys.exit(session.failed)


def plot(session: Session) -> None:
    """Plot the loss of the recipes over time, and the MFU over the batch size, as far as they are measured."""
    results = session.results["parts"]
    rows = {name: results[table.part]["rows"][name] for name, table in TABLES.items() if table.part in results}
    if curves := [row for row in rows.get("recipes", []) if "curve" in row]:
        plot_time_to_loss(curves, [LOSS], session.out / "loss.png")
    if batches := [row for row in rows.get("gpt2", []) if row.get("MFU")]:
        plot_mfu(batches, session.out / "mfu.png", "REHEARSAL" if session.rehearse else session.name)


def plot_mfu(rows: Sequence[dict[str, Any]], file: Path, title: str) -> None:
    """Plot the MFU of minigpt and of the bare loop over the batch size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    batches = [int(row["row"]) for row in rows]
    for key, label in (("MFU", "minigpt"), ("bare MFU", "bare loop")):
        axes.plot(batches, [row[key] for row in rows], marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, list(map(str, batches)))
    axes.set(xlabel="sequences of 1,024 tokens per step", ylabel="MFU", ylim=(0, None), title=f"GPT-2, {title}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
