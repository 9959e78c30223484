"""The callback that sets how long the ranks of a training wait for each other."""

from datetime import timedelta

import lightning.pytorch as L

from minigpt.distributed.process_group import PATIENCE, set_timeout


class CollectiveTimeout(L.Callback):
    """Wait up to `seconds` in a step, and longer while a checkpoint is saved, by its size."""

    def __init__(self, seconds: float) -> None:
        self.timeout = timedelta(seconds=seconds)

    def on_save_checkpoint(
        self, trainer: object, pl_module: L.LightningModule, checkpoint: object
    ) -> None:
        # The weights, their averages and two moments, each of 4 bytes
        n_bytes = 4 * 4 * sum(p.numel() for p in pl_module.parameters())
        # A slow disk or network takes 1 MB per second, while the other ranks wait
        set_timeout(min(PATIENCE, self.timeout + timedelta(seconds=n_bytes / 1e6)))

    def on_train_batch_start(self, *_: object, **__: object) -> None:
        set_timeout(self.timeout)
