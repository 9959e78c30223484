"""The progress bar on a terminal, and one line per validation elsewhere and in `log.txt`."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from tqdm import tqdm

from minigpt.runs.loggers import RunFolderLogger
from minigpt.runs.run_dir import append_log


class Progress(RunFolderLogger):
    """Show the last losses and the speed.

    Args:
        max_steps: length of the bar, optimizer steps.
        file: `log.txt` of the run folder.
    """

    def __init__(self, max_steps: int, file: Path) -> None:
        super().__init__(file)
        self.max_steps, self.terminal = max_steps, sys.stderr.isatty()
        self.fields: dict[str, str] = {}
        self.bar: tqdm[Any] | None = None
        self.last_refresh = 0.0  # time.monotonic() during validation

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        step, bar = step or 0, self._open_bar()
        self.fields.pop("validating", None)
        if "train_loss" in metrics:
            self.fields["loss"] = f"loss {metrics['train_loss']:.3f}"
            self.fields["speed"] = f"{metrics['tokens_per_second']:,.0f} tokens/s"
        if "val_loss" in metrics:
            self.fields["val"] = f"val {metrics['val_loss']:.4f}"
            append_log(self.file.parent, f"step {step}/{self.max_steps}  {self._line()}", show=not self.terminal)
        bar.set_description_str(self._line(), refresh=False)
        bar.update(step - bar.n)

    @rank_zero_only
    def show_validation(self, batch: int, batches: int) -> None:
        """Show the progress of a validation, at most ten times per second."""
        if not self.terminal or time.monotonic() - self.last_refresh < 0.1:
            return
        self.last_refresh = time.monotonic()
        self.fields["validating"] = f"validating {batch}/{batches}"
        self._open_bar().set_description_str(self._line())

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _open_bar(self) -> "tqdm[Any]":
        if self.bar is None:
            self.bar = tqdm(
                total=self.max_steps,
                disable=not self.terminal,
                dynamic_ncols=True,
                bar_format="{n_fmt}/{total_fmt} steps {bar} {desc} {remaining} left",
            )
        return self.bar

    def _line(self) -> str:
        return ", ".join(self.fields[key] for key in ("loss", "val", "speed", "validating") if key in self.fields)
