"""Loss over learning rate at several widths: does the best rate depend on the width?"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from common import TRAIN, launch, summary, table

WIDTHS = (64, 128, 256, 512)
SETTINGS = ("model.n_layer=2", "data.batch_size=8", "schedule.warmup_steps=20")
RATES = {"adamw": "1e-3,2e-3,4e-3,8e-3,16e-3,32e-3", "muon": "1e-2,2e-2,4e-2,8e-2,16e-2"}
KINDS = {
    "AdamW, standard": ("adamw", "standard"),
    "AdamW, mup": ("adamw", "mup"),
    "Muon, standard": ("muon", "standard"),
}


def widths(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure the best validation loss of every width and rate: one row per run, one round per seed."""
    rows = []
    for kind, (optimizer, parametrization) in KINDS.items():
        out = folder / f"{optimizer}-{parametrization}"
        settings = [f"max_steps={args.steps}", f"eval_every={args.steps}", *SETTINGS, *args.overrides]
        axes = [
            f"model.n_embd={','.join(map(str, args.widths or WIDTHS))}",
            f"optimizer.lr={RATES[optimizer]}",
            f"seed=range(1337,{1337 + args.rounds})",
        ]
        model = f"model.parametrization={parametrization}"
        launch(
            [sys.executable, TRAIN, "-m", f"optimizer={optimizer}", model, *settings, *axes, f"hydra.sweep.dir={out}"]
        )
        for point in json.loads((out / "sweep.json").read_text(encoding="utf-8"))["points"]:
            width, rate = int(point["overrides"]["model.n_embd"]), float(point["overrides"]["optimizer.lr"])
            loss = summary(out / point["folder"])["best_val_loss"]
            rows.append({"kind": kind, "n_embd": width, "lr": rate, "val_loss": loss})
    return rows


def _lines(rows: Sequence[dict[str, Any]], kind: str) -> dict[int, list[tuple[float, float]]]:
    """Return (rate, mean loss over seeds) per width, in order."""
    losses: dict[int, dict[float, list[float]]] = {}
    for row in rows:
        if row["kind"] == kind:
            losses.setdefault(row["n_embd"], {}).setdefault(row["lr"], []).append(row["val_loss"])
    return {width: sorted((rate, mean(found)) for rate, found in line.items()) for width, line in losses.items()}


def show_widths(rows: Sequence[dict[str, Any]]) -> None:
    """Print the best rate of each width and its loss."""
    cells = []
    for kind in KINDS:
        for width, line in _lines(rows, kind).items():
            rate, loss = min(line, key=lambda point: point[1])
            cells.append((kind, width, f"{rate:g}", f"{loss:.4f}"))
    print("\n" + table(["", "n_embd", "best rate", "validation loss"], cells))


def plot_widths(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Plot one panel per kind and one line per width, with its minimum marked."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.5), layout="constrained")
    panels = figure.subplots(1, len(KINDS), sharey=True)
    for panel, kind in zip(panels, KINDS, strict=True):
        lines = _lines(rows, kind)
        for place, (width, line) in enumerate(lines.items()):
            color = colormaps["viridis"](place / max(1, len(lines) - 1) * 0.9)
            panel.plot(*zip(*line, strict=True), color=color, marker="o", markersize=4, label=f"n_embd={width}")
            best = min(line, key=lambda point: point[1])
            panel.plot(*best, color=color, marker="*", markersize=16)
        panel.set(xscale="log", xlabel="optimizer.lr", title=kind)
        panel.grid(alpha=0.3)
    low, high = (pick(row["val_loss"] for row in rows) for pick in (min, max))
    panels[0].set(ylabel="validation loss (nats per token)", ylim=(low - 0.05, min(high + 0.05, 1.3 * low)))
    panels[-1].legend()
    figure.savefig(file, dpi=120)
