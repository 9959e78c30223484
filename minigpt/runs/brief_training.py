"""Train a size of model for a moment, to measure its speed on this machine and how well it learns a text."""

import time
from itertools import pairwise
from math import inf
from statistics import median
from typing import Any

import torch
from lightning.fabric import Fabric
from omegaconf import DictConfig
from torch.optim.lr_scheduler import LambdaLR

from minigpt.config import GPTConfig
from minigpt.data.batches import Batches, ValidationBatches, WindowOrder
from minigpt.data.token_files import Corpus
from minigpt.device import training_precision
from minigpt.model import GPT, eval_mode
from minigpt.runs.config_checks import partial_from_config
from minigpt.runs.lightning_workarounds import keep_freed_memory, silence_lightning

TIMED_STEPS = 80
SCORED_BATCHES = 10  # of the validation split


def step_seconds(cfg: DictConfig, corpus: Corpus, *, seconds: float) -> float:
    """Take up to 80 optimizer steps, or as many as take `seconds`, but at least four; return their median time.

    The first half does not count: memory is allocated and kernels are compiled.
    """
    times = _train(cfg, corpus, TIMED_STEPS, seconds)[1]
    return median(b - a for a, b in pairwise(times[len(times) // 2 :])) * cfg.trainer.accumulate_grad_batches


def brief_loss(cfg: DictConfig, corpus: Corpus, *, steps: int) -> float:
    """Return the loss on a part of the validation split after `steps`, in nats per token; the rate decays to 0."""
    model, _, sizes = _train(cfg, corpus, steps, inf)
    val = ValidationBatches(corpus.tokens("val"), block_size=cfg.model.block_size, n_batches=SCORED_BATCHES, **sizes)
    with torch.no_grad(), eval_mode(model):
        return sum(float(model(tokens, targets)) for tokens, targets in val) / len(val)


def _train(cfg: DictConfig, corpus: Corpus, steps: int, seconds: float) -> tuple[Any, list[float], dict[str, Any]]:
    """Return a model after some steps, the time before the first and after each, and the arguments of its batches."""
    keep_freed_memory()
    silence_lightning()
    accelerator = cfg.trainer.accelerator
    precision: Any = cfg.trainer.precision
    if precision == "auto":
        precision = training_precision(accelerator)
    fabric = Fabric(accelerator=accelerator, devices=1, precision=precision)
    torch.manual_seed(cfg.seed)
    module = GPT(GPTConfig(**{**cfg.model, "vocab_size": cfg.model.vocab_size or corpus.tokenizer.vocab_size}))
    model, optimizer = fabric.setup(module, partial_from_config(cfg.optimizer)(module))
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / steps)
    sizes: Any = {"batch_size": cfg.data.batch_size, "rank": 0, "world_size": 1, "device": fabric.device}
    order = WindowOrder(corpus.train.tokens, cfg.model.block_size, cfg.seed)
    times = [time.perf_counter()]
    for tokens, targets in Batches(corpus.tokens("train"), order, first=lambda: 0, stop=steps, repeat=0, **sizes):
        fabric.backward(model(tokens, targets))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if fabric.device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter())
        if len(times) > 4 and times[-1] - times[0] > seconds:
            break
    return model, times, sizes
