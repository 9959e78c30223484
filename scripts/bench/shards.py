"""Benchmark shards: the time of a training step on 5,000 files with slow reads, and on tokens in memory."""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

SHARDS, SHARD_TOKENS = 5000, 60_000
READ_SECONDS = 0.01  # latency of each read, one per window
STEPS = 10  # of each variant in turn


def shards(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return one row per round: ms per step of the model nano with batches of 12 windows, and the ratios.

    The variants alternate every `STEPS` steps. A slow read sleeps; the shards are sparse files.
    """
    import torch

    from minigpt import GPT, GPTConfig
    from minigpt.data import batches
    from minigpt.data.shards import find_shards
    from minigpt.data.token_files import Tokens

    for i in range(SHARDS):
        file = folder / f"train_{i:04}.bin"
        file.touch()
        os.truncate(file, 2 * SHARD_TOKENS)

    class SlowTokens(Tokens):
        def __getitem__(self, index: Any) -> Any:
            time.sleep(READ_SECONDS * len(index))
            return super().__getitem__(index)

    files = find_shards("data.train_bin", f"{folder}/train_*.bin", folder)
    model = GPT(GPTConfig(vocab_size=65, block_size=64, n_layer=4, n_head=4, n_embd=128, dropout=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def read(tokens: Any) -> Iterator[Any]:
        order = batches.WindowOrder(len(tokens), 64, seed=0)
        options: dict[str, Any] = {"batch_size": 12, "rank": 0, "world_size": 1, "repeat": 0, "stop": 10**6}
        yield from batches.Batches(tokens, order, first=lambda: 0, device=torch.device("cpu"), **options)

    def step(source: Iterator[Any]) -> float:
        start = time.perf_counter()
        model(*next(source)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return 1000 * (time.perf_counter() - start)

    def in_turn(read: Callable[[Any], Any], items: Iterable[Any], threads: int) -> Iterator[Any]:
        return map(read, items)

    slow = SlowTokens(files, "uint16", 65)
    sources = {"in memory": read(np.zeros(len(slow), np.uint16)), "slow shards": read(slow)}
    for source in sources.values():
        step(source)
    with patch.object(batches, "map_in_threads", in_turn):
        sources["slow shards, not read ahead"] = read(slow)
        step(sources["slow shards, not read ahead"])
    rows = []
    for _ in range(args.rounds):
        taken: dict[str, list[float]] = {name: [] for name in sources}
        for _ in range(max(1, args.steps // STEPS)):
            for name, source in sources.items():
                taken[name] += [step(source) for _ in range(STEPS)]
        median = {name: statistics.median(values) for name, values in taken.items()}
        row = {f"step, {name} ms": value for name, value in median.items()}
        in_memory = median.pop("in memory")
        rows.append(row | {f"{name}: ratio": value / in_memory for name, value in median.items()})
    return rows
