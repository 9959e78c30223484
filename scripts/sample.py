"""Sample text from a checkpoint: samples to stdout, everything else to stderr."""

import argparse

from minigpt.generation_settings import check_settings
from minigpt.utils.cli import cli_entrypoint
from minigpt.utils.errors import UserError
from minigpt.utils.scripts import usage
from minigpt.utils.terminal import log


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog=usage("sample"), description=__doc__)
    add = parser.add_argument
    add("run", nargs="?", help="run folder, checkpoint, or folder or id of Hugging Face (default: the newest run)")
    add("--step", type=int, metavar="N", help="use the snapshot of this step (default: the best checkpoint)")
    add("--prompt", help="text with \\n, \\t, \\\\ (default: the separator of documents, or a line break)")
    add("--prompt-file", metavar="PATH", help="read the prompt as data.path= does, or from stdin (-)")
    add("--chat", action="store_true", help="answer the prompt: apply the chat template of a Hugging Face folder")
    add("--num-samples", type=int, default=1, metavar="N", help="samples per prompt (default: %(default)s)")
    add("--max-new-tokens", type=int, default=400, metavar="N", help="tokens per sample (default: %(default)s)")
    add("--temperature", type=float, default=0.8, metavar="X", help="0 is greedy decoding (default: %(default)s)")
    add("--top-k", type=int, metavar="K", help="sample from the K most likely tokens (default: all)")
    add("--top-p", type=float, metavar="P", help="… from the fewest with total probability P (default: all)")
    add("--min-p", type=float, metavar="P", help="… from those with P times the highest probability (default: all)")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="1 disables it (default: %(default)s)")
    add("--stop", action="append", default=[], metavar="TEXT", help="stop string, such as '\\n'; can be repeated")
    add("--seed", type=int, default=1337, metavar="N", help="of sample 1; N + 1 of sample 2 … (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON line per sample: text, ids, log-probabilities …")
    add("--originality", action="store_true", help="underline what the training text has verbatim, count what is new")
    add("--score", metavar="PATH", help="print the likelihood of a text, read in the same way, instead of samples")
    add("--field", metavar="NAME", help="of .jsonl or .parquet, with the text (default: the run's data.field, or text)")
    add("--device", default="auto", metavar="DEVICE", help="cpu, cuda, cuda:1 or mps (default: auto, the fastest)")
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", default="float32", choices=dtypes, help="of the weights (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    """Check the settings, load the checkpoint, print."""
    args = arguments()
    names = ("max_new_tokens", "seed", "num_samples", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    options = {name: getattr(args, name) for name in (*names, "stop")}
    check_settings(key=lambda name: f"--{name.replace('_', '-')}", **options)
    if args.originality and (args.json or args.score is not None):
        raise UserError("--originality cannot be combined with --json or --score")
    if args.chat and args.score is not None:
        raise UserError("--chat cannot be combined with --score")

    import torch

    from minigpt.checkpoints.format import text_settings
    from minigpt.checkpoints.init_from import find_pretrained
    from minigpt.data.readers import read_texts
    from minigpt.device import find_device
    from minigpt.sample_cli import print_samples, print_score, read_prompt

    pretrained = find_pretrained(args.run, step=args.step)
    model = pretrained.load().to(find_device(args.device), getattr(torch, args.dtype))
    log(f"sampling from {pretrained.path} on {model.wte.weight.device}")
    settings = text_settings(pretrained.path) | ({"field": args.field} if args.field else {})
    if args.score is not None:
        print_score(model, pretrained.tokenizer, read_texts(args.score, "--score", **settings), as_json=args.json)
        return
    compare = None
    if args.originality:
        from minigpt.extras.interpret.originality import comparison

        compare = comparison(pretrained.path)
    prompt = read_prompt(pretrained.tokenizer, args.prompt, args.prompt_file, settings)
    if (encode_chat := pretrained.tokenizer.encode_chat) and args.chat:
        prompt = "", encode_chat([{"role": "user", "content": prompt[0]}])
        options["stop"] += pretrained.tokenizer.special.values()  # which end a turn
    elif args.chat:
        raise UserError(f"--chat needs a chat template, and {pretrained.path} has none; leave it out")
    elif encode_chat:
        log("the model has a chat template, which is not applied to the prompt; set --chat to have it answered")
    print_samples(model, pretrained.tokenizer, prompt, options, as_json=args.json, compare=compare)


if __name__ == "__main__":
    cli_entrypoint(main)()
