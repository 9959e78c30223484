"""Every path that only a CUDA GPU takes, compared with a CPU or with an ordinary run on the GPU.

`MINIGPT_TEST_DEVICE=cpu python -m pytest -m gpu` rehearses these tests on a CPU, to test the tests.
"""

import asyncio
import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import train_on_ranks
from small_runs import ROOT, TEST_DEVICE, column
from test_decoder import EVERY
from test_generation import ARCHITECTURES
from torch import Tensor
from torch.testing import assert_close
from torch.utils._pytree import keystr, tree_flatten_with_path

import minigpt
from minigpt import GPT, GPTConfig, generate, load_checkpoint
from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.format import read
from minigpt.data import batches
from minigpt.data.batches import Batches, ValidationBatches, WindowOrder
from minigpt.data.tokenizer import ByteTokenizer
from minigpt.device import has_bfloat16
from minigpt.generation import score
from minigpt.interpret.heads import attention_maps
from minigpt.optim import adamw, muon
from minigpt.runs import metrics
from minigpt.sampling import Sampling
from minigpt.serve.engine import Engine, SampleRequest, Token
from minigpt.utils.errors import Diverged

pytestmark = pytest.mark.gpu

SOME = ("soft cap", "scaled rope", "long ngram", "embed_norm", "gelu_tanh, biases", "mup, post-norm", "wide heads")
VARIED = {**ARCHITECTURES, **{name: EVERY[name] for name in SOME}}  # with every setting that makes tensors
RECIPES = ("fast_gpu", "best_gpu", "nanogpt_gpu")
FLOAT32 = "trainer.precision=32-true"
ADAM = {"betas": (0.9, 0.95), "weight_decay": 0.1}
MUON = {"adam_lr": 0.01, "betas": (0.9, 0.95), "ngram_weight_decay": 0.0, "newton_schulz_steps": 5}


@pytest.fixture
def device() -> torch.device:
    return torch.device(TEST_DEVICE)


@pytest.fixture
def on_gpu() -> list[str]:
    """Overrides of a run on the GPU, in the precision that it chooses."""
    return [f"trainer={'cpu' if TEST_DEVICE == 'cpu' else 'gpu'}", "trainer.precision=auto"]


@pytest.fixture
def float32() -> None:
    """Compute matrix products without TF32, which a run of this process may have allowed."""
    torch.backends.cuda.matmul.allow_tf32 = False


def losses(folder: Path, name: str = "train_loss") -> list[float]:
    return column(folder, name)


