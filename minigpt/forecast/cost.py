"""Forecast memory, time and cost of a training run on many GPUs, without one.

Left out: CUDA's buffers, fragmentation, Muon's communication, the block that is recomputed, validation, checkpoints.
"""

from argparse import Namespace
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from minigpt.config import GPTConfig
from minigpt.runs.config_checks import check_run
from minigpt.utils.checks import OPEN_FRACTION, POSITIVE, POSITIVE_INT, one_of
from minigpt.utils.errors import require
from minigpt.utils.files import atomic_write
from minigpt.utils.scripts import ROOT

# Name in `PEAK_FLOPS`, bytes of memory, and bytes per second from a device to the others of its node in one direction
# (NVLink, else PCIe), of the data sheets in `metrics.py`.
GPUS = {
    "A100": ("NVIDIA A100-SXM4-80GB", 80e9, 300e9),
    "H100": ("NVIDIA H100 80GB HBM3", 80e9, 450e9),
    "H200": ("NVIDIA H200", 141e9, 450e9),
    "B200": ("NVIDIA B200", 180e9, 900e9),
    "L4": ("NVIDIA L4", 24e9, 32e9),
    "RTX4090": ("NVIDIA GeForce RTX 4090", 24e9, 32e9),
}
STRATEGIES = ("ddp", "fsdp", "diloco")
VOCAB_SIZES = {"byte": 256, "gpt2": 50_257, "cl100k_base": 100_277, "o200k_base": 200_019}
PLOTTED = [1 << i for i in range(13)]  # devices
_FLAGS = {"devices": POSITIVE_INT, "per_node": POSITIVE_INT, "interconnect": POSITIVE, "mfu": OPEN_FRACTION}
_FLAGS |= {"tokens": POSITIVE, "price": POSITIVE}


def forecast(args: Namespace) -> str:
    """Return the table of a forecast and plot to `args.out`; `args` are those of scripts/forecast.py.

    Where devices train on different numbers of sequences, memory and time are those of a device with the most.
    """
    for name, rule in _FLAGS.items():
        if (value := getattr(args, name)) is not None:
            require(f"--{name.replace('_', '-')}", value, *rule)
    cfg, config = compose_run(args.overrides)
    given, n, batches = cfg.trainer.strategy, args.devices, cfg.trainer.accumulate_grad_batches
    strategy = str(getattr(given, "_target_", given)).rpartition(".")[2].lower()
    require("trainer.strategy", strategy, *one_of(("auto", *STRATEGIES)))
    require("data.batch_size", cfg.data.batch_size, lambda size: size >= n, f"at least --devices {n}")

    import torch

    from minigpt.forecast.memory import Parallelism, Sizes, memory
    from minigpt.forecast.traffic import step_time
    from minigpt.model import GPT
    from minigpt.runs.config_checks import partial_from_config
    from minigpt.runs.metrics import PEAK_FLOPS

    with torch.device("meta"):
        model = GPT(config).to("meta")
    model.checkpoint_blocks = cfg.checkpoint_blocks
    bfloat16, ema = cfg.trainer.precision != "32-true", cfg.ema_decay is not None
    sizes = Sizes(model, partial_from_config(cfg.optimizer)(model), bfloat16=bfloat16, ema=ema)
    gpu, limit, bandwidth = GPUS[args.gpu]
    options = {key: given[key] for key in ("compress", "reshard_after_forward", "outer_every") if key in given}
    spread = Parallelism(strategy, n, args.per_node, bandwidth, args.interconnect * 1e9 / 8, batches, **options)
    batch = ceil(cfg.data.batch_size / n)  # sequences of a device
    compute = batches * batch * config.block_size * config.flops_per_token() / (args.mfu * PEAK_FLOPS[gpu])
    parts, time = memory(sizes, spread, batch), step_time(sizes, spread, compute)
    largest = bisect_right(range(1, 1 << 30), limit, key=lambda batch: memory(sizes, spread, batch)["peak"])
    tokens_per_step = batches * cfg.data.batch_size * config.block_size
    tokens = args.tokens or cfg.max_steps * tokens_per_step
    hours = tokens / tokens_per_step * time["step"] / 3600
    fits = f"of {limit / 1e9:g}: {'fits' if parts['peak'] <= limit else 'DOES NOT FIT'}"
    most = "at most " if cfg.data.batch_size % n else ""
    shape = f"{batches} × {most}{batch} × {config.block_size:,} tokens per device"
    if args.out:
        title = f"{model.num_params() / 1e6:,.0f}M parameters, {shape}, {gpu}"
        plot_scaling(args.out, title, lambda **at: compute / step_time(sizes, replace(spread, **at), compute)["step"])
    rows = [
        ("parameters", model.num_params(), shape),
        *((f"{part}, GB", size / 1e9, fits if part == "peak" else "") for part, size in parts.items()),
        ("largest batch", largest, "sequences per device"),
        ("compute, ms", 1e3 * compute, f"at MFU {args.mfu} of {PEAK_FLOPS[gpu] / 1e12:g} TFLOP/s, {gpu}"),
        ("communication, ms", 1e3 * time["communication"], f"{time['sent'] / 1e6:,.1f} MB sent per device"),
        ("exposed, ms", 1e3 * time["exposed"], "communication that does not overlap with compute"),
        ("step, ms", 1e3 * time["step"], f"{compute / time['step']:.1%} of the speed without communication"),
        ("tokens/s", round(tokens_per_step / time["step"]), ""),
        ("hours", hours, f"for {tokens:,.0f} tokens"),
        *([("cost", args.price * hours * n, f"at {args.price} per device and hour")] if args.price else []),
    ]
    lines = [f"{name:24}{value:18,.{0 if value == int(value) else 3}f}  {note}".rstrip() for name, value, note in rows]
    return "\n".join([*lines, "no GPU was measured: bandwidths, latencies, overlap and MFU are assumptions"])


def compose_run(overrides: Sequence[str]) -> tuple[Any, GPTConfig]:
    """Return the run configuration of scripts/train.py and its architecture, without reading a text."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("train", overrides=list(overrides))
    check_run(cfg)
    require("init_from", cfg.init_from, lambda value: value is None, "null in a forecast", "set model=… instead")
    require("trainer.precision", cfg.trainer.precision, *one_of(("auto", "bf16-mixed", "32-true")))
    size = cfg.model.vocab_size or cfg.tokenizer.get("vocab_size") or VOCAB_SIZES.get(cfg.tokenizer.name)
    require("model.vocab_size", size, *POSITIVE_INT, f"tokenizer={cfg.tokenizer.name} has as many as the text")
    return cfg, GPTConfig(**{**cfg.model, "vocab_size": size})


def plot_scaling(file: Path, title: str, efficiency: Callable[..., float]) -> None:
    """Plot the fraction of the speed without communication over the number of devices, one line per strategy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name in STRATEGIES:
        fractions = [efficiency(strategy=name, devices=n) for n in PLOTTED]
        axes.semilogx(PLOTTED, fractions, base=2, marker=".", label=name)
    axes.set_xticks(PLOTTED, [f"{n:,}" for n in PLOTTED])
    axes.set(xlabel="devices", ylabel="scaling efficiency", ylim=(0, 1.05), title=title)
    axes.legend()
    with atomic_write(file) as partial:
        figure.savefig(partial, dpi=120, format=file.suffix[1:] or "png")
