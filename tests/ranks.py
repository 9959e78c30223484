"""Processes that train together, with the environment that torchrun sets up."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from processes import Script
from torch.distributed import TCPStore

import minigpt
from minigpt.runs.callbacks import metrics


class Fail(Callback):
    """Let rank 1 fail after step 3: raise an error of its own, or be killed."""

    def __init__(self, *, killed: bool) -> None:
        self.killed = killed

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 3:
            if self.killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("a bad batch")


def train_on_ranks(runs: Sequence[Sequence[str]], ranks: int = 2, codes: Sequence[int] = ()) -> str:
    """Train the runs of those overrides, one after another.

    Args:
        codes: exit codes by rank, by default 0.

    Returns:
        The command line as Python sees it.
    """
    # Its port is its own until it is deleted
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RUN_ID": "test",
        "GROUP_RANK": 0,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
    }
    with TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            variables = {**group, "RANK": rank, "LOCAL_RANK": rank}
            env = {name: str(value) for name, value in variables.items()}
            output = Path(folder, f"rank{rank}")
            processes.append(Script(__file__, json.dumps(runs), output=output, env=env))
        ended = [process.wait() for process in processes]
        assert ended == list(codes or [0] * ranks), [process.stderr for process in processes]
    return f"{__file__} {json.dumps(runs)}"


if __name__ == "__main__":
    metrics.PEAK_FLOPS[metrics.device_name(torch.device("cpu"))] = 1e12
    for overrides in json.loads(sys.argv[1]):
        minigpt.train(overrides)
