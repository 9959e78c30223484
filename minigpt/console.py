"""Terminal input and output of samples: streamed and colored text, JSON lines, interactive sessions, scores.

Samples and scores go to stdout, everything else to stderr.
"""

import codecs
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from minigpt.data.tokenizer import SEPARATOR, Tokenizer, encode_prompt, whole_characters
from minigpt.generation import score, stream
from minigpt.int8 import quantize
from minigpt.model import GPT
from minigpt.utils.errors import UserError, require
from minigpt.utils.terminal import escape_control_chars, log

# ANSI 256-color codes by lowest probability: red, orange, yellow, light green, green.
_COLORS = ((0.0, 196), (0.05, 208), (0.2, 220), (0.5, 148), (0.8, 40))
_RESET_COLOR = "\x1b[0m"


class SampleState:
    """Tokens and text of one sample; the text ends with the last complete character."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.text, self.rendered, self.reason = "", "", "length"  # rendered: escaped and colored for the terminal
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")


class Console:
    """Print samples and scores of a model.

    Args:
        options: of `generation.stream`, without the tokenizer.
        show_probs: color every token by its probability.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, options: Mapping[str, Any], *, show_probs: bool) -> None:
        self.model, self.tokenizer, self.show_probs = model, tokenizer, show_probs
        self.reported_truncation = False
        # The control characters of a text could control the terminal.
        self.escape: Callable[[str], str] = escape_control_chars if sys.stdout.isatty() else str
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")  # encodings without some characters, such as Latin-1
        self.stop_strings: list[str] = options["stop"]
        stop = [*self.stop_strings, *(tokenizer.separator.tolist() if tokenizer.separated else ())]
        self.options = {**options, "stop": stop, "tokenizer": tokenizer}

    def sample(self, prompt: str, *, as_json: bool) -> None:
        """Print samples of a prompt: the first as it is generated, then the others; or one JSON line per sample."""
        ids, n_samples = self._encode(prompt), self.options["num_samples"]
        samples = [SampleState() for _ in range(n_samples)]
        headers = [f"── sample {i + 1} ──\n" if n_samples > 1 else "" for i in range(n_samples)]
        write = (lambda text: None) if as_json else _write
        write(headers[0] + self.escape(prompt))
        start = time.perf_counter()
        for text in self._generate(ids, samples, logprobs=as_json or self.show_probs):
            write(text)
        seconds, n_tokens = time.perf_counter() - start, sum(len(sample.tokens) for sample in samples)
        rests = [sample.decoder.decode(b"", final=True) for sample in samples]  # of incomplete characters
        write(f"{rests[0]}\n")
        log(f"{n_tokens:,} tokens in {seconds:.2f} s, {n_tokens / seconds:,.0f} tokens/s")
        for header, sample, rest in zip(headers[1:], samples[1:], rests[1:], strict=True):
            write(f"{header}{self.escape(prompt)}{sample.rendered}{rest}\n")
        for sample, rest in zip(samples, rests, strict=True) if as_json else ():
            values: dict[str, Any] = {"prompt": prompt, "text": sample.text + rest, "tokens": sample.tokens}
            values |= {"logprobs": sample.logprobs, "reason": sample.reason, "tokens_per_second": n_tokens / seconds}
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
        total["bits_per_byte"] = result.bits_per_byte(n_bytes)
        if as_json:
            print(json.dumps(total | {"token_ids": ids, "logprobs": logprobs, "ranks": ranks}))
            return
        if self.show_probs:
            sample = SampleState()
            _write("".join(map(self._append_token, [sample] * len(ids), ids, logprobs)) + "\n")
        for name, value in total.items():
            print(f"{name.replace('_', ' '):16}{value:,{'.4f' if isinstance(value, float) else ''}}")
        print(f"{'top-1 accuracy':16}{ranks.count(0):,} of {len(ids):,} tokens ({ranks.count(0) / len(ids):.1%})")

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
        sample, ids = SampleState(), self._encode(context)
        with suppress(KeyboardInterrupt):
            for text in self._generate(ids, [sample], num_samples=1, seed=seed, logprobs=self.show_probs):
                _write(text)
        _write(f"{_RESET_COLOR if self.show_probs else ''}\n")
        return context + sample.text

    def _generate(self, ids: list[int], samples: Sequence[SampleState], **options: Any) -> Iterator[str]:
        """Extend all samples; yield the new text of the first one after each step."""
        for step in stream(self.model, ids, **(self.options | options)):
            texts = [
                self._append_token(sample, token, logprob, stopped) if sample.reason == "length" else ""
                for sample, token, logprob, stopped in zip_longest(samples, step.tokens, step.logprobs, step.stopped)
            ]
            yield texts[0]

    def _append_token(self, sample: SampleState, token: int, logprob: float | None, stopped: bool = False) -> str:
        """Append a token to a sample; return its text for the terminal, which ends with the first stop string."""
        sample.tokens.append(token)
        begin, text = len(sample.text), sample.text + sample.decoder.decode(self.tokenizer.decode_bytes([token]))
        if stopped:
            sample.reason = "stop"
            found = [(text.find(string, max(0, begin - len(string))), len(string)) for string in self.stop_strings]
            if ends := [at + length for at, length in found if at >= 0]:
                text = text[: min(ends)]
                sample.decoder.reset()
        sample.text, new = text, self.escape(text[begin:])
        if logprob is not None:
            sample.logprobs.append(logprob)
            if self.show_probs and new:
                color = [color for lowest, color in _COLORS if math.exp(logprob) >= lowest][-1]
                new = f"\x1b[38;5;{color}m{new}{_RESET_COLOR}"
        sample.rendered += new
        return new


def move_model(model: GPT, device: str, dtype: str) -> GPT:
    """Move the model to a device ("auto": the fastest) and a precision; int8 is for the CPU."""
    if dtype == "int8":
        require("--device", device, ("auto", "cpu").__contains__, "cpu for --dtype int8")
        expected = "float32, bfloat16 or float16 for a torch without oneDNN"
        require("--dtype", dtype, lambda _: torch.backends.mkldnn.is_available(), expected)
        return quantize(model.cpu())
    available = [*devices(), *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    require("--device", device, ["auto", *available].__contains__, f"one of {', '.join(available)}")
    return model.to(available[0] if device == "auto" else device, getattr(torch, dtype))


def devices() -> list[str]:
    """Return the available device types, the fastest first."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    return [name for name, is_available in available.items() if is_available]


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
