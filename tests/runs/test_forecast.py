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
from conftest import SCRIPTS
from matplotlib import image

from minigpt.config import GPTConfig
from minigpt.data.tokenizer import ByteTokenizer
from minigpt.optim import adamw, muon
from minigpt.runs.forecast import GPUS, VOCAB_SIZES, find_gpu, parse_bandwidth
from minigpt.runs.metrics import PEAK_FLOPS
from minigpt.runs.scaling import Cluster, Sizes, count_sizes, largest_batch, memory, ring_bytes, step_time
from minigpt.utils.cli import cli_entrypoint

PEAK_MEMORY = SCRIPTS / "bench" / "peak_memory.py"
ADAMW = partial(adamw, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
SMALL = {"n_layer": 3, "n_head": 4, "n_embd": 128, "block_size": 128, "vocab_size": 500}
BLOCK = 12 * 768**2 + 13 * 768  # parameters of a block of GPT-2: matrices, and biases and norms


@pytest.fixture(scope="module")
def gpt2() -> Sizes:
    return count_sizes(GPTConfig(), ADAMW, bfloat16=True)


def test_gpt2_has_124_million_parameters_of_4_bytes_and_adamw_holds_8_bytes_per_parameter(gpt2: Sizes) -> None:
    embeddings = (50257 + 1024) * 768
    assert gpt2.blocks == 4 * 12 * BLOCK
    assert gpt2.embeddings == 4 * embeddings
    assert gpt2.weights == 4 * (embeddings + 12 * BLOCK + 2 * 768) == 4 * 124_439_808
    assert gpt2.optimizer == 8 * 124_439_808
    assert gpt2.ema == 0


def test_muon_holds_4_bytes_per_weight_of_a_matrix_in_a_block() -> None:
    options = {"lr": 0.02, "adam_lr": 1e-3, "betas": (0.9, 0.95), "ngram_weight_decay": 0.0, "weight_decay": 0.0}
    make = partial(muon, **options, momentum=0.95, newton_schulz_steps=5)
    sizes = count_sizes(GPTConfig(**SMALL), make, bfloat16=False)
    assert sizes.optimizer == 2 * sizes.weights - 4 * 3 * 12 * 128**2


@pytest.mark.parametrize("bfloat16", [False, True])
def test_activations_are_those_of_the_formula(bfloat16: bool) -> None:
    """Per token and layer: inputs of 2 norms, 4 linear layers and the GELU, q, k, v, and 4 + H numbers per row."""
    L, H, C, T, V = (SMALL[name] for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size"))
    sizes = count_sizes(GPTConfig(**SMALL), ADAMW, bfloat16=bfloat16)
    linear = 2 if bfloat16 else 4  # bytes of inputs and outputs of linear layers
    layer = 4 * (2 * C) + linear * (C + 3 * C + C + C + 4 * C + 4 * C) + 4 * (4 + H)
    assert sizes.activations == T * (L * layer + 4 * C + linear * C + 4 * 2 + 8)  # the final norm, and an id
    assert sizes.logits == 3 * 4 * T * V
    copies = 2 * (12 * L * C**2 + V * C) if bfloat16 else 0
    assert copies <= sizes.casts < copies + 1000


def test_fsdp_shards_weights_gradients_and_optimizer_state_and_gathers_two_blocks(gpt2: Sizes) -> None:
    whole, sharded = (memory(gpt2, 64, 1, strategy) for strategy in ("ddp", "fsdp"))
    for part in ("weights", "gradients", "optimizer state"):
        assert sharded[part] == whole[part] / 64
    assert sharded["gathered weights"] == 4 * (124_439_808 - 10 * BLOCK)
    assert sharded["activations"] == whole["activations"]
    assert "gathered weights" not in whole


def test_diloco_holds_outer_weights_and_momentum_and_frees_gradients(gpt2: Sizes) -> None:
    parts = memory(gpt2, 64, 1, "diloco")
    assert parts["outer weights and momentum"] == 2 * parts["weights"]
    assert parts["peak"] < sum(size for name, size in parts.items() if name != "peak")
    assert memory(gpt2, 64, 1, "diloco", accumulate=True)["peak"] > parts["peak"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "diloco"])
def test_the_largest_batch_fits_and_one_more_sequence_does_not(gpt2: Sizes, strategy: str) -> None:
    batch = largest_batch(gpt2, 8, strategy, 80e9)
    assert memory(gpt2, 8, batch, strategy)["peak"] <= 80e9 < memory(gpt2, 8, batch + 1, strategy)["peak"]
    assert largest_batch(gpt2, 8, strategy, 1e6) == 0


@pytest.mark.parametrize(("values", "batch"), [(SMALL, 8), (SMALL | {"vocab_size": 5000, "n_layer": 2}, 2)])
def test_the_predicted_memory_of_one_device_is_within_10_percent_of_the_measured(
    values: dict[str, Any], batch: int
) -> None:
    command = [sys.executable, str(PEAK_MEMORY), json.dumps(values), str(batch), ""]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    sizes = count_sizes(GPTConfig(**values), ADAMW, bfloat16=False)
    assert memory(sizes, 1, batch, "ddp")["peak"] == pytest.approx(float(done.stdout), rel=0.1)


def test_a_ring_of_n_devices_sends_2_times_n_minus_1_over_n_of_the_gradients(gpt2: Sizes) -> None:
    assert [ring_bytes(600, n, passes=2) for n in (1, 2, 3, 6)] == [0, 600, 800, 1000]
    cluster = Cluster(4, 1, 1e9, 1e9)
    block, rest = 4 * 12 * BLOCK, gpt2.weights - 4 * 12 * BLOCK
    assert step_time(gpt2, cluster, 1.0, "ddp", batches=8)["sent"] == 1.5 * gpt2.weights
    assert step_time(gpt2, cluster, 1.0, "diloco", outer_every=10)["sent"] == 0.15 * gpt2.weights
    # Blocks are gathered twice and their gradients scattered, in every batch; the rest is gathered once.
    assert step_time(gpt2, cluster, 1.0, "fsdp", batches=8)["sent"] == 8 * 0.75 * (3 * block + 2 * rest)


def test_one_device_does_not_communicate(gpt2: Sizes) -> None:
    for strategy in ("ddp", "fsdp", "diloco"):
        time = step_time(gpt2, Cluster(1, 8, 1e9, 1e9), 2.0, strategy)
        assert (time["step"], time["sent"], time["exposed"]) == (2.0, 0, 0)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_communication_overlaps_with_computation_as_far_as_there_is_some(gpt2: Sizes, strategy: str) -> None:
    cluster = Cluster(8, 8, 1e9, 1e9)
    none, long = (step_time(gpt2, cluster, seconds, strategy) for seconds in (0.0, 1000.0))
    assert none["exposed"] == pytest.approx(none["communication"])
    assert gpt2.embeddings / 1e9 < long["exposed"] < none["exposed"]  # embeddings wait for the end
    assert long["step"] == 1000 + long["exposed"]


def test_devices_of_one_node_do_not_use_the_network(gpt2: Sizes) -> None:
    inside, between = (Cluster(n, 8, 1e12, 1e9).seconds(1e9, 1, passes=2) for n in (8, 16))
    assert inside < 0.01 < 1.8 < between


def test_every_gpu_with_a_known_peak_has_a_memory_and_is_found_by_a_word() -> None:
    assert set(GPUS) == set(PEAK_FLOPS)
    assert VOCAB_SIZES["byte"] == ByteTokenizer.vocab_size
    found = {word: find_gpu(word) for word in ("h100", "A100", "L4", "L40", "A100-SXM4-40GB", "4090")}
    assert list(found.values()) == [
        *("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L4", "NVIDIA L40"),
        *("NVIDIA A100-SXM4-40GB", "NVIDIA GeForce RTX 4090"),
    ]
    assert [parse_bandwidth(text) for text in ("400Gbit", "2.5Gbit", "100Mbit")] == [50e9, 0.3125e9, 12.5e6]


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
    flags = ["--devices", "64", "--tokens", "1e10", "--price", "2", "--mfu", "0.5", "--out", str(tmp_path / "plot.png")]
    result = shell("model=gpt2", "tokenizer=gpt2", *flags, "data.batch_size=512", "ema_decay=0.99")
    assert result.code == 0, result.err
    lines = {line[:30].strip(): line[30:].split() for line in result.out.splitlines()}
    assert lines["model"][0] == "124,439,808"
    assert [float(lines[part][0]) for part in ("weights", "optimizer state", "average of the weights")] == [
        *(0.498, 0.996, 0.498)
    ]
    compute, exposed, step = (float(lines[part][0]) for part in ("compute", "exposed", "step"))
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
BAD_INPUT = {
    "gpu": (["--gpu", "V100"], "--gpu must be one of NVIDIA B200, NVIDIA H200"),
    "interconnect": (["--interconnect", "fast"], "--interconnect must be bits per second such as 400Gbit"),
    "no bandwidth": (["--interconnect", "0Gbit"], "--interconnect must be bits per second such as 400Gbit"),
    "no device": (["--devices", "0"], "--devices must be an integer ≥ 1, got 0"),
    "half a node": (["--devices", "12", "data.batch_size=12"], "--devices must be a multiple of --per-node 8, got 12"),
    "batch": (["--devices", "8"], "data.batch_size must be divisible by --devices 8, got 12"),
    "strategy": (["--strategy", "tp"], "--strategy must be one of ddp, fsdp, diloco, got tp"),
    "mfu": (["--mfu", "40"], "--mfu must be in (0, 1), got 40.0"),
    "tokens": (["--tokens", "-1"], "--tokens must be a finite number > 0"),
    "picture": (["--out", "plot.pdf"], "--out must be a .png file, got plot.pdf"),
    "precision": (["trainer.precision=16-mixed"], "trainer.precision must be one of auto, bf16-mixed, 32-true"),
    "average": (["--strategy", "fsdp", "ema_decay=0.9"], "--strategy fsdp has no whole weights"),
    "muon": (["--strategy", "fsdp", "optimizer=muon"], "--strategy fsdp has no whole weights"),
    "pretrained": (["init_from=gpt2", "model=pretrained", "tokenizer=pretrained"], "init_from must be null"),
    "unknown vocabulary": (["tokenizer=char"], "model.vocab_size must be an integer ≥ 1, got null"),
    "unknown model": (["model=gpt3"], "model=gpt3 does not exist"),
    "invalid setting": (["model.n_head=7"], "model.n_embd must be divisible by model.n_head=7, got 768"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_prints_one_line(arguments: list[str], message: str, shell: Callable[..., Any]) -> None:
    overridden = {argument.partition("=")[0] for argument in arguments}
    result = shell(*(value for value in GPT2 if value.partition("=")[0] not in overridden), *arguments)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="adds network namespaces")
def test_two_processes_send_the_predicted_bytes_within_3_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS / "bench"))
    import forecast

    row = forecast.sent_bytes(tmp_path)
    (ratio,) = (value for name, value in row.items() if name.endswith("ratio"))
    assert ratio == pytest.approx(1, abs=0.03)
