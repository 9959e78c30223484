"""Plot `curves.png` from `metrics.csv`: losses and learning rate over optimizer steps."""

from pathlib import Path

from minigpt.runs.run_dir import CURVES, METRICS, read_metrics


def plot_curves(folder: Path) -> None:
    """Plot the curves of a run folder."""
    from matplotlib.figure import Figure

    columns = read_metrics(folder / METRICS)
    figure = Figure(figsize=(8, 6), layout="constrained")
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    if train := columns.get("train_loss"):
        losses.plot(*zip(*train, strict=True), color="tab:blue", alpha=0.6, linewidth=1, label="train")
    if validation := columns.get("val_loss"):
        best_step, best = min(validation, key=lambda point: point[1])
        losses.plot(*zip(*validation, strict=True), color="tab:orange", marker="o", markersize=4, label="validation")
        offset = {"xytext": (0, 14), "textcoords": "offset points", "ha": "right"}
        losses.annotate(f"best {best:.4f}", (best_step, best), color="tab:orange", **offset)
    losses.set(ylabel="loss (nats per token)", title=f"{folder.resolve().name}: loss and learning rate")
    losses.legend()
    if rate := columns.get("learning_rate"):
        rates.plot(*zip(*rate, strict=True), color="tab:green", linewidth=1)
        rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    rates.set(ylabel="learning rate", xlabel="optimizer step")
    rates.set_ylim(bottom=0)
    for axes in (losses, rates):
        axes.grid(alpha=0.3)
    figure.savefig(folder / CURVES, dpi=120)
