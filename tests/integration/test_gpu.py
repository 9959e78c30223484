"""Every path that only a CUDA GPU takes, compared with a CPU or with an ordinary run on the GPU.

`MINIGPT_TEST_DEVICE=cpu python -m pytest -m gpu` rehearses these tests on a CPU, to test the tests.
"""

import asyncio
import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import every_architecture
from models import make_model
from ranks import train_on_ranks
from robustness.faults.tools import different_leaves
from small_runs import ROOT, TEST_DEVICE, column
from torch import Tensor
from torch.testing import assert_close

import minigpt
from minigpt import generate, load_checkpoint
from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.format import read
from minigpt.data import batches
from minigpt.data.batches import Batches, ValidationBatches, WindowOrder
from minigpt.data.tokenizer import ByteTokenizer
from minigpt.extras.interpret.heads import attention_maps
from minigpt.extras.playground.engine import Engine, SampleRequest, Token
from minigpt.model.attention import attend
from minigpt.model.ops import NORMS
from minigpt.runs.callbacks import metrics
from minigpt.runs.run_dir import read_summary
from minigpt.sampling.generation import score
from minigpt.sampling.settings import SamplingSettings
from minigpt.training.optim import adamw, muon
from minigpt.training.precision import training_precision
from minigpt.utils.errors import NonFiniteLoss

pytestmark = pytest.mark.gpu

DEVICE = torch.device(TEST_DEVICE)
KIND = "cpu" if TEST_DEVICE == "cpu" else "gpu"
ON_GPU = [f"trainer={KIND}", "trainer.precision=auto"]  # in the precision that a run chooses
FLOAT32 = "trainer.precision=32-true"
STEP_10 = "checkpoints/step-10.safetensors"  # with this setting:
KEEP_STEP_10 = "callbacks.checkpoint.save_top_k=2"
ADAM: Any = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
MUON: Any = {**ADAM, "adam_lr": 0.01, "momentum": 0.9, "newton_schulz_steps": 5}
MUON |= {"ngram_weight_decay": 0.0}

Train = Callable[..., Any]


@pytest.fixture(autouse=True)
def _float32() -> Iterator[None]:
    # Compute matrix products without TF32, which a run of this process allows
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


def gpu_model(**settings: Any) -> minigpt.GPT:
    return make_model(**{"std": None, "vocab_size": 60, "block_size": 32, "n_embd": 64, **settings})


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fast_gpu", "best_gpu", "nanogpt_gpu"])
def test_a_recipe_trains_in_16_bits_if_the_gpu_is_faster_in_them(
    small: list[str], tmp_path: Path, recipe: str
) -> None:
    # On a GPU only the text is small
    size = [*small, "model.layer_repeats=1"] if KIND == "cpu" else small[:2]
    given = [*size, *ON_GPU, f"experiment={recipe}", "max_steps=50", "eval_every=25", "log_every=5"]
    summary = minigpt.train([*given, f"hydra.run.dir={tmp_path}/run"])
    found = column(tmp_path / "run", "train_loss")
    assert all(map(isfinite, found))
    assert found[-1] < found[0] - 0.05
    assert summary["device"] == metrics.device_name(DEVICE)
    assert summary["precision"] == training_precision(DEVICE.type)


# Blocks of 256 tokens, because a sum over several tiles of keys may have any order.
MIXED = "optimizer=muon ema_decay=0.9 model.dropout=0.1 trainer.accumulate_grad_batches=2"
# Compiled sums over equal tokens may have any order.
COMPILED = "compile=true trainer.deterministic=true"
# Three models, of steps 1 to 7, to 14 and to 20; the second learns when the run resumes.
CHAINED = "callbacks=generations ema_decay=0.9 schedule.warmup_steps=2"


@pytest.mark.parametrize("settings", ["", MIXED, COMPILED, CHAINED, FLOAT32])
def test_a_resumed_run_equals_an_uninterrupted_one(
    train: Train, tmp_path: Path, settings: str
) -> None:
    given = [*ON_GPU, *settings.split(), "model.block_size=256", KEEP_STEP_10]
    try:
        whole = train(*given, folder=tmp_path / "whole").folder
        resumed = train(*given, f"resume={whole}/{STEP_10}", folder=tmp_path / "resumed").folder
    finally:
        torch.use_deterministic_algorithms(False)
    for name in different_leaves(whole / LAST, resumed / LAST):
        assert name.startswith(("['callbacks']", "['minigpt']"))
    assert column(resumed, "train_loss") == column(whole, "train_loss")[2:]  # of steps 15 and 20


