"""What a CUDA GPU runs, without one: devices by fake tensors, dtypes by autocast, graph breaks by `torch.compile`.

A fake tensor has a shape, a dtype and a device, but no values, and an operation on tensors of two devices raises. What
the host reads of it is zeros. Backward passes of fake CUDA tensors need a GPU; those of the compile tests are real.
"""

import asyncio
import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from conftest import CONFIGS
from hydra import compose, initialize_config_dir
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.plugins.precision import MixedPrecision
from test_kv_decoder import EVERY
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import minigpt.data.batches
from minigpt import GPT, GPTConfig
from minigpt.data.batches import Batches, ValidationBatches, WindowOrder
from minigpt.data.tokenizer import ByteTokenizer
from minigpt.ema import EMA
from minigpt.generation import generate, score
from minigpt.interpret.heads import attention_maps, head_ablation, induction_scores, without_heads
from minigpt.model import smear
from minigpt.runs.train import partial_from_config
from minigpt.sampling import Sampling
from minigpt.serve import engine
from minigpt.training import LanguageModel

CUDA = torch.device("cuda", 0)
RECIPES = ["fast_gpu", "best_gpu", "nanogpt_gpu"]
OPTIMIZERS = ["adamw", "muon_fast"]
SMALL = {"block_size": 4, "vocab_size": 256, "n_layer": 1, "n_head": 4, "n_embd": 32}
CONSTANT = {"schedule": lambda step, max_steps: 1.0, "max_steps": 10}


