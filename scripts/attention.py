"""Analyze the attention heads of a trained model: statistics to stdout, plots and an interactive page to files."""

import argparse
import os
import sys
from pathlib import Path

from minigpt.utils.cli import cli_entrypoint
from minigpt.utils.terminal import sanitize_line

# Idle threads sleep instead of spinning. With one other busy process on 2 cores, the ablation of the default model took
# 50 s, and 180 s without this. It takes effect only if it is set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", help="run folder or checkpoint (default: the newest run)")
    parser.add_argument("--prompt", help="text of at least two tokens")
    parser.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file, or from stdin (-)")
    parser.add_argument("--truncate", action="store_true", help="keep the last block_size tokens of a longer prompt")
    parser.add_argument("--layer", type=int, metavar="N", help="plot only this layer, counted from 1 (default: all)")
    parser.add_argument("--head", type=int, metavar="N", help="plot only this head, counted from 1 (default: all)")
    for flag, help_ in {
        "--out": "plot of the attention maps (default: attention.png in the run folder)",
        "--ablation": "also plot the increase of the validation loss when each head is ablated",
        "--html": "also write an interactive page",
    }.items():
        parser.add_argument(flag, type=Path, metavar="FILE", help=help_)
    return parser.parse_args()


def main() -> None:
    """Load, compute, plot, print."""
    args = arguments()
    from tqdm import tqdm

    from minigpt.checkpoints.checkpoint import find_checkpoint, load_checkpoint, run_folder
    from minigpt.checkpoints.validation_split import validation_batches
    from minigpt.console import read_prompt
    from minigpt.interpret import attention_maps, head_stats, page, plots

    prompt = read_prompt(args.prompt, args.prompt_file)
    path = find_checkpoint(args.run)
    out = args.out or run_folder(path) / "attention.png"
    plots.check_outputs({"--out": out, "--ablation": args.ablation, "--html": args.html})
    model, tokenizer = load_checkpoint(path)
    layers = plots.index_slice("--layer", args.layer, model.config.n_layer)
    heads = plots.index_slice("--head", args.head, model.config.n_head)
    tokens = attention_maps.prompt_tokens(tokenizer, prompt, model.config.block_size, truncate=args.truncate)
    batches = validation_batches(path, model) if args.ablation else None
    print(sanitize_line(f"loaded {path}"), file=sys.stderr)

    weights, probabilities = attention_maps.attention_maps(model, tokens)
    texts = attention_maps.token_texts(tokenizer, tokens)
    table = head_stats.head_table(weights, attention_maps.induction_scores(model, tokenizer.vocab_size))
    names = head_stats.head_names(table, len(tokens))
    plots.plot_maps(out, weights, texts, names=names, layers=layers, heads=heads)
    if args.html:
        page.write_page(args.html, labels=texts, weights=weights, probabilities=probabilities)
    if batches:
        progress = tqdm(batches, desc="ablating every head", unit="batch", disable=None)
        table["Δloss"], loss = head_stats.head_ablation(model, progress)
        plots.plot_ablation(args.ablation, table["Δloss"], loss=loss)
    print(head_stats.format_table(table, names))
    for file in filter(None, (out, args.html, args.ablation)):
        print(sanitize_line(f"wrote {file}"), file=sys.stderr)


if __name__ == "__main__":
    cli_entrypoint(main)()
