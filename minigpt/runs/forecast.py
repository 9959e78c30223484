"""Forecast memory, time and cost of a training run on many GPUs, without one. The formulas are in `scaling.py`.

Compared with runs on a CPU: memory, and the bytes that are sent. Extrapolated, because no GPU was measured: what GPU
kernels save, bandwidths and memory of data sheets, latencies, the overlap of communication with computation, and the
MFU, which the user gives. Left out: buffers of CUDA and NCCL and fragmentation (reserve 1 to 3 GB), compile=true,
validation, checkpoints, failures.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from minigpt.config import GPTConfig
from minigpt.runs.config_checks import check_run
from minigpt.utils.checks import OPEN_FRACTION, POSITIVE, POSITIVE_INT, one_of, or_null
from minigpt.utils.errors import UserError, require
from minigpt.utils.files import atomic_write
from minigpt.utils.scripts import ROOT

# Memory in GB, and GB/s from a device to the others of its node in one direction (NVLink, else PCIe), of the data
# sheets in `metrics.py`. Of several names that contain the word of --gpu, the first is taken.
GPUS = {
    "NVIDIA B200": (180, 900),
    "NVIDIA H200": (141, 450),
    "NVIDIA H200 NVL": (141, 450),
    "NVIDIA H100 80GB HBM3": (80, 450),
    "NVIDIA H100 NVL": (94, 300),
    "NVIDIA H100 PCIe": (80, 64),
    "NVIDIA A100-SXM4-80GB": (80, 300),
    "NVIDIA A100-SXM4-40GB": (40, 300),
    "NVIDIA A100 80GB PCIe": (80, 32),
    "NVIDIA A100-PCIE-40GB": (40, 32),
    "NVIDIA L40S": (48, 32),
    "NVIDIA L40": (48, 32),
    "NVIDIA L4": (24, 32),
    "NVIDIA A10": (24, 32),
    "NVIDIA GeForce RTX 4090": (24, 32),
    "NVIDIA GeForce RTX 3090": (24, 32),
}
STRATEGIES = ("ddp", "fsdp", "diloco")
VOCAB_SIZES = {"byte": 256, "gpt2": 50_257, "cl100k_base": 100_277, "o200k_base": 200_019}
MAX_PLOTTED_DEVICES = 4096
ASSUMED = "no GPU was measured: kernels, bandwidths, latencies, overlap and MFU are assumptions; reserve 1 to 3 GB"


def forecast(
    overrides: Sequence[str],
    *,
    gpu: str,
    devices: int,
    per_node: int,
    interconnect: str,
    strategy: str,
    mfu: float,
    tokens: float | None = None,
    price: float | None = None,
    out: Path | None = None,
) -> str:
    """Return the tables of a forecast and write the picture `out`; the arguments are those of scripts/forecast.py.

    Raises:
        UserError: an override or a flag is wrong.
    """
    gpu, network_bandwidth = find_gpu(gpu), parse_bandwidth(interconnect)
    for flag, value, rule in (
        ("--devices", devices, POSITIVE_INT),
        ("--per-node", per_node, POSITIVE_INT),
        ("--strategy", strategy, one_of(STRATEGIES)),
        ("--mfu", mfu, OPEN_FRACTION),
        ("--tokens", tokens, or_null(POSITIVE)),
        ("--price", price, or_null(POSITIVE)),
    ):
        require(flag, value, *rule)
    require("--devices", devices, lambda n: n <= per_node or n % per_node == 0, f"a multiple of --per-node {per_node}")
    require("--out", out, lambda path: path is None or path.suffix == ".png", "a .png file")
    cfg, config = compose_run(overrides)
    batch_size, batches = cfg.data.batch_size, cfg.trainer.accumulate_grad_batches
    require("data.batch_size", batch_size, lambda n: n % devices == 0, f"divisible by --devices {devices}")
    if strategy == "fsdp" and (cfg.ema_decay is not None or cfg.optimizer._target_.endswith("muon")):
        raise UserError("--strategy fsdp has no whole weights, which ema_decay and optimizer=muon need; use ddp")

    from minigpt.runs.metrics import PEAK_FLOPS
    from minigpt.runs.scaling import OUTER_EVERY, Cluster, count_sizes, largest_batch, memory, step_time
    from minigpt.runs.train import partial_from_config

    optimizer, bfloat16 = partial_from_config(cfg.optimizer), cfg.trainer.precision != "32-true"
    sizes = count_sizes(config, optimizer, bfloat16=bfloat16, ema=cfg.ema_decay is not None)
    limit, batch, accumulate = GPUS[gpu][0] * 1e9, batch_size // devices, batches > 1
    parts = memory(sizes, devices, batch, strategy, accumulate=accumulate)
    most = largest_batch(sizes, devices, strategy, limit, accumulate=accumulate)

    cluster = Cluster(devices, per_node, GPUS[gpu][1] * 1e9, network_bandwidth)
    tokens_per_step = batch_size * batches * config.block_size
    compute = tokens_per_step / devices * config.flops_per_token() / (mfu * PEAK_FLOPS[gpu])
    outer_every = getattr(cfg.trainer.strategy, "outer_every", OUTER_EVERY)

    def timed(strategy: str, devices: int) -> dict[str, float]:
        placed = replace(cluster, devices=devices)
        return step_time(sizes, placed, compute, strategy, batches=batches, outer_every=outer_every)

    time, total = timed(strategy, devices), tokens or cfg.max_steps * tokens_per_step
    hours = total / tokens_per_step * time["step"] / 3600
    if out:
        title = (
            f"{sizes.weights / 4e6:,.0f}M parameters, {batches} × {batch} × {config.block_size:,} tokens per device\n"
            f"{gpu}, {per_node} per node, {interconnect} between nodes"
        )
        plot_efficiency(out, lambda *point: compute / timed(*point)["step"], title=title)
    saved = accumulate or (strategy == "ddp" and devices > 1) or strategy == "fsdp"
    notes = {
        "gradients": "" if saved else "made while activations are freed: the peak has the larger of both",
        "peak": f"of {limit / 1e9:g} GB: {'fits' if parts['peak'] <= limit else 'DOES NOT FIT'}",
        "compute": f"at MFU {mfu:g} of {PEAK_FLOPS[gpu] / 1e12:g} TFLOP/s",
        "communication": f"{time['sent'] / 1e6:,.1f} MB sent per device and step",
        "exposed": "communication that does not overlap with compute",
        "step": f"{compute / time['step']:.1%} of the speed without communication",
    }
    shape = ", ".join(f"{name} {getattr(config, name):,}" for name in ("n_layer", "n_embd", "block_size", "vocab_size"))
    precision = "bf16-mixed" if bfloat16 else "32-true"
    rows = [
        f"{'model':30}{sizes.weights // 4:,} parameters: {shape}",
        f"{'devices':30}{devices} × {gpu}, {per_node} per node, {interconnect}; {strategy}, {precision}",
        f"{'batch':30}{batches} × {batch} × {config.block_size:,} tokens per device and step",
        "",
        "memory per device, GB",
        *table({name: size / 1e9 for name, size in parts.items()}, notes),
        f"  {'largest batch':28}{most:12,}  sequences per device",
        "",
        "time per step, ms",
        *table({name: 1e3 * time[name] for name in ("compute", "communication", "exposed", "step")}, notes),
        "",
        f"{'tokens/s':30}{tokens_per_step / time['step']:12,.0f}",
        f"{'hours':30}{hours:12,.2f}  for {total:,.0f} tokens",
        *([f"{'cost':30}{price * hours * devices:12,.2f}  at {price:g} per device and hour"] if price else []),
        "",
        ASSUMED,
    ]
    return "\n".join(rows)


def table(values: dict[str, float], notes: dict[str, str]) -> list[str]:
    """Format one line per value."""
    return [f"  {name:28}{value:12,.3f}  {notes.get(name, '')}".rstrip() for name, value in values.items()]


def find_gpu(name: str) -> str:
    """Return the first known GPU whose name contains the word, or raise UserError."""
    for known in GPUS:
        if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", known, re.IGNORECASE):
            return known
    raise UserError(f"--gpu must be one of {', '.join(GPUS)}, or a word of them, got {name}")


def parse_bandwidth(text: str) -> float:
    """Return bytes per second of a bandwidth such as 400Gbit, or raise UserError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([MGT])bit", text)
    if not found or not float(found[1]):
        raise UserError(f"--interconnect must be bits per second such as 400Gbit or 100Mbit, got {text}")
    return float(found[1]) * {"M": 1e6, "G": 1e9, "T": 1e12}[found[2]] / 8


