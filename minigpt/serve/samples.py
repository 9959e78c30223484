"""The samples of one request, generated at once, as pieces of text that can be sent."""

import asyncio
import codecs
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from math import nan
from typing import cast

from minigpt.data.tokenizer import Tokenizer
from minigpt.serve.engine import Engine, Request, Token
from minigpt.serve.settings import Call

_MAX_QUEUED_TOKENS = 256  # per request, until the client has received those before


@dataclass
class Piece:
    """A part of a sample.

    Args:
        tokens: its tokens with their offsets in the text of the sample.
        reason: "stop" or "length" in the last piece.
    """

    text: str = ""
    tokens: list[tuple[Token, int]] = field(default_factory=list)
    reason: str | None = None


class TextSplitter:
    """Turn tokens into pieces of whole characters; what may begin a stop string is held back until it is decided."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held, self._sent = "", 0  # text, and characters
        self._tokens: list[tuple[Token, int]] = []  # of text that is held

    def prompt(self, tokens: list[Token]) -> Piece:
        """Return the text of a prompt, in which stop strings are ordinary text."""
        piece = Piece()
        for token in tokens:
            piece.tokens.append((token, len(piece.text)))
            piece.text += self._decoder.decode(self.tokenizer.decode_bytes([token.id]))
        self._sent = len(piece.text)
        return piece

    def add(self, token: Token) -> Piece:
        """Return the text that a generated token completes."""
        self._tokens.append((token, self._sent + len(self._held)))
        final = token.reason is not None
        text = self._held + self._decoder.decode(self.tokenizer.decode_bytes([token.id]), final=final)
        end = len(text)
        if token.reason == "stop":
            end = min((at for string in self.stop if (at := text.find(string)) >= 0), default=end)
        elif not final:
            end = next((i for i in range(end) if any(string.startswith(text[i:]) for string in self.stop)), end)
        self._held, self._sent = text[end:], self._sent + end
        everything = token.reason == "length"
        sent = [entry for entry in self._tokens if everything or entry[1] < self._sent]
        self._tokens = self._tokens[len(sent) :]
        return Piece(text[:end], sent, token.reason)


class Samples:
    """All samples of a call: sample i of prompt p has the index p × n + i and the seed `seed` + i.

    Args:
        prompts: token ids of each prompt.
    """

    def __init__(self, engine: Engine, call: Call, prompts: list[list[int]]) -> None:
        self.engine, self.call, self.prompts = engine, call, prompts
        self.n_tokens = 0  # generated
        self._echoed: list[list[Token]] = []
        self._iterators: list[AsyncGenerator[Token]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[tuple[int, Token | Exception | None]] = asyncio.Queue(_MAX_QUEUED_TOKENS)

    async def start(self) -> None:
        """Score the prompts if they are echoed, and queue all samples; errors are those of the engine."""
        call, tokenizer = self.call, self.engine.tokenizer
        for prompt, ids in zip(call.prompts, self.prompts, strict=True) if call.echo else ():
            echoed = ids if prompt else []  # without the start token of an empty prompt
            if call.n_top is None or not echoed:
                self._echoed.append([Token(i, nan, 0, []) for i in echoed])
            else:
                self._echoed.append(await self.engine.score(echoed, n_top=call.n_top))
        end = tokenizer.separator.tolist() if tokenizer.separated else []
        for ids in self.prompts if call.max_tokens else ():
            for i in range(call.n):
                stop, n_top = (*call.stop, *end), call.n_top or 0
                request = Request(ids, call.max_tokens, call.sampling, stop, call.seed + i, n_top)
                self._iterators.append(cast(AsyncGenerator[Token], self.engine.generate(request)))
        self._tasks = [asyncio.create_task(self._drain(i, tokens)) for i, tokens in enumerate(self._iterators)]

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yield the index of a sample and its next piece, which may be empty; the last one has a reason."""
        n_samples = len(self.prompts) * self.call.n
        splitters = [TextSplitter(self.engine.tokenizer, self.call.stop) for _ in range(n_samples)]
        for i, splitter in enumerate(splitters):
            piece = splitter.prompt(self._echoed[i // self.call.n] if self.call.echo else [])
            piece.reason = None if self.call.max_tokens else "length"
            yield i, piece
        running = len(self._tasks)
        while running:
            i, token = await self._queue.get()
            if isinstance(token, Exception):
                raise token
            if token is None:
                running -= 1
            else:
                self.n_tokens += 1
                yield i, splitters[i].add(token)

    async def close(self) -> None:
        """End all samples that are not complete."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for iterator in self._iterators:
            await iterator.aclose()

    async def _drain(self, index: int, tokens: AsyncIterator[Token]) -> None:
        try:
            async for token in tokens:
                await self._queue.put((index, token))
            await self._queue.put((index, None))
        except Exception as error:
            await self._queue.put((index, error))
