"""Analyze the attention heads of a trained model: statistics to stdout, plots to files."""

import argparse
import os
from pathlib import Path

from minigpt.utils.checks import integer
from minigpt.utils.cli import cli_entrypoint
from minigpt.utils.errors import UserError, require
from minigpt.utils.scripts import ArgumentParser, usage
from minigpt.utils.terminal import log

# Idle threads sleep instead of spinning, which is 3.6 times as fast beside a busy process on 2
# cores. torch reads the variable when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = ArgumentParser(prog=usage("attention"), description=__doc__)
    default = "the newest run, or the best run of the newest sweep"
    run_help = f"run folder, checkpoint, or folder or id of Hugging Face (default: {default})"
    parser.add_argument("run", nargs="?", help=run_help)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="text of at least two tokens")
    file_help = "read the prompt as data.path= does, or from stdin (-)"
    prompt.add_argument("--prompt-file", metavar="PATH", help=file_help)
    parser.add_argument(
        "--truncate", action="store_true", help="keep the last block_size tokens of a longer prompt"
    )
    parser.add_argument(
        "--layer", type=int, metavar="N", help="plot only this layer, counted from 1 (default: all)"
    )
    parser.add_argument(
        "--head", type=int, metavar="N", help="plot only this head, counted from 1 (default: all)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.png",
        help="maps (default: attention.png in the run folder, if there is one)",
    )
    parser.add_argument(
        "--ablation", type=Path, metavar="FILE.png", help="plot the loss increase without each head"
    )
    return parser.parse_args()


def main() -> None:
    """Load, compute, plot, print."""
    args = arguments()
    from minigpt.checkpoints.find import run_folder
    from minigpt.checkpoints.format import text_settings
    from minigpt.checkpoints.init_from import find_pretrained
    from minigpt.extras.corpora.run_corpus import validation_batches
    from minigpt.extras.interpret import attention_plots, heads
    from minigpt.extras.interpret.token_pieces import token_pieces
    from minigpt.sampling.sample_cli import read_prompt

    pretrained = find_pretrained(args.run)
    path, tokenizer = pretrained.path, pretrained.tokenizer
    out = args.out or (run_folder(path) if path.is_file() else Path()) / "attention.png"
    attention_plots.check_outputs({"--out": out, "--ablation": args.ablation})
    model = pretrained.load()
    if args.ablation and path.is_dir():
        raise UserError(
            f"--ablation needs the text of a run of minigpt, which {path} has not; leave it out"
        )
    text, ids = read_prompt(tokenizer, args.prompt, args.prompt_file, text_settings(path))
    for flag, number, count in (
        ("layer", args.layer, model.config.n_layer),
        ("head", args.head, model.config.n_head),
    ):
        if number is not None:
            require(f"--{flag}", number, *integer(1, count))
    tokens = heads.prompt_tokens(
        ids if text else [], model.config.block_size, truncate=args.truncate
    )
    batches = validation_batches(path, model) if args.ablation else None
    log(f"loaded {path}")

    weights = heads.attention_maps(model, tokens)
    texts = token_pieces(tokenizer, tokens.tolist())
    table = heads.head_table(weights, heads.induction_scores(model, tokenizer.vocab_size))
    names = heads.head_names(table, len(tokens))
    attention_plots.plot_maps(out, weights, texts, names=names, layer=args.layer, head=args.head)
    if batches:
        table["Δloss"], loss = heads.head_ablation(model, batches)
        attention_plots.plot_ablation(args.ablation, table["Δloss"], loss=loss)
    print(heads.format_table(table, names))
    for file in filter(None, (out, args.ablation)):
        log(f"wrote {file}")


if __name__ == "__main__":
    cli_entrypoint(main)()
