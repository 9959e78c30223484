"""Text generation: `generate` returns samples, `stream` yields them token by token.

`score` rates a given text. Prompts are read once, in one batch, and each step adds one token to
every sample. Samples may be longer than `block_size`: see `drop_older_half` in
`minigpt.sampling.decoder`. Depends on torch alone.

Shapes: B samples, T tokens, V vocab.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from minigpt.model.changes import find_change, unwrap
from minigpt.model.evaluation import evaluation
from minigpt.model.gpt import GPT
from minigpt.sampling.decoder import Decoder
from minigpt.sampling.detokenizer import Detokenizer
from minigpt.sampling.fast.fast_decoder import FastDecoder
from minigpt.sampling.fast.graph_decoder import GraphDecoder
from minigpt.sampling.filters import PerSampleRNG, draw, unused_ids
from minigpt.sampling.settings import SamplingSettings, check_settings
from minigpt.utils.checks import integer
from minigpt.utils.errors import RunError, UserError

if TYPE_CHECKING:
    from minigpt.data.tokenizer import Tokenizer

Prompt: TypeAlias = Tensor | Sequence[int]

NON_FINITE = (
    "the model's logits are NaN or infinite: its weights are, or values overflow in float16; "
    "try float32"
)


@dataclass(frozen=True)
class Step:
    """The next token of every sample; to be ignored for samples that stopped before."""

    tokens: list[int]
    # Characters that each token completes, including a stop string; empty without a tokenizer.
    texts: list[str]
    # Of each token in nats, before temperature and filters; empty unless requested.
    logprobs: list[float]
    stopped: list[bool]  # with this token or before


@dataclass
class Sample:
    """The continuation of a prompt."""

    # Including the one that completes a stop string.
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # as in `Step`
    reason: str = "length"  # at max_new_tokens; or "stop"
    text: str = ""  # empty without a tokenizer

    def append(self, step: Step, i: int) -> None:
        """Append the token of sample i, unless the sample stopped before."""
        if self.reason == "length":
            self.tokens.append(step.tokens[i])
            self.logprobs += step.logprobs[i : i + 1]
            self.reason = "stop" if step.stopped[i] else "length"
            self.text += step.texts[i]


def generate(
    model: GPT, prompts: Prompt | Sequence[Prompt], *, max_new_tokens: int, **options: Any
) -> list[Sample]:
    """Continue one prompt or a batch of prompts; all arguments are those of `stream`.

    Returns:
        `num_samples` samples of the first prompt, then of the second …
    """
    samples: list[Sample] = []
    for step in stream(model, prompts, max_new_tokens=max_new_tokens, **options):
        samples = samples or [Sample() for _ in step.tokens]
        for i, sample in enumerate(samples):
            sample.append(step, i)
    return samples


def stream(
    model: GPT,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int,
    stop: Sequence[str | int] = (),
    tokenizer: "Tokenizer | None" = None,
    seed: int = 0,
    num_samples: int = 1,
    logprobs: bool = False,
    **filters: Any,
) -> Iterator[Step]:
    """Yield the next token of every sample as soon as it is drawn, until all have stopped.

    Args:
        model: is used in evaluation mode, and left in its mode between the steps too.
        prompts: token ids (T,) of one prompt, or a list of prompts of any lengths; the last
            `block_size` are read.
        max_new_tokens: per sample; not limited by `block_size`.
        stop: strings and token ids that end a sample. A string may span tokens.
        tokenizer: for the texts of the samples; required by stop strings. Ids without a token are
            never drawn. Without a tokenizer, any id of the model's vocabulary can be drawn.
        seed: sample i of every prompt has its own random generator, seeded with seed + i.
        num_samples: per prompt.
        logprobs: return the log-probability of every token.
        filters: temperature, top_k, top_p, min_p, repetition_penalty of `SamplingSettings`.

    Raises:
        UserError: a setting or a prompt is invalid; raised by the call, before the first step.
        RunError: the logits are NaN or infinite.
    """
    # Check everything before the first step.
    check_settings(max_new_tokens=max_new_tokens, seed=seed, num_samples=num_samples, stop=stop)
    settings = SamplingSettings(**filters)
    model = unwrap(model)
    batch: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    first = batch[0] if isinstance(batch, Sequence) and batch else None
    # A tensor without a dimension is an id.
    is_batch = getattr(first, "ndim", hasattr(first, "__len__"))
    vocab_size = model.config.vocab_size
    prompt_ids = [check_ids(prompt, vocab_size) for prompt in (batch if is_batch else [batch])]
    seeds = list(range(seed, seed + num_samples)) * len(prompt_ids)
    detokenizers = [
        Detokenizer(tokenizer, stop, prompt_ids[i // num_samples]) for i in range(len(seeds))
    ]
    return _steps(model, prompt_ids, detokenizers, seeds, max_new_tokens, settings, logprobs)


@torch.inference_mode()
def _steps(
    model: GPT,
    prompts: list[list[int]],
    detokenizers: list[Detokenizer],
    seeds: list[int],
    max_new_tokens: int,
    settings: SamplingSettings,
    logprobs: bool,
) -> Iterator[Step]:
    """Yield the steps of `stream`, with a detokenizer and a seed per sample, B of each."""
    # Read the prompts.
    num_samples = len(seeds) // len(prompts)
    decoder = decoder_class(model)(model, prompts, num_samples, max_new_tokens)
    last_tokens = torch.tensor([prompt[-1] for prompt in prompts], device=decoder.device)
    raw_logits = decoder.step(last_tokens.repeat_interleave(num_samples))  # (B, V)
    # Prepare what is drawn from: random numbers, and the ids that a sample can have, or has.
    uniforms = PerSampleRNG(seeds, decoder.device)
    V = raw_logits.size(-1)
    tokenizer = detokenizers[0].tokenizer
    unused = unused_ids(tokenizer.token_bytes, V, decoder.device) if tokenizer else None  # (V,)
    seen = None
    if settings.repetition_penalty != 1:
        seen = torch.zeros_like(raw_logits, dtype=torch.bool)  # (B, V)
        for i, row in enumerate(seen):
            row[prompts[i // num_samples]] = True
    for n in range(1, max_new_tokens + 1):
        # Draw a token for every sample.
        logits = raw_logits.float()  # (B, V)
        tokens = draw(logits, settings, uniforms.number(n - 1), seen, unused)  # (B,)
        ids = tokens.tolist()
        if max(ids) == V:
            raise RunError(NON_FINITE)
        own_logprobs: list[float] = []
        if logprobs:
            # (B, V) to B numbers
            own_logprobs = logits.log_softmax(dim=-1).gather(-1, tokens[:, None])[:, 0].tolist()
        # Yield it with its text.
        last = n == max_new_tokens
        texts = [each.append(new, last=last) for each, new in zip(detokenizers, ids, strict=True)]
        stopped = [each.stopped for each in detokenizers]
        yield Step(ids, texts, own_logprobs, stopped)
        if last or all(stopped):
            return
        # Compute the logits after it.
        if seen is not None:
            seen.scatter_(-1, tokens[:, None], True)  # (B, V)
        raw_logits = decoder.step(tokens)  # (B, V)


def decoder_class(model: GPT) -> type[Decoder]:
    """Return the class that decodes a model: a fast one, unless the user changed the model.

    Without `minigpt.sampling.fast`, it would be `Decoder` for all.
    """
    if find_change(model) is not None:
        return Decoder
    return GraphDecoder if next(model.parameters()).is_cuda else FastDecoder


@dataclass(frozen=True)
class Score:
    """The likelihood of a text, token by token."""

    logprobs: Tensor  # (T,) of each token after those before it, in nats
    ranks: Tensor  # (T,) number of more likely tokens
    # The `n_top` likeliest tokens in each place, with log-probabilities.
    top: list[list[tuple[int, float]]]

    @property
    def nats(self) -> float:
        """Negative log-likelihood of the whole text."""
        return -float(self.logprobs.double().sum())


@torch.no_grad()
def score(model: GPT, tokens: Prompt, start: Prompt, n_top: int = 0) -> Score:
    """Rate a text, ids (T,), after `start`, at least one id that is not rated.

    The model is left in its mode.
    """
    model = unwrap(model)
    before = check_ids(start, model.config.vocab_size)
    ids = before + check_ids(tokens, model.config.vocab_size)
    parts = list(score_windows(model, ids, len(before), n_top))
    logprobs = torch.cat([part.logprobs for part in parts]).cpu()  # (T,)
    ranks = torch.cat([part.ranks for part in parts]).cpu()  # (T,)
    return Score(logprobs, ranks, list(chain.from_iterable(part.top for part in parts)))


def score_windows(model: GPT, ids: Sequence[int], done: int, n_top: int) -> Iterator[Score]:
    """Rate the ids after the first `done`, one window of at most `block_size` per step.

    The window slides: each token has at least half a block, or all text before it, as context. The
    ids are not checked.
    """
    block_size = model.config.block_size
    device = next(model.parameters()).device
    while done < len(ids):
        # Once the text is longer than a window, half of each window is context.
        begin = 0 if done < block_size else done - (block_size + 1) // 2
        window = torch.tensor(ids[begin : begin + block_size + 1], device=device)  # (n,)
        with evaluation(model):
            logits = model(window[None, :-1])[0, done - begin - 1 :].float()  # (n rated, V)
        yield score_logits(logits, window[done - begin :], n_top)
        done = begin + len(window)


def score_logits(logits: Tensor, tokens: Tensor, n_top: int) -> Score:
    """Rate tokens (B,) by their logits (B, V)."""
    logprobs = logits.log_softmax(dim=-1)  # (B, V)
    own = logprobs.gather(-1, tokens[:, None])  # (B, 1)
    ranks = (logprobs > own).sum(dim=-1)  # (B,)
    values, ids = logprobs.topk(min(n_top, logits.size(-1)))  # (B, n) each
    top = [list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
    return Score(own[:, 0], ranks, top)


def check_ids(prompt: object, vocab_size: int) -> list[int]:
    """Return token ids, given as a tensor, an array or a sequence, as a list."""
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(ids, Sequence) and ids:
        items = [i.tolist() if hasattr(i, "tolist") else i for i in ids]
        if all(map(integer(0, vocab_size - 1)[0], items)):
            return items
    raise UserError(f"a prompt must be a non-empty sequence of token ids in [0, {vocab_size})")
