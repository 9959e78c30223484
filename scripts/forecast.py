"""Forecast a training run on many GPUs: memory per device, time per step, cost. Needs no GPU, and trains nothing."""

import argparse
from pathlib import Path

from minigpt.runs.forecast import GPUS, forecast
from minigpt.utils.cli import cli_entrypoint
from minigpt.utils.scripts import usage
from minigpt.utils.terminal import log


def positive(text: str) -> float:
    """Parse a number > 0."""
    if not 0 < float(text) < float("inf"):
        raise ValueError
    return float(text)


def gigabits(text: str) -> float:
    """Parse a bandwidth in Gbit/s: 400Gbit, or 400."""
    return positive(text.lower().removesuffix("gbit"))


def positive_integer(text: str) -> int:
    """Parse an integer ≥ 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog=usage("forecast"), description=__doc__)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="of scripts/train.py, such as trainer=fsdp")
    add("--devices", type=positive_integer, default=1, metavar="N", help="number of GPUs (default: %(default)s)")
    add("--gpu", default="H100", choices=GPUS, help="(default: %(default)s)")
    add("--interconnect", type=gigabits, default=400, metavar="400Gbit", help="Gbit/s of a node, one direction")
    add("--per-node", type=positive_integer, default=8, metavar="N", help="GPUs per node (default: %(default)s)")
    add("--mfu", type=float, default=0.4, metavar="X", help="of one device, measured or assumed (default: %(default)s)")
    add("--tokens", type=positive, metavar="N", help="to train on (default: those of max_steps)")
    add("--price", type=positive, metavar="X", help="of a device per hour, in any currency")
    add("--out", type=Path, metavar="FILE", help="plot the scaling efficiency of all strategies over devices")
    return parser.parse_intermixed_args()


def main() -> None:
    """Forecast and print."""
    args = arguments()
    print(forecast(args))
    if args.out:
        log(f"wrote {args.out}")


if __name__ == "__main__":
    cli_entrypoint(main)()
