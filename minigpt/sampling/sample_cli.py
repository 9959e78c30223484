"""Terminal input and output of samples: streamed text, JSON lines, scores.

Samples and scores go to stdout, everything else to stderr.
"""

import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from minigpt.data.readers import TextChunk, read_texts
from minigpt.data.tokenizer import Tokenizer, encode_prompt, whole_characters
from minigpt.model.gpt import GPT
from minigpt.sampling.generation import Sample, score, stream
from minigpt.training.cpu_threads import GIVEN_BY, ThreadBalancer, cpu_threads
from minigpt.utils.errors import UserError
from minigpt.utils.terminal import escape_control_chars, log, unescape

_MIN_PARALLEL_NUMEL = 1 << 17  # of a weight matrix

# Prints complete samples, compared with the training text: what is before each, their texts, and a
# function that escapes a text.
Compare: TypeAlias = Callable[[Sequence[str], Sequence[str], Callable[[str], str]], None]


def print_samples(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: tuple[str, list[int]],
    options: Mapping[str, Any],
    *,
    as_json: bool,
    compare: Compare | None,
) -> None:
    """Print samples of a prompt: the first as it is generated, then the others.

    Args:
        prompt: its text, which is printed too, and its ids.
        options: of `generation.stream`, without the tokenizer.
        as_json: print one JSON line per sample instead.
        compare: prints the samples instead, when they are complete.
    """
    # Check the stop strings, and log what is special about the prompt.
    text, ids = prompt
    samples = [Sample() for _ in range(options["num_samples"])]
    options = {
        **options,
        "stop": _stops(tokenizer, options["stop"]),
        "tokenizer": tokenizer,
        "logprobs": as_json,
    }
    _log_prompt(model, tokenizer, text, ids)
    # The control characters of a text could control the terminal.
    escape: Callable[[str], str] = escape_control_chars if sys.stdout.isatty() else str
    begins = [escape(text)]
    if len(samples) > 1:
        begins = [f"── sample {i} ──\n{escape(text)}" for i in range(1, len(samples) + 1)]
    # Generate all samples, and meanwhile print the first.
    live = io.StringIO() if as_json or compare else sys.stdout
    print(begins[0], end="", file=live, flush=True)
    changes: list[str] = []
    start = time.perf_counter()
    with cpu_threads(decoding_threads(model, len(samples))):
        threads = ThreadBalancer(fixed=model.wte.weight.device.type != "cpu")
        threads.start()
        for step in stream(model, ids, **options):
            changes.append(threads.end())
            for i, sample in enumerate(samples):
                sample.append(step, i)
            print(escape(step.texts[0]), end="", file=live, flush=True)
            threads.start()
    seconds = time.perf_counter() - start
    print(file=live, flush=True)
    n_tokens = sum(len(sample.tokens) for sample in samples)
    speed = f"{n_tokens:,} tokens in {seconds:.2f} s, {n_tokens / seconds:,.0f} tokens/s"
    log("; ".join(filter(None, [speed, *changes])))
    # Print the others, or all in another form.
    for begin, sample in zip(begins[1:], samples[1:], strict=True):
        print(begin + escape(sample.text), file=live, flush=True)
    if compare:
        compare(begins, [sample.text for sample in samples], escape)
    if as_json:
        for sample in samples:
            values = {"prompt": text, "text": sample.text, **vars(sample)}
            print(json.dumps(values | {"tokens_per_second": n_tokens / seconds}), flush=True)


def decoding_threads(model: GPT, rows: int) -> int | None:
    """Return 1 if one thread decodes as fast as two, else None.

    It does for fewer than four samples of a small model; a number that is given stays.
    """
    largest = max(weight.numel() for weight in (*model.blocks.parameters(), model.lm_head.weight))
    is_given = any(map(os.environ.get, GIVEN_BY))
    return 1 if largest < _MIN_PARALLEL_NUMEL and rows < 4 and not is_given else None


