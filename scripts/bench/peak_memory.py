"""Measure the peak of torch's allocator in three training steps, for the benchmarks `forecast` and `gpu.py`.

Arguments: a GPTConfig as JSON, sequences per device, and ddp or fsdp if torchrun starts this, else "". Prints bytes.
"""

import gc
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from minigpt.config import GPTConfig
from minigpt.model import GPT
from minigpt.optim import adamw

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def train(model: GPT, batch: int, strategy: str = "", *, bfloat16: bool = False) -> None:
    """Take steps as the trainer does: gradients are freed after each."""
    config, device = model.config, model.wte.weight.device
    if strategy == "fsdp":
        mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = adamw(model, **ADAMW)
    ddp = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
    compute = DistributedDataParallel(model, **ddp) if strategy == "ddp" else model
    tokens = torch.randint(config.vocab_size, (batch, config.block_size + 1), device=device)
    for _ in range(3):
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            loss = compute(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def peak_bytes(
    config: GPTConfig,
    batch: int,
    strategy: str = "",
    *,
    device: str = "cpu",
    bfloat16: bool = False,
    checkpoint_blocks: int | None = None,
) -> int:
    """Build a model and train it; return the peak of the allocator of its device, above what was in use before."""

    def build_and_train() -> None:
        with torch.device(device):
            model = GPT(config)
        model.checkpoint_blocks = checkpoint_blocks
        train(model, batch, strategy, bfloat16=bfloat16)

    if device == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        build_and_train()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        build_and_train()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]")


def main() -> None:
    """Measure and print."""
    config, batch, strategy = GPTConfig(**json.loads(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    if strategy:
        distributed.init_process_group("gloo")
    peak = peak_bytes(config, batch, strategy)
    if os.environ.get("RANK", "0") == "0":
        print(peak)


if __name__ == "__main__":
    main()
