"""Sweeps: side by side, one after another and launched one by one; what a job costs beside its training."""

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


def sweep(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Heads by widths, `--steps` each, three ways, and figures of their own.

    The cost of a job beside its training is what four more jobs of one step take in a worker that runs; its
    validation is of one window.
    """
    settings = [f"max_steps={args.steps}", f"eval_every={args.steps}", *args.overrides]
    widths = args.widths or WIDTHS
    axes = [f"model.n_head={','.join(map(str, HEADS))}", f"model.n_embd={','.join(map(str, widths))}"]
    launch(
        [sys.executable, TRAIN, "max_steps=1", f"hydra.run.dir={folder}/warm"]
    )  # token files are cached from here on
    rows = []
    for i in range(args.rounds):
        beside = _sweep(folder / f"beside{i}", *axes, *settings)
        after = _sweep(folder / f"after{i}", *axes, *settings, "hydra.launcher.n_jobs=1")
        start = time.perf_counter()
        for heads, width in itertools.product(HEADS, widths):
            overrides = [f"model.n_head={heads}", f"model.n_embd={width}"]
            launch([sys.executable, TRAIN, *overrides, *settings, f"hydra.run.dir={folder}/{i}-{heads}-{width}"])
        apart = time.perf_counter() - start
        few, many = (
            _sweep(folder / f"{jobs}jobs{i}", f"seed=range({jobs})", "max_steps=1", *_NO_TRAINING) for jobs in (4, 8)
        )
        rows.append(
            {
                "side by side s": beside,
                "one after another s": after,
                "launched one by one s": apart,
                "of one after another": beside / after,
                "of launched one by one": beside / apart,
                "a job beside its training s": (many - few) / 4,
                "checked and listed s": _listed(*axes, *settings),
                f"report over {RUNS} runs s": _report(folder / f"beside{i}", folder / f"many{i}"),
            }
        )
    return rows


_NO_TRAINING = (
    "hydra.launcher.n_jobs=1",
    "data.val_fraction=0.0001",
    "model.n_layer=1",
    "model.n_embd=32",
    "data.batch_size=1",
)


def _sweep(folder: Path, *overrides: str) -> float:
    return launch([sys.executable, TRAIN, "-m", *overrides, f"hydra.sweep.dir={folder}"]).seconds


def _listed(*overrides: str) -> float:
    """Seconds from launch until all points of a sweep, of which none is possible, are checked."""
    return launch([sys.executable, TRAIN, "-m", *overrides, "model.n_layer=0"], fails=True).seconds


def _report(source: Path, folder: Path) -> float:
    """Seconds of a report over copies of a sweep's runs."""
    runs = [path.parent for path in sorted(source.glob("*/summary.json"))]
    for i in range(RUNS):
        copy, overrides = folder / str(i), [f"model.n_head={i % 5}", f"model.n_embd={i // 5 % 10}", f"seed={i // 50}"]
        shutil.copytree(runs[i % len(runs)], copy, ignore=shutil.ignore_patterns("checkpoints", "*.png"))
        (copy / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))
    return launch([sys.executable, REPORT, folder]).seconds