def different_tensors(one: Path, other: Path) -> list[str]:
    """The names of the tensors of weights, optimizer, EMA and random states that differ."""
    parts = ("state_dict", "optimizer_states", "unaveraged", "ema", "rng")
    (left, spec), (right, other_spec) = (
        tree_flatten_with_path([read(folder / LAST).get(part) for part in parts]) for folder in (one, other)
    )
    assert spec == other_spec
    pairs = zip(left, right, strict=True)
    return [keystr(path) for (path, a), (_, b) in pairs if isinstance(a, Tensor) and not torch.equal(a, b)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_in_bfloat16_if_the_gpu_has_it(
    small: list[str], on_gpu: list[str], device: torch.device, tmp_path: Path, recipe: str
) -> None:
    size = [*small, "model.n_inner=null"] if device.type == "cpu" else small[:2]  # on a GPU only the text is small
    given = [*size, *on_gpu, f"experiment={recipe}", "max_steps=50", "eval_every=25", "log_every=5"]
    summary = minigpt.train([*given, f"hydra.run.dir={tmp_path}/run"])
    found = losses(tmp_path / "run")
    assert all(map(isfinite, found))
    assert found[-1] < found[0] - 0.05
    assert summary["device"] == metrics.device_name(device)
    assert summary["precision"] == ("bf16-mixed" if has_bfloat16(device) else "32-true")


# Blocks of 256 tokens, because a sum over several tiles of keys may have any order.
@pytest.mark.parametrize(
    "settings",
    [
        "",
        "model.dropout=0.1 trainer.accumulate_grad_batches=2",
        "optimizer=muon ema_decay=0.9",
        "compile=true",
        FLOAT32,
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    train: Any, on_gpu: list[str], tmp_path: Path, settings: str
) -> None:
    given = [*on_gpu, *settings.split(), "model.block_size=256", "callbacks.checkpoint.save_top_k=2"]
    whole = train(*given, folder=tmp_path / "whole").folder
    resumed = train(*given, f"resume={whole}/checkpoints/step-10.safetensors", folder=tmp_path / "resumed").folder
    assert different_tensors(whole, resumed) == []
    assert losses(resumed) == losses(whole)[2:]  # of steps 15 and 20


@pytest.mark.parametrize("first", ["cpu", "gpu"])
def test_a_run_changes_between_cpu_and_gpu(train: Any, on_gpu: list[str], tmp_path: Path, first: str) -> None:
    devices = [["trainer=cpu", FLOAT32], [*on_gpu, FLOAT32]]
    before, after = devices if first == "cpu" else devices[::-1]
    expected = train(*devices[0], folder=tmp_path / "cpu").folder
    started = train(*before, "callbacks.checkpoint.save_top_k=2", folder=tmp_path / "started").folder
    resumed = train(*after, f"resume={started}/checkpoints/step-10.safetensors", folder=tmp_path / "resumed").folder
    assert losses(resumed, "val_loss") == pytest.approx(losses(expected, "val_loss")[1:], rel=0.01)
    assert load_checkpoint(resumed)[0].wte.weight.device.type == "cpu"


def test_compilation_does_not_change_the_losses(train: Any, on_gpu: list[str], tmp_path: Path) -> None:
    eager, compiled = (
        losses(train(*on_gpu, FLOAT32, f"compile={value}", folder=tmp_path / value).folder)
        for value in ("false", "true")
    )
    assert compiled == pytest.approx(eager, rel=0.01)


def test_the_mfu_of_a_known_gpu_is_logged(
    train: Any, on_gpu: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = metrics.device_name(device)
    peak = metrics.PEAK_FLOPS.get(name, 1e12)
    monkeypatch.setitem(metrics.PEAK_FLOPS, name, peak)
    folder = train(*on_gpu).folder
    logged, speeds = column(folder, "mfu"), column(folder, "flops_per_second")
    assert len(logged) == 4
    assert 0 < min(logged) <= max(logged) < 1
    assert logged == pytest.approx([speed / peak for speed in speeds])


def test_a_run_that_diverges_stops_and_keeps_its_last_checkpoint(train: Any, on_gpu: list[str], tmp_path: Path) -> None:
    """From a checkpoint with huge weights; a GPU is read once per row of metrics."""
    whole = train(*on_gpu, "callbacks.checkpoint.save_top_k=2", folder=tmp_path / "whole").folder
    step_10 = f"resume={whole}/checkpoints/step-10.safetensors"
    with pytest.raises(Diverged, match=r"(is \w+|not finite) at step 1[1-5] \(learning rate"):
        train(*on_gpu, step_10, "optimizer.lr=1e30", "eval_every=20", folder=tmp_path / "run")
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"
    assert not (tmp_path / "run" / LAST).exists()


def test_a_killed_run_recovers_on_the_gpu() -> None:
    command = [sys.executable, "-m", "tests.robustness.faults", "--only", "SIGKILL at", "--trials", "1"]
    env = {**os.environ, "MINIGPT_FAULTS_TRAINER": "cpu" if TEST_DEVICE == "cpu" else "gpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("settings", ["model.position=learned", "model.position=rope model.ngram=3 model.smear=1"])
@pytest.mark.usefixtures("float32")
def test_greedy_text_is_that_of_a_cpu(train: Any, on_gpu: list[str], device: torch.device, settings: str) -> None:
    folder = train(*on_gpu, *settings.split(), "max_steps=100", "eval_every=100").folder
    on_cpu, on_device = (load_checkpoint(folder, device=place)[0] for place in ("cpu", device))
    prompts = [[1, 2, 3], [5]]
    expected, found = (
        generate(model, prompts, max_new_tokens=40, temperature=0, logprobs=True) for model in (on_cpu, on_device)
    )
    assert [sample.tokens for sample in found] == [sample.tokens for sample in expected]
    for one, other in zip(found, expected, strict=True):
        assert_close(Tensor(one.logprobs), Tensor(other.logprobs), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("float32")
def test_64_streams_are_generated_as_one(device: torch.device, dtype: torch.dtype) -> None:
    model = make_model().to(device, dtype)
    samples = generate(model, [1, 2], max_new_tokens=30, temperature=0.8, top_p=0.9, num_samples=64, seed=7)
    assert {len(sample.tokens) for sample in samples} == {30}
    assert len({tuple(sample.tokens) for sample in samples}) == 64
    if dtype == torch.float32:
        (alone,) = generate(model, [1, 2], max_new_tokens=30, temperature=0.8, top_p=0.9, seed=7 + 63)
        assert samples[63].tokens == alone.tokens


def test_a_checkpoint_of_the_gpu_is_sampled_plotted_and_exported(
    train: Any, launch: Callable[..., Any], on_gpu: list[str], device: torch.device, tmp_path: Path
) -> None:
    folder = train(*on_gpu, "callbacks=attention").folder
    assert len(list((folder / "attention").glob("*.png"))) == 2
    commands: dict[str, list[str]] = {
        "sample.py": ["--device", device.type, "--num-samples", "3", "--max-new-tokens", "20", "--dtype", "bfloat16"],
        "attention.py": ["--prompt", "quick brown", "--ablation", f"{tmp_path}/ablation.png"],
        "export.py": ["--to", "safetensors", "--out", f"{tmp_path}/exported.safetensors"],
    }
    for script, arguments in commands.items():
        done = launch(script, str(folder), *arguments)
        assert done.returncode == 0, done.stderr
    original, exported = (load_checkpoint(path)[0] for path in (folder, tmp_path / "exported.safetensors"))
    assert all(map(torch.equal, original.parameters(), exported.parameters()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("make", ["adamw", "muon"])
@pytest.mark.usefixtures("float32")
def test_an_optimizer_takes_the_steps_of_a_cpu(device: torch.device, make: str, dtype: torch.dtype) -> None:
    """Muon orthogonalizes float32 in bfloat16 on a GPU."""
    start = make_model().to(dtype)
    ends = []
    for place in (torch.device("cpu"), device):
        model = copy.deepcopy(start).to(place)
        optimizer: Any = (
            adamw(model, lr=0.01, **ADAM)
            if make == "adamw"
            else muon(model, lr=0.02, weight_decay=0.1, momentum=0.9, **MUON)
        )
        drawn = torch.Generator().manual_seed(0)
        for _ in range(5):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=drawn, dtype=dtype).to(place)
            optimizer.step()
        ends.append([p.detach().cpu() for p in model.parameters()])
    tolerance = 1e-9 if dtype == torch.float64 else 0.05 if make == "muon" else 1e-4
    for before, expected, found in zip(start.parameters(), *ends, strict=True):
        assert (found - expected).norm() <= tolerance * (expected - before.detach()).norm()


@pytest.mark.parametrize("read_from", ["device", "disk"])
def test_batches_on_the_gpu_equal_those_of_a_cpu(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, read_from: str
) -> None:
    if read_from == "disk":
        monkeypatch.setattr(batches, "_MAX_DEVICE_TOKENS", 0)
    tokens: Any = np.random.default_rng(0).integers(0, 60_000, 5000).astype(np.uint16)
    order = WindowOrder(len(tokens), 16, seed=3)
    rank = {"rank": 0, "world_size": 1}

    def of(place: torch.device) -> list[tuple[Tensor, Tensor]]:
        train = Batches(tokens, order, batch_size=8, first=lambda: 0, stop=200, repeat=0, device=place, **rank)
        val = ValidationBatches(tokens, block_size=16, batch_size=8, device=place, **rank)
        return [*islice(train, 100), *val]

    for expected, found in zip(of(torch.device("cpu")), of(device), strict=True):
        for one, other in zip(expected, found, strict=True):
            assert (other.device.type, other.dtype) == (device.type, torch.int64)
            assert torch.equal(one, other.cpu())


@pytest.mark.parametrize(
    ("strategy", "more"), [("ddp", []), ("ddp", ["optimizer=muon"]), ("fsdp", []), ("fsdp", ["optimizer=muon"])]
)
def test_one_rank_trains_as_one_device(
    train: Any, small: list[str], on_gpu: list[str], tmp_path: Path, strategy: str, more: list[str]
) -> None:
    """Over NCCL on a GPU."""
    given = [*on_gpu, FLOAT32, *more]
    expected = losses(train(*given, folder=tmp_path / "one").folder)
    accelerator = f"trainer.accelerator={'cpu' if TEST_DEVICE == 'cpu' else 'gpu'}"
    spread = [f"trainer={strategy}", accelerator, "trainer.devices=1", f"hydra.run.dir={tmp_path}/spread"]
    train_on_ranks([[*small, FLOAT32, *more, *spread]], ranks=1)
    assert losses(tmp_path / "spread") == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("changes", VARIED.values(), ids=VARIED)
@pytest.mark.usefixtures("float32")
def test_every_architecture_computes_on_the_gpu(device: torch.device, changes: dict[str, Any]) -> None:
    config = {"block_size": 4, "vocab_size": 256, "n_layer": 1, "n_head": 4, "n_embd": 32, **changes}
    torch.manual_seed(0)
    model, ids = GPT(GPTConfig(**config)).eval(), torch.arange(12).view(3, 4)
    (loss, maps), (found, their_maps) = (
        (model.to(place)(ids.to(place), ids.to(place)), attention_maps(model, ids[0].to(place)))
        for place in ("cpu", device)
    )
    assert_close(found.cpu(), loss, atol=1e-4, rtol=1e-4)
    assert_close(their_maps, maps, atol=1e-5, rtol=1e-4)
    filters = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "logprobs": True}
    samples = generate(model, [[1, 2, 3], [4] * 7], max_new_tokens=6, num_samples=2, **filters)
    assert [len(sample.tokens) for sample in samples] == [6] * 4  # beyond block_size
    assert score(model, ids[0], [1], n_top=3).logprobs.device.type == "cpu"


def test_autocast_keeps_the_residual_stream_and_the_loss_in_float32(device: torch.device) -> None:
    config = {"position": "rope", "qk_norm": True, "norm": "rmsnorm", "activation": "swiglu", "logit_softcap": 15.0}
    model, outputs = GPT(GPTConfig(vocab_size=60, n_layer=1, n_head=4, n_embd=32, **config)).to(device), {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, args, y, name=name: outputs.update({name: y.dtype}))
    ids = torch.zeros(3, 4, dtype=torch.long, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        assert model(ids, ids).dtype == torch.float32
    assert {name for name, dtype in outputs.items() if dtype == torch.bfloat16} == {
        "lm_head",
        *(f"blocks.0.{name}" for name in ("attention", "attention.qkv", "attention.out", "mlp", "mlp.up", "mlp.down")),
    }


def test_the_server_draws_on_the_gpu(device: torch.device) -> None:
    async def serve(*settings: Sampling) -> list[Token]:
        requests = [SampleRequest([1, 2, i], 4, sampling) for i, sampling in enumerate(settings)]
        return [token async for token in Engine(make_model().to(device), ByteTokenizer()).generate(*requests)]

    settings = [Sampling(temperature=0), Sampling(top_k=3), Sampling(repetition_penalty=1.5)]
    assert len(asyncio.run(serve(*settings))) == 3 * 4


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=60, block_size=32, n_layer=2, n_head=2, n_embd=64)).eval()
