"""Our operations equal torch's, and so do their gradients."""

import pytest
import torch
from tolerance import assert_near
from torch import Tensor
from torch.nn import functional as F

from minigpt.ops import relu_squared, rms_norm

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
    x = scale * torch.randn(shape)
    assert_same(with_gradients(rms_norm, x), with_gradients(lambda x: F.rms_norm(x, shape[-1:], eps=1e-5), x))


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_with_weights_equals_torchs(shape):
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    assert_same(
        with_gradients(rms_norm, x, weight),
        with_gradients(lambda x, w: F.rms_norm(x, shape[-1:], w, eps=1e-5), x, weight),
    )


def test_rms_norm_of_zeros_is_zero_and_has_a_gradient():
    value, gradient = with_gradients(rms_norm, torch.zeros(2, 8))
    assert not value.any()
    assert gradient.isfinite().all()


def test_rms_norm_takes_a_view_with_heads_before_positions():
    x = torch.randn(2, 6, 3, 8)
    assert_same(
        with_gradients(lambda x: rms_norm(x.transpose(1, 2)), x),
        with_gradients(lambda x: F.rms_norm(x.transpose(1, 2), (8,), eps=1e-5), x),
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_relu_squared_equals_torchs(shape):
    x = torch.randn(shape)
    x.view(-1)[0] = 0.0
    assert_same(with_gradients(relu_squared, x), with_gradients(lambda x: F.relu(x).square(), x))


@pytest.mark.parametrize("function", [rms_norm, relu_squared])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_stay_what_they_are(function, dtype):
    x = torch.randn(4, 8, dtype=dtype)
    assert function(x).dtype == dtype


@pytest.mark.parametrize("function", [rms_norm, relu_squared])
def test_a_second_derivative_is_refused_and_not_wrong(function):
    x = torch.randn(4, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
