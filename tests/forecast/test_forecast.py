"""Forecasts: closed forms, the measured memory of training steps, the bytes that gloo sends, and the script."""

import math
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import SCRIPTS
from matplotlib import image

from minigpt.config import GPTConfig
from minigpt.data.tokenizer import ByteTokenizer
from minigpt.forecast.cost import GPUS, VOCAB_SIZES
from minigpt.forecast.memory import Parallelism, Sizes, memory
from minigpt.forecast.traffic import step_time
from minigpt.model import GPT
from minigpt.optim import adamw, muon
from minigpt.runs.metrics import PEAK_FLOPS

ADAMW = partial(adamw, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
SMALL = {"n_layer": 3, "n_head": 4, "n_embd": 128, "block_size": 128, "vocab_size": 500}
BLOCK = 12 * 768**2 + 13 * 768  # parameters of a block of GPT-2: matrices, and biases and norms


def count(
    values: dict[str, Any], optimizer: Any = ADAMW, checkpoint_blocks: int | None = None, **options: Any
) -> Sizes:
    with torch.device("meta"):
        model = GPT(GPTConfig(**values)).to("meta")
    model.checkpoint_blocks = checkpoint_blocks
    return Sizes(model, optimizer(model), **options)


def spread(strategy: str, devices: int, per_node: int = 8, bandwidth: float = 1e9, **options: Any) -> Parallelism:
    return Parallelism(strategy, devices, per_node, 1e12 if per_node == 8 else bandwidth, bandwidth, **options)


@pytest.fixture(scope="module")
def gpt2() -> Sizes:
    return count({}, bfloat16=True)


def test_gpt2_has_124_million_parameters_of_4_bytes_and_adamw_holds_8_bytes_per_parameter(gpt2: Sizes) -> None:
    embeddings = (50257 + 1024) * 768
    assert gpt2.blocks == 4 * 12 * BLOCK
    assert gpt2.embeddings == 4 * 50257 * 768
    assert gpt2.weights == 4 * (embeddings + 12 * BLOCK + 2 * 768) == 4 * 124_439_808
    assert gpt2.optimizer == 8 * 124_439_808
    assert count(SMALL, bfloat16=True, ema=True).optimizer == 3 * count(SMALL, bfloat16=True).weights


def test_muon_holds_4_bytes_per_weight_of_a_matrix_in_a_block() -> None:
    options = {"lr": 0.02, "adam_lr": 1e-3, "betas": (0.9, 0.95), "ngram_weight_decay": 0.0, "weight_decay": 0.0}
    make = partial(muon, **options, momentum=0.95, newton_schulz_steps=5)
    sizes = count(SMALL, make, bfloat16=False)
    assert sizes.optimizer == 2 * sizes.weights - 4 * 3 * 12 * 128**2


@pytest.mark.parametrize("bfloat16", [False, True])
def test_activations_are_those_of_the_formula(bfloat16: bool) -> None:
    """Per token and layer: inputs of 2 norms, 4 linear layers and the GELU, q, k, v, and 4 + H numbers per row."""
    L, H, C, T, V = (SMALL[name] for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size"))
    sizes = count(SMALL, bfloat16=bfloat16)
    linear = 2 if bfloat16 else 4  # bytes of inputs and outputs of linear layers
    layer = 4 * (2 * C) + linear * (C + 3 * C + C + C + 4 * C + 4 * C) + 4 * (4 + H)
    assert sizes.activations == T * (L * layer + 4 * C + linear * C + 4 * 2 + 8)  # the final norm, and an id
    assert sizes.logits == 3 * 4 * T * V
    copies = 2 * (12 * L * C**2 + V * C) if bfloat16 else 0
    assert memory(sizes, spread("ddp", 2), 1)["weights"] - sizes.weights == pytest.approx(copies, rel=0.01)
    kept = count(SMALL, bfloat16=bfloat16, checkpoint_blocks=1).activations
    assert kept == sizes.activations - T * L * (layer - 4 * C)  # of a block, its input


def test_fsdp_shards_weights_gradients_and_optimizer_state_and_gathers_two_blocks_in_bfloat16(gpt2: Sizes) -> None:
    whole, sharded = (memory(gpt2, spread(strategy, 64), 1) for strategy in ("ddp", "fsdp"))
    for part in ("gradients", "optimizer state"):
        assert sharded[part] == whole[part] / 64
    embeddings = (50257 + 1024) * 768 + 2 * 768  # and the final norm
    copy_of_head = 2 * 50257 * 768
    gathered = sharded["weights"] - gpt2.weights / 64 - copy_of_head
    assert gathered == pytest.approx(4 * embeddings + 2 * 2 * BLOCK)
    assert sharded["activations"] == whole["activations"]
    kept = memory(gpt2, spread("fsdp", 64, reshard_after_forward=False), 1)
    assert kept["weights"] - sharded["weights"] == pytest.approx(2 * 10 * BLOCK)


def test_diloco_holds_outer_weights_and_momentum_and_frees_gradients(gpt2: Sizes) -> None:
    parts = memory(gpt2, spread("diloco", 64), 1)
    assert parts["optimizer state"] == gpt2.optimizer + 2 * gpt2.weights
    assert parts["peak"] < sum(size for name, size in parts.items() if name != "peak")
    assert memory(gpt2, spread("diloco", 64, batches=2), 1)["peak"] > parts["peak"]


@pytest.mark.parametrize(("values", "batch"), [(SMALL, 8), (SMALL | {"vocab_size": 5000, "n_layer": 2}, 2)])
def test_the_predicted_memory_of_one_device_is_within_10_percent_of_the_measured(
    values: dict[str, Any], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS / "bench"))
    from peak_memory import peak_bytes

    predicted = memory(count(values, bfloat16=False), spread("ddp", 1), batch)["peak"]
    assert predicted == pytest.approx(peak_bytes(GPTConfig(**values), batch), rel=0.1)


def test_a_ring_of_n_devices_sends_2_times_n_minus_1_over_n_of_the_gradients(gpt2: Sizes) -> None:
    def sent(strategy: str, devices: int, **options: Any) -> float:
        return step_time(gpt2, spread(strategy, devices, **options), 1.0)["sent"] / gpt2.weights

    assert [sent("ddp", n) for n in (1, 2, 3, 6)] == pytest.approx([0, 1, 4 / 3, 5 / 3])
    assert sent("ddp", 4, batches=8) == 1.5
    assert sent("ddp", 4, compress=True) == 0.75
    assert sent("diloco", 4, outer_every=10) == pytest.approx(0.15)
    # Blocks are gathered twice in bfloat16 and their gradients scattered in float32, in every batch.
    assert sent("fsdp", 4, batches=8) == pytest.approx(8 * 1.5)
    saved = 0.75 * gpt2.blocks / gpt2.weights
    assert sent("fsdp", 4, reshard_after_forward=False) == pytest.approx(1.5 - saved / 2)
    full = count({}, bfloat16=False)
    sent_in_float32 = step_time(full, spread("fsdp", 4), 1.0)["sent"] / gpt2.weights
    assert sent_in_float32 == pytest.approx(1.5 + saved)


@pytest.mark.parametrize("devices", [1, 2, 64, 1024])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "diloco"])
def test_the_latency_of_a_step_is_5_microseconds_per_hop(gpt2: Sizes, strategy: str, devices: int) -> None:
    tree = 2 * (devices - 1).bit_length()  # sums go up until one device has all, and then down
    hops = {
        "ddp": (14 + 1) * tree,  # buckets of 25 MiB, and the embeddings
        "fsdp": (devices - 1) * 2 * (12 * 3 + 2),  # a ring; 2 batches gather blocks twice and scatter them
        "diloco": tree / 20,
    }[strategy]
    time = step_time(gpt2, spread(strategy, devices, bandwidth=math.inf, per_node=1, batches=2), 0.0)
    assert [time[part] for part in ("communication", "exposed", "step")] == pytest.approx([hops * 5e-6] * 3)
    assert step_time(gpt2, spread(strategy, 1), 2.0) == {"communication": 0, "exposed": 0, "step": 2.0, "sent": 0}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_communication_overlaps_with_computation_as_far_as_there_is_some(gpt2: Sizes, strategy: str) -> None:
    none, long = (step_time(gpt2, spread(strategy, 8, per_node=1), seconds) for seconds in (0.0, 1000.0))
    assert none["exposed"] == pytest.approx(none["communication"])
    assert gpt2.embeddings / 1e9 < long["exposed"] < none["exposed"]  # embeddings wait for the end
    assert long["step"] == 1000 + long["exposed"]


