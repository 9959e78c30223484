"""Processes that train together, as torchrun starts them."""

import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

import torch
from robustness.faults.tools import forkserver

import minigpt
from minigpt.runs import metrics


def train_on_ranks(runs: Sequence[Sequence[str]], ranks: int = 2) -> None:
    """Train the runs of those overrides, one after another, in one process per rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    group |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    of_ranks = [{**group, "RANK": rank, "LOCAL_RANK": rank} for rank in map(str, range(ranks))]
    processes: list[Any] = [forkserver.Process(target=_train, args=(runs, env), daemon=True) for env in of_ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * ranks


def _train(runs: Sequence[Sequence[str]], env: dict[str, str]) -> None:
    os.environ.update(env)
    metrics.PEAK_FLOPS[metrics.device_name(torch.device("cpu"))] = 1e12
    for overrides in runs:
        minigpt.train(overrides)
        assert not [thread for thread in threading.enumerate() if "answer" in thread.name]  # it could abort the exit
