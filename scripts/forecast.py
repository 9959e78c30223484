"""Forecast a training run on many GPUs: memory per device, time per step, cost. Needs no GPU, and trains nothing."""

import argparse
from pathlib import Path

from minigpt.forecast.cost import GPUS, forecast
from minigpt.utils.cli import cli_entrypoint
from minigpt.utils.scripts import usage
from minigpt.utils.terminal import log


def gigabits(text: str) -> float:
    """Parse a bandwidth in Gbit/s: 400Gbit, or 400."""
    return float(text.lower().removesuffix("gbit"))


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog=usage("forecast"), description=__doc__)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help=f"of {usage('train')}, such as trainer=fsdp")
    add("--devices", type=int, default=1, metavar="N", help="number of GPUs (default: %(default)s)")
    add("--gpu", default="H100", choices=GPUS, help="(default: %(default)s)")
    add("--interconnect", type=gigabits, default=400, metavar="400Gbit", help="Gbit/s of a node, one direction")
    add("--per-node", type=int, default=8, metavar="N", help="GPUs per node (default: %(default)s)")
    add("--mfu", type=float, default=0.4, metavar="X", help="of one device, measured or assumed (default: %(default)s)")
    add("--tokens", type=float, metavar="N", help="to train on (default: those of max_steps)")
    add("--price", type=float, metavar="X", help="of a device per hour, in any currency")
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
