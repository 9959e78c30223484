"""Terminal input and output of samples: streamed and colored text, JSON lines, interactive sessions, scores.

Samples and scores go to stdout, everything else to stderr.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from operator import add
from pathlib import Path
from typing import Any

import torch

from minigpt.data.detokenizer import token_pieces
from minigpt.data.tokenizer import SEPARATOR, Tokenizer, encode_prompt, whole_characters
from minigpt.generation import Sample, score, stream
from minigpt.model import GPT
from minigpt.utils.errors import UserError
from minigpt.utils.terminal import escape_control_chars, log

# ANSI 256-color codes by lowest probability: red, orange, yellow, light green, green.
_COLORS = ((0.0, 196), (0.05, 208), (0.2, 220), (0.5, 148), (0.8, 40))
_RESET_COLOR = "\x1b[0m"
_UNDERLINE, _NO_UNDERLINE = "\x1b[4m", "\x1b[24m"

# Returns the spans of a text that the training text has, of keys "start" and "end", and a table of what is new.
Compare = Callable[[str], tuple[Sequence[Mapping[str, Any]], str]]


class Console:
    """Print samples and scores of a model; `options` are those of `generation.stream`, without the tokenizer."""

    compare: Compare | None = None  # with the training text

    def __init__(self, model: GPT, tokenizer: Tokenizer, options: Mapping[str, Any], *, show_probs: bool) -> None:
        self.model, self.tokenizer, self.show_probs = model, tokenizer, show_probs  # show_probs: color each token
        self.reported_truncation = False
        # The control characters of a text could control the terminal.
        self.escape: Callable[[str], str] = escape_control_chars if sys.stdout.isatty() else str
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")  # encodings without some characters, such as Latin-1
        stop = [*options["stop"], *(tokenizer.separator.tolist() if tokenizer.separated else ())]
        self.options = {**options, "stop": stop, "tokenizer": tokenizer}

    def sample(self, prompt: str, *, as_json: bool) -> None:
        """Print samples of a prompt: the first as it is generated, then the others; or one JSON line per sample."""
        ids, samples = self._encode(prompt), [Sample() for _ in range(self.options["num_samples"])]
        begins = [(f"── sample {i + 1} ──\n" if samples[1:] else "") + self.escape(prompt) for i in range(len(samples))]
        rendered = begins
        write = (lambda text: None) if as_json or self.compare else _write
        write(begins[0])
        start = time.perf_counter()
        for texts in self._generate(ids, samples, logprobs=as_json or self.show_probs):
            write(texts[0])
            rendered = list(map(add, rendered, texts))
        write("\n")
        seconds, n_tokens = time.perf_counter() - start, sum(len(sample.tokens) for sample in samples)
        log(f"{n_tokens:,} tokens in {seconds:.2f} s, {n_tokens / seconds:,.0f} tokens/s")
        write("".join(f"{text}\n" for text in rendered[1:]))
        if self.compare:
            self._show_copies(begins, [sample.text for sample in samples], self.compare)
        for sample in samples if as_json else ():
            values = {"prompt": prompt, "text": sample.text} | vars(sample) | {"tokens_per_second": n_tokens / seconds}
            print(json.dumps(values), flush=True)

    def chat(self, context: str) -> None:
        """Continue the context by each typed line and the reply to it; `/reset` clears the context, `/quit` exits."""
        with suppress(ImportError):
            import readline  # noqa: F401  # line editing and history
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="replace")
        log("type a text to continue; /reset clears the context, /quit exits, Ctrl-C stops a reply")
        input_prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
        seed = self.options["seed"]
        while True:
            try:
                line = input(input_prompt)
                command = line.strip()
                if command == "/quit":
                    return
                if command == "/reset":
                    context = ""
                elif command.startswith("/"):
                    raise UserError(f"unknown command {command}; use /reset or /quit")
                else:
                    context, seed = self._reply(context + line, seed), seed + 1
            except EOFError:
                return
            except KeyboardInterrupt:
                log("")
            except UserError as error:
                log(f"error: {error}")

    def score(self, text: str, *, as_json: bool) -> None:
        """Print the likelihood of a text: in total, and per token with `show_probs` or as JSON."""
        if not text:
            raise UserError("--score must be a non-empty text")
        ids, n_bytes = self.tokenizer.encode(text).tolist(), len(text.encode())
        result = score(self.model, ids, self.tokenizer.start.tolist())
        logprobs, ranks = result.logprobs.tolist(), result.ranks.tolist()
        total = {"tokens": len(ids), "bytes": n_bytes, "nats": result.nats, "nats_per_token": result.nats / len(ids)}
        total["bits_per_byte"] = result.nats / math.log(2) / n_bytes
        if as_json:
            print(json.dumps(total | {"token_ids": ids, "logprobs": logprobs, "ranks": ranks}))
            return
        if self.show_probs:
            _write("".join(map(self._render, token_pieces(self.tokenizer, ids), logprobs)) + "\n")
        for name, value in total.items():
            print(f"{name.replace('_', ' '):16}{value:,{'.4f' if isinstance(value, float) else ''}}")
        print(f"{'top-1 accuracy':16}{ranks.count(0):,} of {len(ids):,} tokens ({ranks.count(0) / len(ids):.1%})")

    def _show_copies(self, begins: Sequence[str], texts: Sequence[str], compare: Compare) -> None:
        """Print texts with the spans underlined that occur in the training text, then what is new of all of them."""
        for shown, text in zip(begins, texts, strict=True):
            at = 0
            for span in compare(text)[0]:
                copied = self.escape(text[max(at, span["start"]) : span["end"]])
                shown += f"{self.escape(text[at : span['start']])}{_UNDERLINE}{copied}{_NO_UNDERLINE}"
                at = span["end"]
            _write(f"{shown}{self.escape(text[at:])}\n")
        print(compare("".join(texts))[1], file=sys.stderr)

    def _encode(self, prompt: str) -> list[int]:
        """Encode a prompt; log the start token of an empty one, and a truncation."""
        ids: list[int] = encode_prompt(self.tokenizer, prompt).tolist()
        if not prompt:
            log(f"no prompt: starting from {self.tokenizer.decode(ids) or SEPARATOR!r}")
        block_size = self.model.config.block_size
        if len(ids) > block_size and not self.reported_truncation:
            self.reported_truncation = True  # once per session
            log(f"the prompt has {len(ids):,} tokens; only the last {block_size:,} are read")
        return ids

    def _reply(self, context: str, seed: int) -> str:
        """Print a continuation of the context, until Ctrl-C; return the context with it."""
        sample, ids = Sample(), self._encode(context)
        with suppress(KeyboardInterrupt):
            for texts in self._generate(ids, [sample], num_samples=1, seed=seed, logprobs=self.show_probs):
                _write(texts[0])
        _write(f"{_RESET_COLOR if self.show_probs else ''}\n")
        return context + sample.text

    def _generate(self, ids: list[int], samples: Sequence[Sample], **options: Any) -> Iterator[list[str]]:
        """Extend all samples; yield their new texts for the terminal after each step."""
        for step in stream(self.model, ids, **(self.options | options)):
            for i, sample in enumerate(samples):
                sample.append(step, i)
            yield [self._render(*token) for token in zip_longest(step.texts, step.logprobs)]

    def _render(self, text: str, logprob: float | None) -> str:
        """Return the text of a token for the terminal."""
        text = self.escape(text)
        if not (self.show_probs and text) or logprob is None:
            return text
        color = [color for lowest, color in _COLORS if math.exp(logprob) >= lowest][-1]
        return f"\x1b[38;5;{color}m{text}{_RESET_COLOR}"


def read_prompt(prompt: str | None, file: str | None) -> str:
    """Return the prompt given as text, in a file or on stdin (`-`); empty by default."""
    if file is None:
        return whole_characters(prompt or "")  # as the tokenizer encodes it
    if prompt is not None:
        raise UserError("--prompt and --prompt-file exclude each other; give one of them")
    return read_text(file, "--prompt-file")


def read_text(file: str, option: str) -> str:
    """Read a UTF-8 text file, or stdin (`-`)."""
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return content.decode("utf-8")
    except OSError as error:
        raise UserError(f"{option}={file} cannot be read ({(error.strerror or str(error)).lower()})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{option}={file} is not UTF-8 text: bad byte at offset {error.start:,}") from error


def prompt_tokens(tokenizer: Tokenizer, prompt: str, block_size: int, *, truncate: bool = False) -> torch.Tensor:
    """Encode a prompt to token ids (T,), T ≥ 2; `truncate` keeps the last `block_size` tokens of a longer one."""
    tokens = torch.as_tensor(tokenizer.encode(prompt)).long()
    if len(tokens) < 2:
        raise UserError(f"--prompt must have at least 2 tokens, got {len(tokens)}")
    if len(tokens) > block_size and not truncate:
        raise UserError(f"--prompt must have at most block_size={block_size} tokens, got {len(tokens)}; set --truncate")
    return tokens[-block_size:]


def _write(text: str) -> None:
    print(text, end="", flush=True)
