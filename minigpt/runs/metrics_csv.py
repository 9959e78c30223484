"""The Lightning logger that writes `metrics.csv`."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger

from minigpt.runs.run_dir import read_rows, write_rows

COLUMNS = (
    *("step", "tokens", "seconds", "train_loss", "val_loss", "val_bits_per_byte"),
    *("learning_rate", "grad_norm", "tokens_per_second", "flops_per_second", "mfu"),
)


class MetricsCSV(Logger):
    """Append one row per measurement to `metrics.csv` at once, so that a killed run keeps its metrics.

    A metric of another callback, outside `COLUMNS`, gets a column when it first appears. Lightning's CSVLogger removes
    the file of a run that resumes.
    """

    name = version = ""  # callbacks of Lightning write to save_dir/name/version, which is the run folder
    columns: tuple[str, ...] = ()

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    @property
    def save_dir(self) -> str:
        return str(self.file.parent)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if not metrics.keys() <= set(self.columns):
            names, rows = read_rows(self.file) if self.file.exists() else ([], [])
            self.columns = tuple(dict.fromkeys([*(names or COLUMNS), *metrics]))
            write_rows(self.file, self.columns, rows)
        with open(self.file, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.columns).writerow({"step": step, **metrics})
