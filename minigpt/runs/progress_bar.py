"""The progress bar on a terminal, and its lines in `log.txt`."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from tqdm import tqdm

from minigpt.runs.metrics_csv import RunFolderLogger
from minigpt.runs.run_dir import append_log
from minigpt.utils.terminal import is_rank_zero


class Progress(RunFolderLogger):
    """Show the last losses and the speed: a bar on a terminal, one line per validation elsewhere and in `log.txt`."""

    def __init__(self, max_steps: int, file: Path) -> None:
        super().__init__(file)
        self.terminal = sys.stderr.isatty()
        self.fields: dict[str, str] = {}
        self.last_refresh = 0.0  # time.monotonic() during validation
        self.bar: tqdm[Any] = tqdm(
            total=max_steps,
            disable=not (self.terminal and is_rank_zero()),
            delay=1e-3,  # appears with the first metrics
            dynamic_ncols=True,
            bar_format="{n_fmt}/{total_fmt} steps {bar} {desc} {remaining} left",
        )

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        step = step or 0
        self.fields.pop("validating", None)
        if "train_loss" in metrics:
            self.fields["loss"] = f"loss {metrics['train_loss']:.3f}"
            self.fields["speed"] = f"{metrics['tokens_per_second']:,.0f} tokens/s"
        if "val_loss" in metrics:
            self.fields["val"] = f"val {metrics['val_loss']:.4f}"
            append_log(self.file.parent, f"step {step}/{self.bar.total}  {self._line()}", show=not self.terminal)
        self.bar.set_description_str(self._line(), refresh=False)
        self.bar.update(step - self.bar.n)

    @rank_zero_only
    def show_validation(self, batch: int, batches: int) -> None:
        """Show the progress of a validation, at most ten times per second."""
        if self.terminal and time.monotonic() - self.last_refresh >= 0.1:
            self.last_refresh = time.monotonic()
            self.fields["validating"] = f"validating {batch}/{batches}"
            self.bar.set_description_str(self._line())

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.bar.close()

    def _line(self) -> str:
        return ", ".join(self.fields[key] for key in ("loss", "val", "speed", "validating") if key in self.fields)
