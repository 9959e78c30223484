"""The callback that keeps the weights of a run at about 24 steps, so that one can watch the model
learn.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback

from minigpt.checkpoints.find import SNAPSHOTS, find_snapshots
from minigpt.checkpoints.format import write
from minigpt.runs.callbacks.resume_state import EMACallback, ResumeState, check_saved
from minigpt.runs.callbacks.samples import only_a_warning
from minigpt.utils.checks import POSITIVE, integer
from minigpt.utils.errors import require

BYTES_PER_PARAMETER = 2  # bfloat16


class Snapshots(Callback):
    """Write the weights, or their averages, in bfloat16 after about `count` steps: 0, 1, 2, 4, …,
    max_steps.

    Args:
        count: snapshots of a run, at most.
        max_mb: size of all in megabytes, at most; a larger model has fewer snapshots, or none.
    """

    def __init__(self, *, max_steps: int, count: int = 24, max_mb: float = 200) -> None:
        require("callbacks.snapshots.count", count, *integer(2))
        require("callbacks.snapshots.max_mb", max_mb, *POSITIVE)
        self.max_steps, self.count, self.max_mb = max_steps, count, max_mb
        self.last_step = -1  # of a snapshot
        self.writer = ThreadPoolExecutor(1, "snapshots")

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        size = BYTES_PER_PARAMETER * pl_module.model.config.num_params() / 1e6
        self.steps = log_spaced(self.max_steps, min(self.count, int(self.max_mb / size)))
        for step, file in (
            find_snapshots(trainer.default_root_dir).items() if trainer.is_global_zero else ()
        ):
            if step > trainer.global_step:  # the run resumes from before
                file.unlink()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Copy the weights after a step, on all ranks, because they gather sharded weights; rank 0
        writes the copy.
        """
        step = trainer.global_step
        if step not in self.steps or step == self.last_step:  # batches may share a step
            return
        self.last_step = step
        check_saved(pl_module.model)
        averages = [
            callback.ema for callback in trainer.callbacks if isinstance(callback, EMACallback)
        ]
        for ema in averages:
            ema.swap()
        state = trainer.strategy.lightning_module_state_dict()
        for ema in averages:
            ema.swap()
        if trainer.is_global_zero:
            (content,) = (
                callback.contents
                for callback in trainer.callbacks
                if isinstance(callback, ResumeState)
            )
            # Tied weights are copied once
            copies = {x.data_ptr(): x.to("cpu", torch.bfloat16, copy=True) for x in state.values()}
            content = {
                **content,
                "state_dict": {name: copies[x.data_ptr()] for name, x in state.items()},
            }
            self.writer.submit(_write, content, snapshot_path(trainer.default_root_dir, step))

    on_train_end = on_train_batch_start

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        self.writer.shutdown()

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.writer.shutdown()


def snapshot_path(folder: str | Path, step: int) -> Path:
    """Return the file of the snapshot of a step in a run folder, as `find_snapshots` finds it."""
    return Path(folder) / SNAPSHOTS / f"step-{step}.safetensors"


def log_spaced(last: int, count: int) -> set[int]:
    """Return 0 and up to `count` - 1 steps from 1 to `last` with evenly spaced logarithms; none for
    a count below 2.
    """
    return (
        {0, *(round(last ** (1 - i / max(1, count - 2))) for i in range(count - 1))}
        if count > 1
        else set()
    )


def _write(content: dict[str, Any], file: Path) -> None:
    """Write a snapshot; a failure is only a warning, because a run can do without."""
    with only_a_warning(f"{file} cannot be written"):
        write(content, file)
