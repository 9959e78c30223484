"""Norms and activations equal torch's in value and gradient, and an entry in the tables adds another."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerance import assert_near, terms_of
from torch import Tensor
from torch.nn import functional as F

from minigpt.config import NORM_PARAMS, UP_PROJECTIONS, GPTConfig
from minigpt.device import has_bfloat16
from minigpt.generation import generate
from minigpt.model import GPT
from minigpt.ops import ACTIVATIONS, NORMS, apply_dropout, layer_norm, relu_squared, rms_norm
from minigpt.utils.errors import UserError

SHAPES = [(7,), (3, 5, 16), (2, 4, 9, 8)]


def with_gradients(function, *inputs: Tensor) -> list[Tensor]:
    """The result, and the gradient of a random weighting of it by every input."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*inputs)
    weighting = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return [y.detach(), *torch.autograd.grad((y * weighting).sum(), inputs)]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert_near(a, b, terms=288)  # numbers in the largest input


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_rms_norm_equals_torchs(shape, scale):
    x, weight = scale * torch.randn(shape), torch.randn(shape[-1])
    for given in ([x], [x, weight], [x.transpose(0, -2), weight] if len(shape) > 1 else [x]):
        expected = with_gradients(lambda x, *weight: F.rms_norm(x, x.shape[-1:], *weight, eps=1e-5), *given)
        assert_same(with_gradients(rms_norm, *given), expected)


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_a_norm_with_a_bias_adds_it(norm: Callable[..., Tensor]):
    x, weight, bias = torch.randn(3, 8), torch.randn(8), torch.randn(8)
    assert_same(with_gradients(norm, x, weight, bias), with_gradients(lambda x, w, b: norm(x, w) + b, x, weight, bias))


def test_rms_norm_of_zeros_is_zero_and_has_a_finite_gradient():
    value, gradient = with_gradients(rms_norm, torch.zeros(2, 8))
    assert not value.any()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_relu_squared_equals_torchs(shape):
    x = torch.randn(shape)
    x.view(-1)[0] = 0.0
    assert_same(with_gradients(relu_squared, x), with_gradients(lambda x: F.relu(x).square(), x))


def test_relu_squared_in_bfloat16_is_that_of_64_bits_rounded():
    x = torch.randn(5, 16, dtype=torch.bfloat16, requires_grad=True)
    exact = F.relu(x.double()).square()
    assert_near(relu_squared(x).double(), exact, terms=1, dtype=torch.bfloat16)
    (found,) = torch.autograd.grad(relu_squared(x).sum(), x)
    assert_near(found.double(), 2 * F.relu(x.double()), terms=1, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_each_element_independently_and_scales_the_rest(p: float, dtype: torch.dtype):
    torch.manual_seed(0)
    x = torch.ones(1_000_003, dtype=dtype, requires_grad=True)
    y = apply_dropout(x, p)
    dropped = (y == 0).float()
    deviation = (p * (1 - p) / len(x)) ** 0.5
    for i in range(4):  # elements that share a random number
        assert dropped[i::4].mean().item() == pytest.approx(p, abs=5 * 2 * deviation)
    centered = dropped - p
    for lag in (1, 2, 3, 4, 8):
        covariance = (centered[lag:] * centered[:-lag]).mean().item()
        assert covariance == pytest.approx(0, abs=5 * p * (1 - p) / len(x) ** 0.5)
    kept = y[dropped == 0].double()
    assert_near(kept, torch.full_like(kept, 1 / (1 - p)), terms=1, dtype=dtype)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, y)
    assert apply_dropout(x, p, training=False) is x
    torch.manual_seed(0)
    assert torch.equal(apply_dropout(x, p), y)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs /proc/cpuinfo")
def test_instructions_for_bfloat16_are_those_that_the_system_lists():
    flags = set(Path("/proc/cpuinfo").read_text().split())
    assert has_bfloat16(torch.device("cpu")) == bool(flags & {"avx512_bf16", "amx_bf16"})
    assert not has_bfloat16(torch.device("meta"))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_model_has_per_sample_gradients_and_products_with_its_hessian():
    """Source: https://docs.pytorch.org/tutorials/intermediate/per_sample_grads.html"""
    options = {"norm": "rmsnorm", "activation": "relu2", "position": "rope", "qk_norm": True, "smear": 1}
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=11, **options))
    weights, ids = dict(model.named_parameters()), torch.randint(11, (3, 9))

    def loss(weights: dict[str, Tensor], ids: Tensor) -> Tensor:  # (9,)
        return torch.func.functional_call(model, weights, (ids[None, :-1], ids[None, 1:]))

    def gradients(ids: Tensor, **options: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(weights, ids), [*weights.values()], **options)

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, ids)
    for i in range(3):
        torch.testing.assert_close([*gradients(ids[i])], [gradient[i] for gradient in per_sample.values()])

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # the fused kernel has no second one
        vectors = [torch.randn_like(weight) for weight in weights.values()]
        products = torch.autograd.grad(gradients(ids[0], create_graph=True), [*weights.values()], vectors)
        forward = torch.func.jvp(
            lambda weights: torch.func.grad(loss)(weights, ids[0]),
            (weights,),
            (dict(zip(weights, vectors, strict=True)),),
        )[1]
    torch.testing.assert_close([*products], [*forward.values()], rtol=1e-4, atol=1e-4)


def gated_tanh(x: Tensor) -> Tensor:
    gate, x = x.chunk(2, dim=-1)
    return gate.tanh() * x


def mean_abs_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return x / (x.abs().mean(-1, keepdim=True) + eps) * weight + (0 if bias is None else bias)


@pytest.mark.parametrize(
    ("setting", "functions", "function", "sizes", "size"),
    [
        ("activation", ACTIVATIONS, torch.sin, UP_PROJECTIONS, 1),
        ("activation", ACTIVATIONS, gated_tanh, UP_PROJECTIONS, 2),
        ("norm", NORMS, mean_abs_norm, NORM_PARAMS, ("weight", "bias")),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_a_function_and_its_size_add_an_activation_or_a_norm_to_the_model_and_to_cached_sampling(
    setting: str, functions: Any, function: Any, sizes: Any, size: Any, bias: bool, monkeypatch: pytest.MonkeyPatch
):
    settings = {"block_size": 16, "vocab_size": 29, "n_layer": 2, "n_head": 4, "n_embd": 32, "bias": bias}
    with pytest.raises(UserError, match=f"model.{setting} must be one of"):
        GPTConfig(**settings, **{setting: "new"})
    monkeypatch.setitem(functions, "new", function)
    monkeypatch.setitem(sizes, "new", size)
    torch.manual_seed(0)
    model = GPT(GPTConfig(**settings, **{setting: "new"}))
    assert model.config.num_params() == model.num_params()
    prompt = [3, 1]
    (sample,) = generate(model.eval(), prompt, max_new_tokens=14, logprobs=True)
    full = model(torch.tensor([prompt + sample.tokens]))[0, 1:-1].log_softmax(-1)  # without a cache
    expected = full.gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0]
    assert_near(torch.tensor(sample.logprobs), expected, full, terms=terms_of(model.config))
