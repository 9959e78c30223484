"""Text from a model: read the prompts once, then draw a token a step; and how likely a given text is.

`generate` returns whole samples, `stream` yields the same tokens as they are drawn, `score` tells what a model
thinks of a text that is there. Depends on torch alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from minigpt.kv_decoder import Decoder
from minigpt.model import GPT
from minigpt.sampling import PerSampleRNG, Sampling
from minigpt.utils.errors import RunError, UserError

Prompt = Tensor | Sequence[int]


class Decodes(Protocol):
    """What a tokenizer must do for texts to stop at."""

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The text of token ids in UTF-8."""


@dataclass
class Sample:
    """What followed a prompt.

    Args:
        tokens: ids, without the prompt's, up to the one that ends what it stopped at.
        logprobs: of each token, in nats, as the model has it: before temperature and filters. Empty unless asked for.
        reason: "length", or "stop" where it came to what it should stop at.
    """

    tokens: list[int]
    logprobs: list[float]
    reason: str = "length"

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.tokens[:8])) + (", …" if len(self.tokens) > 8 else "")
        return f"Sample({len(self.tokens)} tokens [{shown}], reason={self.reason!r})"


@dataclass(frozen=True)
class Step:
    """The next token of every sample; what follows the end of a sample means nothing.

    Args:
        tokens: an id each.
        logprobs: as in `Sample`.
        stopped: whether a sample has come to what it should stop at, with this token or before.
    """

    tokens: list[int]
    logprobs: list[float]
    stopped: list[bool]


def generate(
    model: GPT,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: Sequence[str | int] = (),
    tokenizer: Decodes | None = None,
    seed: int = 0,
    num_samples: int = 1,
    logprobs: bool = False,
    compile: bool = False,
) -> list[Sample]:
    """Continue a prompt, or several together.

    Args:
        prompts: token ids (T,) of one prompt, or a list of prompts of any lengths. The end of one that is longer than
            `block_size` is read.
        max_new_tokens: of each sample.
        temperature, top_k, top_p, min_p, repetition_penalty: see `Sampling`.
        stop: texts and token ids that end a sample. A text may lie across tokens; the sample ends with the token
            that completes it.
        tokenizer: needed where `stop` has texts.
        seed: sample i of every prompt draws from its own generator, seeded with seed + i.
        num_samples: of each prompt.
        logprobs: record the log-probability of every token.
        compile: compile the step, which takes a while; on a CPU it gave nothing.

    Returns:
        `num_samples` samples of the first prompt, then of the second …

    Raises:
        UserError: a setting is impossible.
    """
    samples: list[Sample] = []
    steps = stream(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop,
        tokenizer=tokenizer,
        seed=seed,
        num_samples=num_samples,
        logprobs=logprobs,
        compile=compile,
    )
    for step in steps:
        samples = samples or [Sample([], []) for _ in step.tokens]
        for i, sample in enumerate(samples):
            if sample.reason == "length":
                sample.tokens.append(step.tokens[i])
                sample.logprobs += step.logprobs[i : i + 1]
                sample.reason = "stop" if step.stopped[i] else "length"
    return samples


def stream(
    model: GPT,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: Sequence[str | int] = (),
    tokenizer: Decodes | None = None,
    seed: int = 0,
    num_samples: int = 1,
    logprobs: bool = False,
    compile: bool = False,
) -> Iterator[Step]:
    """`generate`, yielding the next token of every sample as soon as it is drawn; ends when all have stopped.

    Args:
        model, prompts, max_new_tokens …: as for `generate`.

    Raises:
        UserError: a setting is impossible.
    """
    check_settings(max_new_tokens=max_new_tokens, seed=seed, num_samples=num_samples)
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    rows = _rows(prompts, model.config.vocab_size)
    stops = _Stops(stop, tokenizer, len(rows) * num_samples)
    if stops.texts and tokenizer is None:
        raise UserError("stop has texts, and which tokens make them only a tokenizer knows; give tokenizer=")
    return _steps(model, rows, sampling, max_new_tokens, stops, seed, num_samples, logprobs, compile)


def check_settings(
    *, max_new_tokens: int, seed: int = 0, num_samples: int = 1, stop: Sequence[str | int] = (), **sampling: Any
) -> None:
    """Raises UserError, naming the setting, for one that is impossible."""
    for name, value, least, most, expected in (
        ("max_new_tokens", max_new_tokens, 1, (1 << 63) - 1, "of at least 1"),
        ("seed", seed, 0, (1 << 63) - 1, "of at least 0"),
        ("num_samples", num_samples, 1, 1 << 16, "from 1 to 65536"),
    ):
        if type(value) is not int or not least <= value <= most:
            raise UserError(f"{name}={value} is not possible; it takes a whole number {expected}")
    Sampling(**sampling)
    _Stops(stop, None, 0)


def _rows(prompts: Prompt | Sequence[Prompt], vocab_size: int) -> list[list[int]]:
    """The ids of each prompt."""
    given = _plain(prompts)
    rows = given if isinstance(given, list) and given and hasattr(given[0], "__len__") else [given]
    ids = [_plain(row) for row in rows]
    for row in ids:
        if not isinstance(row, list) or not row or not all(type(i) is int and 0 <= i < vocab_size for i in row):
            raise UserError(f"a prompt must be a row of at least one token id, from 0 to {vocab_size - 1}")
    return ids


def _row(tokens: Prompt, vocab_size: int) -> list[int]:
    rows = _rows(tokens, vocab_size)
    if len(rows) > 1:
        raise UserError("a text to score must be one row of token ids")
    return rows[0]