class HostReads(TorchFunctionMode):
    """Read ones from fake tensors; check that copies to the GPU that do not wait for it are from pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x = args[0] if args else None
        if function in (Tensor.tolist, Tensor.item):
            return np.ones(tuple(x.shape), int).tolist()
        if function in (Tensor.__bool__, Tensor.__int__, Tensor.__float__):
            return {"__bool__": True, "__int__": 1, "__float__": 1.0}[function.__name__]
        if function is Tensor.pin_memory:
            self.pinned.append(x)
            return x
        if function is Tensor.to and kwargs and kwargs.get("non_blocking") and not x.is_cuda:
            assert any(x is pinned for pinned in self.pinned)
        return function(*args, **(kwargs or {}))


@contextmanager
def autocast() -> Iterator[None]:
    """Enable autocast for CUDA, which torch.autocast does only if there is a GPU."""
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    yield
    torch.set_autocast_enabled("cuda", False)


@pytest.fixture
def gpu_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., GPT]]:
    """Return a function that builds a model on the CPU and moves it to a fake GPU; all new tensors are fake ones."""
    (library,) = Path(torch.__file__).with_name("lib").glob("libc10.[sd]*")
    # A torch without CUDA has no device guard for it: that of meta tensors, which does nothing, takes its place.
    guards = (ctypes.c_void_p * 15).in_dll(ctypes.CDLL(str(library)), "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[1]
    monkeypatch.setattr(fake_tensor, "CONSTANT_NUMEL_LIMIT", -1)  # constants would be copied to a real GPU
    guards[1] = before or guards[14]  # numbers of c10/core/DeviceType.h

    def build(dtype: torch.dtype = torch.float32, **config: Any) -> GPT:
        with unset_fake_temporarily():
            model = GPT(GPTConfig(**config)).to(dtype)
        model.to(CUDA)
        if model.config.tie_embeddings:  # fake parameters are new objects
            model.lm_head.weight = model.wte.weight
        return model

    with FakeTensorMode(allow_non_fake_inputs=True), HostReads():
        yield build
    guards[1] = before


def recipe(name: str, *overrides: str) -> Any:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", overrides=[f"experiment={name}", "model.vocab_size=65", *overrides])


def tokens(shape: tuple[int, ...] = (3, 4), device: torch.device = CUDA) -> Tensor:
    return torch.zeros(shape, dtype=torch.long, device=device)


# Devices.


def test_a_tensor_on_the_wrong_device_raises(gpu_model: Callable[..., GPT]) -> None:
    """Mistakes that the tests below would find."""
    model = gpu_model(**SMALL, position="rope")
    with pytest.raises(RuntimeError, match="same device"):
        model(tokens(device=torch.device("cpu")))
    with pytest.raises(RuntimeError, match="same device"):
        smear(torch.ones(3, 8, 4, device=CUDA), nn.ParameterList([torch.ones(4)]), None)
    with pytest.raises(RuntimeError, match="same device"):
        Sampling(repetition_penalty=2.0).draw(torch.ones(2, 9, device=CUDA), torch.rand(2), torch.ones(2, 9) > 0)
    model.rotary = model.rotary.cpu()
    with pytest.raises(RuntimeError, match="same device"):
        model(tokens())


@pytest.mark.parametrize("changes", EVERY.values(), ids=EVERY)
def test_every_architecture_trains_generates_and_is_inspected_on_one_device(
    gpu_model: Callable[..., GPT], changes: dict[str, Any]
) -> None:
    model = gpu_model(**SMALL | {"dropout": 0.1, "ngram_dropout": 0.1} | changes)
    for precision in (nullcontext, autocast):
        with precision():
            loss = model(tokens(), tokens())
        assert (loss.device, loss.dtype) == (CUDA, torch.float32)
    filters = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "logprobs": True}
    samples = generate(model, [[1, 2, 3], [4] * 7], max_new_tokens=6, num_samples=2, **filters)
    assert [len(sample.tokens) for sample in samples] == [6] * 4  # beyond block_size
    scores = score(model, tokens((7,)), [1], n_top=3)
    assert {scores.logprobs.device.type, attention_maps(model, tokens((4,))).device.type} == {"cpu"}
    assert without_heads(model, [(0, 1), (0, 3)])(tokens()).device == CUDA


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_in_half_precision_generates_and_is_inspected(gpu_model: Callable[..., GPT], dtype: torch.dtype) -> None:
    options = {"position": "rope", "qk_norm": True, "norm": "rmsnorm", "activation": "swiglu", "n_kv_head": 2}
    model = gpu_model(dtype, **SMALL, **options, ngram=3, smear=1)
    assert len(generate(model, [1, 2], max_new_tokens=6)[0].tokens) == 6
    increases, _ = head_ablation(model, [(tokens(), tokens())])
    assert increases.shape == induction_scores(model, 256).shape == (1, 4)


@pytest.mark.parametrize("max_on_device", [1 << 28, 0], ids=["tokens on the GPU", "tokens on the CPU"])
def test_batches_are_on_the_gpu(
    gpu_model: Callable[..., GPT], monkeypatch: pytest.MonkeyPatch, max_on_device: int
) -> None:
    monkeypatch.setattr(minigpt.data.batches, "_MAX_DEVICE_TOKENS", max_on_device)
    options: Any = {"batch_size": 4, "rank": 0, "world_size": 1, "device": CUDA}
    order = WindowOrder(100, 8, 0)
    training = Batches(np.arange(100), order, first=lambda: 0, stop=5, repeat=0, **options)
    validation = ValidationBatches(np.arange(100), block_size=8, **options)  # the last window is padded
    assert (training.read_windows.on_device is None) == (max_on_device == 0)
    for batches in (training, validation):
        read = list(batches)
        assert len(read) == len(batches) > 1
        assert {(x.device, x.dtype, x.size(1)) for batch in read for x in batch} == {(CUDA, torch.int64, 8)}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_a_gpu_trains_and_validates_on_one_device(
    gpu_model: Callable[..., GPT], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A step at the recipe's shapes, with gradients of any values."""
    monkeypatch.setattr("minigpt.optim.has_bfloat16", lambda device: device.type == "cuda")
    cfg = recipe(name)
    model = gpu_model(**cfg.model)
    module = LanguageModel(model, optimizer=partial_from_config(cfg.optimizer), **CONSTANT)
    optimizer, ema = module.make_optimizer(model), EMA(model.parameters(), 0.9)
    corpus, order = np.zeros(1_000_000, np.uint16), WindowOrder(1_000_000, cfg.model.block_size, 0)
    options: Any = {"batch_size": cfg.data.batch_size, "rank": 0, "world_size": 1, "device": CUDA}
    for batch in Batches(corpus, order, first=lambda: 0, stop=2, repeat=0, **options):
        with autocast():
            assert module.training_step(batch, 0).device == CUDA
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        module.configure_gradient_clipping(optimizer, cfg.trainer.gradient_clip_val)
        optimizer.step()
        ema.update()
    ema.swap()
    windows = ValidationBatches(corpus[:10_000], block_size=cfg.model.block_size, **options)
    nats = sum(model(*batch, reduction="sum") for batch in windows)
    state = [x for values in optimizer.state.values() for x in values.values()]
    assert {x.device for x in (module.grad_norm, nats, *ema.shadow, *state)} == {CUDA}
    assert {x.dtype for x in state} == {torch.float32}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_is_on_the_gpu_after_a_resume(gpu_model: Callable[..., GPT], name: str) -> None:
    """A checkpoint is on the CPU. Lightning moves the state of an optimizer except "step", which torch's is to move."""
    make = partial_from_config(recipe("fast_gpu", f"optimizer={name}").optimizer)
    model = gpu_model(**SMALL)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer, resumed = make(model), make(model)
    optimizer.step()
    resumed.load_state_dict(pytree.tree_map_only(Tensor, Tensor.cpu, optimizer.state_dict()))
    _optimizer_to_device(resumed, CUDA)
    resumed.step()
    states = [x for values in resumed.state.values() for x in values.values()]
    assert len(states) >= 2 * len(optimizer.state) - 8  # Muon has one per matrix
    assert {x.device for x in states} == {CUDA}


