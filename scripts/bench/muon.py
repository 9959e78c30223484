"""A step of Muon on 2 and 4 ranks: each rank orthogonalizes all matrices, or its share of them."""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

from minigpt.config import GPTConfig
from minigpt.model import GPT
from minigpt.optim import muon as make_muon

RANKS = (2, 4)
SHAPE = GPTConfig(vocab_size=256, block_size=64, n_layer=6, n_head=4, n_embd=256)


def muon(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure the ms of an optimizer step of 5M parameters on CPU processes of one thread each, without network."""
    rows = []
    for i in range(args.rounds):
        row: dict[str, Any] = {}
        for ranks in RANKS:
            file = folder / f"{ranks}_{i}"
            multiprocessing.spawn(measure, (ranks, args.steps, file), nprocs=ranks)
            whole, divided = (float(ms) for ms in file.with_suffix(".ms").read_text().split())
            row |= {f"{ranks} ranks: all matrices ms": whole, f"{ranks} ranks: a share ms": divided}
            row[f"{ranks} ranks: ratio"] = whole / divided
        rows.append(row)
    return rows


def measure(rank: int, ranks: int, steps: int, file: Path) -> None:
    """Write the median ms of a step with all matrices, and with a share of them, in alternation."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{file}", rank=rank, world_size=ranks)
    model = GPT(SHAPE)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    options: dict[str, Any] = {"lr": 0.02, "adam_lr": 0.01, "betas": (0.9, 0.95), "ngram_weight_decay": 0.0}
    optimizer = make_muon(model, **options, weight_decay=0.0, momentum=0.95, newton_schulz_steps=5)
    ms: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(steps):
        for divided, taken in ms.items():
            optimizer.replicas = distributed.group.WORLD if divided else None
            distributed.barrier()
            start = time.perf_counter()
            optimizer.step()
            distributed.barrier()
            taken.append(1000 * (time.perf_counter() - start))
    if rank == 0:
        file.with_suffix(".ms").write_text(f"{statistics.median(ms[False])} {statistics.median(ms[True])}")
    distributed.destroy_process_group()
