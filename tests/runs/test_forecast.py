"""Forecasts: closed forms, the measured memory of training steps, the bytes that gloo sends, and the script."""

import json
import os
import runpy
import shutil
import subprocess
import sys
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
from minigpt.model import GPT
from minigpt.optim import adamw, muon
from minigpt.runs.forecast import GPUS, VOCAB_SIZES
from minigpt.runs.metrics import PEAK_FLOPS
from minigpt.runs.scaling import Parallelism, Sizes, memory, step_time
from minigpt.utils.cli import cli_entrypoint

PEAK_MEMORY = SCRIPTS / "bench" / "peak_memory.py"
ADAMW = partial(adamw, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
SMALL = {"n_layer": 3, "n_head": 4, "n_embd": 128, "block_size": 128, "vocab_size": 500}
BLOCK = 12 * 768**2 + 13 * 768  # parameters of a block of GPT-2: matrices, and biases and norms


def count(
    values: dict[str, Any], optimizer: Any = ADAMW, *, checkpoint_blocks: int | None = None, **options: Any
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
    values: dict[str, Any], batch: int
) -> None:
    command = [sys.executable, str(PEAK_MEMORY), json.dumps(values), str(batch), ""]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    sizes = count(values, bfloat16=False)
    assert memory(sizes, spread("ddp", 1), batch)["peak"] == pytest.approx(float(done.stdout), rel=0.1)


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


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "diloco"])
def test_one_device_does_not_communicate(gpt2: Sizes, strategy: str) -> None:
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
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """Run the script in this process."""

    def run(*arguments: str) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["forecast.py", *arguments])
        code = 0
        try:
            cli_entrypoint(runpy.run_path(str(SCRIPTS / "forecast.py"))["main"])()
        except SystemExit as ended:
            code = int(ended.code or 0)
        return SimpleNamespace(code=code, **dict(zip(("out", "err"), capsys.readouterr(), strict=True)))

    return run


def test_the_script_prints_tables_and_plots_three_strategies(shell: Callable[..., Any], tmp_path: Path) -> None:
    flags = [
        "--devices",
        "64",
        "--interconnect",
        "400Gbit",
        "--tokens",
        "1e10",
        "--price",
        "2",
        "--mfu",
        "0.5",
        "--out",
        str(tmp_path / "plot.png"),
    ]
    result = shell("model=gpt2", "tokenizer=gpt2", *flags, "data.batch_size=512", "ema_decay=0.99")
    assert result.code == 0, result.err
    lines = {line[:24].strip(): line[24:].split() for line in result.out.splitlines()}
    assert lines["parameters"][0] == "124,439,808"
    assert float(lines["optimizer state, GB"][0]) == 1.493  # AdamW and the average of the weights
    compute, exposed, step = (float(lines[part][0]) for part in ("compute, ms", "exposed, ms", "step, ms"))
    assert compute == pytest.approx(1e3 * 8 * 1024 * GPTConfig().flops_per_token() / (0.5 * 989e12), abs=0.001)
    assert step == pytest.approx(compute + exposed, abs=0.002)
    hours, cost = float(lines["hours"][0]), float(lines["cost"][0])
    assert hours == pytest.approx(1e10 / (512 * 1024) * step / 3.6e6, abs=0.01)
    assert cost == pytest.approx(2 * 64 * hours, abs=2 * 64 * 0.005)
    assert "no GPU was measured" in result.out
    picture = image.imread(tmp_path / "plot.png")[:, :, :3] * 255
    for color in ((31, 119, 180), (255, 127, 14), (44, 160, 44)):
        assert (abs(picture - color).max(axis=-1) < 2).sum() > 200


GPT2 = ("model=gpt2", "tokenizer=gpt2")
BAD_FLAGS = (
    *(["--gpu", "V100"], ["--interconnect", "fast"], ["--interconnect", "0"], ["--devices", "0"]),
    *(["--tokens", "-1"], ["--per-node", "2.5"]),
)
BAD_INPUT = {
    "batch": (["--devices", "8"], "data.batch_size must be divisible by --devices 8, got 12"),
    "strategy": (["trainer.strategy=tp"], "trainer.strategy must be one of auto, ddp, fsdp, diloco, got tp"),
    "mfu": (["--mfu", "40"], "--mfu must be in (0, 1), got 40.0"),
    "precision": (["trainer.precision=16-mixed"], "trainer.precision must be one of auto, bf16-mixed, 32-true"),
    "pretrained": (["init_from=gpt2", "model=pretrained", "tokenizer=pretrained"], "init_from must be null"),
    "unknown vocabulary": (["tokenizer=char"], "model.vocab_size must be an integer ≥ 1, got None"),
    "unknown model": (["model=gpt3"], "model=gpt3 does not exist"),
    "invalid setting": (["model.n_head=7"], "model.n_embd must be divisible by model.n_head=7, got 768"),
}


@pytest.mark.parametrize("flags", BAD_FLAGS, ids=" ".join)
def test_a_bad_flag_is_named(flags: list[str], shell: Callable[..., Any]) -> None:
    result = shell(*GPT2, *flags)
    assert (result.code, result.out) == (2, "")
    assert f"error: argument {flags[0]}: invalid" in result.err


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_prints_one_line(arguments: list[str], message: str, shell: Callable[..., Any]) -> None:
    overridden = {argument.partition("=")[0] for argument in arguments}
    result = shell(*(value for value in GPT2 if value.partition("=")[0] not in overridden), *arguments)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err


OPTIONS = {
    "trainer=fsdp": "optimizer=muon",
    "trainer=fsdp ema_decay=0.9": "trainer.strategy.reshard_after_forward=false",
    "trainer=diloco eval_every=200": "trainer.strategy.outer_every=100",
    "trainer=ddp": "checkpoint_blocks=1",
}


@pytest.mark.parametrize(("overrides", "option"), OPTIONS.items(), ids=OPTIONS)
def test_options_of_a_run_change_its_forecast(overrides: str, option: str, shell: Callable[..., Any]) -> None:
    run = (*GPT2, *overrides.split(), "--devices", "4")
    without, result = shell(*run), shell(*run, option)
    assert (without.code, result.code) == (0, 0), result.err
    assert result.out != without.out


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="adds network namespaces")
def test_two_processes_send_the_predicted_bytes_within_3_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS / "bench"))
    import forecast

    row = forecast.sent_bytes(tmp_path, ["ddp", "fsdp"])
    ratios = [value for name, value in row.items() if name.endswith("ratio")]
    assert ratios == [pytest.approx(1, abs=0.03)] * 2
