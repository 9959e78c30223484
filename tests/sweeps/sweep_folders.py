"""Folders of runs and points in memory, from which tests make sweeps."""

import itertools
import json
import math
from pathlib import Path

from minigpt.sweeps.ranking import ranked
from minigpt.sweeps.results import Point, read_looks, read_sweep
from minigpt.sweeps.sweep_plots import sweep_figure

TOKENS = 64  # per step


FILES = {"sweep.csv", "sweep.md", "sweep.png", "runs.csv"}


def run_folder(
    folder, *overrides, losses=(3.0, 2.0), bytes_per_token=None, params=1000, speed=100.0, **summary
):
    """Write the folder of a run: a validation every 10 steps; no summary if its status is None."""
    (folder / ".hydra").mkdir(parents=True)
    # YAML, too
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(list(overrides)), encoding="utf-8")
    given = (override.lstrip("+").partition("=") for override in overrides)
    settings = {key: int(value) if value.isdecimal() else value for key, _, value in given}
    (folder / ".hydra" / "config.yaml").write_text(json.dumps(settings), encoding="utf-8")
    steps = 10 * len(losses)
    lines = [
        "step,tokens,seconds,train_loss,val_loss,val_bits_per_byte,"
        "tokens_per_second,flops_per_second"
    ]
    for step, loss in zip(range(10, steps + 1, 10), losses, strict=True):
        tokens = step * TOKENS
        bits = loss / math.log(2) / bytes_per_token if bytes_per_token else ""
        lines.append(
            f"{step},{tokens},{tokens / speed},{loss + 0.1},,,{speed},{6 * params * speed}"
        )
        lines.append(f"{step},,,,{loss},{bits},,")
    if losses:
        (folder / "metrics.csv").write_text("\n".join([*lines, ""]), encoding="utf-8")
    values = {
        "status": "completed",
        "best_val_loss": min(losses, default=None),
        "params": params,
        "steps": steps,
    }
    values |= {
        "tokens": steps * TOKENS,
        "flops": 6 * params * steps * TOKENS,
        "seconds": steps * TOKENS / speed,
    }
    values |= {"tokens_per_second": speed, **summary}
    if values["status"]:
        (folder / "summary.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def read_table(folders):
    """The table of a sweep, without its report."""
    return ranked(read_sweep(*folders), read_looks(*folders))


def points_of(shape, loss, **values):
    """Points in memory: `shape` names settings and their values, `loss` is a function of them."""
    points = []
    for chosen in itertools.product(*shape.values()):
        best = loss(*chosen)
        totals = {"params": 1000, "flops": 1e9, "seconds": 1.0, "tokens_per_second": 10.0}
        totals |= (
            {}
            if best is None
            else {"best_val_loss": best, "best_val_bits_per_byte": best / math.log(2)}
        )
        totals |= {
            name: value(*chosen) if callable(value) else value for name, value in values.items()
        }
        status = totals.pop("status", "completed")
        curve = () if best is None else ((100, best + 1), (200, best))
        overrides = dict(zip(shape, chosen, strict=True))
        points.append(
            Point(Path("sweep", f"{len(points)}"), overrides, status, totals=totals, curve=curve)
        )
    return points


def panels_of(points, **options):
    """The panels: swept settings, learning curves, loss over parameters, loss over FLOPs."""
    return sweep_figure(ranked(points), title="sweep", **options).axes[:4]
