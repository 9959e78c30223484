"""Read offline runs of Weights & Biases."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def records(run_folder: Path, index: int = 0) -> list[dict[str, Any]]:
    """The records of an offline run in a run folder, the first by default, read with wandb's own inspector."""
    offline = sorted((run_folder / "wandb").glob("offline-run-*"))[index]
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(offline)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in shown.splitlines()]