def compose_run(overrides: Sequence[str]) -> tuple[Any, GPTConfig]:
    """Return the run configuration of scripts/train.py and its architecture, without reading a text."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("train", overrides=list(overrides))
    check_run(cfg)
    require("init_from", cfg.init_from, lambda value: value is None, "null in a forecast", "set model=… instead")
    require("trainer.precision", cfg.trainer.precision, *one_of(("auto", "bf16-mixed", "32-true")))
    size = cfg.model.vocab_size or cfg.tokenizer.get("vocab_size") or VOCAB_SIZES.get(cfg.tokenizer.name)
    if size is None:
        depends = f"that of tokenizer={cfg.tokenizer.name} depends on the text"
        raise UserError(f"model.vocab_size must be an integer ≥ 1, got null; {depends}: set it, or tokenizer=gpt2")
    return cfg, GPTConfig(**{**cfg.model, "vocab_size": size})


def plot_efficiency(file: Path, efficiency: Callable[[str, int], float], *, title: str) -> None:
    """Plot the fraction of the speed without communication over the number of devices, one line per strategy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    devices = [1 << i for i in range(MAX_PLOTTED_DEVICES.bit_length())]
    for strategy in STRATEGIES:
        axes.plot(devices, [efficiency(strategy, n) for n in devices], marker="o", markersize=4, label=strategy)
    axes.set_xscale("log", base=2)
    axes.set_xticks(devices, [f"{n:,}" for n in devices])
    axes.set(xlabel="devices", ylabel="scaling efficiency", ylim=(0, 1.05), title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_write(file) as partial:
        figure.savefig(partial, dpi=120, format="png")
