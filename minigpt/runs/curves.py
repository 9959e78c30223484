"""The plot `curves.png` of a run, which a notebook shows while it trains."""

from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minigpt.runs.metrics_csv import read_metrics
from minigpt.runs.run_dir import CURVES, METRICS
from minigpt.utils.terminal import notebook, sanitize_line


def plot_curves(folder: Path, summary: Mapping[str, Any] = {}) -> None:
    """Plot the losses and the learning rate of a run folder over optimizer steps, and mark the best of its summary.

    A notebook shows the plot where the training of this cell has an output for it.
    """
    from matplotlib.figure import Figure

    columns = {name: list(zip(*points, strict=True)) for name, points in read_metrics(folder / METRICS).items()}
    figure = Figure(figsize=(8, 6), layout="constrained")
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    lines: dict[str, Any] = {
        "train_loss": (losses, {"color": "tab:blue", "alpha": 0.6, "linewidth": 1, "label": "train"}),
        "val_loss": (losses, {"color": "tab:orange", "marker": "o", "markersize": 4, "label": "validation"}),
        "learning_rate": (rates, {"color": "tab:green", "linewidth": 1}),
    }
    for name, (axes, style) in lines.items():
        if name in columns:
            axes.plot(*columns[name], **style)
    if (best := summary.get("best_val_loss")) is not None:
        losses.plot(summary["best_step"], best, "*", color="tab:red", markersize=10, label=f"best {best:.4f}")
    losses.set(ylabel="loss (nats per token)", title=f"{sanitize_line(folder.resolve().name)}: loss and learning rate")
    losses.legend()
    rates.set(ylabel="learning rate", xlabel="optimizer step", ylim=(0, None))
    rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    for axes in (losses, rates):
        axes.grid(alpha=0.3)
    figure.savefig(folder / CURVES, dpi=120)
    if shell := notebook():
        shell.display_pub.publish(
            {"image/png": b64encode((folder / CURVES).read_bytes()).decode()},
            {"image/png": {"width": 640}},
            transient={"display_id": f"{folder} {shell.execution_count}"},
            update=True,
        )
