"""A bare training loop of any recipe with minigpt's model and optimizer, for `python scripts/bench step`.

Takes the overrides of train.py, and computes in the precision of `trainer.precision=auto`. Prints as JSON the tokens,
the seconds of all steps, the FLOPs per token, the bytes that a step reads and writes, and the FLOP/s of a large matrix
product on this machine.
"""

import json
import statistics
import sys
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from common import ROOT
from hydra import compose, initialize_config_dir
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minigpt.config import GPTConfig
from minigpt.data.prepare import load_corpus
from minigpt.model import GPT
from minigpt.ops import has_bfloat16
from minigpt.runs.train import partial_from_config
from minigpt.utils.cli import cli_entrypoint

MATRIX_SIZE = 2048


@cli_entrypoint
def main() -> None:
    """Train, and print the measurements."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("train", overrides=sys.argv[1:])
    corpus = load_corpus(cfg.data, cfg.tokenizer)
    torch.manual_seed(cfg.seed)
    model = GPT(GPTConfig(**{**cfg.model, "vocab_size": corpus.tokenizer.vocab_size}))
    optimizer = partial_from_config(cfg.optimizer)(model)
    schedule = LambdaLR(optimizer, partial(partial_from_config(cfg.schedule), max_steps=cfg.max_steps))
    tokens = torch.from_numpy(corpus.tokens("train")[:].astype(np.int64))
    B, T = cfg.data.batch_size, cfg.model.block_size
    window, reduced = torch.arange(T + 1), has_bfloat16(torch.device("cpu"))

    def step() -> None:
        batch = tokens[torch.randint(len(tokens) - T, (B, 1)) + window]  # (B, T + 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=reduced):
            loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        clip_grad_norm_(model.parameters(), cfg.trainer.gradient_clip_val)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    start = time.perf_counter()
    for _ in range(cfg.max_steps):
        step()
    seconds = time.perf_counter() - start
    results = {"tokens": cfg.max_steps * B * T, "seconds": seconds, "flops_per_token": model.config.flops_per_token()}
    with MemoryTraffic() as traffic:
        step()
    print(json.dumps(results | {"bytes_per_step": traffic.bytes, "matrix_flops": matrix_flops()}))


class MemoryTraffic(TorchDispatchMode):
    """Count the bytes that each operation reads and writes, as if nothing stayed in a cache."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.embedding.default:  # reads as many rows as it writes
            self.bytes += 2 * result.nbytes
        elif not func.is_view:
            inputs, outputs = func._schema.arguments, func._schema.returns
            values = [*args, *((kwargs or {}).get(argument.name) for argument in inputs[len(args) :])]
            for argument, value in zip(inputs, values, strict=True):
                in_place = argument.alias_info is not None and argument.alias_info.is_write
                self.bytes += (1 + in_place) * tensor_bytes(value)
            if all(output.alias_info is None for output in outputs):
                self.bytes += tensor_bytes(result)
        return result


def tensor_bytes(values: Any) -> int:
    """Return the bytes of all tensors in nested containers."""
    return sum(value.nbytes for value in tree_leaves(values) if isinstance(value, Tensor))


def matrix_flops() -> float:
    """FLOP/s of a large float32 matrix product, median of ten."""
    matrix, seconds = torch.randn(MATRIX_SIZE, MATRIX_SIZE), []
    for _ in range(10):
        start = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - start)
    return 2 * MATRIX_SIZE**3 / statistics.median(seconds)


if __name__ == "__main__":
    main()
