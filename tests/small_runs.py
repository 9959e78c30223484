"""Small runs: their overrides, and what is in a run folder."""

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS, CONFIGS = ROOT / "scripts", ROOT / "configs"
# Of tests marked gpu; cpu rehearses them
TEST_DEVICE = os.environ.get("MINIGPT_TEST_DEVICE", "cuda")
TIMES = {
    "seconds",
    "wall_seconds",
    "tokens_per_second",
    "flops_per_second",
    "mfu",
}  # columns that no two runs share


def small_run(text: Path, data: Path, *overrides: str) -> list[str]:
    """Return overrides that make a run small, and those given.

    It draws samples, and text to be compared, only if one of them names it.
    """
    small = f"""
        data.path={text} data.folder={data} data.batch_size=8
        trainer=cpu trainer.precision=32-true
        model.block_size=16 model.n_layer=2 model.n_head=2 model.n_embd=32
        max_steps=20 eval_every=10 log_every=5
    """.split()
    # Which has a model of its own
    if any(override.startswith("init_from=") for override in overrides):
        small = [setting for setting in small if not setting.startswith("model.")]
    for name in ("samples", "originality"):
        if not any(name in override for override in overrides):
            small.append(f"callbacks.{name}=null")
    return [*small, *overrides]


def composed(*overrides: str, return_hydra_config: bool = False) -> DictConfig:
    """Compose the configuration of a run."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", list(overrides), return_hydra_config=return_hydra_config)


def rows(folder: Path) -> list[dict[str, str]]:
    """Return the rows of the metrics.csv of a run, without the columns that measure time."""
    found = table(folder / "metrics.csv")
    for row in found:
        for name in TIMES & row.keys():
            del row[name]
    return found


def table(file: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with open(file, newline="", encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


def column(folder: Path, name: str) -> list[float]:
    """Return the numbers in a column of the metrics.csv of a run."""
    return [float(row[name]) for row in table(folder / "metrics.csv") if row[name]]


def wandb_records(run: Path, index: int = 0, parts: str = "offline-run-*") -> list[dict[str, Any]]:
    """Return the records of a part of a run of Weights & Biases, read with its own inspector."""
    part = sorted((run / "wandb").glob(parts))[index]
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(part)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def one_line(result: Any) -> str:
    """Return the line on stderr of a script that refused its input, and printed nothing else."""
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1), (
        result.stderr
    )
    return result.stderr.strip()


def wait_until(condition: Callable[[], Any], seconds: float = 300) -> None:
    """Wait until a condition holds, which may fail an assertion itself."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timeout after {seconds:g} s"
        time.sleep(0.05)
