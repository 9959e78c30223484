"""Sample text from a checkpoint: text to stdout, everything else to stderr."""

import argparse
import sys

from minigpt.errors import one_line


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", help="run folder or checkpoint (default: the newest run)")
    parser.add_argument("--prompt", default="", help="text to continue (default: begin from a new line)")
    parser.add_argument("--num-samples", type=int, default=1, metavar="N")
    parser.add_argument("--max-new-tokens", type=int, default=400, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.8, help="below 1 plays safe, 0 takes the likeliest")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens (default: all)")
    parser.add_argument("--seed", type=int, default=1337)
    return parser.parse_args()


def main() -> None:
    """Load, generate, print."""
    args = arguments()
    import torch

    from minigpt.checkpoint import find_checkpoint, load_checkpoint
    from minigpt.generation import check_settings, generate
    from minigpt.tokenizer import encode_prompt

    settings = {name: getattr(args, name) for name in ("max_new_tokens", "temperature", "top_k", "seed", "num_samples")}
    check_settings(**settings)
    path = find_checkpoint(args.run)
    model, tokenizer = load_checkpoint(path)
    print(f"sampling from {path}", file=sys.stderr)
    prompt = torch.as_tensor(encode_prompt(tokenizer, args.prompt)).long()
    for i, sample in enumerate(generate(model, prompt, **settings)):
        if args.num_samples > 1:
            print(f"── sample {i + 1} ──", file=sys.stderr, flush=True)
        print(args.prompt + tokenizer.decode(sample.numpy()), flush=True)


if __name__ == "__main__":
    one_line(main)()
