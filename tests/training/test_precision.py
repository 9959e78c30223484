"""Precisions and compilation: which one a device has, and what stays in float32."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from small_runs import composed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from minigpt import GPT, GPTConfig, load_checkpoint
from minigpt.runs.trainer import partial_from_config
from minigpt.training.language_model import LanguageModel
from minigpt.training.precision import half_dtype, training_precision


def test_a_precision_that_a_cpu_lacks_is_replaced_with_a_warning(train, capsys):
    assert train("trainer.precision=16-mixed", "max_steps=1").summary["precision"] == "bf16-mixed"
    warning = "trainer.precision=16-mixed needs a GPU; this run is bf16-mixed"
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize(("supported", "precision"), [(True, "bf16-mixed"), (False, "32-true")])
def test_automatic_precision_is_bfloat16_where_the_device_has_it(
    train, monkeypatch, supported, precision
):
    def half(device):
        return torch.bfloat16 if supported and device.type == "cpu" else None

    monkeypatch.setattr("minigpt.training.precision.half_dtype", half)
    max_steps = f"max_steps={40 if supported else 1}"
    run = train("trainer.precision=auto", "optimizer.lr=1e-2", max_steps, "eval_every=40")
    assert run.summary["precision"] == precision
    assert run.loss < 2.5 or not supported


@pytest.mark.parametrize(
    ("capability", "rocm", "precision"),
    [
        ((6, 1), None, "32-true"),  # GTX 10
        ((7, 0), None, "16-mixed"),  # V100
        ((7, 5), None, "16-mixed"),  # T4, RTX 20
        ((8, 0), None, "bf16-mixed"),  # A100
        ((9, 0), None, "bf16-mixed"),  # H100
        ((9, 4), "6.4", "bf16-mixed"),  # MI300
    ],
)
def test_automatic_precision_of_a_gpu_is_its_faster_16_bit_type(
    monkeypatch, capability, rocm, precision
):
    """With replaced capabilities, of which torch's functions read whether a GPU has bfloat16."""
    gpu = SimpleNamespace(major=capability[0], minor=capability[1])
    for name, value in {
        "cuda.is_available": lambda: True,
        "cuda.current_device": lambda: 0,
        "cuda.get_device_properties": lambda device=None: gpu,
        "cuda._check_bf16_tensor_supported": lambda device: True,  # emulated on every GPU
        "version.hip": rocm,
        "accelerator.current_accelerator": lambda check_available: torch.device("cuda"),
    }.items():
        monkeypatch.setattr(f"torch.{name}", value)
    half_dtype.cache_clear()
    assert training_precision("auto") == precision
    half_dtype.cache_clear()


SMALL = {"block_size": 4, "vocab_size": 256, "n_layer": 1, "n_head": 4, "n_embd": 32}


def language_model(recipe, *overrides, **settings):
    """Return a small model with the optimizer of a recipe."""
    make = partial_from_config("optimizer", composed(f"experiment={recipe}", *overrides).optimizer)
    model = GPT(GPTConfig(**SMALL | settings))
    settings = {"optimizer": make, "max_steps": 10}
    return LanguageModel(model, schedule=lambda step, max_steps: 1.0, **settings)


@pytest.mark.parametrize("name", ["adamw", "muon_fast"])
def test_a_step_in_bfloat16_keeps_weights_gradients_and_state_in_float32(name):
    module = language_model("fast_gpu", f"optimizer={name}", position="rope", qk_norm=True)
    model = module.model
    ids = torch.zeros(3, 4, dtype=torch.long)
    optimizer = module.make_optimizer(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, ids)
    loss.backward()
    optimizer.step()
    found = {p.grad.dtype for p in model.parameters()} | {p.dtype for p in model.parameters()}
    for values in optimizer.state.values():
        found |= {value.dtype for value in values.values()}
    assert found == {torch.float32}


@pytest.mark.parametrize("name", ["adamw", "muon_fast"])
def test_with_16_mixed_gradients_are_clipped_after_the_loss_scale_is_removed(name):
    """In a fused step, torch would remove it after clipping. Lightning has it for GPUs alone."""
    module = language_model("fast_gpu", f"optimizer={name}")
    ids = torch.randint(256, (3, 4))
    module.model(ids, ids).backward()
    expected = nn.utils.get_total_norm([p.grad for p in module.model.parameters()])
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    mixed = MixedPrecision("16-mixed", "cpu")
    trainer = Trainer(accelerator="cpu", max_steps=1, plugins=mixed, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(ids, ids), batch_size=3))
    assert float(module.grad_norm) == pytest.approx(float(expected), rel=0.02)


@pytest.mark.slow
def test_a_compiled_model_trains_to_the_same_loss(train, finished):
    from torch._dynamo.utils import counters

    torch.compiler.reset()  # what other tests have compiled
    counters.clear()
    compiled = train("compile=true")
    assert counters["stats"]["unique_graphs"] == 1  # validation is not compiled
    assert compiled.loss == pytest.approx(finished.summary["best_val_loss"], abs=1e-4)
    assert isinstance(load_checkpoint(compiled.folder)[0], GPT)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "checkpoint_blocks"), [("best_gpu", None), ("nanogpt_gpu", 1)])
def test_a_model_compiles_without_graph_breaks_and_once(monkeypatch, name, checkpoint_blocks):
    """Training and validation of whole and of padded batches, twice, with a GPU's attention."""
    monkeypatch.setattr("minigpt.model.attention._MAX_EXPLICIT", 0)
    sizes = SMALL | {"n_layer": 3}  # which layer_repeats divides
    module = language_model(name, **dict(composed(f"experiment={name}").model) | sizes)
    model = module.model
    ids = torch.randint(256, (4, 4))
    model.checkpoint_blocks = checkpoint_blocks
    torch._dynamo.reset()
    model.compile(fullgraph=True, backend="aot_eager")
    optimizer = module.make_optimizer(model)
    padded = ids.where(torch.arange(4) < 2, -100)
    for cycle in range(2):
        once = torch._dynamo.config.patch(error_on_recompile=cycle > 0)
        with once, torch.autocast("cpu", torch.bfloat16):
            module.training_step((ids, ids), 0).backward()
            module.configure_gradient_clipping(optimizer, 1.0)
            optimizer.step()
            module.eval()
            with torch.no_grad():
                for rows in (4, 3):
                    model(ids[:rows], padded[:rows], reduction="sum")
            module.train()
