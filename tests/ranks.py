"""Processes that train together, as torchrun starts them."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

# One run after another, in each process.
RANK = """
import json, sys, torch
from minigpt import train
from minigpt.runs import metrics
metrics.PEAK_FLOPS[metrics.device_name(torch.device("cpu"))] = 1e12
for overrides in json.loads(sys.argv[1]):
    train(overrides)
"""


def train_on_ranks(runs: Sequence[Sequence[str]], ranks: int = 2) -> str:
    """Train the runs of those overrides; return the command line as Python sees it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    group |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    argument = json.dumps(runs)
    command = [sys.executable, "-c", RANK, argument]
    processes = [
        subprocess.Popen(command, env={**os.environ, **group, "RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE)
        for rank in map(str, range(ranks))
    ]
    output = [process.communicate(timeout=300)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, output
    return f"-c {argument}"
