"""Servers in a thread, their models, and the engine that the tests of this folder use."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from models import save_tokenizer

from minigpt import GPT, GPTConfig, save_checkpoint
from minigpt.data.tokenizer import ByteTokenizer, Tokenizer
from minigpt.serve.engine import Engine
from minigpt.serve.loaded_models import Models, find_models
from minigpt.serve.server import create_app, new_server, open_socket
from minigpt.utils.errors import RunError

ENGINE: Any = Engine


class SmallEngine(Engine):
    """Take at most three requests at once."""

    max_running, max_waiting = 2, 1
    last: "SmallEngine"

    def __init__(self, model: GPT, tokenizer: Tokenizer) -> None:
        super().__init__(model, tokenizer)
        SmallEngine.last = self

    @classmethod
    def n_open(cls) -> int:
        return sum(not job.ended for job in cls.last._jobs)


class BrokenEngine(Engine):
    """Fail after one token."""

    def _step(self) -> None:
        if self._running[0].n_tokens:
            raise RunError("the model's logits are NaN")
        super()._step()


def make_run(folder: Path, tokenizer: Tokenizer | None = None, *, seed: int = 0, **settings: Any) -> Path:
    """Write the run folder of a model with random weights, by default of bytes."""
    torch.manual_seed(seed)
    values = {"vocab_size": 256, "block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 16}
    model = GPT(GPTConfig(**{**values, **settings}))
    for name, parameter in model.named_parameters():  # far from the small initial weights, which make all tokens alike
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    (folder / "checkpoints").mkdir(parents=True)
    save_checkpoint(model, tokenizer or ByteTokenizer(), folder / "checkpoints" / "best.safetensors")
    return folder


@contextmanager
def serving(
    sources: Sequence[Path | str], *, engine: Any = ENGINE, access_log: bool = False, **options: Any
) -> Iterator[Any]:
    """Run a server in a thread: `url` and `stop`; options are those of `create_app`."""
    models = Models(find_models([str(source) for source in sources]), device="cpu")
    app, opened = create_app(models, **({"host": "127.0.0.1"} | options)), open_socket("127.0.0.1", 0)
    server = new_server(app, access_log=access_log)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    thread.start()

    def stop() -> None:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()

    try:
        with patch("minigpt.serve.engine.Engine", engine):
            yield SimpleNamespace(url=f"http://127.0.0.1:{opened.getsockname()[1]}", stop=stop)
    finally:
        stop()


CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful assistant.<|im_end|>
' }}{% endif %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""  # of SmolLM2-Instruct


def make_instruct_folder(folder: Path) -> Path:
    """Write a Llama with random weights, a tokenizer and a chat template, as transformers saves them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    theirs = save_tokenizer(folder, CHATML, special, eos_token="<|im_end|>", chat_template=CHATML)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(theirs), max_position_embeddings=256, eos_token_id=2, bos_token_id=0, **sizes)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
    model.save_pretrained(folder)
    return folder
