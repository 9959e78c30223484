"""Write a model in another format: a Hugging Face folder, or a checkpoint of its weights and tokenizer alone."""

import argparse
import os
import shlex
import sys
from pathlib import Path

from minigpt.utils.cli import cli_entrypoint
from minigpt.utils.errors import require
from minigpt.utils.scripts import usage
from minigpt.utils.terminal import sanitize_line


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog=usage("export"), description=__doc__)
    add = parser.add_argument
    add("run", nargs="?", help="run folder, checkpoint, or folder or id of Hugging Face (default: the newest run)")
    formats = ("huggingface", "safetensors")
    add(
        "--to", required=True, choices=formats, help="a folder for transformers, or a checkpoint without training state"
    )
    add("--out", required=True, type=Path, metavar="PATH", help="folder or file to write")
    return parser.parse_args()


def main() -> None:
    """Load the model, write it, print the next step."""
    args = arguments()
    require("--out", args.out, lambda path: not os.path.lexists(path), "a path that does not exist yet")
    from minigpt.checkpoints.export import export_folder
    from minigpt.checkpoints.models import save_checkpoint
    from minigpt.checkpoints.pretrained import find_pretrained

    pretrained = find_pretrained(args.run)
    if args.to == "safetensors":
        save_checkpoint(pretrained.load(), pretrained.tokenizer, args.out)
        print(sanitize_line(f"{args.out}: weights and tokenizer of {pretrained.path}"))
        return
    architecture = export_folder(pretrained, args.out)
    print(sanitize_line(f"{args.out}: {architecture} of {pretrained.path}"))
    if architecture.startswith("MiniGPT"):
        print("no class of transformers computes this model: load it with trust_remote_code=True", file=sys.stderr)
    print(sanitize_line(f"to upload it: {shlex.join(('hf', 'upload', args.out.name, str(args.out)))}"))


if __name__ == "__main__":
    cli_entrypoint(main)()
