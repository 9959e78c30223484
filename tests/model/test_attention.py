"""Attention against its formula, query by query, and torch's module, and its invariants."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_near
from torch import Tensor, nn

from minigpt.model.attention import (
    MultiHeadAttention,
    attend,
    attend_explicit,
    rotary_table,
    rotate,
)
from minigpt.utils.errors import UserError

TERMS = 24 + 6 + 9 + 24  # of the modules below: projection, scores, values, output


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    B, K, groups, T = (draw(st.integers(1, most)) for most in (2, 2, 3, 4))
    S, D, E = (draw(st.integers(1, most)) for most in (8, 6, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    shapes = {"q": (B, K * groups, T, D), "k": (B, K, S, D), "v": (B, K, S, E)}
    problem: dict[str, Any] = {}
    for name, shape in shapes.items():
        problem[name] = torch.randn(shape, generator=generator).to(dtype)
    problem["mask"] = None
    if draw(st.booleans()):
        sizes = [draw(st.sampled_from([1, size])) for size in (B, K * groups, T, S)]
        shape = sizes[draw(st.integers(0, 4)) :]  # from a number to (B, H, T, S)
        share = draw(st.sampled_from([0.2, 0.5, 0.9]))
        problem["mask"] = torch.rand(shape, generator=generator) < share
    problem["causal"] = draw(st.booleans())
    problem["scale"] = draw(st.none() | st.floats(0.01, 1.5))
    return problem


@given(problems())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_fused_and_explicit_attention_equal_the_formula_in_value_and_gradient(
    problem: dict[str, Any],
):
    inputs = [problem[name].requires_grad_() for name in "qkv"]
    dtype = problem["q"].dtype
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected, expected_weights = formula(**{**problem, **dict(zip("qkv", exact, strict=True))})
    direction = torch.linspace(-1, 1, expected.numel(), dtype=dtype).view_as(expected)
    references = torch.autograd.grad(expected, exact, direction.double())
    explicit, weights = attend_explicit(**problem)
    assert_near(weights.double(), expected_weights, *inputs, terms=8 + 6, dtype=dtype)
    for y in (attend(**problem), explicit):
        assert y.dtype == dtype
        assert_near(y.double(), expected, *inputs, terms=8 + 6, dtype=dtype)
        gradients = torch.autograd.grad(y, inputs, direction)
        for gradient, reference in zip(gradients, references, strict=True):
            assert_near(gradient.double(), reference, *inputs, terms=2 * (8 + 6), dtype=dtype)


@pytest.mark.parametrize(
    ("bias", "causal", "padded"), [(True, True, True), (False, True, False), (True, False, True)]
)
def test_output_and_weights_equal_those_of_torchs_module(bias: bool, causal: bool, padded: bool):
    reference = nn.MultiheadAttention(24, 4, bias=bias, batch_first=True)
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = MultiHeadAttention(24, 4, bias=bias, causal=causal, scale=0.2)
    weights = {}
    for name, weight in reference.state_dict().items():
        weights[name.replace("in_proj_", "qkv.").replace("out_proj", "out")] = weight
    ours.load_state_dict(weights)
    for name, projection in reference.named_parameters():
        if name.startswith("in_proj"):  # of the queries: the module's own scale is 1/√6
            projection.data[:24] *= 0.2 * math.sqrt(6)
    x = torch.randn(2, 7, 24)
    masks: dict[str, Any] = {"attn_mask": torch.ones(7, 7).triu(1).bool() if causal else None}
    mask = None
    if padded:
        masks["key_padding_mask"] = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
        mask = ~masks["key_padding_mask"][:, None, None]
    expected, expected_weights = reference(x, x, x, **masks, average_attn_weights=False)
    assert_near(ours(x, mask=mask), expected, terms=TERMS)
    assert_near(ours.attention_weights(x, mask=mask), expected_weights, terms=TERMS)


def test_rotation_multiplies_pairs_as_complex_numbers():
    x = torch.randn(2, 10, 3, 8)
    start = 1_000_003
    positions = torch.arange(start, start + 10)[:, None, None]
    angle = positions * 50.0 ** (-torch.arange(0, 8, 2).double() / 8)
    turn = torch.polar(torch.ones_like(angle), angle)
    expected = torch.complex(x[..., :4], x[..., 4:]) * turn
    rotated = rotate(x, rotary_table(10, 8, 50.0, start=start))
    assert_near(rotated, torch.cat((expected.real, expected.imag), -1).float(), x, terms=2)


# The fused kernel, and the formula
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_drops_weights(dtype: torch.dtype):
    attention = MultiHeadAttention(64, 4, dropout=0.2).to(dtype)
    attention.out = nn.Identity()
    # A token sees itself alone
    y = attention(torch.randn(5000, 1, 64, dtype=dtype)).unflatten(-1, (4, 16))
    # Of 20,000 weights, more than five standard deviations; dropout of the output is rarer
    assert (y == 0).all(-1).float().mean().item() == pytest.approx(0.2, abs=0.015)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_token_attends_to_itself_exactly(dtype: torch.dtype):
    q, k, v = torch.randn(3, 2, 3, 1, 8, dtype=dtype)
    assert torch.equal(attend(q, k, v, causal=True), v)


def test_a_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(UserError, match=r"^n_embd must be divisible by n_head=4, got 10"):
        MultiHeadAttention(10, 4)


def formula(q, k, v, *, causal, mask, scale) -> tuple[Tensor, Tensor]:
    """Compute attention one query at a time over its visible keys: output and weights."""
    B, H, T, D = q.shape
    K, S = k.shape[1:3]
    visible = torch.ones(B, H, T, S, dtype=torch.bool) if mask is None else mask.expand(B, H, T, S)
    scale = 1 / math.sqrt(D) if scale is None else scale
    rows = []
    outputs = []
    for b, h, t in product(range(B), range(H), range(T)):
        group = h * K // H
        seen = visible[b, h, t] & (torch.arange(S) <= (t + S - T if causal else S))
        raised = (k[b, group] @ q[b, h, t] * scale).exp() * seen
        rows.append(raised / (raised.sum() if seen.any() else 1))
        outputs.append(rows[-1] @ v[b, group])
    return torch.stack(outputs).view(B, H, T, -1), torch.stack(rows).view(B, H, T, S)
