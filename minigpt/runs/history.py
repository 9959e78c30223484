"""The history of a run for the page: losses over steps, and the samples of its validations."""

import csv
from math import isfinite
from pathlib import Path
from typing import Any

from minigpt.runs.run_dir import METRICS, SAMPLE_HEADER, SAMPLES, read_metrics

MAX_POINTS = 500  # of a curve


def read_history(folder: Path) -> dict[str, Any] | None:
    """Return `train_loss` and `val_loss`, lists of [step, loss], and `samples`, a list of step and text.

    Long curves are thinned, and losses that are not finite are left out. None: the folder holds no readable metrics.
    """
    try:
        columns = read_metrics(folder / METRICS)
    except (OSError, ValueError, csv.Error):
        return None
    curves = {name: _thin(columns.get(name, [])) for name in ("train_loss", "val_loss")}
    samples, file = [], folder / SAMPLES
    if file.is_file():
        for section in SAMPLE_HEADER.split(file.read_text(encoding="utf-8", errors="replace"))[1:]:
            header, _, text = section.partition("\n")
            samples.append({"step": int(header.split()[2].rstrip(",")[:18]), "text": text.strip()})
    return {**curves, "samples": samples}


def _thin(points: list[tuple[int, float]]) -> list[list[float]]:
    """Keep at most about `MAX_POINTS` points, the last one among them."""
    finite = [[step, loss] for step, loss in points if isfinite(loss)]
    every = -(-len(finite) // MAX_POINTS) or 1
    return finite[::-every][::-1]
