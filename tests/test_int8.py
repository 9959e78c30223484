"""Int8 weights: rounding errors against their closed form, rows of a batch, and whole models."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from minigpt import GPT, GPTConfig
from minigpt.int8 import Int8Linear, quantize
from minigpt.kv_decoder import Decoder

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "wide": {"n_embd": 384, "n_layer": 1},
    "no biases": {"bias": False, "activation": "relu2", "norm": "rmsnorm_noscale", "position": "rope"},
    "llama": {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "n_kv_head": 2, "tie_embeddings": False},
    "one inner channel": {"n_inner": 1},
    "post-norm": {"norm_position": "post", "smear": 1, "ngram": 2, "ngram_dim": 8, "ngram_buckets": 16},
}


def make(**changes: Any) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{"vocab_size": 65, "block_size": 24, "n_layer": 2, "n_head": 4, "n_embd": 64, **changes}))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model.eval()


def product(layer: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """The exact result of a layer, and the largest error that rounding to int8 can cause."""
    x, weight = x.double(), layer.weight.double()
    max_weight = float(Int8Linear(layer).weight.abs().max())
    input_error = x.abs().amax(-1, keepdim=True) / 127 / 2  # half a step
    weight_error = weight.abs().amax(1) / max_weight / 2
    error = input_error * (weight.abs() + weight_error[:, None]).sum(1) + x.abs().sum(-1, keepdim=True) * weight_error
    return nn.functional.linear(x, weight, None if layer.bias is None else layer.bias.double()), error


@given(st.integers(2, 300), st.integers(1, 80), st.lists(st.integers(1, 5), max_size=2), st.booleans(), st.integers(0))
def test_a_result_is_within_the_bound_of_rounding(
    channels: int, out: int, shape: list[int], bias: bool, seed: int
) -> None:
    torch.manual_seed(seed % 2**31)
    layer = nn.Linear(channels, out, bias=bias)
    x = torch.randn(*shape, 1, channels) * torch.randn(*shape, 1, 1).exp()
    exact, error = product(layer, x)
    result = Int8Linear(layer)(x)
    assert result.shape == exact.shape
    assert ((result - exact).abs() <= error * 1.001 + 1e-5 * exact.abs().max()).all()


def test_numbers_that_int8_holds_are_multiplied_exactly() -> None:
    layer = nn.Linear(200, 3)
    numbers = torch.randint(-60, 61, (4, 200)).float()
    numbers[:, 0] = 127
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-1, 2, (3, 200)) * torch.tensor([0.25, 1, 8])[:, None])
        result = Int8Linear(layer)(numbers) - layer.bias
        torch.testing.assert_close(result, numbers @ layer.weight.T, rtol=1e-5, atol=1e-4)


def test_a_row_of_zeros_gives_the_bias_and_a_row_of_nan_leaves_the_others_alone() -> None:
    layer = nn.Linear(30, 7)
    x = torch.stack((torch.zeros(30), torch.full((30,), float("nan")), torch.ones(30)))
    result = Int8Linear(layer)(x)
    assert torch.equal(result[0], layer.bias)
    assert result[1].isnan().all()
    assert torch.equal(result[2], Int8Linear(layer)(x[2:])[0])
    with torch.no_grad():
        layer.weight.zero_()
    assert torch.equal(Int8Linear(layer)(torch.ones(1, 30))[0], layer.bias)


def test_a_row_does_not_depend_on_the_rest_of_the_batch() -> None:
    layer, x = Int8Linear(nn.Linear(100, 40)), torch.randn(9, 100) * torch.logspace(-3, 3, 9)[:, None]
    assert torch.equal(layer(x), torch.cat([layer(row[None]) for row in x]))


def test_results_are_right_without_vnni() -> None:
    program = """if True:
        import torch
        from minigpt.int8 import Int8Linear
        layer = torch.nn.Linear(512, 64)
        torch.nn.init.constant_(layer.weight, -0.5)
        x = torch.ones(5, 512)
        assert ((Int8Linear(layer)(x) - layer(x)).abs() < 1e-3).all(), Int8Linear(layer)(x)
    """
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@torch.no_grad()
def test_logits_are_those_of_the_rounded_weights(shape: dict[str, Any]) -> None:
    text = torch.randint(65, (3, 20))
    model, rounded, quantized = make(**shape), make(**{**shape, "tie_embeddings": False}), quantize(make(**shape))
    rounded.load_state_dict(model.state_dict())
    for name, layer in quantized.named_modules():
        if isinstance(layer, Int8Linear):
            rounded.get_parameter(f"{name}.weight").copy_((layer.weight * (layer.scale * 127)).T)
    expected, logits = rounded(text), quantized(text)
    assert (logits - expected).square().mean() < 2e-3 * expected.square().mean()
    assert torch.equal(quantized.wte.weight, model.wte.weight)
    kept = [layer.in_features for layer in quantized.blocks.modules() if isinstance(layer, nn.Linear)]
    assert kept == [1] * len(quantized.blocks) if model.config.n_inner == 1 else not kept


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@torch.no_grad()
def test_decoding_gives_the_logits_of_the_quantized_model(shape: dict[str, Any]) -> None:
    text = torch.randint(65, (2, 20))
    model = quantize(make(**shape))
    decoder = Decoder(model, text[:, :5].tolist(), max_new_tokens=20)
    logits = torch.stack([decoder.logits, *(decoder.step(token) for token in text.T[5:])], dim=1)
    expected = model(text)[:, 4:]
    # Another order of the sums in attention and norms moves some numbers to the next integer.
    assert (logits - expected).square().mean() < 2e-4 * expected.square().mean()
