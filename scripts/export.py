"""Write a model in another format: a Hugging Face folder, a checkpoint without training state, or
an HTML page.
"""

import argparse
import os
import sys
from pathlib import Path

from minigpt.utils.cli import cli_entrypoint
from minigpt.utils.errors import UserError, require
from minigpt.utils.scripts import ArgumentParser, shell_join, usage
from minigpt.utils.terminal import sanitize_line, warn


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = ArgumentParser(prog=usage("export"), description=__doc__)
    add = parser.add_argument
    default = "the newest run, or the best run of the newest sweep"
    run_help = f"run folder, checkpoint, or folder or id of Hugging Face (default: {default})"
    add("run", nargs="?", help=run_help)
    formats = ("huggingface", "safetensors", "html")
    formats_help = (
        "a folder for transformers, a checkpoint without training state, "
        "or a page that runs the model"
    )
    add("--to", required=True, choices=formats, help=formats_help)
    add("--out", required=True, type=Path, metavar="PATH", help="folder or file to write")
    weights_help = "format of the weights in the page of --to html (default: float16)"
    add("--weights", choices=("float16", "float32"), help=weights_help)
    add(
        "--snapshots",
        action="store_true",
        help="put the snapshots of the run into the page of --to html too",
    )
    return parser.parse_args()


def main() -> None:
    """Load the model, write it, print the next step."""
    args = arguments()
    require(
        "--out", args.out, lambda path: not os.path.lexists(path), "a path that does not exist yet"
    )
    for flag, value in (("--weights", args.weights), ("--snapshots", args.snapshots)):
        require(
            flag, value, lambda value: not value or args.to == "html", "left out without --to html"
        )
    from minigpt.checkpoints.find import find_snapshots, run_folder
    from minigpt.checkpoints.init_from import find_pretrained
    from minigpt.checkpoints.load import save_checkpoint
    from minigpt.extras.huggingface.export_huggingface import export_folder
    from minigpt.extras.interpret.learning import learning_curves
    from minigpt.extras.playground.export_html import export_html
    from minigpt.extras.playground.history import read_history

    pretrained = find_pretrained(args.run)
    if args.to == "safetensors":
        save_checkpoint(pretrained.load(), pretrained.tokenizer, args.out)
        print(sanitize_line(f"{args.out}: weights and tokenizer of {pretrained.path}"))
        return
    if args.to == "html":
        folder = run_folder(pretrained.path)
        found = find_snapshots(folder) if args.snapshots else {}
        if args.snapshots and not found:
            raise UserError(f"--snapshots: {folder} has no snapshots; leave it out")
        learned = []
        try:
            learned = learning_curves(folder) if found else []
        except UserError as error:  # they need the validation split; the weights do not
            warn(f"the page has no curves of what was learned when: {error}")
        weights, history = args.weights or "float16", read_history(folder)
        steps = export_html(
            pretrained, args.out, weights, history, snapshots=found, learned=learned
        )
        also = f" and {len(steps)} of its {len(found)} snapshots" if found else ""
        size = args.out.stat().st_size / 1e6
        print(
            sanitize_line(
                f"{args.out}: {size:.1f} MB, the model of {pretrained.path}{also}; open it in a "
                "browser"
            )
        )
        return
    architecture = export_folder(pretrained, args.out)
    print(sanitize_line(f"{args.out}: {architecture} of {pretrained.path}"))
    if architecture.startswith("MiniGPT"):
        print(
            "no class of transformers computes this model: load it with trust_remote_code=True",
            file=sys.stderr,
        )
    print(
        sanitize_line(f"to upload it: {shell_join('hf', 'upload', args.out.name, str(args.out))}")
    )


if __name__ == "__main__":
    cli_entrypoint(main)()
