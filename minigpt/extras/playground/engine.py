"""Generation for many requests at once: one thread per model that decodes all running requests in
one batch.

Requests join and leave the batch between two steps. A request has its own random generator, so its
tokens are those of `minigpt.sampling.generation.generate` with its settings and seed, whatever else
runs, except for rounding: matrix products of another batch size can differ in the last bits of the
logits.

Shapes: B running requests, V vocab.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor

from minigpt.data.tokenizer import Tokenizer
from minigpt.extras.playground.free_memory import memory
from minigpt.extras.playground.joining import joining_decoder
from minigpt.model.gpt import GPT
from minigpt.sampling.decoder import drop_older_half, first_window
from minigpt.sampling.detokenizer import Detokenizer
from minigpt.sampling.filters import PerSampleRNG, draw, unused_ids
from minigpt.sampling.generation import (
    NON_FINITE,
    check_ids,
    score_logits,
    score_windows,
)
from minigpt.sampling.settings import SamplingSettings
from minigpt.training.cpu_threads import ThreadBalancer
from minigpt.utils.errors import RunError, UserError
from minigpt.utils.terminal import log

T = TypeVar("T")

# Between tokens that are sent: the event loop holds Python's lock, which the steps need too
_SEND_SECONDS = 0.03


class QueueFull(Exception):
    """Too many requests wait."""


@dataclass(frozen=True)
class SampleRequest:
    """One sample to generate."""

    prompt: list[int]  # token ids, at least one
    max_new_tokens: int
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    stop: tuple[str | int, ...] = ()  # strings and token ids
    seed: int = 0
    n_top: int | None = (
        0  # likely alternatives to return per token; None: no log-probabilities and ranks either
    )

    @property
    def length(self) -> int:
        """Number of tokens of its text at the end, at most."""
        return len(self.prompt) + self.max_new_tokens


@dataclass(slots=True)
class Token:
    """A generated or scored token."""

    id: int
    logprob: float | None = None  # in nats, before temperature and filters
    rank: int = 0  # number of likelier tokens
    # The likeliest with log-probabilities, in this order
    top: list[tuple[int, float]] = field(default_factory=list)
    reason: str | None = None  # "stop" or "length" with the last token of a request
    sample: int = 0  # index of its request among those of a stream
    text: str = ""  # the characters that a generated token completes, up to and with a stop string
    # Characters at the end of the sample's text so far that are a stop string or may become one
    n_held: int = 0


class Engine:
    """Generate for many requests at once. To be built and called in one asyncio event loop.

    Steps, new requests and calls of `run` wait in the queue of the thread, where each step queues
    the next one. The KV cache grows with the texts and is freed when no request is left. A request
    waits while the cache could outgrow `max_cache_bytes` with it before it ends. After an
    exception, each running request takes its step alone, and only those that raise it again end.
    """

    max_running = 32  # requests that are decoded in one batch
    max_waiting = 256  # requests that wait for a place; more raise `QueueFull`

    def __init__(self, model: GPT, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self.max_cache_bytes = memory(next(model.parameters()).device) // 4
        self._thread, self._loop = ThreadPoolExecutor(1, "engine"), asyncio.get_running_loop()
        # Of the event loop:
        self._jobs: list[_Job] = []  # that may run or wait
        self._n_calls = 0
        # Of the thread:
        self._decoder = joining_decoder(model)
        # (V,)
        self._unused = unused_ids(
            tokenizer.token_bytes, model.config.vocab_size, self._decoder.device
        )
        self._threads = ThreadBalancer(fixed=self._decoder.device.type != "cpu")
        self._running: list[_Job] = []  # in the order of the decoder's rows
        self._waiting: list[_Job] = []
        self._unsent: list[tuple[TokenStream, Token | Exception]] = []
        self._next_send = 0.0

    def generate(self, *requests: SampleRequest) -> "TokenStream":
        """Queue requests and return their tokens as they are generated; closing the iterator ends
        the requests.

        If too many requests wait, or a prompt is invalid or can never be run, QueueFull or
        UserError is raised at once.
        """
        for request in requests:
            check_ids(request.prompt, self.model.config.vocab_size)
            if (needed := self._decoder.cache_bytes(request.length)) > self.max_cache_bytes:
                raise UserError(
                    "the key-value cache of a sample must be at most "
                    f"{self.max_cache_bytes / 1e6:,.0f} MB, "
                    f"got {needed / 1e6:,.0f} MB of {request.length:,} tokens; use fewer max_tokens"
                )
        stream = TokenStream(requests, self)
        self._check_room(len(stream.jobs))
        self._jobs += stream.jobs
        self._thread.submit(self._add, stream.jobs)
        return stream

    async def run(self, function: Callable[[GPT], T]) -> T:
        """Call a function of the model in the engine's thread, between two steps. Raises QueueFull
        as `generate`.
        """
        self._check_room(1)
        self._n_calls += 1
        try:
            return await self._loop.run_in_executor(
                self._thread, torch.inference_mode()(function), self.model
            )
        finally:
            self._n_calls -= 1

    async def score(self, prompt: list[int], *, n_top: int = 0) -> list[Token]:
        """Return every token of a prompt, with the log-probability after those before it of all but
        the first.

        The windows are those of `minigpt.sampling.generation.score`; steps of other requests run
        between two of them.
        """
        check_ids(prompt, self.model.config.vocab_size)
        tokens, windows = [Token(prompt[0])], score_windows(self.model, prompt, 1, n_top)
        while len(tokens) < len(prompt):
            found = await self.run(lambda _: next(windows))
            if not found.logprobs.isfinite().all():
                raise RunError(NON_FINITE)
            tokens += map(
                Token,
                prompt[len(tokens) :],  # `map` ends with the window
                found.logprobs.tolist(),
                found.ranks.tolist(),
                found.top,
            )
        return tokens

    @property
    def busy(self) -> bool:
        """Whether a request runs or waits."""
        return self._n_calls > 0 or not all(job.ended for job in self._jobs)

    async def close(self) -> None:
        """End the thread; requests that run or wait raise RunError."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        _deliver(
            [(job.stream, RunError("the engine is closed")) for job in self._jobs if not job.ended]
        )

    def _check_room(self, n_new: int) -> None:
        self._jobs = [job for job in self._jobs if not job.ended]
        if len(self._jobs) + self._n_calls + n_new > self.max_running + self.max_waiting:
            raise QueueFull(f"{self.max_waiting} requests wait")

    # The methods below run in the thread.

    def _add(self, jobs: "list[_Job]") -> None:
        if jobs and not (self._running or self._waiting):
            self._thread.submit(self._work)  # comes after this method
        self._waiting += jobs

    @torch.inference_mode()
    def _work(self) -> None:
        """Run a step, and queue the next one."""
        try:
            self._leave()
            self._join()
            if self._running:
                self._threads.start()
                self._step()
                if change := self._threads.end():
                    log(change)
        # Of the model, such as a lack of memory, which its frames hold until the end of this call
        except Exception:
            self._thread.submit(self._step_alone)
        if not self._running:
            self._decoder = joining_decoder(self.model)  # with an empty cache
        if self._running or self._waiting:
            self._thread.submit(self._work)  # raises if the engine is closed

    @torch.inference_mode()
    def _step_alone(self) -> None:
        """End the requests whose step raises an exception alone too; the others take it so, and
        then join again.
        """
        jobs = [job for job in self._running if not job.ended]
        for job in jobs:
            self._running = [job]
            try:
                self._decoder = joining_decoder(self.model)
                self._decoder.add(job.context)
                self._step()
            except Exception as error:
                job.ended = True
                self._send([(job.stream, error)])
        self._running, self._waiting = [], jobs + self._waiting
        self._decoder = joining_decoder(self.model)

    def _leave(self) -> None:
        """Free the rows of requests that ended."""
        for row in reversed(range(len(self._running))):
            if self._running[row].ended:
                self._decoder.drop(row)
                self._running[row] = self._running[-1]
                self._running.pop()

    def _join(self) -> None:
        """Read prompts that wait, together at most `block_size` tokens, if there is memory; equal
        ones once.
        """
        self._waiting = [job for job in self._waiting if not job.ended]
        room, unread = self.max_running - len(self._running), self.model.config.block_size
        for context, group in groupby(self._waiting[:room], lambda job: job.context):
            unread -= len(context)
            jobs = list(group)
            # Rows of the cache have equal lengths
            longest = max(job.request.length for job in self._running + jobs)
            most = self.max_cache_bytes // max(1, self._decoder.cache_bytes(longest))
            room = most - len(self._running)
            if unread < 0 or room <= 0:
                break
            joining = jobs[:room]
            del self._waiting[: len(joining)]
            self._running += joining
            self._decoder.add(context, len(joining))
            if joining != jobs:  # the next group is not the first that waits
                break

    def _step(self) -> None:
        """Add one token to every running request."""
        last = torch.tensor([job.context[-1] for job in self._running], device=self._decoder.device)
        logits = self._decoder.step(last).float()  # (B, V)
        tokens = self._draw(logits)  # (B,)
        n_tops = [job.request.n_top for job in self._running if job.request.n_top is not None]
        rows: Iterable[Any] = [(token, 0.0, 0, []) for token in tokens.tolist()]
        if n_tops:
            # Of logits that are NaN, V is drawn
            scored = score_logits(logits, tokens.clamp(max=logits.size(-1) - 1), max(n_tops))
            rows = zip(
                tokens.tolist(),
                scored.logprobs.tolist(),
                scored.ranks.tolist(),
                scored.top,
                strict=True,
            )
        for job, token in zip(self._running, rows, strict=True):
            self._send([(job.stream, job.append(*token))], at_once=job.ended or job.n_tokens == 1)

    def _draw(self, logits: Tensor) -> Tensor:
        """Draw a token for every running request, (B,), in one batch for each of their sampling
        settings.
        """
        tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
        for sampling in {job.request.sampling for job in self._running}:
            rows = [i for i, job in enumerate(self._running) if job.request.sampling == sampling]
            jobs = [self._running[row] for row in rows]
            seen = [job.seen for job in jobs if job.seen is not None]
            index = rows if len(rows) < len(self._running) else slice(None)  # without a copy
            tokens[index] = draw(
                logits[index],
                sampling,
                torch.cat([job.uniforms.number(job.n_tokens) for job in jobs]),
                torch.stack(seen) if seen else None,
                self._unused,
            )
        return tokens

    def _send(
        self, items: list[tuple["TokenStream", Token | Exception]], *, at_once: bool = True
    ) -> None:
        """Put items into their streams, in one call of the event loop."""
        self._unsent += items
        if at_once or time.monotonic() >= self._next_send:
            ready, self._unsent, self._next_send = (
                self._unsent,
                [],
                time.monotonic() + _SEND_SECONDS,
            )
            self._loop.call_soon_threadsafe(_deliver, ready)  # raises if the event loop is closed


