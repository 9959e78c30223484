"""Lightning loggers that write into the run folder: `metrics.csv`, and the base of the progress bar."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger

from minigpt.utils.files import atomic_write, sync

COLUMNS = (
    *("step", "tokens", "seconds", "train_loss", "val_loss", "val_bits_per_byte"),
    *("learning_rate", "grad_norm", "tokens_per_second", "flops_per_second", "mfu"),
)


class RunFolderLogger(Logger):
    """Base of loggers with one file in the run folder.

    Callbacks of Lightning write to save_dir/name/version: with empty names, into the run folder too.
    """

    name = version = ""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    @property
    def save_dir(self) -> str:
        return str(self.file.parent)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class MetricsCSV(RunFolderLogger):
    """Append one row per measurement to `metrics.csv` at once, so that a killed run keeps its metrics.

    A metric of another callback, outside `COLUMNS`, gets a column when it first appears.
    """

    columns: tuple[str, ...] = ()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if not self.columns or not self.file.exists() or not metrics.keys() <= set(self.columns):
            self._add_columns(metrics)
        with open(self.file, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.columns).writerow({"step": step, **metrics})

    def _add_columns(self, metrics: Mapping[str, float]) -> None:
        content = self.file.read_text(encoding="utf-8") if self.file.exists() else ""
        reader = csv.DictReader(content.splitlines())
        self.columns = tuple(dict.fromkeys([*(reader.fieldnames or COLUMNS), *metrics]))
        with atomic_write(self.file) as partial, open(partial, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(reader)

    @rank_zero_only
    def save(self) -> None:
        """Sync the file before a checkpoint, so that no checkpoint outlives its metrics in a power failure."""
        sync(self.file)
