"""An engine without batching, built on `generation.stream`: a reference for the server's tests."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch

from minigpt.generation import Step, stream
from minigpt.serve.engine import Engine, QueueFull, Request, Token


class SimpleEngine(Engine):
    def __init__(self, model: Any, tokenizer: Any, *, max_running: int = 32, max_waiting: int = 256) -> None:
        super().__init__(model, tokenizer)
        self.limit, self.running = max_running + max_waiting, set[int]()
        self.lock = asyncio.Lock()

    def generate(self, request: Request) -> AsyncIterator[Token]:
        if len(self.running) >= self.limit:
            raise QueueFull(f"{len(self.running)} requests")
        steps = stream(
            self.model,
            request.prompt,
            max_new_tokens=request.max_new_tokens,
            stop=request.stop,
            tokenizer=self.tokenizer,
            seed=request.seed,
            **vars(request.sampling),
        )
        return _Tokens(self, request, steps)

    async def score(self, prompt: list[int], *, n_top: int = 0) -> list[Token]:
        first = Token(prompt[0], float("nan"), 0, [])
        return [first, *(self.rate(prompt[:i], prompt[i], n_top) for i in range(1, len(prompt)))]

    async def close(self) -> int:
        return len(self.running)

    @torch.inference_mode()
    def rate(self, context: list[int], token: int, n_top: int, reason: str | None = None) -> Token:
        ids = torch.tensor([context[-self.model.config.block_size :]])
        logprobs = self.model(ids)[0, -1].log_softmax(-1)
        values, tops = logprobs.topk(n_top)
        listed = list(zip(tops.tolist(), values.tolist(), strict=True))
        return Token(token, logprobs[token].item(), int((logprobs > logprobs[token]).sum()), listed, reason)


class _Tokens:
    def __init__(self, engine: SimpleEngine, request: Request, steps: Iterator[Step]) -> None:
        self.engine, self.request, self.steps = engine, request, steps
        self.ids: list[int] = []
        self.closed = False
        engine.running.add(id(self))

    def __aiter__(self) -> "_Tokens":
        return self

    async def __anext__(self) -> Token:
        if self.closed:
            raise StopAsyncIteration
        try:
            async with self.engine.lock:
                token = await asyncio.to_thread(self._next)
        except BaseException:
            await self.aclose()
            raise
        if token.reason:
            await self.aclose()
        return token

    def _next(self) -> Token:
        step, request = next(self.steps), self.request
        context, token = [*request.prompt, *self.ids], step.tokens[0]
        self.ids.append(token)
        reason = "stop" if step.stopped[0] else "length" if len(self.ids) == request.max_new_tokens else None
        return self.engine.rate(context, token, request.n_top, reason)

    async def aclose(self) -> None:
        self.closed = True
        self.engine.running.discard(id(self))
