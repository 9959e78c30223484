"""Time to loss: the steps and seconds after which recipes and the baseline reach given validation
losses.

Training time excludes validation; startup, from launch to the first step, is a separate column.
"""

import argparse
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bare_nanogpt import RECIPES as BASELINES
from common import TRAIN, bare_nanogpt, launch, machine, metrics, summary, table
from omegaconf import OmegaConf

from minigpt.checkpoints.load import load_checkpoint
from minigpt.data.prepare import load_corpus

BASELINE = "baseline"
RECIPES = (
    BASELINE,
    "sprint_cpu eval_every=5",
    "sprint_4x128_cpu eval_every=10",
    "fast_cpu",
    "coffee_cpu",
    "best_cpu",
)
LOSSES = (1.88, 1.6)  # 1.88: published by nanoGPT for its recipe, from 20 random batches


def time_to_loss(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run every recipe with every seed; a row has startup, validation curve, and crossings of
    `--losses`.
    """
    rows = []
    for seed in range(1337, 1337 + args.rounds):
        for recipe in args.recipes or RECIPES:
            if recipe.split()[0] == BASELINE:
                rows.append(run_baseline(recipe, seed, args.overrides))
            else:
                run = folder / f"{len(rows)}"
                rows.append(
                    run_recipe(recipe, seed, run, args.overrides)
                    | {"estimate": nanogpt_estimate(run)}
                )
    for row in rows:
        row["crossings"] = {str(loss): crossing(row["curve"], loss) for loss in args.losses}
    return rows


def run_recipe(recipe: str, seed: int, run: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run a recipe, which may include overrides, as in "sprint_cpu eval_every=5"."""
    recipe, *settings = recipe.split()
    command = [
        sys.executable,
        TRAIN,
        f"experiment={recipe}",
        f"seed={seed}",
        f"hydra.run.dir={run}",
    ]
    command += [*overrides, *settings]
    _, first_row = launch(command, watch=run / "metrics.csv")
    measured = metrics(run)
    first = next(row for row in measured if row["seconds"])
    results = summary(run)
    clock = [(0.0, 0.0)] + [
        (float(row["step"]), float(row["seconds"])) for row in measured if row["seconds"]
    ]
    startup = max(0.0, first_row - float(first["seconds"]))
    steps, seconds = zip(*clock, strict=True)
    # The time of the first row without compilation
    expected = statistics.median(np.diff(seconds) / np.diff(steps)) * steps[1]
    curve = []
    for row in measured:
        if row["val_loss"]:  # interpolate between the logged times
            at = float(np.interp(int(row["step"]), steps, seconds))
            curve.append({"step": int(row["step"]), "seconds": at, "loss": float(row["val_loss"])})
    return {
        "recipe": recipe,
        "seed": seed,
        "params": results["params"],
        "tokens": results["tokens"],
        "startup s": startup,
        "train s": results["seconds"],
        "first steps s": max(0.0, seconds[1] - expected),  # compilation time
        "curve": curve,
    }


@torch.inference_mode()
def nanogpt_estimate(run: Path) -> float:
    """The validation loss of the best checkpoint as nanoGPT estimates it: over 200 batches of 64
    random windows.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    corpus = load_corpus(
        *(OmegaConf.load(run / ".hydra/config.yaml")[name] for name in ("data", "tokenizer"))
    )
    model, _ = load_checkpoint(run, device=device)
    tokens = torch.from_numpy(corpus.tokens("val")[:].astype(np.int64)).to(device)
    generator, window = torch.Generator().manual_seed(0), torch.arange(model.config.block_size + 1)
    losses = []
    for _ in range(200):
        start = torch.randint(len(tokens) - len(window) + 1, (64, 1), generator=generator)
        batch = tokens[(start + window).to(device)]  # (B, T + 1)
        losses.append(model(batch[:, :-1], batch[:, 1:]).item())
    return statistics.mean(losses)


def run_baseline(recipe: str, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Run the baseline, which may include overrides."""
    settings = [f"seed={seed}", *overrides, *recipe.split()[1:]]
    (output, total), sizes = (
        bare_nanogpt(settings),
        BASELINES["cuda" if "device=cuda" in settings else "cpu"],
    )
    points = re.findall(
        r"iter +(\d+) train-s +([\d.]+) wall-s +([\d.]+).* full-val ([\d.]+)", output
    )
    steps, wall, trained = int(points[-1][0]), float(points[-1][2]), float(points[-1][1])
    return {
        "recipe": BASELINE,
        "seed": seed,
        "estimate": None,  # there is no checkpoint
        "params": int(re.search(r"params ([\d,]+)", output)[1].replace(",", "")),  # type: ignore[index]
        "tokens": steps * sizes.batch * sizes.block,
        "startup s": total - wall,
        "train s": trained,
        "first steps s": 0.0,
        "curve": [
            {"step": int(i), "seconds": float(s), "loss": float(loss)} for i, s, _, loss in points
        ],
    }


def crossing(curve: Sequence[dict[str, Any]], loss: float) -> dict[str, Any] | None:
    """The first validation at or below a loss."""
    return next((point for point in curve if point["loss"] <= loss), None)


def show_time_to_loss(rows: Sequence[dict[str, Any]], losses: Sequence[float]) -> None:
    """Print one row per recipe: medians over seeds, with the range."""
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    seeds = len(rows) // len(recipes)
    print(f"\ntime_to_loss, {seeds} seeds, {machine()}; training seconds, medians (min–max)\n")
    heads = [
        "recipe",
        "params",
        "startup",
        "training",
        "last loss",
        "best loss",
        "nanoGPT's estimate",
    ]
    heads += [f"to {loss}{what}" for loss in losses for what in ("", ", from launch", ", steps")]
    lines = []
    for recipe in recipes:
        some = [row for row in rows if row["recipe"] == recipe]
        cells = [recipe, f"{some[0]['params']:,}"]
        cells += [spread([row[name] for row in some]) for name in ("startup s", "train s")]
        cells.append(spread([row["curve"][-1]["loss"] for row in some], 4))
        cells.append(spread([min(point["loss"] for point in row["curve"]) for row in some], 4))
        cells.append(
            "" if recipe.split()[0] == BASELINE else spread([row["estimate"] for row in some], 4)
        )
        for loss in losses:
            points = [row["crossings"][str(loss)] for row in some]
            if not all(points):
                cells += [f"{sum(map(bool, points))} of {len(some)} seeds", "", ""]
                continue
            cells.append(spread([point["seconds"] for point in points]))
            cells.append(
                spread(
                    [row["startup s"] + p["seconds"] for row, p in zip(some, points, strict=True)]
                )
            )
            cells.append(spread([point["step"] for point in points], 0))
        lines.append(cells)
    print(table(heads, lines))


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Format median, minimum and maximum."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:,.{digits}f}" + (
        f" ({low:,.{digits}f}–{high:,.{digits}f})" if len(values) > 1 else ""
    )


def plot_time_to_loss(rows: Sequence[dict[str, Any]], losses: Sequence[float], file: Path) -> None:
    """Plot validation loss over training time, over time since launch, and over tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.8), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    for row in rows:
        color = f"C{recipes.index(row['recipe'])}"
        label = (
            row["recipe"] if row is next(r for r in rows if r["recipe"] == row["recipe"]) else None
        )
        seconds = [point["seconds"] for point in row["curve"]]
        last = row["curve"][-1]["step"]
        loss = [point["loss"] for point in row["curve"]]
        launched = [row["startup s"] + s for s in seconds]
        tokens = [point["step"] / last * row["tokens"] for point in row["curve"]]
        for axis, x in zip(axes, (seconds, launched, tokens), strict=True):
            axis.plot(x, loss, color=color, label=label, linewidth=1.4, alpha=0.85)
    names = ("training time (s)", "time since launch without validation (s)", "tokens")
    top = max(2.6, 1.2 * min(point["loss"] for row in rows for point in row["curve"]))
    for axis, name in zip(axes, names, strict=True):
        for loss in losses:
            axis.axhline(loss, color="gray", linestyle=":", linewidth=1)
        axis.set(xlabel=name, xscale="log", ylim=(None, top))
        axis.grid(alpha=0.3)
    for loss in losses:
        axes[0].annotate(
            f"{loss}", (0.01, loss), xycoords=("axes fraction", "data"), va="bottom", color="gray"
        )
    axes[0].set_ylabel("validation loss (nats per character)")
    axes[2].legend(loc="lower left")  # the first has the labels of the losses
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