def _plain(tokens: Any) -> Any:
    """Tensors, arrays and sequences of numbers as lists."""
    if hasattr(tokens, "tolist"):
        return tokens.tolist()
    return list(tokens) if isinstance(tokens, Sequence) and not isinstance(tokens, str) else tokens


@torch.inference_mode()
def _steps(
    model: GPT,
    rows: list[list[int]],
    sampling: Sampling,
    max_new_tokens: int,
    stops: "_Stops",
    seed: int,
    num_samples: int,
    logprobs: bool,
    compile: bool,
) -> Iterator[Step]:
    training = model.training
    model.eval()
    try:
        decoder = Decoder(model, rows, num_samples, max_new_tokens, compile=compile)
        uniforms = PerSampleRNG([seed + i for _ in rows for i in range(num_samples)], decoder.device)
        seen = None
        if sampling.repetition_penalty != 1:
            seen = torch.zeros_like(decoder.logits, dtype=torch.bool)
            for row, text in zip(seen, decoder.texts, strict=True):
                row[text] = True
        for i in range(max_new_tokens):
            logits = decoder.logits.float()  # (B, V)
            tokens = sampling.draw(logits, uniforms.next(), seen)  # (B,)
            ids, told = tokens.tolist(), list[float]()
            # Such a draw lies past the vocabulary; the greatest of such logits tells nothing.
            if max(ids) >= logits.size(-1) or (i == 0 and not logits.isfinite().all()):
                raise RunError("the model's logits are no numbers; its weights hold some that are none")
            if logprobs:
                told = logits.log_softmax(dim=-1).gather(-1, tokens[:, None])[:, 0].tolist()
            stopped = stops.after(ids)
            yield Step(ids, told, stopped)
            if i + 1 == max_new_tokens or all(stopped):
                return
            if seen is not None:
                seen.scatter_(-1, tokens[:, None], True)
            decoder.step(tokens)
    finally:
        model.train(training)


class _Stops:
    """Watches samples for what they should stop at."""

    def __init__(self, stop: Sequence[str | int], tokenizer: Decodes | None, n_samples: int) -> None:
        listed = isinstance(stop, Sequence) and not isinstance(stop, str)
        if not listed or not all(isinstance(one, str | int) and one != "" for one in stop):
            raise UserError(
                f"stop={stop!r} is not possible; it takes a list of texts and token ids, none of them empty"
            )
        self.ids = {one for one in stop if isinstance(one, int)}
        try:
            self.texts = [one.encode() for one in stop if isinstance(one, str)]
        except UnicodeEncodeError as error:
            raise UserError(f"stop={stop!r} is not possible; half a character is no text") from error
        self.tokenizer = tokenizer
        self.longest = max(map(len, self.texts), default=1) - 1
        self.tails = [b""] * n_samples
        self.stopped = [False] * n_samples

    def after(self, tokens: Sequence[int]) -> list[bool]:
        """Which samples have stopped when each has got a token more."""
        if self.ids or self.texts:
            for i, token in enumerate(tokens):
                if not self.stopped[i]:
                    self.stopped[i] = token in self.ids or self._completes(i, token)
        return list(self.stopped)

    def _completes(self, i: int, token: int) -> bool:
        if self.tokenizer is None or not self.texts:
            return False
        text = self.tails[i] + self.tokenizer.decode_bytes([token])
        self.tails[i] = text[-self.longest :] if self.longest else b""
        return any(one in text for one in self.texts)


@dataclass(frozen=True)
class Score:
    """How likely each token of a text is after those before it.

    Args:
        logprobs: (T,) in nats.
        ranks: (T,) how many tokens were likelier.
    """

    logprobs: Tensor
    ranks: Tensor

    def __repr__(self) -> str:
        return f"Score({len(self.logprobs)} tokens, nats={self.nats:.4f})"

    @property
    def nats(self) -> float:
        """Of the whole text."""
        return -float(self.logprobs.double().sum())

    def bits_per_byte(self, n_bytes: int) -> float:
        """Of a text of so many bytes."""
        return self.nats / math.log(2) / n_bytes


@torch.no_grad()
def score(model: GPT, tokens: Prompt, start: Prompt) -> Score:
    """The probability of a text.

    Args:
        tokens: (T,) its ids, at least one.
        start: ids that stand before it, at least one: what a text begins from.

    Every token is seen with at least half a block before it, or all that there is: windows of `block_size` go on by
    half of it.
    """
    before, text = _row(start, model.config.vocab_size), _row(tokens, model.config.vocab_size)
    device, block_size = model.wte.weight.device, model.config.block_size
    ids = torch.tensor(before[-block_size:] + text, device=device)  # (N,)
    first = len(ids) - len(text)  # the first that is scored
    training = model.training
    model.eval()
    logprobs, ranks, done = [], [], first
    try:
        while done < len(ids):
            begin = 0 if done < block_size else done - (block_size + 1) // 2
            end = min(len(ids), begin + block_size + 1)
            logits = model(ids[None, begin : end - 1])[0, done - begin - 1 :].float()  # (n, V)
            wanted = ids[done:end, None]  # (n, 1)
            found = logits.log_softmax(dim=-1)
            logprobs.append(found.gather(-1, wanted)[:, 0])
            ranks.append((found > found.gather(-1, wanted)).sum(dim=-1))
            done = end
    finally:
        model.train(training)
    return Score(torch.cat(logprobs).cpu(), torch.cat(ranks).cpu())
