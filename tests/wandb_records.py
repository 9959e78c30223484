"""Read offline runs of Weights & Biases."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def records(run_folder: Path) -> list[dict[str, Any]]:
    """The records of a run folder's only offline run, read with wandb's own inspector."""
    (offline,) = (run_folder / "wandb").glob("offline-run-*")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(offline)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in shown.splitlines()]
