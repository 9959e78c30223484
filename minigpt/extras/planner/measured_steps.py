"""Measure how long the optimizer steps of a run take."""

import time
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from lightning.fabric import Fabric
from omegaconf import DictConfig

from minigpt.data.batches import Batches, WindowOrder
from minigpt.data.token_files import Corpus
from minigpt.model.config import GPTConfig
from minigpt.model.gpt import GPT
from minigpt.runs.lightning_workarounds import set_up_process
from minigpt.runs.trainer import partial_from_config
from minigpt.training.cpu_threads import ThreadBalancer, cpu_threads
from minigpt.training.precision import training_precision
from minigpt.utils.errors import UserError

TIMED_STEPS = 80  # to measure a size, at most
SETTLED_STEPS = (6, 13)  # after which fewer threads are tried, and which have those if they are
SLOW = 5  # times the time to measure a size, after which two steps of it are enough


def step_seconds(
    cfg: DictConfig,
    corpus: Corpus,
    *,
    seconds: float,
    config: GPTConfig | None = None,
    settle: bool = False,
) -> float:
    """Take up to 80 optimizer steps, or as many as take `seconds`, but at least four, or two slow
    ones; return their median time.

    The first half does not count, in which memory is allocated, nor does compilation, in the first
    step.

    Args:
        config: the architecture, by default that of `cfg`.
        settle: take as many as it needs to find the threads that have cores, and their speed.
    """
    # The model, the optimizer and the batches of a run
    fabric, model, optimizer = _set_up(cfg, corpus, config)
    tokens = corpus.windows("train", cfg.model.block_size)
    batches = Batches(
        tokens,
        WindowOrder(len(tokens), cfg.model.block_size, cfg.seed, moves=corpus.is_text),
        first=lambda: 0,
        stop=TIMED_STEPS,
        repeat=0,
        batch_size=cfg.data.batch_size,
        rank=0,
        world_size=1,
        device=fabric.device,
    )
    # Steps, until they take long enough
    times = [time.perf_counter()]
    with cpu_threads(cfg.threads):
        fixed = cfg.threads is not None or fabric.device.type != "cpu"
        threads = ThreadBalancer(window=max(0.1, seconds / 4), fixed=fixed)
        for batch in batches:
            threads.start()
            fabric.backward(model(*batch))
            optimizer.step()
            optimizer.zero_grad()
            if fabric.device.type != "cpu":
                torch.accelerator.synchronize()
            threads.end()
            times.append(time.perf_counter())
            least = SETTLED_STEPS[torch.get_num_threads() < threads.most] if settle else 4
            measured = times[-1] - times[1]  # the first step compiles
            if measured > seconds and (len(times) > least or measured > SLOW * seconds):
                break
    return (
        median(b - a for a, b in pairwise(times[len(times) // 2 :]))
        * cfg.trainer.accumulate_grad_batches
    )


def _set_up(cfg: DictConfig, corpus: Corpus, config: GPTConfig | None) -> tuple[Fabric, Any, Any]:
    set_up_process()
    accelerator = cfg.trainer.accelerator
    precision: Any = cfg.trainer.precision
    if precision == "auto":
        precision = training_precision(accelerator)
    try:
        fabric = Fabric(accelerator=accelerator, devices=1, precision=precision)
    except Exception as error:  # Lightning raises a dozen kinds for an option that it rejects
        raise UserError(f"the trainer cannot be built: {error}") from error
    if config is None:
        vocab_size = cfg.model.vocab_size or corpus.tokenizer.vocab_size
        config = GPTConfig(**{**cfg.model, "vocab_size": vocab_size})
    module = GPT(config)
    module.checkpoint_blocks = cfg.checkpoint_blocks
    if cfg.compile:
        module.compile()
    optimizer = partial_from_config("optimizer", cfg.optimizer)(module)
    return fabric, *fabric.setup(module, optimizer)
