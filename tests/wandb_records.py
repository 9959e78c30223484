"""Read offline runs of Weights & Biases."""

from pathlib import Path
from typing import Any

from robustness.faults.server import read_records


def records(run_folder: Path, index: int = 0) -> list[dict[str, Any]]:
    """The records of an offline run in a run folder, the first by default, read with wandb's own inspector."""
    offline = sorted((run_folder / "wandb").glob("offline-run-*"))[index]
    return read_records(offline)
