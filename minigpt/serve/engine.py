"""Generation for many requests at once: one thread per model that decodes all running requests in one batch."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from minigpt.data.tokenizer import Tokenizer
from minigpt.model import GPT
from minigpt.sampling import Sampling


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

    def generate(self, request: Request) -> AsyncIterator[Token]:
        """Queue a request and return its tokens as they are generated; closing the iterator ends the request.

        Raises:
            QueueFull: at once, if too many requests wait.
            UserError: at once, if a setting or the prompt is invalid.
        """
        raise NotImplementedError

    async def score(self, prompt: list[int], *, n_top: int = 0) -> list[Token]:
        """Return the log-probability of every token of a prompt after those before it; of the first, NaN."""
        raise NotImplementedError

    async def close(self) -> int:
        """End the thread; return the number of requests that were cut off."""
        raise NotImplementedError
