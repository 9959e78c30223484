"""Report a sweep: print the answer and the ranked table, and write them and the plot."""

import argparse
from pathlib import Path

from minigpt.utils.cli import cli_entrypoint
from minigpt.utils.scripts import ArgumentParser, usage


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = ArgumentParser(prog=usage("sweep_report"), description=__doc__)
    latest = Path("runs/sweeps/latest")
    folders = (
        "sweep, or folder with runs below it; several are compared in one table "
        f"(default: {latest})"
    )
    out = "folder to write to (default: the sweep's own, and none for several folders)"
    along = "plot the loss over this numeric setting, such as optimizer.lr or lr"
    parser.add_argument(
        "folders", nargs="*", type=Path, default=[latest], metavar="FOLDER", help=folders
    )
    parser.add_argument("--out", type=Path, help=out)
    parser.add_argument("--along", metavar="KEY", help=along)
    return parser.parse_args()


def main() -> None:
    """Parse and report."""
    args = parse_args()
    from minigpt.sweeps.report import report

    report(args.folders, out=args.out, along=args.along)


if __name__ == "__main__":
    cli_entrypoint(main)()
