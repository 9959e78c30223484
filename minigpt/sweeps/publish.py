"""The table and the plot of a sweep on Weights & Biases."""

import csv
from pathlib import Path
from typing import Any

from minigpt.runs.wandb_logger import wandb_logger
from minigpt.sweeps.report import PLOT, TABLE


def publish_sweep(folder: Path, *, group: str, tags: list[str], **options: Any) -> None:
    """Log the table and the plot of a sweep as a run of its own in the sweep's group."""
    logger = wandb_logger(folder=folder, name=f"{folder.name} summary", group=group, tags=tags, **options)
    if logger is None:
        return
    import wandb

    with open(folder / TABLE, newline="", encoding="utf-8") as file:
        rows: list[list[Any]] = list(csv.reader(file))
    table = wandb.Table(columns=rows[0], data=rows[1:])
    with logger.ignore_lost_client():
        logger.experiment.log({"sweep": table, "plot": wandb.Image(str(folder / PLOT))})
    logger.finish({})
