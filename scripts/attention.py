"""Look at what the heads of a trained model attend to: a table to stdout, pictures and a page to files."""

import argparse
import os
import sys
from pathlib import Path

from minigpt.utils.cli import cli_entrypoint
from minigpt.utils.terminal import sanitize_line

# Threads that wait for one another sleep instead of spinning: beside one other busy process on 2 cores the values of
# the default model's heads took 50 s, and 180 s without this. It counts only if it is set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", help="run folder or checkpoint (default: the newest run)")
    parser.add_argument("--prompt", help="the text to look at, at least two tokens")
    parser.add_argument("--prompt-file", metavar="FILE", help="the text is in a file, or on stdin (-)")
    parser.add_argument("--truncate", action="store_true", help="of a prompt that is too long, take the end")
    parser.add_argument("--layer", type=int, metavar="N", help="draw this layer only; the first is 1 (default: all)")
    parser.add_argument("--head", type=int, metavar="N", help="draw this head only; the first is 1 (default: all)")
    parser.add_argument(
        "--out", type=Path, metavar="MAPS.png", help="draw the maps here (default: attention.png in the run folder)"
    )
    parser.add_argument("--values", type=Path, metavar="VALUES.png", help="draw what each head is worth, too")
    parser.add_argument("--html", type=Path, metavar="PAGE.html", help="write a page to explore, too")
    return parser.parse_args()


def main() -> None:
    """Load, measure, draw, print."""
    args = arguments()
    from minigpt.checkpoints.find import find_checkpoint, run_folder
    from minigpt.checkpoints.models import load_checkpoint
    from minigpt.console import read_prompt
    from minigpt.interpret import heads as inspection
    from minigpt.interpret import plots as drawing

    prompt = read_prompt(args.prompt, args.prompt_file)
    path = find_checkpoint(args.run)
    out = args.out or run_folder(path) / "attention.png"
    inspection.check_outputs([out, args.values], [args.html])
    model, tokenizer = load_checkpoint(path)
    layers = inspection.chosen("layer", args.layer, model.config.n_layer)
    heads = inspection.chosen("head", args.head, model.config.n_head)
    tokens = inspection.prompt_tokens(tokenizer, prompt, model.config.block_size, truncate=args.truncate)
    batches = inspection.validation_batches(path, model) if args.values else None
    print(sanitize_line(f"looking at {path}"), file=sys.stderr)

    weights, probabilities = inspection.attention_maps(model, tokens)
    texts = inspection.token_texts(tokenizer, tokens)
    table = inspection.head_table(weights, inspection.repeat_scores(model, tokenizer.vocab_size))
    names = inspection.head_names(table, len(tokens))
    drawing.plot_maps(out, weights, texts, names=names, layers=layers, heads=heads)
    if args.html:
        from minigpt.interpret.page import write_page

        write_page(args.html, labels=texts, weights=weights, probabilities=probabilities)
    if batches:
        values, loss = inspection.head_ablation(model, batches)
        drawing.plot_ablation(args.values, values, loss=loss)
        table["worth"] = values
    print(inspection.format_table(table, names))
    for written in filter(None, (out, args.html, args.values)):
        print(sanitize_line(f"wrote {written}"), file=sys.stderr)


if __name__ == "__main__":
    cli_entrypoint(main)()
