"""Servers in a thread, their models, and the engine that the tests of this folder use."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from minigpt import GPT, GPTConfig, save_checkpoint
from minigpt.data.tokenizer import ByteTokenizer
from minigpt.serve.api import create_app
from minigpt.serve.engine import Engine, QueueFull, Request, Token
from minigpt.serve.guard import Guard
from minigpt.serve.models import Models, find_models
from minigpt.serve.server import Server, open_socket
from minigpt.utils.errors import RunError

ENGINE: Any = Engine


class EndlessEngine(Engine):
    """Generate the letter a until the iterator is closed; at most three requests at once."""

    open = 0

    def generate(self, request: Request) -> AsyncGenerator[Token]:
        if EndlessEngine.open == 3:
            raise QueueFull("3 of 3")
        EndlessEngine.open += 1
        return _Endless()

    async def close(self) -> int:
        return EndlessEngine.open


class _Endless:
    def __aiter__(self) -> "_Endless":
        return self

    async def __anext__(self) -> Token:
        await asyncio.sleep(0.01)
        return Token(ord("a"), -1.0, 0, [])

    async def aclose(self) -> None:
        EndlessEngine.open -= 1


class BrokenEngine(Engine):
    """Fail after one token."""

    async def generate(self, request: Request) -> AsyncGenerator[Token]:
        yield Token(ord("a"), -1.0, 0, [])
        raise RunError("the model's logits are NaN")

    async def close(self) -> int:
        return 0


def make_run(folder: Path, **settings: Any) -> Path:
    """Write the run folder of a byte model with random weights."""
    torch.manual_seed(0)
    values = {"vocab_size": 256, "block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 16}
    model = GPT(GPTConfig(**{**values, **settings}))
    for parameter in model.parameters():  # far from the small initial weights, which make all bytes alike
        torch.nn.init.normal_(parameter, std=0.3)
    (folder / "checkpoints").mkdir(parents=True)
    save_checkpoint(model, ByteTokenizer(), folder / "checkpoints" / "best.safetensors")
    return folder


@contextmanager
def serving(sources: Sequence[Path | str], *, engine: Any = ENGINE, **options: Any) -> Iterator[Any]:
    """Run a server in a thread: `url`, `guard` and `stop`; options are those of `Guard`."""
    models = Models(find_models([str(source) for source in sources]), device="cpu", engine=engine)
    guard, started = Guard(create_app(models), **({"host": "127.0.0.1"} | options)), threading.Event()
    server, opened = Server(guard, started.set), open_socket("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    thread.start()
    assert started.wait(10)

    def stop() -> None:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()

    yield SimpleNamespace(url=f"http://127.0.0.1:{opened.getsockname()[1]}", guard=guard, stop=stop)
    stop()
