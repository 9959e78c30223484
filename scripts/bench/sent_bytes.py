"""A callback of the benchmark `forecast` that counts the bytes that the processes of a run send to each other."""

import json
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import distributed


class SentBytes(Callback):
    """Write the bytes that the loopback device of this network namespace has sent at the middle and the end of a run.

    Args:
        out: the file, a list in JSON.
    """

    def __init__(self, out: str) -> None:
        self.out, self.sent = Path(out), list[int]()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *batch: object) -> None:
        """Count after a barrier, so that no process is ahead."""
        if 2 * trainer.global_step in (trainer.max_steps, 2 * trainer.max_steps):
            distributed.barrier()
            devices = dict(line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:])
            (name,) = (name for name in devices if name.strip() == "lo")
            self.sent.append(int(devices[name].split()[8]))
            if trainer.is_global_zero:
                self.out.write_text(json.dumps(self.sent))
