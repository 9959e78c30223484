"""Train a size of model for a moment, to measure its speed on this machine."""

import time
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from lightning.fabric import Fabric
from omegaconf import DictConfig

from minigpt.config import GPTConfig
from minigpt.data.batches import Batches, WindowOrder
from minigpt.data.token_files import Corpus
from minigpt.device import training_precision
from minigpt.model import GPT
from minigpt.runs.lightning_workarounds import keep_freed_memory, silence_lightning
from minigpt.runs.parts import partial_from_config

TIMED_STEPS = 80


def step_seconds(cfg: DictConfig, corpus: Corpus, *, seconds: float) -> float:
    """Take up to 80 optimizer steps, or as many as take `seconds`, but at least four; return their median time.

    The first half does not count: memory is allocated and kernels are compiled.
    """
    keep_freed_memory()
    silence_lightning()
    accelerator = cfg.trainer.accelerator
    precision: Any = cfg.trainer.precision
    if precision == "auto":
        precision = training_precision(accelerator)
    fabric = Fabric(accelerator=accelerator, devices=1, precision=precision)
    module = GPT(GPTConfig(**{**cfg.model, "vocab_size": cfg.model.vocab_size or corpus.tokenizer.vocab_size}))
    model, optimizer = fabric.setup(module, partial_from_config("optimizer", cfg.optimizer)(module))
    sizes: Any = {"batch_size": cfg.data.batch_size, "rank": 0, "world_size": 1, "device": fabric.device}
    order = WindowOrder(corpus.train.tokens, cfg.model.block_size, cfg.seed)
    times = [time.perf_counter()]
    for tokens, targets in Batches(corpus.tokens("train"), order, first=lambda: 0, stop=TIMED_STEPS, repeat=0, **sizes):
        fabric.backward(model(tokens, targets))
        optimizer.step()
        optimizer.zero_grad()
        if fabric.device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter())
        if len(times) > 4 and times[-1] - times[0] > seconds:
            break
    return median(b - a for a, b in pairwise(times[len(times) // 2 :])) * cfg.trainer.accumulate_grad_batches
