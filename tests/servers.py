"""Servers in a thread, their models, and engines that are small or broken."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from models import draw_weights, make_model, save_tokenizer, write_run

from minigpt import GPT
from minigpt.data.tokenizer import Tokenizer
from minigpt.extras.playground.engine import Engine
from minigpt.extras.playground.loaded_models import Models, find_models
from minigpt.extras.playground.server import create_app, new_server, open_socket
from minigpt.utils.errors import RunError

ENGINE: Any = Engine
# Of a model with random weights
BYTES: dict[str, Any] = {"std": 0.3, "vocab_size": 256, "block_size": 32}


# Take at most three requests at once
class SmallEngine(Engine):
    max_running = 2
    max_waiting = 1
    last: "SmallEngine"

    def __init__(self, model: GPT, tokenizer: Tokenizer) -> None:
        super().__init__(model, tokenizer)
        SmallEngine.last = self

    @classmethod
    def n_open(cls) -> int:
        return sum(not job.ended for job in cls.last._jobs)


# Take so long that nobody waits for the end of a long text
class SlowEngine(Engine):
    def _step(self) -> None:
        time.sleep(0.002)
        super()._step()


# Fail after one token
class BrokenEngine(Engine):
    def _step(self) -> None:
        if self._running[0].n_tokens:
            raise RunError("the model's logits are NaN")
        super()._step()


# Write the run folder of a model of bytes with random weights
def make_run(folder: Path, **settings: Any) -> Path:
    return write_run(folder, make_model(**BYTES | settings))


# Run a server in a thread: `url`, `port` and `stop`; options are those of `create_app`
@contextmanager
def serving(
    sources: Sequence[Path | str],
    *,
    engine: Any = ENGINE,
    access_log: bool = False,
    port: int = 0,
    **options: Any,
) -> Iterator[Any]:
    models = Models(find_models([str(source) for source in sources]), device="cpu")
    app = create_app(models, **({"host": "127.0.0.1"} | options))
    opened = open_socket("127.0.0.1", port)
    server = new_server(app, access_log=access_log)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    thread.start()

    def stop() -> None:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()

    try:
        with patch("minigpt.extras.playground.engine.Engine", engine):
            port = opened.getsockname()[1]
            yield SimpleNamespace(url=f"http://127.0.0.1:{port}", port=port, stop=stop)
    finally:
        stop()


# Of SmolLM2-Instruct
CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_instruct_folder(folder: Path, **options: Any) -> Path:
    """Write a Llama with random weights, a tokenizer and a chat template, as transformers does.

    Args:
        options: of the tokenizer, and `ends`, the ids that end a text.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    options = {"eos_token": "<|im_end|>", "chat_template": CHATML, **options}
    ids = {"eos_token_id": options.pop("ends", 2), "bos_token_id": 0}
    theirs = save_tokenizer(folder, CHATML, special, **options)
    sizes = {"vocab_size": len(theirs), "max_position_embeddings": 256, "hidden_size": 32}
    sizes |= {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **ids))
    torch.manual_seed(0)
    draw_weights(model)
    model.save_pretrained(folder)
    return folder
