"""Samples for people and programs: text as it comes, colors, JSON, a conversation, the score of a text.

What was asked for goes to stdout, everything else to stderr.
"""

import codecs
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minigpt.data.tokenizer import SEPARATOR, BPETokenizer, Tokenizer, encode_prompt, whole_characters
from minigpt.generation import Step, check_settings, score, stream
from minigpt.model import GPT
from minigpt.utils.errors import UserError
from minigpt.utils.terminal import escape_control_chars, sanitize_line

# Probability from which on a token has a color of the 256 that terminals know: red, orange, yellow, green.
_COLORS = ((0.0, 196), (0.05, 208), (0.2, 220), (0.5, 148), (0.8, 40))
_PLAIN = "\x1b[0m"


def move_model(model: GPT, device: str, dtype: str) -> GPT:
    """Move the model to a device ("auto": the first of `devices`) and a precision.

    Raises:
        UserError: there is no such device.
    """
    if device == "auto":
        device = devices()[0]
    try:
        torch.zeros(1, device=device).item()  # can it compute, and say what?
        return model.to(device, getattr(torch, dtype))
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # what torch says without CUDA is any of them
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise UserError(f"--device={device} is not there; this machine has {', '.join(devices())}") from error


def devices() -> list[str]:
    """The kinds of devices that this machine has, the fastest first."""
    gpus = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return [*(name for name, there in gpus.items() if there), "cpu"]


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt that was given as text, or in a file, or (`-`) on stdin; empty where none was.

    Raises:
        UserError: both were given, or the file is no text.
    """
    if file is None:
        return whole_characters(prompt or "")  # as the tokenizer reads it
    if prompt is not None:
        raise UserError("--prompt and --prompt-file are two prompts; give one of them")
    return read_text(file, "--prompt-file")


def read_text(file: str, option: str) -> str:
    """A text file, or (`-`) stdin.

    Raises:
        UserError: there is no such file, or it is no text.
    """
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return content.decode("utf-8")
    except OSError as error:
        raise UserError(f"{option}={file} cannot be read ({(error.strerror or str(error)).lower()})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{option}={file} is not UTF-8 text: bad byte at offset {error.start:,}") from error


@dataclass
class SampleState:
    """A sample as it grows: its tokens, and the text of those whose characters are whole."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    shown: str = ""  # the text with its colors
    reason: str = "length"
    decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace"))


