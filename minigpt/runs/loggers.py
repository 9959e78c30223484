"""Loggers of the run folder: `metrics.csv`, and the base of the progress bar's logger."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger

from minigpt.utils.files import atomic_write, sync

COLUMNS = (
    "step",
    "tokens",
    "seconds",
    "train_loss",
    "val_loss",
    "val_bits_per_byte",
    "learning_rate",
    "grad_norm",
    "tokens_per_second",
    "flops_per_second",
    "mfu",
)


class RunFolderLogger(Logger):
    """A Lightning logger whose files lie in the run folder; Lightning's callbacks write there too.

    They write to save_dir/name/version, so name and version are empty.
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
    """Append a row to `metrics.csv` per measurement and flush it, so that a killed run keeps its curve.

    A metric outside `COLUMNS`, logged by another callback, gets a column when it first appears.
    """

    columns: Sequence[str] = ()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if not self.columns or not self.file.exists() or not metrics.keys() <= set(self.columns):
            self._add_columns(metrics)
        with open(self.file, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.columns).writerow({"step": step, **metrics})

    def _add_columns(self, names: Iterable[str]) -> None:
        rows: list[dict[str, str]] = []
        columns: Sequence[str] = COLUMNS
        if self.file.exists():
            with open(self.file, newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                rows, columns = list(reader), reader.fieldnames or COLUMNS
        self.columns = list(dict.fromkeys([*columns, *names]))
        with atomic_write(self.file) as partial, open(partial, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)

    @rank_zero_only
    def save(self) -> None:
        """Sync the file before a checkpoint, which must not survive a power loss without its curve."""
        sync(self.file)
