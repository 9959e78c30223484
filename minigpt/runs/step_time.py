"""Measure how long an optimizer step of a run takes on this machine."""

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
from minigpt.runs.config_checks import partial_from_config
from minigpt.runs.lightning_workarounds import keep_freed_memory, silence_lightning


def seconds_per_step(cfg: DictConfig, corpus: Corpus, seconds: float) -> float:
    """Train for about `seconds`, at least three steps and return the median time of those after the first."""
    keep_freed_memory()
    silence_lightning()
    accelerator = cfg.trainer.accelerator
    precision: Any = cfg.trainer.precision
    if precision == "auto":
        precision = training_precision(accelerator)
    fabric = Fabric(accelerator=accelerator, devices=1, precision=precision)
    model = GPT(GPTConfig(**{**cfg.model, "vocab_size": cfg.model.vocab_size or corpus.tokenizer.vocab_size}))
    model, optimizer = fabric.setup(model, partial_from_config(cfg.optimizer)(model))
    batches = Batches(
        corpus.tokens("train"),
        WindowOrder(corpus.train.tokens, cfg.model.block_size, cfg.seed),
        batch_size=cfg.data.batch_size,
        rank=0,
        world_size=1,
        first=lambda: 0,
        stop=1 << 30,
        repeat=0,
        device=fabric.device,
    )
    times = [time.perf_counter()]
    for tokens, targets in batches:
        fabric.backward(model(tokens, targets))
        optimizer.step()
        optimizer.zero_grad()
        if fabric.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        if len(times) > 3 and times[-1] - times[0] > seconds:
            break
    return median(b - a for a, b in pairwise(times[1:]))
