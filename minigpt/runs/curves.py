"""The plot `curves.png` of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minigpt.runs.metrics_csv import read_metrics
from minigpt.runs.run_dir import CURVES, METRICS
from minigpt.utils.terminal import sanitize_line


def plot_curves(folder: Path, summary: Mapping[str, Any] = {}) -> None:
    """Plot the losses and the learning rate of a run folder over optimizer steps, and mark the best of its summary."""
    from matplotlib.figure import Figure

    columns = {name: list(zip(*points, strict=True)) for name, points in read_metrics(folder / METRICS).items()}
    figure = Figure(figsize=(8, 6), layout="constrained")
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    if "train_loss" in columns:
        losses.plot(*columns["train_loss"], color="tab:blue", alpha=0.6, linewidth=1, label="train")
    if "val_loss" in columns:
        losses.plot(*columns["val_loss"], color="tab:orange", marker="o", markersize=4, label="validation")
    if (best := summary.get("best_val_loss")) is not None:
        losses.plot(summary["best_step"], best, "*", color="tab:red", markersize=10, label=f"best {best:.4f}")
    if "learning_rate" in columns:
        rates.plot(*columns["learning_rate"], color="tab:green", linewidth=1)
    losses.set(ylabel="loss (nats per token)", title=f"{sanitize_line(folder.resolve().name)}: loss and learning rate")
    losses.legend()
    rates.set(ylabel="learning rate", xlabel="optimizer step", ylim=(0, None))
    rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    for axes in (losses, rates):
        axes.grid(alpha=0.3)
    figure.savefig(folder / CURVES, dpi=120)
