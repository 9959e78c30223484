"""A bare training loop of any recipe with minigpt's model and optimizer, for the benchmarks `step`
and `gpu.py`.

Takes the overrides of train.py, computes in the precision of `trainer.precision=auto`, and on a
CUDA GPU if one is available, unless `trainer.accelerator` is cpu.

Prints as JSON the tokens, the seconds of all steps and of the first, the tokens/s of the others,
the FLOPs per token, and the peak memory of a GPU.
"""

import json
import sys
import time
from functools import partial

import numpy as np
import torch
from common import ROOT
from hydra import compose, initialize_config_dir
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from minigpt.data.prepare import load_corpus
from minigpt.model.config import GPTConfig
from minigpt.model.gpt import GPT
from minigpt.runs.trainer import partial_from_config
from minigpt.training.precision import half_dtype
from minigpt.utils.cli import cli_entrypoint

FIRST_STEPS = 10  # of a GPU: they compile


@cli_entrypoint
def main() -> None:
    """Train, and print the measurements."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("train", overrides=sys.argv[1:])
    corpus = load_corpus(cfg.data, cfg.tokenizer)
    on_gpu = cfg.trainer.accelerator != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True  # as the trainer does
    torch.manual_seed(cfg.seed)
    vocab_size = cfg.model.vocab_size or corpus.tokenizer.vocab_size
    model = GPT(GPTConfig(**{**cfg.model, "vocab_size": vocab_size})).to(device)
    model.checkpoint_blocks = cfg.checkpoint_blocks
    if cfg.compile:
        model.compile()
    optimizer = partial_from_config("optimizer", cfg.optimizer)(model)
    schedule = LambdaLR(
        optimizer, partial(partial_from_config("schedule", cfg.schedule), max_steps=cfg.max_steps)
    )
    tokens = torch.from_numpy(corpus.tokens("train")[:].astype(np.int64)).to(device)
    B, T = cfg.data.batch_size, cfg.model.block_size
    window = torch.arange(T + 1, device=device)
    dtype = half_dtype(device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    first = min(FIRST_STEPS, cfg.max_steps // 2)
    start = time.perf_counter()
    for i in range(cfg.max_steps):
        if i == first:
            synchronize(device)
            first_seconds = time.perf_counter() - start
        batch = tokens[torch.randint(len(tokens) - T, (B, 1), device=device) + window]  # (B, T + 1)
        with torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(batch[:, :-1], batch[:, 1:])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), cfg.trainer.gradient_clip_val)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
    synchronize(device)
    total = time.perf_counter() - start
    results = {
        "tokens": cfg.max_steps * B * T,
        "seconds": total,
        "first_seconds": first_seconds,
        "steady_tokens_per_second": (cfg.max_steps - first) * B * T / (total - first_seconds),
        "flops_per_token": model.config.flops_per_token(),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None,
    }
    print(json.dumps(results))


def synchronize(device: torch.device) -> None:
    """Wait for the kernels of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
