"""The plot `curves.png` of a run, which a notebook shows while it trains."""

from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path

from minigpt.runs.callbacks.samples import only_a_warning
from minigpt.runs.metrics_csv import read_metrics
from minigpt.runs.run_dir import CURVES, METRICS
from minigpt.utils.terminal import notebook, sanitize_line


@only_a_warning(f"{CURVES} was not written")
def plot_curves(folder: Path, summary: Mapping[str, float | None] = {}) -> None:
    """Plot the losses and the learning rate of a run folder over optimizer steps.

    The best loss of the summary is marked. A notebook shows the plot where the training of this
    cell has an output for it. An error is only a warning.
    """
    from matplotlib.figure import Figure

    # Losses above, the learning rate below
    figure = Figure(figsize=(8, 6), layout="constrained")
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    metrics = read_metrics(folder / METRICS)
    for axes, name, line, style in (
        (losses, "train_loss", "-", {"c": "tab:blue", "alpha": 0.6, "lw": 1, "label": "train"}),
        (losses, "val_loss", "-o", {"c": "tab:orange", "ms": 4, "label": "validation"}),
        (rates, "learning_rate", "-", {"c": "tab:green", "lw": 1}),
    ):
        if name in metrics:
            axes.plot(*zip(*metrics[name], strict=True), line, **style)
        axes.grid(alpha=0.3)
    # The best of a run that has ended
    best = summary.get("best_val_loss")
    if best is not None:
        losses.plot(
            summary["best_step"],
            best,
            "*",
            color="tab:red",
            markersize=10,
            label=f"best {best:.4f}",
        )
    # What the axes show
    losses.set(
        ylabel="loss (nats per token)",
        title=f"{sanitize_line(folder.resolve().name)}: loss and learning rate",
    )
    losses.legend()
    rates.set(ylabel="learning rate", xlabel="optimizer step", ylim=(0, None))
    rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    # The file, and its output in a notebook
    figure.savefig(folder / CURVES, dpi=120)
    if kernel := notebook():
        kernel.shell.display_pub.publish(
            {"image/png": b64encode((folder / CURVES).read_bytes()).decode()},
            {"image/png": {"width": 640}},
            transient={"display_id": f"{folder} {kernel.shell.execution_count}"},
            update=True,
        )
