"""Sweeps: runs in parallel, in sequence and in processes of their own; the overhead of a job."""

import argparse
import itertools
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from common import ROOT, TRAIN, launch

HEADS, WIDTHS = (2, 4, 8), (64, 128, 256)
REPORT = ROOT / "scripts" / "sweep_report.py"
RUNS = 500
_NO_TRAINING = ["hydra.launcher.n_jobs=1", "data.val_fraction=0.0001", "data.batch_size=1"]
_NO_TRAINING += ["model.n_layer=1", "model.n_embd=32"]


def sweep(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Time a grid of heads and widths, `--steps` each, in three ways.

    The overhead of a job is the time of four more jobs of one step and one validation window in a running worker.
    """
    settings = [f"max_steps={args.steps}", f"eval_every={args.steps}", *args.overrides]
    widths = args.widths or WIDTHS
    axes = [f"model.n_head={','.join(map(str, HEADS))}", f"model.n_embd={','.join(map(str, widths))}"]
    # Token files are cached from here on.
    launch([sys.executable, TRAIN, "max_steps=1", f"hydra.run.dir={folder}/warm"])
    rows = []
    for i in range(args.rounds):
        parallel = _sweep(folder / f"parallel{i}", *axes, *settings)
        sequence = _sweep(folder / f"sequence{i}", *axes, *settings, "hydra.launcher.n_jobs=1")
        start = time.perf_counter()
        for heads, width in itertools.product(HEADS, widths):
            overrides = [f"model.n_head={heads}", f"model.n_embd={width}"]
            launch([sys.executable, TRAIN, *overrides, *settings, f"hydra.run.dir={folder}/{i}-{heads}-{width}"])
        separate = time.perf_counter() - start
        few, many = (
            _sweep(folder / f"{jobs}jobs{i}", f"seed=range({jobs})", "max_steps=1", *_NO_TRAINING) for jobs in (4, 8)
        )
        rows.append(
            {
                "in parallel s": parallel,
                "in sequence s": sequence,
                "one process per run s": separate,
                "parallel / sequence": parallel / sequence,
                "parallel / one process per run": parallel / separate,
                "overhead per job s": (many - few) / 4,
                "check of all points s": _check(*axes, *settings),
                f"report over {RUNS} runs s": _report(folder / f"parallel{i}", folder / f"many{i}"),
            }
        )
    return rows


def _sweep(folder: Path, *overrides: str) -> float:
    return launch([sys.executable, TRAIN, "-m", *overrides, f"hydra.sweep.dir={folder}"]).seconds


def _check(*overrides: str) -> float:
    """Time the check of all points of a sweep without a possible one, in seconds from launch."""
    return launch([sys.executable, TRAIN, "-m", *overrides, "model.n_layer=0"], fails=True).seconds


def _report(source: Path, folder: Path) -> float:
    """Time a report over copies of a sweep's runs, in seconds."""
    runs = [path.parent for path in sorted(source.glob("*/summary.json"))]
    for i in range(RUNS):
        copy, overrides = folder / str(i), [f"model.n_head={i % 5}", f"model.n_embd={i // 5 % 10}", f"seed={i // 50}"]
        shutil.copytree(runs[i % len(runs)], copy, ignore=shutil.ignore_patterns("checkpoints", "*.png"))
        (copy / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))
    return launch([sys.executable, REPORT, folder]).seconds
