"""GPU benchmark: the recipes fast_gpu and best_gpu, and tokens/s and MFU of GPT-2."""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from common import TRAIN, launch, metrics
from time_to_loss import crossing, run_recipe

from minigpt.utils.errors import UserError

LOSS = 1.4655  # nanoGPT's GPU recipe, mean of five runs; source: configs/experiment/nanogpt_gpu.yaml
GPT2 = [  # 124M parameters with nanoGPT's vocabulary size, for any text
    *("model=gpt2", "model.vocab_size=50304", "model.bias=false", "data.batch_size=32", "compile=true"),
    *("max_steps=60", "eval_every=60", "data.eval_batch_size=8", "callbacks.samples.max_new_tokens=1"),
]


def gpu(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure per seed the time of fast_gpu to LOSS and the best loss of best_gpu, and once the speed of GPT-2."""
    import torch

    if not torch.cuda.is_available() and "trainer=cpu" not in args.overrides:
        raise UserError("found no CUDA GPU; to test the benchmark, set --overrides trainer=cpu and a small model")
    rows = []
    for seed in range(1337, 1337 + args.rounds):
        fast = run_recipe("fast_gpu", seed, folder / f"fast{seed}", args.overrides)
        best = run_recipe("best_gpu", seed, folder / f"best{seed}", args.overrides)
        reached = crossing(fast["curve"], LOSS) or {"seconds": float("nan"), "step": float("nan")}
        rows.append(
            {
                f"fast_gpu: seconds to {LOSS}": reached["seconds"],
                "fast_gpu: compilation seconds": fast["first steps s"],
                f"fast_gpu: seconds from launch to {LOSS}": fast["startup s"] + reached["seconds"],
                f"fast_gpu: steps to {LOSS}": reached["step"],
                "fast_gpu: best loss": min(point["loss"] for point in fast["curve"]),
                "best_gpu: best loss": min(point["loss"] for point in best["curve"]),
                "best_gpu: seconds": best["train s"],
            }
        )
    run = folder / "gpt2"
    launch([sys.executable, TRAIN, *GPT2, *args.overrides, f"hydra.run.dir={run}"])
    rows_after_compilation = metrics(run)[1:]
    for name in ("tokens_per_second", "mfu"):
        if values := [float(row[name]) for row in rows_after_compilation if row.get(name)]:
            rows[0][f"gpt2: {name}"] = statistics.median(values)
    return rows
