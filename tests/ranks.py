"""Processes that train together, with the environment that torchrun sets up."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from processes import Script
from torch.distributed import TCPStore

import minigpt
from minigpt.runs.callbacks import metrics


def train_on_ranks(runs: Sequence[Sequence[str]], ranks: int = 2) -> str:
    """Train the runs of those overrides, one after another; return the command line as Python sees it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # its port is its own until it is deleted
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    group |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    with TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            env = {name: str(value) for name, value in {**group, "RANK": rank, "LOCAL_RANK": rank}.items()}
            processes.append(Script(__file__, json.dumps(runs), output=Path(folder, f"rank{rank}"), env=env))
        codes = [process.wait() for process in processes]
        assert codes == [0] * ranks, [process.stderr for process in processes]
    return f"{__file__} {json.dumps(runs)}"


if __name__ == "__main__":
    metrics.PEAK_FLOPS[metrics.device_name(torch.device("cpu"))] = 1e12
    for overrides in json.loads(sys.argv[1]):
        minigpt.train(overrides)