class TokenStream(asyncio.Queue[Token | Exception], AsyncIterator[Token]):
    """The tokens of some requests, for `async for`. Raises the exception that ended one of them."""

    def __init__(self, requests: Sequence[SampleRequest], engine: Engine) -> None:
        super().__init__()
        self.jobs = [_Job(request, i, self, engine) for i, request in enumerate(requests)]
        self._n_open = len(self.jobs)

    async def __anext__(self) -> Token:
        """Wait for the next token; cancellation ends the requests."""
        if self._n_open == 0:
            raise StopAsyncIteration
        try:
            item = await self.get()
            if isinstance(item, Exception):
                raise item
        except BaseException:
            await self.aclose()
            raise
        self._n_open -= item.reason is not None
        return item

    async def aclose(self) -> None:
        """End the requests; their rows are free before the next step."""
        self._n_open = 0
        for job in self.jobs:
            job.ended = True


class _Job:
    """The state of a request. `ended` is set by both threads and never reset."""

    def __init__(
        self, request: SampleRequest, index: int, stream: TokenStream, engine: Engine
    ) -> None:
        device, self.config = engine.model.wte.weight.device, engine.model.config
        self.request, self.index, self.stream = request, index, stream
        self.n_tokens, self.ended = 0, False
        # The tokens that the next one sees, as in a decoder.
        self.context = [*first_window(request.prompt, self.config.block_size), request.prompt[-1]]
        self.detokenizer = Detokenizer(engine.tokenizer, request.stop, request.prompt)
        self.uniforms = PerSampleRNG([request.seed], device)
        self.seen = None  # (V,), for a repetition penalty
        if request.sampling.repetition_penalty != 1:
            self.seen = torch.zeros(self.config.vocab_size, dtype=torch.bool, device=device)
            self.seen[request.prompt] = True

    def append(
        self, token: int, logprob: float, rank: int, top: list[tuple[int, float]]
    ) -> Token | Exception:
        """Append a token; return it, or the error if the logits are NaN or infinite, which is token
        V.
        """
        if token == self.config.vocab_size:
            self.ended = True
            return RunError(NON_FINITE)
        full = self.n_tokens + 1 == self.request.max_new_tokens
        text = self.detokenizer.append(token, last=full)
        self.n_tokens += 1
        drop_older_half(self.context, self.config.block_size)
        self.context.append(token)
        if self.seen is not None:
            self.seen[token] = True
        reason = "stop" if self.detokenizer.stopped else "length" if full else None
        self.ended |= reason is not None
        return Token(
            token,
            None if self.request.n_top is None else logprob,
            rank,
            top[: self.request.n_top or 0],
            reason,
            self.index,
            text,
            n_held=len(self.detokenizer.held),
        )


def _deliver(items: list[tuple[TokenStream, Token | Exception]]) -> None:
    for stream, item in items:
        stream.put_nowait(item)
