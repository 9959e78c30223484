"""Sample text from a checkpoint: text to stdout, everything else to stderr."""

import argparse
import sys

from minigpt.utils.cli import cli_entrypoint
from minigpt.utils.errors import UserError
from minigpt.utils.terminal import sanitize_line


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", help="run folder or checkpoint (default: the newest run)")
    parser.add_argument("--prompt", help="text to continue (default: what texts of the corpus begin from)")
    parser.add_argument("--prompt-file", metavar="FILE", help="the prompt is in a file, or on stdin (-)")
    parser.add_argument(
        "--num-samples", type=int, default=1, metavar="N", help="how many, drawn together (default: %(default)s)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=400, metavar="N", help="length (default: %(default)s)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="below 1 plays safe, 0 takes the likeliest (default: %(default)s)",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens (default: all)")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="… from the fewest with probability P together (default: all)"
    )
    parser.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="… from those with P times the likeliest's probability (default: all)",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="above 1 repeats less (default: %(default)s)",
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end with this text; can be repeated"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1337,
        metavar="N",
        help="seed of the first sample, N + 1 of the second … (default: %(default)s)",
    )
    parser.add_argument("--interactive", action="store_true", help="continue what you type, and keep the context")
    parser.add_argument("--json", action="store_true", help="a line for each sample: text, ids, log-probabilities …")
    parser.add_argument("--show-probs", action="store_true", help="color tokens: red is unlikely, green is likely")
    parser.add_argument("--score", metavar="FILE", help="say how likely a text is (- for stdin) instead of writing one")
    parser.add_argument(
        "--device",
        default="auto",
        metavar="DEVICE",
        help="cpu, cuda, cuda:1 or mps (default: auto, which is cuda, mps or cpu: the first that is there)",
    )
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", default="float32", choices=dtypes, help="of the weights (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="compile the step: slow to start, and no gain on a CPU")
    return parser.parse_args()


def main() -> None:
    """Load, and speak."""
    args = arguments()
    from minigpt.checkpoints.find import find_checkpoint
    from minigpt.checkpoints.models import load_checkpoint
    from minigpt.console import Console, move_model, read_prompt, read_text
    from minigpt.generation import check_settings

    numbers = ("max_new_tokens", "seed", "num_samples")
    filters = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    settings = {name: getattr(args, name) for name in (*numbers, *filters, "stop")}
    check_settings(**settings)
    if args.interactive and (args.json or args.score is not None):
        raise UserError("--interactive talks to a person: it goes with neither --json nor --score")
    path = find_checkpoint(args.run)
    model, tokenizer = load_checkpoint(path)
    model = move_model(model, args.device, args.dtype)
    print(sanitize_line(f"sampling from {path} on {model.wte.weight.device}"), file=sys.stderr)
    options = settings | {"compile": args.compile}
    console = Console(model, tokenizer, options, show_probs=args.show_probs)
    if args.score is not None:
        console.score(read_text(args.score, "--score"), as_json=args.json)
        return
    prompt = read_prompt(args.prompt, args.prompt_file)
    if args.interactive:
        console.talk(prompt)
    else:
        console.sample(prompt, as_json=args.json)


if __name__ == "__main__":
    cli_entrypoint(main)()
