"""The progress bar on a terminal and in a notebook, and its lines in `log.txt`."""

import sys
from pathlib import Path

from tqdm import tqdm

from minigpt.runs.curves import plot_curves
from minigpt.runs.run_dir import append_log
from minigpt.utils.terminal import notebook


class Progress:
    """Show the last losses and the speed: a bar on a terminal, else one line per validation.

    A notebook shows the curves too, which each validation updates.
    """

    def __init__(self, max_steps: int, folder: Path, *, step: int = 0) -> None:
        self.folder = folder
        self.fields = {"loss": "", "val": "", "speed": ""}
        if kernel := notebook():  # an output above the bar for the curves
            kernel.shell.display_pub.publish(
                {"text/html": ""},
                transient={"display_id": f"{folder} {kernel.shell.execution_count}"},
            )
        self.bar = tqdm(
            range(0),  # updated without iterating
            total=max_steps,
            initial=step,  # of a run that resumes
            disable=not (sys.stderr.isatty() or notebook()),
            delay=1e-3,  # appears with the first metrics
            miniters=0,  # any update prints it again, at most ten times per second
            dynamic_ncols=True,
            bar_format="{n_fmt}/{total_fmt} steps {bar} {desc} {remaining} left",
        )

    def log(self, metrics: dict[str, float], step: int) -> None:
        if "train_loss" in metrics:
            self.fields["loss"] = f"loss {metrics['train_loss']:.3f}"
            self.fields["speed"] = f"{metrics['tokens_per_second']:,.0f} tokens/s"
        if "val_loss" in metrics:
            self.fields["val"] = f"val {metrics['val_loss']:.4f}"
            append_log(
                self.folder,
                f"step {step}/{self.bar.total}  {self._text()}",
                show=bool(self.bar.disable),
            )
            if notebook():
                plot_curves(self.folder)
        self.bar.set_description_str(self._text(), refresh=False)
        self.bar.update(step - self.bar.n)

    def log_validation(self, batch: int, batches: int) -> None:
        self.bar.set_description_str(self._text(f"validating {batch}/{batches}"), refresh=False)
        self.bar.update(0)

    def print(self, line: str) -> None:
        with tqdm.external_write_mode(file=sys.stderr):  # beside the bar
            append_log(self.folder, line)

    def _text(self, *more: str) -> str:
        return ", ".join(filter(None, (*self.fields.values(), *more)))
