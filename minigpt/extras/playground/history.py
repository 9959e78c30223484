"""The history of a run for the page: its losses over steps, the samples of its validations, and its
status.
"""

import csv
import re
from math import isfinite
from pathlib import Path
from typing import Any

from minigpt.runs.metrics_csv import read_metrics
from minigpt.runs.run_dir import END_HEADER, METRICS, SAMPLES, is_locked, read_summary

MAX_POINTS = 500  # of a curve
_END_HEADER = re.compile(rf"(?m)^{END_HEADER}$")
_SAMPLE_HEADER = re.compile(r"(?m)^── step (\d{1,18})\d*, validation loss .*\n")


def read_history(folder: Path) -> dict[str, Any] | None:
    """Return `train_loss` and `val_loss`, lists of [step, loss], and `samples`, a list of step and
    text.

    Long curves are thinned, and losses that are not finite are left out. None: the folder holds no
    readable metrics.
    """
    try:
        columns = read_metrics(folder / METRICS)
    except (OSError, ValueError, csv.Error):
        return None
    curves = {name: _thin(columns.get(name, [])) for name in ("train_loss", "val_loss")}
    return {
        **curves,
        "samples": [{"step": step, "text": text} for step, text in read_samples(folder)],
    }


def read_samples(folder: Path) -> list[tuple[int, str]]:
    """Return the step and the text of each sample in `samples.txt`; none if it is missing."""
    file = folder / SAMPLES
    parts = (
        _SAMPLE_HEADER.split(file.read_text(encoding="utf-8", errors="replace"))
        if file.is_file()
        else []
    )
    texts = (_END_HEADER.split(part)[0].strip() for part in parts[2::2])
    return list(zip(map(int, parts[1::2]), texts, strict=True))


def run_status(folder: Path) -> str:
    """Return "running", or how a run ended, with the reason of a failure; empty if nothing is
    known.
    """
    if is_locked(folder):
        return "running"
    try:
        summary = read_summary(folder)
    except (OSError, ValueError):
        return ""
    return ": ".join(filter(None, (summary.get("status"), summary.get("reason"))))


def _thin(points: list[tuple[int, float]]) -> list[list[float]]:
    """Keep at most about `MAX_POINTS` points, the last one among them."""
    finite = [[step, loss] for step, loss in points if isfinite(loss)]
    every = -(-len(finite) // MAX_POINTS) or 1
    return finite[::-every][::-1]
