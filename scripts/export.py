"""Write a checkpoint's weights as a safetensors file, with the model's values and the tokenizer in its metadata."""

import argparse
from pathlib import Path

from minigpt.utils.cli import cli_entrypoint
from minigpt.utils.terminal import sanitize_line


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", help="run folder or checkpoint (default: the newest run)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write here (default: model.safetensors in the run folder)"
    )
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", default="float32", choices=dtypes, help="of the weights (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    """Load, and write."""
    args = arguments()
    from minigpt.checkpoints.checkpoint import find_checkpoint, load_checkpoint, run_folder
    from minigpt.checkpoints.export import export

    path = find_checkpoint(args.run)
    out = args.out or run_folder(path) / "model.safetensors"
    export(*load_checkpoint(path), out, dtype=args.dtype)
    print(sanitize_line(f"wrote {out} from {path}"))


if __name__ == "__main__":
    cli_entrypoint(main)()
