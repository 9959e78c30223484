"""Sample text from a checkpoint: samples to stdout, everything else to stderr."""

import argparse

from minigpt.sampling.settings import check_settings
from minigpt.utils.cli import cli_entrypoint
from minigpt.utils.errors import UserError
from minigpt.utils.extras import from_extras
from minigpt.utils.scripts import ArgumentParser, usage
from minigpt.utils.terminal import log

FILTERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
SAMPLING = ("max_new_tokens", "seed", "num_samples", *FILTERS, "stop")
EXCLUDES = {"score": (*SAMPLING, "chat", "originality"), "originality": ("json",)}


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = ArgumentParser(prog=usage("sample"), description=__doc__)
    add = parser.add_argument
    default = "the newest run, or the best run of the newest sweep"
    run_help = f"run folder, checkpoint, or folder or id of Hugging Face (default: {default})"
    add("run", nargs="?", help=run_help)
    add(
        "--step",
        type=int,
        metavar="N",
        help="use the snapshot of this step (default: the best checkpoint)",
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt_help = "text with \\n, \\t, \\\\ (default: the separator of documents, or a line break)"
    prompt.add_argument("--prompt", help=prompt_help)
    file_help = "read the prompt as data.path= does, or from stdin (-)"
    prompt.add_argument("--prompt-file", metavar="PATH", help=file_help)
    add(
        "--chat",
        action="store_true",
        help="answer the prompt: apply the chat template of the model",
    )
    add(
        "--num-samples",
        type=int,
        default=1,
        metavar="N",
        help="samples per prompt (default: %(default)s)",
    )
    add(
        "--max-new-tokens",
        type=int,
        default=400,
        metavar="N",
        help="tokens per sample (default: %(default)s)",
    )
    add(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="0 is greedy decoding (default: %(default)s)",
    )
    add(
        "--top-k", type=int, metavar="K", help="sample from the K most likely tokens (default: all)"
    )
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="… from the fewest with total probability P (default: all)",
    )
    add(
        "--min-p",
        type=float,
        metavar="P",
        help="… from those with P times the highest probability (default: all)",
    )
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="1 disables it (default: %(default)s)",
    )
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop string, such as '\\n'; can be repeated",
    )
    add(
        "--seed",
        type=int,
        default=1337,
        metavar="N",
        help="of sample 1; N + 1 of sample 2 … (default: %(default)s)",
    )
    add(
        "--json",
        action="store_true",
        help="print one JSON line per sample: text, ids, log-probabilities …",
    )
    add(
        "--originality",
        action="store_true",
        help="underline what the training text has verbatim, count what is new",
    )
    add(
        "--score",
        metavar="PATH",
        help="print the likelihood of a text after the prompt, read in the same way",
    )
    add(
        "--field",
        metavar="NAME",
        help="of .jsonl, .csv or .parquet, with the text (default: data.field of the run)",
    )
    add(
        "--device",
        default="auto",
        metavar="DEVICE",
        help="cpu, cuda, cuda:1 or mps (default: auto, the fastest)",
    )
    dtypes = ("float32", "bfloat16", "float16")
    dtype_help = (
        "of the weights; a T4 or a V100 has float16, but no bfloat16 (default: %(default)s)"
    )
    add("--dtype", default="float32", choices=dtypes, help=dtype_help)
    args = parser.parse_args()
    # Without the defaults of argparse, a value is what was typed.
    typed = parser.parse_args(namespace=argparse.Namespace(**dict.fromkeys(vars(args))))
    given = {name for name, value in vars(typed).items() if value is not None}
    for name, others in EXCLUDES.items():
        ignored = ", ".join(flag(other) for other in others if other in given)
        if name in given and ignored:
            raise UserError(f"{ignored} cannot be combined with {flag(name)}")
    if "field" in given and not given & {"score", "prompt_file"}:
        raise UserError("--field names the text in a file; it needs --score or --prompt-file")
    if args.score == args.prompt_file == "-":
        raise UserError("--score and --prompt-file cannot both be read from stdin (-)")
    return args


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


def main() -> None:
    """Check the settings, load the checkpoint, print."""
    args = arguments()
    options = {name: getattr(args, name) for name in SAMPLING}
    check_settings(key=flag, **options)

    import torch

    from minigpt.checkpoints.format import text_settings
    from minigpt.checkpoints.init_from import find_pretrained
    from minigpt.data.readers import read_texts
    from minigpt.sampling.sample_cli import print_samples, print_score, read_prompt
    from minigpt.training.precision import find_device

    pretrained = find_pretrained(args.run, step=args.step)
    model = pretrained.load().to(find_device(args.device), getattr(torch, args.dtype))
    log(f"sampling from {pretrained.path} on {model.wte.weight.device}")
    field = {} if args.field is None else {"field": args.field}
    settings = text_settings(pretrained.path) | field
    prompt = read_prompt(pretrained.tokenizer, args.prompt, args.prompt_file, settings)
    if args.score is not None:
        texts = read_texts(args.score, "--score", **settings)
        print_score(model, pretrained.tokenizer, texts, start=prompt[1], as_json=args.json)
        return
    compare = None
    if args.originality:
        from minigpt.extras.interpret.originality import comparison

        compare = comparison(pretrained.path)
    has_template = pretrained.tokenizer.chat is not None
    if has_template and args.chat:
        encode_chat = from_extras("encode_chat")
        question = [{"role": "user", "content": prompt[0]}]
        prompt = "", encode_chat(pretrained.tokenizer, question)
        options["stop"] += pretrained.tokenizer.special.values()  # which end a turn
    elif args.chat:
        raise UserError(
            f"--chat needs a chat template, and {pretrained.path} has none; leave it out"
        )
    elif has_template:
        log(
            "the model has a chat template, which is not applied to the prompt; set --chat to "
            "have it answered"
        )
    print_samples(model, pretrained.tokenizer, prompt, options, as_json=args.json, compare=compare)


if __name__ == "__main__":
    cli_entrypoint(main)()
