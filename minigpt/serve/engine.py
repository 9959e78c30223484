"""Generation for many requests at once: one thread per model that decodes all running requests in one batch.

Requests join and leave the batch between two steps. A request has its own random generator, so its tokens are those
of `minigpt.generation.generate` with its settings and seed, whatever else runs, except for rounding: matrix products
of another batch size can differ in the last bits of the logits.

Shapes: B running requests, V vocab.
"""

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from minigpt.data.tokenizer import Tokenizer
from minigpt.generation import NON_FINITE, Score, StopCriteria, check_ids, score, top_logprobs
from minigpt.generation_settings import check_settings
from minigpt.kv_decoder import Decoder
from minigpt.model import GPT
from minigpt.sampling import PerSampleRNG, Sampling
from minigpt.utils.errors import RunError

_SEND_SECONDS = 0.01  # between tokens that are sent: the event loop holds Python's lock, which the steps need too
_CLOSED = "the engine is closed"


class QueueFull(Exception):
    """Too many requests wait."""


@dataclass(frozen=True)
class Request:
    """One sample to generate.

    Args:
        prompt: token ids, at least one.
        stop: strings and token ids.
        n_top: number of likeliest alternatives to return per token.
    """

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str | int, ...] = ()
    seed: int = 0
    n_top: int = 0


@dataclass(frozen=True)
class Token:
    """A generated or scored token.

    Args:
        logprob: in nats, before temperature and filters.
        rank: number of likelier tokens.
        top: the likeliest tokens at this place with their log-probabilities, the likeliest first.
        reason: "stop" or "length" with the last token of a request, else None.
    """

    id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
    reason: str | None = None


class Engine:
    """Generate for many requests at once. All methods are for one asyncio event loop.

    Args:
        max_running: requests that are decoded in one batch.
        max_waiting: requests that wait for a place; more raise `QueueFull`.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, *, max_running: int = 32, max_waiting: int = 256) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self.max_running, self.max_waiting = max_running, max_waiting
        self._decoder: Decoder | None = None
        self._running: list[_Job] = []  # in the order of the decoder's rows
        self._waiting: list[_Job] = []
        self._scores: list[tuple[Future[Score], Callable[[], Score]]] = []
        self._unsent: list[tuple[_Job, Token | Exception]] = []
        self._next_send, self._closing = 0.0, False
        self._changed = threading.Condition()  # also guards the moves of requests
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def generate(self, request: Request) -> "TokenStream":
        """Queue a request and return its tokens as they are generated; closing the iterator ends the request.

        Raises:
            QueueFull: at once, if too many requests wait.
            UserError: at once, if a setting or the prompt is invalid, or the engine is closed.
        """
        settings = {name: value for name, value in vars(request).items() if name not in ("prompt", "sampling")}
        check_settings(**settings)
        check_ids(request.prompt, self.model.config.vocab_size)
        job = _Job(request, self.tokenizer, self.model)
        self._append(self._waiting, job)
        return TokenStream(job)

    async def score(self, prompt: list[int], *, n_top: int = 0) -> list[Token]:
        """Return the log-probability of every token of a prompt after those before it; of the first, NaN.

        The windows are those of `minigpt.generation.score`. Raises QueueFull and UserError as `generate`.
        """
        check_settings(n_top=n_top)
        check_ids(prompt, self.model.config.vocab_size)
        tokens = [Token(prompt[0], math.nan, 0, [])]
        if len(prompt) > 1:
            result: Future[Score] = Future()
            self._append(self._scores, (result, partial(score, self.model, prompt[1:], prompt[:1], n_top)))
            found = await asyncio.wrap_future(result)
            rest = zip(prompt[1:], found.logprobs.tolist(), found.ranks.tolist(), found.top, strict=True)
            tokens += [Token(*row) for row in rest]
        return tokens

    async def close(self) -> int:
        """End the thread; return the number of requests that were cut off: they raise RunError."""
        self._loop = asyncio.get_running_loop()
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)
        error = RunError(_CLOSED)
        cut_off = [job for job in (*self._running, *self._waiting) if not job.ended]
        self._send([(job, error) for job in cut_off])
        results = [result for result, _ in self._scores if result.set_running_or_notify_cancel()]
        for result in results:
            result.set_exception(error)
        self._running, self._waiting, self._scores = [], [], []
        return len(cut_off) + len(results)

    def _append(self, queue: list[Any], item: Any) -> None:
        self._loop = asyncio.get_running_loop()
        with self._changed:
            if self._closing:
                raise RunError(_CLOSED)
            n_open = sum(not job.ended for job in (*self._running, *self._waiting)) + len(self._scores)
            if n_open >= self.max_running + self.max_waiting:
                raise QueueFull(f"{self.max_waiting} requests wait")
            queue.append(item)
            self._changed.notify()

    @torch.inference_mode()
    def _work(self) -> None:
        """Run steps while there is any request, until `close`."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._running or self._waiting or self._scores)
                if self._closing:
                    return
            self._score_next()
            try:
                self._leave()
                if self._waiting:
                    self._join()
                if self._running:
                    self._step()
            except Exception as error:  # of the model, such as a lack of memory
                failed, self._running, self._decoder = self._running, [], None
                self._send([(job, error) for job in failed if not job.ended])

    def _leave(self) -> None:
        """Free the rows of requests that ended."""
        with self._changed:
            for row in reversed(range(len(self._running))):
                if self._running[row].ended and self._decoder:
                    self._decoder.drop(row)
                    self._running[row] = self._running[-1]
                    self._running.pop()

    def _join(self) -> None:
        """Read the prompts of waiting requests, together at most `block_size` tokens; equal prompts are read once."""
        joining, block_size = list[list[_Job]](), self.model.config.block_size
        with self._changed:
            waiting = [job for job in self._waiting if not job.ended]
            room, unread = self.max_running - len(self._running), block_size
            for prompt, jobs in groupby(waiting[:room], lambda job: job.request.prompt):
                unread -= len(prompt[-block_size:])
                if unread < 0:
                    break
                joining.append(list(jobs))
            n_joining = sum(map(len, joining))
            self._running, self._waiting = self._running + waiting[:n_joining], waiting[n_joining:]
        for group in joining:
            self._decoder = self._decoder or Decoder(self.model)
            self._decoder.add(group[0].request.prompt, len(group))

    def _step(self) -> None:
        """Add one token to every running request."""
        assert self._decoder
        last = torch.tensor([job.last for job in self._running], device=self._decoder.device)
        logits = self._decoder.step(last).float()  # (B, V)
        tokens = self._draw(logits)
        ids = torch.tensor(tokens, device=logits.device).clamp(max=logits.size(-1) - 1)  # of NaN logits the draw is V
        logprobs = logits.log_softmax(dim=-1)
        of_tokens = logprobs.gather(-1, ids[:, None])  # (B, 1)
        ranks = (logprobs > of_tokens).sum(dim=-1).tolist()
        n_top = max(job.request.n_top for job in self._running)
        top = top_logprobs(logprobs, n_top) if n_top else [[] for _ in ranks]
        rows = zip(self._running, tokens, of_tokens[:, 0].tolist(), ranks, top, strict=True)
        items = [(job, job.append(*token)) for job, *token in rows if not job.ended]
        self._send(items, at_once=any(job.ended for job in self._running))

    def _draw(self, logits: Tensor) -> list[int]:
        """Draw a token for every running request, in one batch for each of their sampling settings."""
        groups: dict[Sampling, list[int]] = {}
        for row, job in enumerate(self._running):
            groups.setdefault(job.request.sampling, []).append(row)
        tokens = [0] * len(logits)
        for sampling, rows in groups.items():
            jobs = [self._running[row] for row in rows]
            uniforms = torch.cat([job.uniforms.next() for job in jobs])
            seen = [job.seen for job in jobs if job.seen is not None]
            group = logits if len(groups) == 1 else logits[rows]
            drawn = sampling.draw(group, uniforms, torch.stack(seen) if seen else None)
            for row, token in zip(rows, drawn.tolist(), strict=True):
                tokens[row] = token
        return tokens

    def _score_next(self) -> None:
        """Rate the next text that waits, if any."""
        if self._scores:
            result, rate = self._scores.pop(0)
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(rate())
                except Exception as error:
                    result.set_exception(error)

    def _send(self, items: list[tuple["_Job", Token | Exception]], *, at_once: bool = True) -> None:
        """Put items into the queues of their requests, in one call of the event loop."""
        self._unsent += items
        if at_once or time.monotonic() >= self._next_send:
            ready, self._unsent, self._next_send = self._unsent, [], time.monotonic() + _SEND_SECONDS
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(_deliver, ready)