def test_a_run_changes_between_cpu_and_gpu(train: Train, tmp_path: Path) -> None:
    devices = {"cpu": ["trainer=cpu", FLOAT32], "gpu": [*ON_GPU, FLOAT32]}
    for name, on in devices.items():
        train(*on, KEEP_STEP_10, folder=tmp_path / name)
    expected = column(tmp_path / "cpu", "val_loss")[1:]
    for first, then in (("cpu", "gpu"), ("gpu", "cpu")):
        resume = f"resume={tmp_path / first}/{STEP_10}"
        resumed = train(*devices[then], resume, folder=tmp_path / f"on {then}").folder
        assert column(resumed, "val_loss") == pytest.approx(expected, rel=0.01)
        assert load_checkpoint(resumed)[0].wte.weight.device.type == "cpu"


@pytest.mark.slow
def test_compilation_does_not_change_the_losses(train: Train, tmp_path: Path) -> None:
    eager = train(*ON_GPU, FLOAT32, "compile=false", folder=tmp_path / "eager").folder
    compiled = train(*ON_GPU, FLOAT32, "compile=true", folder=tmp_path / "compiled").folder
    expected = column(eager, "train_loss")
    assert column(compiled, "train_loss") == pytest.approx(expected, rel=0.01)


def test_the_mfu_of_a_known_gpu_is_logged(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    name = metrics.device_name(DEVICE)
    peak = metrics.PEAK_FLOPS.get(name, 1e12)
    monkeypatch.setitem(metrics.PEAK_FLOPS, name, peak)
    folder = train(*ON_GPU).folder
    logged = column(folder, "mfu")
    assert len(logged) == 4
    assert 0 < min(logged) <= max(logged) < 1
    assert logged == pytest.approx([s / peak for s in column(folder, "flops_per_second")])


def test_a_run_that_diverges_stops_and_keeps_its_last_checkpoint(train: Train) -> None:
    # The losses of a GPU are read once per row of metrics
    folder = train(*ON_GPU, "pause_at=10").folder
    with pytest.raises(NonFiniteLoss, match=r"(is \w+|not finite) at step 1[1-5] \(learning rate"):
        train(*ON_GPU, "resume=auto", "optimizer.lr=1e30")
    assert read_summary(folder)["status"] == "failed"
    assert read(folder / LAST)["global_step"] == 10


@pytest.mark.slow
def test_a_killed_run_recovers_on_the_gpu() -> None:
    command = [sys.executable, "-m", "robustness.faults", "--only", "SIGKILL at", "--trials", "1"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}/tests", "MINIGPT_FAULTS_TRAINER": KIND}
    options: Any = {"capture_output": True, "encoding": "utf-8", "check": False, "timeout": 600}
    done = subprocess.run(command, cwd=ROOT, env=env, **options)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "settings", ["model.position=learned", "model.position=rope model.ngram=3 model.smear=1"]
)
def test_greedy_text_is_that_of_a_cpu(train: Train, settings: str) -> None:
    folder = train(*ON_GPU, *settings.split(), "max_steps=100", "eval_every=100").folder
    torch.backends.cuda.matmul.allow_tf32 = False  # as before the run
    options = {"max_new_tokens": 40, "temperature": 0, "logprobs": True}
    models = [load_checkpoint(folder, device=place)[0] for place in ("cpu", DEVICE)]
    samples = [generate(model, [[1, 2, 3], [5]], **options) for model in models]
    for one, other in zip(*samples, strict=True):
        assert one.tokens == other.tokens
        assert_close(Tensor(one.logprobs), Tensor(other.logprobs), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_64_streams_are_generated_as_one(dtype: torch.dtype) -> None:
    model = gpu_model().to(DEVICE, dtype)
    drawn = {"max_new_tokens": 30, "temperature": 0.8, "top_p": 0.9}
    samples = generate(model, [1, 2], num_samples=64, seed=7, **drawn)
    assert {len(sample.tokens) for sample in samples} == {30}
    assert len({tuple(sample.tokens) for sample in samples}) == 64
    if dtype == torch.float32:
        (alone,) = generate(model, [1, 2], seed=7 + 63, **drawn)
        assert samples[63].tokens == alone.tokens


def test_a_checkpoint_of_the_gpu_is_sampled_plotted_and_exported(
    train: Train, call: Any, tmp_path: Path
) -> None:
    folder = train(*ON_GPU, "callbacks=attention").folder
    assert len(list((folder / "attention").glob("*.png"))) == 2
    commands = {
        "sample.py": f"--device {TEST_DEVICE} --num-samples 3 --max-new-tokens 20 --dtype bfloat16",
        "attention.py": f"--prompt quick --ablation {tmp_path}/ablation.png",
        "export.py": f"--to safetensors --out {tmp_path}/exported.safetensors",
    }
    for script, arguments in commands.items():
        done = call(script, str(folder), *arguments.split())
        assert done.returncode == 0, done.stderr
    original, _ = load_checkpoint(folder)
    exported, _ = load_checkpoint(tmp_path / "exported.safetensors")
    assert all(map(torch.equal, original.parameters(), exported.parameters()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("make", [adamw, muon])
def test_an_optimizer_takes_the_steps_of_a_cpu(make: Any, dtype: torch.dtype) -> None:
    # Muon orthogonalizes float32 in bfloat16 on a GPU
    start = gpu_model().to(dtype)
    ends = []
    for place in (torch.device("cpu"), DEVICE):
        model = copy.deepcopy(start).to(place)
        optimizer = make(model, **(ADAM if make is adamw else MUON))
        drawn = torch.Generator().manual_seed(0)
        for _ in range(5):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=drawn, dtype=dtype).to(place)
            optimizer.step()
        ends.append([p.detach().cpu() for p in model.parameters()])
    in_float32 = 0.05 if make is muon else 1e-4
    tolerance = 1e-9 if dtype == torch.float64 else in_float32
    for before, expected, found in zip(start.parameters(), *ends, strict=True):
        assert (found - expected).norm() <= tolerance * (expected - before.detach()).norm()


@pytest.mark.parametrize(
    "tokens_on_device", [batches._MAX_DEVICE_TOKENS, 0], ids=["device", "disk"]
)
def test_batches_on_the_gpu_equal_those_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch, tokens_on_device: int
) -> None:
    monkeypatch.setattr(batches, "_MAX_DEVICE_TOKENS", tokens_on_device)
    tokens: Any = np.random.default_rng(0).integers(0, 60_000, 5000).astype(np.uint16)
    order = WindowOrder(len(tokens), 16, seed=3)

    def of(place: torch.device) -> list[tuple[Tensor, Tensor]]:
        options: Any = {"batch_size": 8, "device": place, "rank": 0, "world_size": 1}
        train = Batches(tokens, order, first=lambda: 0, stop=200, repeat=0, **options)
        return [*islice(train, 100), *ValidationBatches(tokens, block_size=16, **options)]

    for expected, found in zip(of(torch.device("cpu")), of(DEVICE), strict=True):
        for one, other in zip(expected, found, strict=True):
            assert (other.device.type, other.dtype) == (DEVICE.type, torch.int64)
            assert torch.equal(one, other.cpu())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_rank_trains_as_one_device(
    train: Train, small: list[str], tmp_path: Path, strategy: str, optimizer: str
) -> None:
    # Over NCCL on a GPU
    given = [FLOAT32, f"optimizer={optimizer}"]
    expected = column(train(ON_GPU[0], *given, folder=tmp_path / "one").folder, "train_loss")
    spread = [f"trainer={strategy}", f"trainer.accelerator={KIND}", "trainer.devices=1"]
    train_on_ranks([[*small, *spread, *given, f"hydra.run.dir={tmp_path}/spread"]], ranks=1)
    assert column(tmp_path / "spread", "train_loss") == pytest.approx(expected, rel=1e-3)


@every_architecture
def test_every_architecture_computes_on_the_gpu(settings: dict[str, Any]) -> None:
    sizes = {"block_size": 4, "vocab_size": 256, "n_layer": 1, "n_head": 4, "n_embd": 32}
    model = gpu_model(**{**sizes, **settings})
    ids = torch.arange(12).view(3, 4)
    found = []
    for place in ("cpu", DEVICE):
        loss = model.to(place)(ids.to(place), ids.to(place))
        found.append((loss.cpu(), attention_maps(model, ids[0].to(place))))
    (loss, maps), (their_loss, their_maps) = found
    assert_close(their_loss, loss, atol=1e-4, rtol=1e-4)
    assert_close(their_maps, maps, atol=1e-5, rtol=1e-4)
    options = {"max_new_tokens": 6, "num_samples": 2, "logprobs": True, "temperature": 0.7}
    options |= {"top_k": 9, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2}
    samples = generate(model, [[1, 2, 3], [4] * 7], **options)
    assert [len(sample.tokens) for sample in samples] == [6] * 4  # beyond block_size
    assert score(model, ids[0], [1], n_top=3).logprobs.device.type == "cpu"


@pytest.mark.skipif(KIND == "cpu", reason="measures the memory of a GPU")
@pytest.mark.parametrize("masked", [False, True])
def test_grouped_queries_in_float32_or_with_a_mask_need_no_memory_for_all_scores(
    masked: bool,
) -> None:
    T, dtype = 4096, torch.bfloat16 if masked else torch.float32
    q, k, v = (torch.randn(1, heads, T, 64, device=DEVICE, dtype=dtype) for heads in (8, 2, 2))
    mask = torch.ones(T, T, dtype=torch.bool, device=DEVICE).tril() if masked else None
    expected = attend(q.float().cpu(), k.float().cpu(), v.float().cpu(), causal=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = attend(q, k, v, causal=not masked, mask=mask)
    scores = 8 * T * T * 2  # bytes, in 16 bits
    assert torch.cuda.max_memory_allocated() - before < scores / 2
    assert_close(found.float().cpu(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_keeps_the_loss_in_float32_and_in_float16_or_on_a_cpu_the_residual_stream(
    half: torch.dtype,
) -> None:
    config = {"n_layer": 1, "n_head": 4, "n_embd": 32, "qk_norm": True, "position": "rope"}
    config |= {"norm": "rmsnorm_noscale", "activation": "swiglu", "logit_softcap": 15.0}
    model = gpu_model(**config).to(DEVICE)
    names = {module: name for name, module in model.named_modules()}
    outputs = {}
    for module in names:
        module.register_forward_hook(lambda m, _, y: outputs.update({names[m]: y.dtype}))
    ids = torch.zeros(3, 4, dtype=torch.long, device=DEVICE)
    with torch.autocast(DEVICE.type, half):
        assert model(ids, ids).dtype == torch.float32
    in_block = ("attention", "attention.qkv", "attention.out", "mlp", "mlp.up", "mlp.down")
    reduced = {"lm_head", *(f"blocks.0.{name}" for name in in_block)}
    if KIND == "gpu" and half == torch.bfloat16:
        reduced |= {"final_norm", "blocks.0", "blocks.0.norm_1", "blocks.0.norm_2"}
    assert {name for name, dtype in outputs.items() if dtype == half} == reduced


def test_autocast_does_not_round_the_weights_of_norms() -> None:
    # As the residual stream
    x = Tensor([1, -1] * 4).to(DEVICE, torch.bfloat16 if KIND == "gpu" else torch.float32)
    weight = torch.full((8,), 1 + 2**-9, device=DEVICE)  # in bfloat16: 1
    with torch.autocast(DEVICE.type, torch.bfloat16):
        for norm in NORMS.values():
            assert_close(norm(x, weight).float(), x.float() * weight, atol=1e-4, rtol=0)


def test_models_generate_at_once_as_one_after_another() -> None:
    def texts(model: minigpt.GPT) -> list[list[int]]:
        options: Any = {"max_new_tokens": 40, "temperature": 0}
        return [generate(model, [1], num_samples=n, **options)[-1].tokens for n in range(1, 9)]

    models = [gpu_model(n_layer=n_layer).to(DEVICE) for n_layer in (1, 2, 3)]
    expected = [texts(model) for model in models]
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(texts, models)) == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_gpu_that_is_not_the_current_one_generates_the_same_text() -> None:
    model = gpu_model()
    options = {"max_new_tokens": 30, "temperature": 0}
    first = generate(model.to("cuda:0"), [1, 2], **options)
    assert generate(model.to("cuda:1"), [1, 2], **options) == first


def test_the_server_draws_on_the_gpu() -> None:
    settings: list[Any] = [{"temperature": 0}, {"top_k": 3}, {"repetition_penalty": 1.5}]
    requests = [SampleRequest([1, 2, 3], 4, SamplingSettings(**given)) for given in settings]

    async def serve() -> list[Token]:
        engine = Engine(gpu_model().to(DEVICE), ByteTokenizer())
        return [token async for token in engine.generate(*requests)]

    assert len(asyncio.run(serve())) == 3 * 4