class Console:
    """A model and its tokenizer that speak.

    Args:
        options: those of `generation.stream`, without the tokenizer.
        show_probs: color every token by its probability.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, options: Mapping[str, Any], *, show_probs: bool) -> None:
        self.model, self.tokenizer, self.options, self.show_probs = model, tokenizer, dict(options), show_probs
        self.terminal, self.truncated = sys.stdout.isatty(), False
        if hasattr(sys.stdout, "reconfigure"):  # an encoding without some of the characters, such as Latin-1
            sys.stdout.reconfigure(errors="backslashreplace")
        stop = list(self.options.get("stop", ()))
        if isinstance(tokenizer, BPETokenizer) and tokenizer.separated:
            stop.append(int(tokenizer.separator[0]))  # the document is at its end
        self.options |= {"stop": stop, "tokenizer": tokenizer}

    def sample(self, prompt: str, *, as_json: bool) -> None:
        """Print what follows a prompt: the first sample as it comes, then the others; or a line of JSON for each."""
        ids = self._start(prompt)
        told = [SampleState() for _ in range(self.options["num_samples"])]
        if not as_json:
            self._head(0)
            _write(self._shown(prompt))
        clock = _Clock(min(len(ids), self.model.config.block_size))
        for step in stream(self.model, ids, logprobs=as_json or self.show_probs, **self.options):
            clock.tick()
            for i, sample in enumerate(told):
                new = self._grow(sample, step, i)
                if i == 0 and not as_json:
                    _write(new)
        rests = [sample.decoder.decode(b"", final=True) for sample in told]
        if not as_json:
            _write(f"{self._shown(rests[0])}\n")
        speed = clock.tell(sum(len(sample.tokens) for sample in told))
        for i, (sample, rest) in enumerate(zip(told, rests, strict=True)):
            sample.text += rest
            if as_json:
                values = {"prompt": prompt, "text": sample.text, "tokens": sample.tokens, "logprobs": sample.logprobs}
                print(json.dumps(values | {"reason": sample.reason, "tokens_per_second": speed}), flush=True)
            elif i > 0:
                self._head(i)
                _write(f"{self._shown(prompt)}{sample.shown}{self._shown(rest)}\n")

    def talk(self, context: str) -> None:
        """Continue what is typed, and keep all of it as the context; a line with a slash is a command."""
        with suppress(ImportError):
            import readline  # noqa: F401  # arrow keys, and the lines before
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="replace")
        person = sys.stdin.isatty()
        _tell("what you type is continued; /reset, /quit, /temperature 0.7, /top_k 50, …; Ctrl-C stops the text")
        turn = 0
        while True:
            try:
                if person and not sys.stdout.isatty():  # where a prompt would be in the text
                    print("> ", end="", file=sys.stderr, flush=True)
                line = input("> " if person and sys.stdout.isatty() else "")
            except EOFError:
                return
            except KeyboardInterrupt:
                _tell("")
                continue
            command, _, value = line.strip().partition(" ")
            try:
                if command == "/quit":
                    return
                if command == "/reset":
                    context = ""
                elif command.startswith("/"):
                    self._set(command[1:], value)
                else:
                    context, turn = self._answer(context + line, turn), turn + 1
            except UserError as error:
                _tell(f"error: {error}")

    def score(self, text: str, *, as_json: bool) -> None:
        """Print how likely a text is: in all, and each token with `show_probs` or as JSON.

        Raises:
            UserError: it is empty.
        """
        if not text:
            raise UserError("the text to score is empty; give one with something in it")
        ids = self.tokenizer.encode(text).tolist()
        found = score(self.model, ids, self.tokenizer.start.tolist())
        n_bytes = len(text.encode())
        total: dict[str, Any] = {
            "tokens": len(ids),
            "bytes": n_bytes,
            "nats": found.nats,
            "nats_per_token": found.nats / len(ids),
            "bits_per_byte": found.bits_per_byte(n_bytes),
        }
        if as_json:
            each = {"token_ids": ids, "logprobs": found.logprobs.tolist(), "ranks": found.ranks.tolist()}
            print(json.dumps(total | each))
            return
        if self.show_probs:
            told = SampleState()
            for token, logprob in zip(ids, found.logprobs.tolist(), strict=True):
                _write(self._add(told, token, logprob))
            _write("\n")
        for name, value in total.items():
            print(f"{name.replace('_', ' '):16}{value:,.4f}" if isinstance(value, float) else f"{name:16}{value:,}")
        first = int((found.ranks == 0).sum())
        print(f"{'first choice':16}{first:,} of {len(ids):,} tokens ({first / len(ids):.1%})")

    def _start(self, prompt: str) -> list[int]:
        """The ids to begin from; says what a text without a prompt begins from, and what is not read."""
        ids: list[int] = encode_prompt(self.tokenizer, prompt).tolist()
        if not prompt:
            begin = self.tokenizer.decode_bytes(ids)
            names = {b"": SEPARATOR, b"\n": "a line break"}
            _tell(f"no prompt: beginning from {names.get(begin, begin.decode(errors='replace'))}")
        block_size = self.model.config.block_size
        if len(ids) > block_size and not self.truncated:
            self.truncated = True  # a conversation stays so
            _tell(f"the prompt has {len(ids):,} tokens, of which the model reads the last {block_size:,}")
        return ids

    def _grow(self, sample: SampleState, step: Step, i: int) -> str:
        """Add a token to a sample that has not stopped; what is to be shown of it."""
        if sample.reason == "stop":
            return ""
        sample.reason = "stop" if step.stopped[i] else "length"
        before = len(sample.text)
        logprob = step.logprobs[i] if step.logprobs else 0.0
        new = self._add(sample, step.tokens[i], logprob)
        if sample.reason == "stop":  # nothing after a stop is shown, also of the token that it ends in
            texts = [one for one in self.options["stop"] if isinstance(one, str)]
            found = [(sample.text.find(one, max(0, before - len(one))), len(one)) for one in texts]
            if ends := [at + length for at, length in found if at >= 0]:
                sample.text = sample.text[: min(ends)]
                sample.decoder.reset()
                new = self._colored(sample.text[before:], logprob)
        sample.shown += new
        return new

    def _add(self, sample: SampleState, token: int, logprob: float) -> str:
        sample.tokens.append(token)
        sample.logprobs.append(logprob)
        text = sample.decoder.decode(self.tokenizer.decode_bytes([token]))
        sample.text += text
        return self._colored(text, logprob)

    def _shown(self, text: str) -> str:
        """A text as it is, but for a terminal, which would obey what a model or a file has in it."""
        return escape_control_chars(text) if self.terminal else text

    def _colored(self, text: str, logprob: float) -> str:
        text = self._shown(text)
        if not self.show_probs or not text:
            return text
        color = [color for least, color in _COLORS if math.exp(logprob) >= least][-1]
        return f"\x1b[38;5;{color}m{text}{_PLAIN}"

    def _head(self, i: int) -> None:
        if self.options["num_samples"] > 1:
            _write(f"── sample {i + 1} ──\n")

    def _answer(self, context: str, turn: int) -> str:
        """Continue a context; returns it with what was said, also when Ctrl-C broke that off."""
        ids = self._start(context)
        told = SampleState()
        options = self.options | {"num_samples": 1, "seed": self.options["seed"] + turn}
        try:
            for step in stream(self.model, ids, logprobs=self.show_probs, **options):
                _write(self._grow(told, step, 0))
        except KeyboardInterrupt:
            pass
        _write(f"{_PLAIN if self.show_probs else ''}\n")
        return context + told.text

    def _set(self, name: str, value: str) -> None:
        """Change a setting.

        Raises:
            UserError: there is no such setting, or it cannot have this value.
        """
        kinds: dict[str, Callable[[str], Any]] = {
            **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), float),
            **dict.fromkeys(("top_k", "max_new_tokens", "seed"), int),
        }
        if name not in kinds:
            raise UserError(f"/{name} is no command; there are /reset, /quit, and /{', /'.join(kinds)} with a value")
        try:
            changed = {name: None if value in ("none", "off") else kinds[name](value)}
        except ValueError as error:
            raise UserError(f"/{name} takes a number after it, not {value or 'nothing'}") from error
        check_settings(**{key: self.options[key] for key in kinds} | changed)
        self.options |= changed


class _Clock:
    """Seconds of reading the prompt, and tokens a second after it."""

    def __init__(self, n_prompt: int) -> None:
        self.n_prompt, self.began, self.ticks = n_prompt, time.perf_counter(), list[float]()

    def tick(self) -> None:
        """Every sample has a token more."""
        self.ticks.append(time.perf_counter())

    def tell(self, n_tokens: int) -> float | None:
        """Say it; returns tokens a second of all samples together, none where there was one step."""
        reading = f"read {self.n_prompt:,} tokens in {self.ticks[0] - self.began:.3f} s"
        if len(self.ticks) == 1:
            _tell(reading)
            return None
        speed = n_tokens * (1 - 1 / len(self.ticks)) / (self.ticks[-1] - self.ticks[0])
        _tell(f"{reading}, then {speed:,.0f} tokens/s")
        return speed


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _tell(line: str) -> None:
    print(sanitize_line(line), file=sys.stderr, flush=True)
