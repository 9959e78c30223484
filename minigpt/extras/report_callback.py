"""What a callback may add to the end of a run; `runs/fit.py` finds it by its `on_sampled`."""

from pathlib import Path

import lightning.pytorch as L

from minigpt.data.token_files import Corpus
from minigpt.model.gpt import GPT
from minigpt.runs.run_dir import Summary


class ReportCallback(L.Callback):
    """Add to the results of a run: to `summary.json`, and to what is printed."""

    draws = ""  # what `on_sampled` draws, for the log

    def on_sampled(
        self, model: GPT, corpus: Corpus, sample: str, folder: Path, seconds: float
    ) -> None:
        """Use the model of `best.safetensors` on rank 0; an error is only a warning.

        Args:
            sample: the final sample of the run.
            folder: of the run.
            seconds: that are left for it, at most.
        """

    def results(self) -> Summary:
        """Return entries of `summary.json`, however the run ended."""
        return {}

    def lines(self, summary: Summary) -> list[tuple[str, str]]:
        """Return labels and texts to print below the validation loss, for the whole summary."""
        return []
