"""Write a checkpoint's weights as a safetensors file, with the model's values and the tokenizer in its metadata."""

import argparse
from pathlib import Path

from minigpt.errors import clean, one_line


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", help="run folder or checkpoint (default: the newest run)")
    parser.add_argument("--out", default="model.safetensors", metavar="FILE", help="(default: model.safetensors)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    return parser.parse_args()


def main() -> None:
    """Load, and write."""
    args = arguments()
    from minigpt.checkpoint import find_checkpoint, load_checkpoint
    from minigpt.export import export

    path = find_checkpoint(args.run)
    export(*load_checkpoint(path), Path(args.out), dtype=args.dtype)
    print(clean(f"wrote {args.out} from {path}"))


if __name__ == "__main__":
    one_line(main)()
