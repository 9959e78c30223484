"""Norms and activations equal torch's in value and gradient; an entry in the tables adds one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import make_model
from tolerance import assert_near, terms_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.testing import assert_close

from minigpt.model.config import NORM_PARAMS, UP_PROJECTIONS, GPTConfig
from minigpt.model.ops import ACTIVATIONS, NORMS, apply_dropout, relu_squared, rms_norm
from minigpt.sampling.generation import generate
from minigpt.utils.errors import UserError


def assert_same(
    function: Callable[..., Tensor], reference: Callable[..., Tensor], *inputs: Tensor
) -> None:
    """Compare results, and the gradients of a random weighting of them by every input."""
    found = []
    for one in (function, reference):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        y = one(*leaves)
        weighting = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        found.append([y.detach(), *torch.autograd.grad((y * weighting).sum(), leaves)])
    for a, b in zip(*found, strict=True):
        assert_near(a, b, terms=288)  # numbers in the largest input


@pytest.mark.parametrize("scale", [1e-3, 100.0])
def test_rms_norm_equals_torchs(scale: float):
    x = scale * torch.randn(2, 4, 9, 8)
    weight, bias = torch.randn(2, 8)

    def reference(x: Tensor, w: Tensor | None = None, b: Any = 0.0) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w, eps=1e-5) + b

    for given in ([x], [x.transpose(0, -2), weight], [x, weight, bias]):
        assert_same(rms_norm, reference, *given)


def test_on_a_gpu_autocast_computes_norms_with_weights_in_float32():
    """Others are computed in the type of their input."""
    before = torch.is_autocast_enabled("cuda")
    found = {}
    try:
        torch.set_autocast_enabled("cuda", True)  # `torch.autocast` asks for a GPU
        with FakeTensorMode():  # types and shapes alone, on any device
            x = torch.empty(2, 8, device="cuda", dtype=torch.bfloat16)
            weight = torch.empty(8, device="cuda")
            for name, norm in NORMS.items():
                found[name, True] = norm(x, None).dtype
                found[name, False] = norm(x, weight).dtype
    finally:
        torch.set_autocast_enabled("cuda", before)
    reduced = {key for key, dtype in found.items() if dtype == torch.bfloat16}
    assert reduced == {("rmsnorm", True), ("rmsnorm_noscale", True)}
    assert set(found.values()) == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_the_weights_of_a_norm_may_have_another_type_than_its_input(
    dtypes: tuple[torch.dtype, torch.dtype],
):
    x = torch.randn(2, 4, 8).to(dtypes[0])
    weight = torch.randn(8).to(dtypes[1])
    for norm in NORMS.values():
        assert torch.equal(norm(x, weight), norm(x, weight.to(x.dtype)))


def test_rms_norm_of_zeros_is_zero_and_has_a_finite_gradient():
    x = torch.zeros(2, 8, requires_grad=True)
    y = rms_norm(x)
    y.sum().backward()
    assert not y.any()
    assert x.grad.isfinite().all()


def test_relu_squared_equals_torchs_and_in_bfloat16_that_of_64_bits_rounded():
    x = torch.randn(3, 5, 16)
    assert_same(relu_squared, lambda x: F.relu(x).square(), x)
    x = x.bfloat16().requires_grad_()
    positive = F.relu(x.detach().double())
    assert_near(relu_squared(x).double(), positive.square(), terms=1, dtype=torch.bfloat16)
    (found,) = torch.autograd.grad(relu_squared(x).sum(), x)
    assert_near(found.double(), 2 * positive, terms=1, dtype=torch.bfloat16)


@pytest.mark.parametrize(("p", "dtype"), [(0.1, torch.float32), (0.5, torch.bfloat16)])
def test_dropout_drops_each_element_independently_and_scales_the_rest(p: float, dtype: torch.dtype):
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


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_model_has_per_sample_gradients_and_second_derivatives_in_forward_and_reverse_mode():
    settings = {"norm": "rmsnorm", "activation": "relu2", "position": "rope", "qk_norm": True}
    model = make_model(std=None, smear=1, **settings)
    weights = dict(model.named_parameters())
    ids = torch.randint(23, (3, 9))

    def loss(weights: dict[str, Tensor], ids: Tensor) -> Tensor:  # (9,)
        return torch.func.functional_call(model, weights, (ids[None, :-1], ids[None, 1:]))

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, ids)
    for i in range(3):
        gradients = torch.autograd.grad(loss(weights, ids[i]), [*weights.values()])
        assert_close([*gradients], [gradient[i] for gradient in per_sample.values()])
    # The fused kernel has neither
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        vectors = {name: torch.randn_like(weight) for name, weight in weights.items()}
        of_first = torch.func.grad(lambda weights: loss(weights, ids[0]))
        _, forward = torch.func.jvp(of_first, (weights,), (vectors,))
        first = loss(weights, ids[0])
        gradients = torch.autograd.grad(first, [*weights.values()], create_graph=True)
        products = torch.autograd.grad(gradients, [*weights.values()], [*vectors.values()])
    assert_close([*products], [*forward.values()], rtol=1e-4, atol=1e-4)


def gated_tanh(x: Tensor) -> Tensor:
    gate, x = x.chunk(2, dim=-1)
    return gate.tanh() * x


def mean_abs_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return x / (x.abs().mean(-1, keepdim=True) + eps) * weight + bias


@pytest.mark.parametrize(
    ("setting", "functions", "function", "sizes", "size"),
    [
        ("activation", ACTIVATIONS, gated_tanh, UP_PROJECTIONS, 2),
        ("norm", NORMS, mean_abs_norm, NORM_PARAMS, ("weight", "bias")),
    ],
)
def test_a_function_and_its_size_add_an_activation_or_a_norm_to_model_and_sampling(
    setting: str,
    functions: Any,
    function: Any,
    sizes: Any,
    size: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    with pytest.raises(UserError, match=f"model.{setting} must be one of"):
        GPTConfig(**{setting: "new"})
    monkeypatch.setitem(functions, "new", function)
    monkeypatch.setitem(sizes, "new", size)
    model = make_model(**{setting: "new"})
    prompt = [3, 1]
    assert model.config.num_params() == model.num_params()
    (sample,) = generate(model, prompt, max_new_tokens=14, logprobs=True)
    full = model(torch.tensor([prompt + sample.tokens]))[0, 1:-1].log_softmax(-1)  # without a cache
    expected = full.gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0]
    assert_near(torch.tensor(sample.logprobs), expected, full, terms=terms_of(model.config))