def test_devices_of_one_node_do_not_use_the_network(gpt2: Sizes) -> None:
    inside, between = (step_time(gpt2, spread("ddp", n), 0.0)["communication"] for n in (8, 16))
    assert inside < 0.01 < 0.9 < between


def test_every_gpu_has_a_known_peak() -> None:
    assert {name for name, _, _ in GPUS.values()} <= set(PEAK_FLOPS)
    assert VOCAB_SIZES["byte"] == ByteTokenizer.vocab_size


@pytest.fixture
def shell(call: Callable[..., SimpleNamespace]) -> Callable[..., SimpleNamespace]:
    """Run the script in this process."""
    return partial(call, "forecast.py")


def table(output: str) -> dict[str, str]:
    """The first word of each row by its name."""
    return {line[:24].strip(): line[24:].split()[0].replace(",", "") for line in output.splitlines()}


def test_the_script_prints_a_table_and_plots_three_strategies(shell: Callable[..., Any], tmp_path: Path) -> None:
    flags = ["--devices=64", "--interconnect=400Gbit", "--tokens=1e10", "--price=2", "--mfu=0.5"]
    result = shell(*GPT2, *flags, f"--out={tmp_path}/plot.png", "data.batch_size=512", "ema_decay=0.99")
    assert result.returncode == 0, result.stderr
    row = table(result.stdout)
    assert row["parameters"] == "124439808"
    assert float(row["optimizer state, GB"]) == 1.493  # AdamW and the average of the weights
    compute, exposed, step = (float(row[part]) for part in ("compute, ms", "exposed, ms", "step, ms"))
    assert compute == pytest.approx(1e3 * 8 * 1024 * GPTConfig().flops_per_token() / (0.5 * 989e12), abs=0.001)
    assert step == pytest.approx(compute + exposed, abs=0.002)
    sent = 2 * 63 / 64 * 4 * 124_439_808  # bytes that each device sends around the ring, twice
    assert float(row["communication, ms"]) == pytest.approx(1e3 * sent / (400e9 / 8), rel=0.06)  # and latencies
    hours, cost = float(row["hours"]), float(row["cost"])
    assert hours == pytest.approx(1e10 / (512 * 1024) * step / 3.6e6, abs=0.01)
    assert cost == pytest.approx(2 * 64 * hours, abs=2 * 64 * 0.005)
    assert "no GPU was measured" in result.stdout
    picture = image.imread(tmp_path / "plot.png")[:, :, :3] * 255
    for color in ((31, 119, 180), (255, 127, 14), (44, 160, 44)):
        assert (abs(picture - color).max(axis=-1) < 2).sum() > 200


