"""Say what a sweep came to so far: a ranked table to stdout, and to files sweep.csv and sweep.png."""

import argparse
from pathlib import Path

from minigpt.utils.cli import cli_entrypoint


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    latest = Path("runs/sweeps/latest")
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        default=[latest],
        metavar="FOLDER",
        help=f"of a sweep, or any that runs lie below; several are compared in one table (default: {latest})",
    )
    parser.add_argument(
        "--out", type=Path, help="folder to write to (default: the sweep's own, of several the current one)"
    )
    parser.add_argument("--along", metavar="KEY", help="plot the loss over this setting, such as optimizer.lr or lr")
    return parser.parse_args()


def main() -> None:
    """Read, print, draw."""
    args = arguments()
    from minigpt.sweeps.report import report

    report(args.folders, out=args.out, along=args.along)


if __name__ == "__main__":
    cli_entrypoint(main)()
