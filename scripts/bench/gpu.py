"""What a GPU is for: the recipes fast_gpu and best_gpu to their end, and how much of the chip a GPT-2 uses."""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from common import TRAIN, launch, metrics
from time_to_loss import crossing, ours

from minigpt.utils.errors import UserError

LOSS = 1.4655  # the mean best of five runs of nanoGPT's recipe for a GPU; sources: configs/experiment/nanogpt_gpu.yaml
GPT2 = [  # 124M parameters at nanoGPT's vocabulary, whatever the text is
    *("model=gpt2", "model.vocab_size=50304", "model.bias=false", "data.batch_size=32", "compile=true"),
    *("max_steps=60", "eval_every=60", "data.eval_batch_size=8", "callbacks.samples.max_new_tokens=1"),
]


def gpu(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return a row per seed: fast_gpu to LOSS in seconds and steps, best_gpu's best loss; once, GPT-2's speed."""
    import torch

    if not torch.cuda.is_available() and "trainer=cpu" not in args.overrides:
        raise UserError("no CUDA GPU on this machine; --overrides trainer=cpu and a small model try the benchmark")
    rows = []
    for seed in range(1337, 1337 + args.rounds):
        fast = ours("fast_gpu", seed, folder / f"fast{seed}", args.overrides)
        best = ours("best_gpu", seed, folder / f"best{seed}", args.overrides)
        reached = crossing(fast["curve"], LOSS) or {"seconds": float("nan"), "step": float("nan")}
        rows.append(
            {
                f"fast_gpu: seconds to {LOSS}": reached["seconds"],
                "fast_gpu: of them, compiling": fast["first steps s"],
                f"fast_gpu: seconds to {LOSS}, from launch": fast["startup s"] + reached["seconds"],
                f"fast_gpu: steps to {LOSS}": reached["step"],
                "fast_gpu: best loss": min(point["loss"] for point in fast["curve"]),
                "best_gpu: best loss": min(point["loss"] for point in best["curve"]),
                "best_gpu: seconds": best["train s"],
            }
        )
    run = folder / "gpt2"
    launch([sys.executable, TRAIN, *GPT2, *args.overrides, f"hydra.run.dir={run}"])
    told = metrics(run)[1:]  # without the first row, in which the model is compiled
    for name in ("tokens_per_second", "mfu"):
        if values := [float(row[name]) for row in told if row.get(name)]:
            rows[0][f"gpt2: {name}"] = statistics.median(values)
    return rows
