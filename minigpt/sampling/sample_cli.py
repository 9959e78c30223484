"""Terminal input and output of samples: streamed text, JSON lines, scores.

Samples and scores go to stdout, everything else to stderr.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from minigpt.data.readers import TextChunk, read_texts
from minigpt.data.tokenizer import Tokenizer, encode_prompt, whole_characters
from minigpt.model.gpt import GPT
from minigpt.sampling.generation import Sample, score, stream
from minigpt.training.cpu_threads import ThreadBalancer, cpu_threads, decoding_threads
from minigpt.utils.errors import UserError
from minigpt.utils.terminal import escape_control_chars, log, unescape

_UNDERLINE, _NO_UNDERLINE = "\x1b[4m", "\x1b[24m"

# Returns the spans of samples that the training text has, of keys "sample" (its index), "start" and "end", and a table
# of what is new.
Compare = Callable[[Sequence[str]], tuple[Sequence[Mapping[str, Any]], str]] | None
Prompt = tuple[str, list[int]]  # its text, which is printed too, and its ids


def print_samples(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: Prompt,
    options: Mapping[str, Any],
    *,
    as_json: bool,
    compare: Compare,
) -> None:
    """Print samples of a prompt: the first as it is generated, then the others; or one JSON line per sample.

    Args:
        options: of `generation.stream`, without the tokenizer.
        compare: with the training text; the samples are printed when they are complete.
    """
    # The control characters of a text could control the terminal.
    escape: Callable[[str], str] = escape_control_chars if sys.stdout.isatty() else str
    stop = _stops(tokenizer, options["stop"])
    (text, ids), samples = prompt, [Sample() for _ in range(options["num_samples"])]
    _log_prompt(model, tokenizer, text, ids)
    begins = [
        (f"── sample {i + 1} ──\n" if samples[1:] else "") + escape(text)
        for i in range(len(samples))
    ]
    write = (lambda text: None) if as_json or compare else _write
    write(begins[0])
    start, changes = time.perf_counter(), list[str]()
    with cpu_threads(decoding_threads(model, len(samples))):
        threads = ThreadBalancer(fixed=model.wte.weight.device.type != "cpu")
        threads.start()
        for step in stream(
            model, ids, **{**options, "stop": stop}, tokenizer=tokenizer, logprobs=as_json
        ):
            if change := threads.end():
                changes.append(change)
            before = len(samples[0].text)
            for i, sample in enumerate(samples):
                sample.append(step, i)
            write(escape(samples[0].text[before:]))
            threads.start()
    write("\n")
    seconds, n_tokens = time.perf_counter() - start, sum(len(sample.tokens) for sample in samples)
    log(
        "; ".join(
            [
                f"{n_tokens:,} tokens in {seconds:.2f} s, {n_tokens / seconds:,.0f} tokens/s",
                *changes,
            ]
        )
    )
    for begin, sample in zip(begins[1:], samples[1:], strict=True):
        write(f"{begin}{escape(sample.text)}\n")
    if compare:
        spans, table = compare([sample.text for sample in samples])
        for i, (begin, sample) in enumerate(zip(begins, samples, strict=True)):
            _write(
                begin
                + _underline(sample.text, [span for span in spans if span["sample"] == i], escape)
                + "\n"
            )
        print(table, file=sys.stderr)
    if as_json:
        for sample in samples:
            values = (
                {"prompt": text, "text": sample.text}
                | vars(sample)
                | {"tokens_per_second": n_tokens / seconds}
            )
            print(json.dumps(values), flush=True)


def print_score(
    model: GPT,
    tokenizer: Tokenizer,
    chunks: Iterable[TextChunk],
    *,
    start: Sequence[int],
    as_json: bool,
) -> None:
    """Print the likelihood of documents after `start`: in total, and as JSON also per token."""
    ids, n_bytes = _tokenize(tokenizer, chunks)
    if not ids:
        raise UserError("--score must be a non-empty text")
    ids += tokenizer.suffix
    result = score(model, ids, start)
    logprobs, ranks = result.logprobs.tolist(), result.ranks.tolist()
    total = {
        "tokens": len(ids),
        "bytes": n_bytes,
        "nats": result.nats,
        "nats_per_token": result.nats / len(ids),
        "bits_per_byte": result.nats / math.log(2) / n_bytes,
    }
    if as_json:
        print(json.dumps(total | {"token_ids": ids, "logprobs": logprobs, "ranks": ranks}))
        return
    for name, value in total.items():
        print(f"{name.replace('_', ' '):16}{value:,{'.4f' if isinstance(value, float) else ''}}")
    print(
        f"{'top-1 accuracy':16}{ranks.count(0):,} of {len(ids):,} tokens ({ranks.count(0) / len(ids):.1%})"
    )


def read_prompt(
    tokenizer: Tokenizer, prompt: str | None, file: str | None, settings: Mapping[str, str]
) -> Prompt:
    """Return the prompt given as text, in files or on stdin (`-`), with its ids; no prompt is the start of a text.

    `settings` are `field` and `separator` of the data group; files are tokenized as in training.
    """
    if file is None:
        typed = unescape(prompt or "")
        if prompt and typed != prompt:
            log(
                r"--prompt: \n is a line break, \t a tab, \\ a backslash; --prompt-file takes a text as it is"
            )
        text = whole_characters(typed)  # as the tokenizer encodes it
        return text, encode_prompt(tokenizer, text).tolist()
    chunks = [chunk for chunk in read_texts(file, "--prompt-file", **settings) if chunk.text]
    between = tokenizer.names(tokenizer.separator)
    text = "".join(
        f"{between if chunk.first and i else ''}{chunk.text}" for i, chunk in enumerate(chunks)
    )
    ids = _tokenize(tokenizer, chunks)[0]
    return text, [*tokenizer.prefix, *ids] if ids else tokenizer.start.tolist()


def _tokenize(tokenizer: Tokenizer, chunks: Iterable[TextChunk]) -> tuple[list[int], int]:
    """Return the ids of documents and their bytes of UTF-8: separators are tokens of no bytes, as in training."""
    documents: list[list[str]] = []
    for text, first in chunks:
        documents += [[]] if first else []
        documents[-1].append(text)
    ids, n_bytes = list[int](), 0
    for parts in (
        documents if tokenizer.splits_at_cuts else [["".join(parts)] for parts in documents]
    ):
        ids += tokenizer.separator.tolist() if ids and any(parts) else []
        for text in filter(None, parts):
            ids += tokenizer.parse(text).tolist()
            n_bytes += len(text.encode())
    return ids, n_bytes


def _log_prompt(model: GPT, tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    """Log the start token of an empty prompt, special tokens as ordinary text, and a truncation."""
    if plain := [name for name, i in tokenizer.special.items() if name in text and i not in ids]:
        log(f"{', '.join(plain)} in the prompt is encoded as ordinary text")
    if not text and ids == tokenizer.start.tolist():
        log(f"no prompt: starting from {tokenizer.names(ids)!r}")
    if len(ids) > model.config.block_size:
        log(
            f"the prompt has {len(ids):,} tokens; only the last {model.config.block_size:,} are read"
        )


def _stops(tokenizer: Tokenizer, typed: Sequence[str | int]) -> list[str | int]:
    """Return stop strings with `\\n` and `\\t` replaced, ids, the ids of special tokens by name, and the end tokens.

    Raise UserError for a string that the tokenizer cannot produce.
    """
    texts, special = [unescape(stop) for stop in typed if isinstance(stop, str)], tokenizer.special
    for text in texts:
        try:
            found, reason = tokenizer.decode(tokenizer.encode(text)), ""
        except UserError as error:
            found, reason = "", f": {error}"
        if text not in special and (text not in found or any(name in text for name in special)):
            raise UserError(
                f"--stop must be a text that the tokenizer can produce, got {text!r}{reason}"
            )
    named = [special[text] for text in texts if text in special]
    ids = [stop for stop in typed if isinstance(stop, int)]
    return [*texts, *ids, *named, *tokenizer.end_ids]


def _underline(text: str, spans: Sequence[Mapping[str, Any]], escape: Callable[[str], str]) -> str:
    """Return an escaped text with its spans underlined, which may overlap."""
    shown, at = "", 0
    for span in spans:
        copied = escape(text[max(at, span["start"]) : span["end"]])
        shown += f"{escape(text[at : span['start']])}{_UNDERLINE}{copied}{_NO_UNDERLINE}"
        at = span["end"]
    return shown + escape(text[at:])


def _write(text: str) -> None:
    print(text, end="", flush=True)