class TokenStream(AsyncIterator[Token]):
    """The tokens of a request. Raises the exception that ended it, if one did."""

    def __init__(self, job: "_Job") -> None:
        self._job, self._exhausted = job, False

    async def __anext__(self) -> Token:
        """Wait for the next token; cancellation ends the request."""
        if self._exhausted:
            raise StopAsyncIteration
        try:
            item = await self._job.items.get()
            if isinstance(item, Exception):
                raise item
        except BaseException:
            await self.aclose()
            raise
        self._exhausted = item.reason is not None
        return item

    async def aclose(self) -> None:
        """End the request; its row is free before the next step."""
        self._job.ended = self._exhausted = True

    def __del__(self) -> None:
        self._job.ended = True


class _Job:
    """The state of a request. `ended` is set by both threads and never reset."""

    def __init__(self, request: Request, tokenizer: Tokenizer, model: GPT) -> None:
        device = model.wte.weight.device
        self.request, self.last, self.n_tokens, self.ended = request, request.prompt[-1], 0, False
        self.items: asyncio.Queue[Token | Exception] = asyncio.Queue()
        self.criteria, self.uniforms = StopCriteria(request.stop, tokenizer, 1), PerSampleRNG([request.seed], device)
        self.seen = None  # (V,), for a repetition penalty
        if request.sampling.repetition_penalty != 1:
            self.seen = torch.zeros(model.config.vocab_size, dtype=torch.bool, device=device)
            self.seen[request.prompt] = True

    def append(self, token: int, logprob: float, rank: int, top: list[tuple[int, float]]) -> Token | Exception:
        """Append a token; return it, or the error if the logits are NaN or infinite."""
        if math.isnan(logprob):
            self.ended = True
            return RunError(NON_FINITE)
        self.last, self.n_tokens = token, self.n_tokens + 1
        if self.seen is not None:
            self.seen[token] = True
        full = self.n_tokens == self.request.max_new_tokens
        reason = "stop" if self.criteria.update([token])[0] else "length" if full else None
        if reason:
            self.ended = True
        return Token(token, logprob, rank, top[: self.request.n_top], reason)


def _deliver(items: list[tuple[_Job, Token | Exception]]) -> None:
    for job, item in items:
        job.items.put_nowait(item)