def test_the_server_draws_on_the_gpu(gpu_model: Callable[..., GPT], monkeypatch: pytest.MonkeyPatch) -> None:
    class Inline:
        """Call at once: fake tensors are made in this thread only."""

        def __init__(self, *args: Any) -> None: ...
        def submit(self, function: Callable[..., Any], *args: Any) -> None:
            function(*args)

    async def serve() -> list[engine.Token]:
        settings = [Sampling(temperature=0), Sampling(top_k=3), Sampling(repetition_penalty=1.5)]
        requests = [engine.Request([1, 2, i], 4, sampling) for i, sampling in enumerate(settings)]
        return [token async for token in engine.Engine(model, ByteTokenizer()).generate(*requests)]

    monkeypatch.setattr(engine, "ThreadPoolExecutor", Inline)
    model = gpu_model(**SMALL, position="rope")
    assert len(asyncio.run(serve())) == 3 * 4


# Precision.


def test_autocast_keeps_the_residual_stream_and_the_loss_in_float32(gpu_model: Callable[..., GPT]) -> None:
    """By the lists of https://docs.pytorch.org/docs/stable/amp.html for CUDA, of which the CPU's differ."""
    options = {"position": "rope", "qk_norm": True, "norm": "rmsnorm", "activation": "swiglu", "n_kv_head": 2}
    model, outputs = gpu_model(**SMALL, **options, logit_softcap=15.0), {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, args, y, name=name: outputs.update({name: y.dtype}))
    with autocast():
        loss = model(tokens(), tokens())
    assert loss.dtype == torch.float32
    assert {name for name, dtype in outputs.items() if dtype == torch.bfloat16} == {
        "lm_head",
        *(f"blocks.0.{name}" for name in ("attention", "attention.qkv", "attention.out", "mlp", "mlp.up", "mlp.down")),
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_in_bfloat16_keeps_weights_gradients_and_state_in_float32(name: str) -> None:
    cfg = recipe("fast_gpu", f"optimizer={name}")
    model = GPT(GPTConfig(**SMALL, position="rope", norm="rmsnorm", qk_norm=True))
    optimizer, ids = partial_from_config(cfg.optimizer)(model), tokens(device=torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(ids), model(ids, ids)
    loss.backward()
    optimizer.step()
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    state = [x for values in optimizer.state.values() for x in values.values()]
    assert {x.dtype for p in model.parameters() for x in (p, p.grad, *state)} == {torch.float32}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_16_mixed_gradients_are_clipped_after_the_loss_scale_is_removed(name: str) -> None:
    """In a fused step, torch would remove it after clipping. Lightning has this precision for GPUs alone."""
    norms = {}
    for precision in ("16-mixed", None):
        torch.manual_seed(0)
        cfg = recipe("fast_gpu", f"optimizer={name}")
        module = LanguageModel(GPT(GPTConfig(**SMALL)), optimizer=partial_from_config(cfg.optimizer), **CONSTANT)
        plugins = [MixedPrecision(precision, "cpu")] if precision else []
        quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = L.Trainer(accelerator="cpu", max_steps=1, gradient_clip_val=1e-3, plugins=plugins, **quiet)
        trainer.fit(module, [(torch.randint(256, (3, 4)), torch.randint(256, (3, 4)))])
        norms[precision] = float(module.grad_norm)
    assert norms["16-mixed"] == pytest.approx(norms[None], rel=0.02)


# Compilation.


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*RECIPES, "checkpoint_blocks"])
def test_a_model_compiles_without_graph_breaks_and_once(name: str, precision: torch.dtype) -> None:
    """Training, validation of whole, last and padded batches, and both again; in bfloat16 as `bf16-mixed`."""
    small = [f"model.{key}={value}" for key, value in SMALL.items() if key != "vocab_size"]
    cfg = recipe(name if name in RECIPES else "best_gpu", *small)
    torch.manual_seed(0)
    model = GPT(GPTConfig(**cfg.model | {"n_inner": None}))
    model.checkpoint_blocks = 1 if name not in RECIPES else None
    torch._dynamo.reset()
    model.compile(fullgraph=True, backend="aot_eager")
    module = LanguageModel(model, optimizer=partial_from_config(cfg.optimizer), **CONSTANT)
    optimizer, ema = module.make_optimizer(model), EMA(model.parameters(), 0.9)
    options: Any = {"batch_size": 4, "rank": 0, "world_size": 1, "device": torch.device("cpu")}
    corpus = np.arange(43) % 65
    for cycle in range(3):
        with torch._dynamo.config.patch(error_on_recompile=cycle > 0):
            order = WindowOrder(len(corpus), 4, 0)
            for batch in Batches(corpus, order, first=lambda: 0, stop=2, repeat=0, **options):
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
                    loss = module.training_step(batch, 0)
                loss.backward()
                module.configure_gradient_clipping(optimizer, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                ema.update()
            ema.swap()
            module.eval()
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
                for windows in ValidationBatches(corpus, block_size=4, **options):
                    model(*windows, reduction="sum")
            module.train()
            ema.swap()
