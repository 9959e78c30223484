"""The table and the picture of a sweep on Weights & Biases."""

import csv
from pathlib import Path
from typing import Any

from minigpt.runs.wandb_logger import Wandb, finish, wandb_logger
from minigpt.sweeps.results import PICTURE, TABLE


def publish_sweep(folder: Path, *, group: str, tags: list[str], **options: Any) -> None:
    """Send the table and the picture of a sweep to Weights & Biases, as a run of their own among the sweep's."""
    logger = wandb_logger(folder=folder, name=f"{folder.name} summary", group=group, tags=tags, **options)
    if not isinstance(logger, Wandb):
        return
    import wandb

    with open(folder / TABLE, newline="", encoding="utf-8") as file:
        rows: list[list[Any]] = list(csv.reader(file))
    table = wandb.Table(columns=rows[0], data=rows[1:])
    with logger.ignore_lost_client():
        logger.experiment.log({"sweep": table, "picture": wandb.Image(str(folder / PICTURE))})
    finish(logger, {})
