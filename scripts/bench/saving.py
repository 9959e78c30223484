"""Measure the time to write a checkpoint of model=baby, and its share of training."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from common import ONLY_TRAINING, ROOT, TRAIN, launch, summary

from minigpt.checkpoints.find import BEST, LAST
from minigpt.checkpoints.format import hardlink_or_copy, read, write

MODEL = "baby"


def saving(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure writing and syncing the checkpoint of a real run, as a share of training at the default eval_every."""
    interval = yaml.safe_load((ROOT / "configs" / "train.yaml").read_text(encoding="utf-8"))["eval_every"]
    small = ["data.val_fraction=0.005", *ONLY_TRAINING, "eval_every=4", "max_steps=4"]
    rows = []
    for i in range(args.rounds):
        run = folder / f"saving{i}"
        launch([sys.executable, TRAIN, f"model={MODEL}", *small, *args.overrides, f"hydra.run.dir={run}"])
        ran = summary(run)
        content = read(run / LAST)
        start = time.perf_counter()
        write(content, run / LAST)
        hardlink_or_copy(run / LAST, run / BEST)
        seconds, step = time.perf_counter() - start, ran["seconds"] / ran["steps"]
        rows.append(
            {
                "checkpoint MB": (run / LAST).stat().st_size / 1e6,
                "saving s": seconds,
                "a step s": step,
                f"steps between two of {MODEL}": interval,
                "share of training %": 100 * seconds / (interval * step),
            }
        )
    return rows
