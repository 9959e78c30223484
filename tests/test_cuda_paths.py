"""What a CUDA GPU runs, without one: devices by fake tensors, dtypes by autocast, graph breaks by `torch.compile`."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from conftest import CONFIGS
from fake_gpu import CUDA, autocast, fake_gpu, model_on_gpu
from hydra import compose, initialize_config_dir
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.plugins.precision import MixedPrecision
from test_generation import ARCHITECTURES
from test_kv_decoder import EVERY
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

import minigpt.data.batches
from minigpt import GPT, GPTConfig
from minigpt.data.batches import Batches, ValidationBatches, WindowOrder
from minigpt.data.tokenizer import ByteTokenizer
from minigpt.ema import EMA
from minigpt.generation import generate, score
from minigpt.interpret.heads import attention_maps, head_ablation, induction_scores, without_heads
from minigpt.ops import ACTIVATIONS
from minigpt.runs.config_checks import partial_from_config
from minigpt.sampling import PerSampleRNG, Sampling
from minigpt.serve import engine
from minigpt.training import LanguageModel

CPU = torch.device("cpu")
RECIPES = ["fast_gpu", "best_gpu", "nanogpt_gpu"]
OPTIMIZERS = ["adamw", "muon_fast"]
SMALL = {"block_size": 4, "vocab_size": 256, "n_layer": 1, "n_head": 4, "n_embd": 32}
LLAMA = {"position": "rope", "qk_norm": True, "norm": "rmsnorm", "activation": "swiglu", "n_kv_head": 2}
SOME = ("soft cap", "scaled rope", "long ngram", "embed_norm", "gelu_tanh, biases", "mup, post-norm", "wide heads")
VARIED = {**ARCHITECTURES, **{name: EVERY[name] for name in SOME}}  # with every setting that makes tensors


@pytest.fixture
def gpu() -> Iterator[None]:
    with fake_gpu():
        yield


def recipe(name: str, *overrides: str) -> Any:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", overrides=[f"experiment={name}", "model.vocab_size=65", *overrides])


def language_model(model: GPT, name: str, *overrides: str) -> LanguageModel:
    """Return the module that trains a model with the optimizer of a recipe."""
    make = partial_from_config(recipe(name, *overrides).optimizer)
    return LanguageModel(model, optimizer=make, schedule=lambda step, max_steps: 1.0, max_steps=10)


def tokens(shape: tuple[int, ...] = (3, 4), device: torch.device = CUDA) -> Tensor:
    return torch.zeros(shape, dtype=torch.long, device=device)


def splits(n: int, block_size: int, batch_size: int, device: torch.device) -> tuple[Batches, ValidationBatches]:
    """Return two training batches and all validation batches of n tokens."""
    corpus, order = np.arange(n) % 65, WindowOrder(n, block_size, 0)
    options: Any = {"batch_size": batch_size, "rank": 0, "world_size": 1, "device": device}
    training = Batches(corpus, order, first=lambda: 0, stop=2, repeat=0, **options)
    return training, ValidationBatches(corpus, block_size=block_size, **options)


def test_a_tensor_on_the_wrong_device_raises(gpu: None) -> None:
    """A mistake that the tests below would find."""
    model = model_on_gpu(**SMALL, position="rope")
    model.rotary = model.rotary.cpu()
    with pytest.raises(RuntimeError, match="same device"):
        model(tokens())


@pytest.mark.parametrize("changes", VARIED.values(), ids=VARIED)
def test_every_architecture_trains_generates_and_is_inspected_on_one_device(gpu: None, changes: dict[str, Any]) -> None:
    model = model_on_gpu(**SMALL | {"dropout": 0.1, "ngram_dropout": 0.1} | changes)
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
def test_a_model_in_half_precision_generates_and_is_inspected(gpu: None, dtype: torch.dtype) -> None:
    model = model_on_gpu(dtype, **SMALL, **LLAMA, ngram=3, smear=1)
    assert len(generate(model, [1, 2], max_new_tokens=6)[0].tokens) == 6
    assert PerSampleRNG([1], CUDA).next().device == CUDA  # else the draw is on the CPU
    increases, _ = head_ablation(model, [(tokens(), tokens())])
    assert increases.shape == induction_scores(model, 256).shape == (1, 4)


@pytest.mark.parametrize("max_on_device", [1 << 28, 0], ids=["tokens on the GPU", "tokens on the CPU"])
def test_batches_are_on_the_gpu(gpu: None, monkeypatch: pytest.MonkeyPatch, max_on_device: int) -> None:
    monkeypatch.setattr(minigpt.data.batches, "_MAX_DEVICE_TOKENS", max_on_device)
    for batches in splits(100, 8, 4, CUDA):  # the last window of validation is padded
        read = list(batches)
        assert (batches.read_windows.on_device is None) == (max_on_device == 0)
        assert len(read) == len(batches) > 1
        assert {(x.device, x.dtype, x.size(1)) for batch in read for x in batch} == {(CUDA, torch.int64, 8)}


@pytest.mark.parametrize("name", ["fast_gpu", *(pytest.param(name, marks=pytest.mark.slow) for name in RECIPES[1:])])
def test_a_recipe_of_a_gpu_trains_and_validates_on_one_device(
    gpu: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A step at the recipe's shapes, with gradients of any values."""
    monkeypatch.setattr("minigpt.optim.has_bfloat16", lambda device: device.type == "cuda")
    cfg = recipe(name)
    model = model_on_gpu(**cfg.model)
    module = language_model(model, name)
    optimizer, ema = module.make_optimizer(model), EMA(model.parameters(), 0.9)
    training, validation = splits(20_000, cfg.model.block_size, cfg.data.batch_size, CUDA)
    for batch in training:
        with autocast():
            assert module.training_step(batch, 0).device == CUDA
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        module.configure_gradient_clipping(optimizer, cfg.trainer.gradient_clip_val)
        optimizer.step()
        ema.update()
    ema.swap()
    nats = sum(model(*batch, reduction="sum") for batch in validation)
    state = [x for values in optimizer.state.values() for x in values.values()]
    assert {x.device for x in (module.grad_norm, nats, *ema.shadow, *state)} == {CUDA}
    assert {x.dtype for x in state} == {torch.float32}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_is_on_the_gpu_after_a_resume(gpu: None, name: str) -> None:
    """A checkpoint is on the CPU. Lightning moves the state of an optimizer except "step", which torch's is to move."""
    model = model_on_gpu(**SMALL)
    make = language_model(model, "fast_gpu", f"optimizer={name}").make_optimizer
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer, resumed = make(model), make(model)
    optimizer.step()
    resumed.load_state_dict(pytree.tree_map_only(Tensor, Tensor.cpu, optimizer.state_dict()))
    _optimizer_to_device(resumed, CUDA)
    resumed.step()
    assert {x.device for values in resumed.state.values() for x in values.values()} == {CUDA}


