"""Plot `curves.png` from `metrics.csv`: losses and learning rate over optimizer steps."""

from pathlib import Path

from minigpt.runs.run_dir import CURVES, METRICS, read_metrics


def plot_curves(folder: Path) -> None:
    """Plot the curves of a run folder."""
    from matplotlib.figure import Figure

    columns = {name: list(zip(*points, strict=True)) for name, points in read_metrics(folder / METRICS).items()}
    figure = Figure(figsize=(8, 6), layout="constrained")
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    if "train_loss" in columns:
        losses.plot(*columns["train_loss"], color="tab:blue", alpha=0.6, linewidth=1, label="train")
    if "val_loss" in columns:
        losses.plot(*columns["val_loss"], color="tab:orange", marker="o", markersize=4, label="validation")
        best, best_step = min(zip(*reversed(columns["val_loss"]), strict=True))
        offset = {"xytext": (0, 14), "textcoords": "offset points", "ha": "right"}
        losses.annotate(f"best {best:.4f}", (best_step, best), color="tab:orange", **offset)
    if "learning_rate" in columns:
        rates.plot(*columns["learning_rate"], color="tab:green", linewidth=1)
    losses.set(ylabel="loss (nats per token)", title=f"{folder.resolve().name}: loss and learning rate")
    losses.legend()
    rates.set(ylabel="learning rate", xlabel="optimizer step")
    rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    rates.set_ylim(bottom=0)
    for axes in (losses, rates):
        axes.grid(alpha=0.3)
    figure.savefig(folder / CURVES, dpi=120)
