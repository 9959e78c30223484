"""A run folder and the story it tells: curves, samples, summary, and which run is the newest."""

import csv
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from minigpt.errors import UserError
from minigpt.files import whole

METRICS, CURVES, SAMPLES, SUMMARY = "metrics.csv", "curves.png", "samples.txt", "summary.json"


@contextmanager
def taken(folder: Path) -> Iterator[Path]:
    """Take a run folder; give it back if nothing of the run came to stand in it.

    Raises:
        UserError: it holds a run already, or cannot be written.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one process of several takes it for all
        yield folder
        return
    if (folder / METRICS).exists() or (folder / SUMMARY).exists():
        raise UserError(f"{folder} holds a run already; choose another folder with hydra.run.dir=…, or remove it")
    latest = folder.parent / "latest"
    before = latest.readlink() if latest.is_symlink() else None
    _link(latest, Path(folder.name))
    try:
        yield folder
    finally:
        if all(entry.name == ".hydra" for entry in folder.iterdir()):
            shutil.rmtree(folder)
            if latest.is_symlink() and latest.readlink() == Path(folder.name):  # no newer run took it
                _link(latest, before)


def tell(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write the end of the story: `curves.png` and `summary.json`. Of a run that never began there is none."""
    measured = (folder / METRICS).exists()
    if not measured and not summary.get("steps"):
        return
    if measured:
        draw_curves(folder)
    with whole(folder / SUMMARY) as partial:
        partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def announce(folder: Path, sample: str, summary: Mapping[str, Any], *, sampler: Path) -> None:
    """Print the sample, and where things are."""
    folder, python, sampler = _short(folder), _short(Path(sys.executable)), _short(sampler)
    print(f"{sample.strip()}\n")
    print(f"validation loss  {summary['best_val_loss']:.4f} at step {summary['best_step']}")
    print(f"run folder       {folder}")
    print(f"curves           {folder / CURVES}")
    if summary["checkpoint"]:  # a run may be told to keep none
        print(f"best checkpoint  {folder / summary['checkpoint']}")
        print(f"sample again     {python} {sampler} {folder} --seed 1")


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _link(link: Path, target: Path | None) -> None:
    """Point a link somewhere, or remove it; where links cannot be made there is none."""
    with suppress(OSError):
        link.unlink(missing_ok=True)
        if target is not None:
            link.symlink_to(target, target_is_directory=True)


def read_metrics(file: Path) -> dict[str, list[tuple[int, float]]]:
    """The columns of `metrics.csv`, each a list of (step, value) where it has one."""
    columns: dict[str, list[tuple[int, float]]] = {}
    with open(file, newline="", encoding="utf-8") as rows:
        for row in csv.DictReader(rows):
            for name, value in row.items():
                if value and name != "step":
                    columns.setdefault(name, []).append((int(row["step"]), float(value)))
    return columns


def draw_curves(folder: Path) -> None:
    """Draw `curves.png` from `metrics.csv`: losses and learning rate over optimizer steps."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    columns = read_metrics(folder / METRICS)
    figure, (losses, rates) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    if train := columns.get("train_loss"):
        losses.plot(*zip(*train, strict=True), color="tab:blue", alpha=0.6, linewidth=1, label="train")
    if validation := columns.get("val_loss"):
        best_step, best = min(validation, key=lambda point: point[1])
        losses.plot(*zip(*validation, strict=True), color="tab:orange", marker="o", markersize=4, label="validation")
        losses.annotate(
            f"best {best:.4f}",
            (best_step, best),
            xytext=(0, 14),
            textcoords="offset points",
            ha="right",
            color="tab:orange",
        )
    losses.set(ylabel="loss (nats per token)", title=f"{folder.name}: loss and learning rate")
    losses.legend()
    if rate := columns.get("learning_rate"):
        rates.plot(*zip(*rate, strict=True), color="tab:green", linewidth=1)
        rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    rates.set(ylabel="learning rate", xlabel="optimizer step")
    rates.set_ylim(bottom=0)
    for axes in (losses, rates):
        axes.grid(alpha=0.3)
    figure.savefig(folder / CURVES, dpi=120)
    plt.close(figure)
