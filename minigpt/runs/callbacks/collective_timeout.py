"""The callback that sets how long the ranks of a training wait for each other."""

from datetime import timedelta
from typing import Any

import lightning.pytorch as L

from minigpt.distributed.process_group import PATIENCE, set_timeout

SAVED_BYTES_PER_SECOND = 1e6  # of a slow disk or network, while the other ranks wait


class CollectiveTimeout(L.Callback):
    """Wait up to `seconds` in a training step, and longer while a checkpoint is saved, by its size."""

    def __init__(self, seconds: float) -> None:
        self.timeout = timedelta(seconds=seconds)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        n_bytes = (
            4 * 4 * sum(p.numel() for p in pl_module.parameters())
        )  # weights, their averages, two moments
        set_timeout(
            min(PATIENCE, self.timeout + timedelta(seconds=n_bytes / SAVED_BYTES_PER_SECOND))
        )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        set_timeout(self.timeout)