def test_the_largest_share_of_an_uneven_batch_decides_memory_and_time(shell: Callable[..., Any]) -> None:
    """Of 12 sequences 5 devices take 3, 3, 2, 2, 2."""
    run = (*GPT2, "model.n_layer=2", "--devices", "5")
    uneven, even = (shell(*run, f"data.batch_size={size}") for size in (12, 15))
    assert "1 × at most 3 × 1,024 tokens per device" in uneven.stdout
    rows, expected = table(uneven.stdout), table(even.stdout)
    assert int(rows["tokens/s"]) == pytest.approx(int(expected["tokens/s"]) * 12 / 15, rel=1e-6)
    different = {name for name in rows if rows[name] != expected[name]}
    assert different == {"tokens/s"}  # a step trains on 12 sequences, as slowly as on 15


GPT2 = ("model=gpt2", "tokenizer=gpt2")
BAD_INPUT = {
    "--interconnect fast": "argument --interconnect: invalid gigabits value: 'fast'",
    "--interconnect 0": "--interconnect must be a finite number > 0, got 0.0",
    "--devices 0": "--devices must be an integer ≥ 1, got 0",
    "--per-node 0": "--per-node must be an integer ≥ 1, got 0",
    "--tokens -1": "--tokens must be a finite number > 0, got -1.0",
    "--price inf": "--price must be a finite number > 0, got inf",
    "--mfu 40": "--mfu must be in (0, 1), got 40.0",
    "--devices 16": "data.batch_size must be at least --devices 16, got 12",
    "trainer.strategy=tp": "trainer.strategy must be one of auto, ddp, fsdp, diloco, got tp",
    "trainer.precision=16-mixed": "trainer.precision must be one of auto, bf16-mixed, 32-true",
    "init_from=gpt2 model=pretrained tokenizer=pretrained": "init_from must be null",
    "tokenizer=char": "model.vocab_size must be an integer ≥ 1, got None",
    "max_steps=0": "max_steps must be an integer ≥ 1, got 0",
}


@pytest.mark.parametrize("arguments", BAD_INPUT)
def test_bad_input_is_named(arguments: str, shell: Callable[..., Any]) -> None:
    result = shell(*GPT2, *arguments.split())
    assert (result.returncode, result.stdout) == (2, "")
    *usage, error = result.stderr.splitlines()
    assert BAD_INPUT[arguments] in error
    assert not usage or "error: argument" in error


OPTIONS = {
    "trainer=fsdp": ("optimizer=muon", "ema_decay=0.9", "trainer.strategy.reshard_after_forward=false"),
    "trainer=diloco eval_every=200": ("trainer.strategy.outer_every=100", "trainer.strategy.compress=true"),
    "trainer=ddp": ("checkpoint_blocks=1", "trainer.accumulate_grad_batches=2", "trainer.precision=32-true"),
}


@pytest.mark.parametrize("overrides", OPTIONS)
def test_options_of_a_run_change_its_forecast(overrides: str, shell: Callable[..., Any]) -> None:
    run = (*GPT2, "model.n_layer=2", *overrides.split(), "--devices", "4")
    outputs = [shell(*run, *option).stdout for option in ([], *([option] for option in OPTIONS[overrides]))]
    assert all(outputs)
    assert len(set(outputs)) == len(outputs)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="adds network namespaces")
def test_two_processes_send_the_predicted_bytes_within_3_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS / "bench"))
    import forecast

    monkeypatch.setattr(forecast, "STEPS", 10)
    rows = [
        forecast.sent_bytes(tmp_path / "float32", ["ddp", "fsdp"]),
        forecast.sent_bytes(tmp_path / "bfloat16", ["fsdp"], precision="bf16-mixed"),  # gradients stay in float32
    ]
    ratios = [value for row in rows for name, value in row.items() if name.endswith("ratio")]
    assert ratios == [pytest.approx(1, abs=0.03)] * 3, rows