def test_the_server_draws_on_the_gpu(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Inline:
        """Call at once: fake tensors are made in this thread only."""

        def __init__(self, *args: Any) -> None: ...
        def submit(self, function: Callable[..., Any], *args: Any) -> None:
            function(*args)

    async def serve(*settings: Sampling) -> list[engine.Token]:
        requests = [engine.SampleRequest([1, 2, i], 4, sampling) for i, sampling in enumerate(settings)]
        return [token async for token in engine.Engine(model, ByteTokenizer()).generate(*requests)]

    monkeypatch.setattr(engine, "ThreadPoolExecutor", Inline)
    model = model_on_gpu(**SMALL, position="rope")
    settings = [Sampling(temperature=0), Sampling(top_k=3), Sampling(repetition_penalty=1.5)]
    assert len(asyncio.run(serve(*settings))) == 3 * 4


def test_autocast_keeps_the_residual_stream_and_the_loss_in_float32(gpu: None) -> None:
    """By the lists of https://docs.pytorch.org/docs/stable/amp.html for CUDA, of which the CPU's differ."""
    model, outputs = model_on_gpu(**SMALL, **LLAMA, logit_softcap=15.0), {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, args, y, name=name: outputs.update({name: y.dtype}))
    with autocast():
        loss = model(tokens(), tokens())
        hidden = torch.ones(2, 4, dtype=torch.bfloat16, device=CUDA)
        assert {activation(hidden).dtype for activation in ACTIVATIONS.values()} == {torch.bfloat16}
    assert loss.dtype == torch.float32
    assert {name for name, dtype in outputs.items() if dtype == torch.bfloat16} == {
        "lm_head",
        *(f"blocks.0.{name}" for name in ("attention", "attention.qkv", "attention.out", "mlp", "mlp.up", "mlp.down")),
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_in_bfloat16_keeps_weights_gradients_and_state_in_float32(name: str) -> None:
    model, ids = GPT(GPTConfig(**SMALL, **LLAMA)), tokens(device=CPU)
    optimizer = language_model(model, "fast_gpu", f"optimizer={name}").make_optimizer(model)
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
    model, ids = GPT(GPTConfig(**SMALL)), torch.randint(256, (3, 4))
    model(ids, ids).backward()
    expected = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    module = language_model(model, "fast_gpu", f"optimizer={name}")
    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = L.Trainer(accelerator="cpu", max_steps=1, plugins=MixedPrecision("16-mixed", "cpu"), **quiet)
    trainer.fit(module, DataLoader(TensorDataset(ids, ids), batch_size=3))
    assert float(module.grad_norm) == pytest.approx(float(expected), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "checkpoint_blocks"), [("best_gpu", None), ("nanogpt_gpu", 1)])
def test_a_model_compiles_without_graph_breaks_and_once(
    monkeypatch: pytest.MonkeyPatch, name: str, checkpoint_blocks: int | None
) -> None:
    """Training, validation of whole, last and padded batches, and both again, with the attention of a GPU."""
    monkeypatch.setattr("minigpt.attention._MAX_EXPLICIT", 0)
    model = GPT(GPTConfig(**dict(recipe(name).model) | SMALL))
    model.checkpoint_blocks = checkpoint_blocks
    torch._dynamo.reset()
    model.compile(fullgraph=True, backend="aot_eager")
    module = language_model(model, name)
    optimizer, ema = module.make_optimizer(model), EMA(model.parameters(), 0.9)
    training, validation = splits(43, 4, 4, CPU)
    for cycle in range(2):
        with torch._dynamo.config.patch(error_on_recompile=cycle > 0):
            for batch in training:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = module.training_step(batch, 0)
                loss.backward()
                module.configure_gradient_clipping(optimizer, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                ema.update()
            ema.swap()
            module.eval()
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                for batch in validation:
                    model(*batch, reduction="sum")
            module.train()
            ema.swap()