def print_score(
    model: GPT,
    tokenizer: Tokenizer,
    chunks: Iterable[TextChunk],
    *,
    start: Sequence[int],
    as_json: bool,
) -> None:
    """Print the likelihood of documents after `start`: in total, and as JSON also per token."""
    documents = _documents(tokenizer, chunks)
    ids = _tokenize(tokenizer, documents)
    if not ids:
        raise UserError("--score must be a non-empty text")
    ids += tokenizer.suffix
    result = score(model, ids, start)
    ranks = result.ranks.tolist()
    n_bytes = sum(len("".join(parts).encode()) for parts in documents)  # separators have none
    total = {
        "tokens": len(ids),
        "bytes": n_bytes,
        "nats": result.nats,
        "nats_per_token": result.nats / len(ids),
        "bits_per_byte": result.nats / math.log(2) / n_bytes,
    }
    if as_json:
        per_token = {"token_ids": ids, "logprobs": result.logprobs.tolist(), "ranks": ranks}
        print(json.dumps(total | per_token))
        return
    for name, value in total.items():
        number = f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"
        print(f"{name.replace('_', ' '):16}{number}")
    n_first = ranks.count(0)
    print(f"{'top-1 accuracy':16}{n_first:,} of {len(ids):,} tokens ({n_first / len(ids):.1%})")


def read_prompt(
    tokenizer: Tokenizer, prompt: str | None, file: str | None, settings: Mapping[str, str]
) -> tuple[str, list[int]]:
    """Return the prompt given as text, in files or on stdin (`-`), with its ids.

    Without a prompt, sampling starts a new text.

    Args:
        settings: `field` and `separator` of the data group; files are tokenized as in training.
    """
    if file is None:
        typed = unescape(prompt or "")
        if prompt and typed != prompt:
            log(
                r"--prompt: \n is a line break, \t a tab, \\ a backslash; "
                "--prompt-file takes a text as it is"
            )
        text = whole_characters(typed)  # as the tokenizer encodes it
        return text, encode_prompt(tokenizer, text).tolist()
    documents = _documents(tokenizer, read_texts(file, "--prompt-file", **settings))
    text = tokenizer.names(tokenizer.separator).join(filter(None, map("".join, documents)))
    ids = _tokenize(tokenizer, documents)
    return text, [*tokenizer.prefix, *ids] if ids else tokenizer.start.tolist()


def _documents(tokenizer: Tokenizer, chunks: Iterable[TextChunk]) -> list[list[str]]:
    """Return the parts of each document that training tokenizes by themselves."""
    documents: list[list[str]] = []
    for text, first in chunks:
        if first:
            documents.append([])
        documents[-1].append(text)
    if tokenizer.splits_at_cuts:
        return documents
    return [["".join(parts)] for parts in documents]


def _tokenize(tokenizer: Tokenizer, documents: Iterable[Sequence[str]]) -> list[int]:
    """Return the ids of documents, with separators as in training."""
    ids: list[int] = []
    for parts in documents:
        if ids and any(parts):
            ids += tokenizer.separator.tolist()
        for text in filter(None, parts):
            ids += tokenizer.parse(text).tolist()
    return ids


def _log_prompt(model: GPT, tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    if plain := [name for name, i in tokenizer.special.items() if name in text and i not in ids]:
        log(f"{', '.join(plain)} in the prompt is encoded as ordinary text")
    if not text and ids == tokenizer.start.tolist():
        log(f"no prompt: starting from {tokenizer.names(ids)!r}")
    if len(ids) > model.config.block_size:
        log(
            f"the prompt has {len(ids):,} tokens; "
            f"only the last {model.config.block_size:,} are read"
        )


def _stops(tokenizer: Tokenizer, typed: Sequence[str | int]) -> list[str | int]:
    r"""Return stop strings and ids: those that are typed, those of special tokens, and end tokens.

    `\n` and `\t` in strings are replaced.

    Raises:
        UserError: the tokenizer cannot produce a string.
    """
    texts = [unescape(item) for item in typed if isinstance(item, str)]
    for text in texts:
        found = reason = ""
        try:
            found = tokenizer.decode(tokenizer.encode(text))
        except UserError as error:
            reason = f": {error}"
        is_plain = text in found and not any(name in text for name in tokenizer.special)
        if text not in tokenizer.special and not is_plain:
            raise UserError(
                f"--stop must be a text that the tokenizer can produce, got {text!r}{reason}"
            )
    named = [tokenizer.special[text] for text in texts if text in tokenizer.special]
    ids = [item for item in typed if isinstance(item, int)]
    return [*texts, *ids, *named, *tokenizer.end_ids]
