"""A bare training loop of any recipe with minigpt's model and optimizer, for the benchmarks `step` and `gpu.py`.

Takes the overrides of train.py, computes in the precision of `trainer.precision=auto`, and on a CUDA GPU if one is
available, unless `trainer.accelerator` is cpu. `+mode=reduce-overhead` sets the mode of `compile=true`, `+profile=true`
adds the operations of five more steps that take the most time.

Prints as JSON the tokens, the seconds of all steps and of the first, the FLOPs per token, the FLOP/s of a large matrix
product, and the peak memory of a GPU or the bytes that a step on a CPU reads and writes.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from common import ROOT, seconds
from hydra import compose, initialize_config_dir
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minigpt.config import GPTConfig
from minigpt.data.prepare import load_corpus
from minigpt.device import has_bfloat16
from minigpt.model import GPT
from minigpt.runs.config_checks import partial_from_config
from minigpt.utils.cli import cli_entrypoint

MATRIX_SIZES = {"cpu": (2048, torch.float32), "cuda": (8192, torch.bfloat16)}
FIRST_STEPS = 10  # of a GPU: they compile and capture
PROFILED_STEPS = 5


@cli_entrypoint
def main() -> None:
    """Train, and print the measurements."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("train", overrides=sys.argv[1:])
    corpus = load_corpus(cfg.data, cfg.tokenizer)
    on_gpu = cfg.trainer.accelerator != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True  # as the trainer does
    torch.manual_seed(cfg.seed)
    vocab_size = cfg.model.vocab_size or corpus.tokenizer.vocab_size
    model = GPT(GPTConfig(**{**cfg.model, "vocab_size": vocab_size})).to(device)
    if cfg.compile:
        model.compile(mode=cfg.get("mode"))
    optimizer = partial_from_config(cfg.optimizer)(model)
    schedule = LambdaLR(optimizer, partial(partial_from_config(cfg.schedule), max_steps=cfg.max_steps))
    tokens = torch.from_numpy(corpus.tokens("train")[:].astype(np.int64)).to(device)
    B, T = cfg.data.batch_size, cfg.model.block_size
    window, reduced = torch.arange(T + 1, device=device), has_bfloat16(device)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        batch = tokens[torch.randint(len(tokens) - T, (B, 1), device=device) + window]  # (B, T + 1)
        with torch.autocast(device.type, torch.bfloat16, enabled=reduced):
            loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        clip_grad_norm_(model.parameters(), cfg.trainer.gradient_clip_val)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    first = min(FIRST_STEPS, cfg.max_steps // 2)
    start = time.perf_counter()
    for i in range(cfg.max_steps):
        if i == first:
            synchronize(device)
            first_seconds = time.perf_counter() - start
        step()
    synchronize(device)
    results = {
        "tokens": cfg.max_steps * B * T,
        "seconds": time.perf_counter() - start,
        "first_steps": first,
        "first_seconds": first_seconds,
        "flops_per_token": model.config.flops_per_token(),
    }
    if on_gpu:
        results["peak_bytes"] = torch.cuda.max_memory_allocated()
    if cfg.get("profile"):
        results["operations"] = slowest_operations(step, device)
    results["matrix_flops"] = matrix_flops(device)
    if not on_gpu:
        with torch.compiler.set_stance("force_eager"), MemoryTraffic() as traffic:
            step()
        results["bytes_per_step"] = traffic.bytes
    print(json.dumps(results))


def synchronize(device: torch.device) -> None:
    """Wait for the kernels of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def slowest_operations(step: Callable[[], None], device: torch.device) -> list[dict[str, Any]]:
    """Profile steps; return the kernels of a GPU, or the operations of a CPU, with their share of the time."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
        synchronize(device)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [event for event in profiler.key_averages() if event.device_type == kind and not event.is_user_annotation]
    times = [(event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3 for event in events]  # ms
    rows = [
        {
            "operation": event.key,
            "ms per step": taken / PROFILED_STEPS,
            "share": taken / sum(times),
            "calls per step": event.count / PROFILED_STEPS,
        }
        for event, taken in zip(events, times, strict=True)
    ]
    return sorted(rows, key=lambda row: -row["ms per step"])[:15]


class MemoryTraffic(TorchDispatchMode):
    """Count the bytes that each operation reads and writes, as if nothing stayed in a cache."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.embedding.default:  # reads as many rows as it writes
            self.bytes += 2 * result.nbytes
        elif not func.is_view:
            inputs, outputs = func._schema.arguments, func._schema.returns
            values = [*args, *((kwargs or {}).get(argument.name) for argument in inputs[len(args) :])]
            for argument, value in zip(inputs, values, strict=True):
                in_place = argument.alias_info is not None and argument.alias_info.is_write
                self.bytes += (1 + in_place) * tensor_bytes(value)
            if all(output.alias_info is None for output in outputs):
                self.bytes += tensor_bytes(result)
        return result


def tensor_bytes(values: Any) -> int:
    """Return the bytes of all tensors in nested containers."""
    return sum(value.nbytes for value in tree_leaves(values) if isinstance(value, Tensor))


def matrix_flops(device: torch.device) -> float:
    """FLOP/s of a large matrix product, median of ten: float32 on a CPU, bfloat16 on a GPU."""
    size, dtype = MATRIX_SIZES[device.type]
    matrix = torch.randn(size, size, device=device, dtype=dtype)

    def multiply() -> None:
        matrix @ matrix
        synchronize(device)

    return 2 * size**3 / seconds(multiply, times=10)


if __name__ == "__main__":
    main()
