"""Attention compared with its formula, query by query, and with torch's module, and its invariants."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_near
from torch import Tensor, nn
from torch.testing import assert_close

from minigpt.attention import KVCache, MultiHeadAttention, attend, attend_explicit, rotary_table, rotate
from minigpt.utils.errors import UserError

PROPERTY = settings(max_examples=200, deadline=None, derandomize=True)
TERMS = 24 + 6 + 9 + 24  # of the modules below: projection, scores, values, output


@st.composite
def problems(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = (torch.float64,)) -> dict[str, Any]:
    """Draw queries, keys, values and settings; some queries may see no key."""
    B, K, groups, T = (draw(st.integers(1, most)) for most in (2, 3, 3, 5))
    S, D, E = draw(st.integers(1, 8)), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shapes, dtype = ((B, K * groups, T, D), (B, K, S, D), (B, K, S, E)), draw(st.sampled_from(dtypes))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    mask = None
    if draw(st.booleans()):
        shape = draw(st.sampled_from([(T, S), (1, S), (B, 1, 1, S), (B, 1, T, S), (B, K * groups, T, S)]))
        mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.2, 0.5, 0.9]))
    scale = draw(st.none() | st.floats(0.01, 1.5))
    return {"q": q, "k": k, "v": v, "causal": draw(st.booleans()), "mask": mask, "scale": scale}


@st.composite
def modules(draw: st.DrawFn, **fixed: Any) -> tuple[MultiHeadAttention, Tensor]:
    """Draw an attention module of any kind, and an input (B, T, C)."""
    n_kv_head, groups, n_embd = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 12))
    torch.manual_seed(draw(st.integers(0, 2**32)))
    kind = {
        "head_dim": 2 * draw(st.integers(1, 4)),
        "bias": draw(st.booleans()),
        "causal": draw(st.booleans()),
        "qk_norm": draw(st.booleans()),
        "scale": draw(st.none() | st.floats(0.1, 1.5)),
        **fixed,
    }
    module = MultiHeadAttention(n_embd, n_kv_head * groups, n_kv_head=n_kv_head, **kind).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=n_embd**-0.5)
    x = torch.randn(draw(st.integers(1, 2)), draw(st.integers(1, 9)), n_embd, dtype=torch.float64)
    return module, x


@given(problems())
@PROPERTY
def test_fused_and_explicit_attention_equal_the_formula(problem: dict[str, Any]):
    expected, expected_weights = formula(**problem)
    y, weights = attend_explicit(**problem)
    assert_close(weights, expected_weights)
    assert_close(y, expected)
    assert_close(attend(**problem), expected)


@given(problems(dtypes=(torch.float64, torch.float32, torch.bfloat16)))
@PROPERTY
def test_attention_equals_the_explicit_one_in_64_bits_in_value_and_gradient(problem: dict[str, Any]):
    inputs, dtype = [problem[name].requires_grad_() for name in "qkv"], problem["q"].dtype
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = attend_explicit(**{**problem, **dict(zip("qkv", exact, strict=True))})[0]
    direction = torch.linspace(-1, 1, expected.numel(), dtype=dtype).view_as(expected)
    references = torch.autograd.grad(expected, exact, direction.double())
    for y in (attend(**problem), attend_explicit(**problem)[0]):
        assert y.dtype == dtype
        assert_near(y.double(), expected, *inputs, terms=8 + 6, dtype=dtype)
        for gradient, reference in zip(torch.autograd.grad(y, inputs, direction), references, strict=True):
            assert_near(gradient.double(), reference, *inputs, terms=2 * (8 + 6), dtype=dtype)
    with torch.no_grad():  # in bfloat16 on a CPU, the fused kernel instead of the formula
        assert_near(attend(**problem).double(), expected, *inputs, terms=8 + 6, dtype=dtype)


@given(modules(), st.integers(0, 40))
@PROPERTY
def test_rotary_attention_depends_on_relative_positions_only(case: tuple[MultiHeadAttention, Tensor], shift: int):
    attention, x = case
    T, D = x.size(1), attention.head_dim
    table = rotary_table(shift + T, D).double()
    here, there = table[:, :T], table[:, shift:]
    rounded = {"terms": TERMS, "dtype": torch.float32}  # that of sines and cosines
    assert_near(attention(x, rotary=there), attention(x, rotary=here), **rounded)
    assert_near(attention.attention_weights(x, rotary=there), attention.attention_weights(x, rotary=here), **rounded)
    # A score equals that of the query rotated by the distance and the key without rotation.
    q, k = torch.randn(2, 1, 1, 1, D, dtype=torch.float64)
    score = rotate(q, table[:, -1:]) @ rotate(k, table[:, T - 1 : T]).mT
    assert_near(score, rotate(q, table[:, shift : shift + 1]) @ k.mT, q.norm() * k.norm(), **rounded)


@given(modules(causal=True), st.booleans(), st.data())
@PROPERTY
def test_cached_decoding_equals_one_forward_pass(
    case: tuple[MultiHeadAttention, Tensor], rope: bool, data: st.DataObject
):
    attention, x = case
    (B, T, _), D = x.shape, attention.head_dim
    table = rotary_table(T, D).double() if rope else None
    cache = KVCache((B, attention.n_kv_head, T + 3, D), device=x.device, dtype=x.dtype)
    parts = []
    while cache.length < T:
        start = cache.length
        end = start + data.draw(st.integers(1, T - start))
        parts.append(attention(x[:, start:end], rotary=None if table is None else table[:, start:end], cache=cache))
        assert cache.length == end
    assert_close(torch.cat(parts, 1), attention(x, rotary=table))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_output_and_weights_equal_those_of_torchs_module(bias: bool, causal: bool, padded: bool):
    ours, reference = pair(bias=bias, causal=causal)
    x = torch.randn(2, 7, 24)
    future = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3]) if padded else None
    masks: dict[str, Any] = {"attn_mask": future, "key_padding_mask": padding}
    expected, expected_weights = reference(x, x, x, **masks, average_attn_weights=False)
    mask = None if padding is None else ~padding[:, None, None]
    assert_near(ours(x, mask=mask), expected, terms=TERMS)
    assert_near(ours.attention_weights(x, mask=mask), expected_weights, terms=TERMS)


def test_rotation_multiplies_pairs_as_complex_numbers():
    x = torch.randn(2, 10, 3, 8)
    angle = torch.arange(10)[:, None, None] * 50.0 ** (-torch.arange(0, 8, 2) / 8)
    expected = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(10, 1, 4), angle)
    # The angles of the reference are of 32 bits: as far off as the largest of them is.
    assert_near(rotate(x, rotary_table(10, 8, 50.0)), torch.cat((expected.real, expected.imag), -1), 10 * x, terms=2)


def test_attention_dropout_zeroes_its_fraction_of_the_weights():
    attention = MultiHeadAttention(64, 4, dropout=0.2)
    attention.out = nn.Identity()
    y = attention(torch.randn(5000, 1, 64)).unflatten(-1, (4, 16))  # one weight per head: a token sees itself alone
    silent = (y == 0).all(-1)  # of 20,000 weights, more than five standard deviations; dropout of the output is rarer
    assert silent.float().mean().item() == pytest.approx(0.2, abs=0.015)


def test_dropout_drops_weights_and_keeps_their_expectation():
    q, k, v = torch.randn(3, 1, 1, 200, 8)
    kept = attend_explicit(q, k, v)[1]
    y, weights = attend_explicit(q, k, v, dropout=0.25)
    dropped = weights == 0
    assert 0.24 < dropped.float().mean() < 0.26
    assert_near(weights[~dropped], kept[~dropped] / 0.75, terms=8 + 200)
    assert_near(y, weights @ v, terms=200)


def test_invalid_arguments_raise_with_their_names():
    with pytest.raises(UserError, match=r"^n_embd must be divisible by n_head=4, got 10"):
        MultiHeadAttention(10, 4)
    with pytest.raises(UserError, match=r"^n_head must be divisible by n_kv_head=3, got 4"):
        MultiHeadAttention(12, 4, n_kv_head=3)


def formula(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention one query at a time over its visible keys: output and weights."""
    B, H, T, D = q.shape
    S, group = k.size(2), H // k.size(1)
    scale = 1 / math.sqrt(D) if scale is None else scale
    y, weights = q.new_zeros(B, H, T, v.size(3)), q.new_zeros(B, H, T, S)
    allowed = torch.ones(B, H, T, S, dtype=torch.bool) if mask is None else mask.expand(B, H, T, S)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                seen = [s for s in range(S) if allowed[b, h, t, s] and not (causal and s > t + S - T)]
                raised = [math.exp(scale * torch.dot(q[b, h, t], k[b, h // group, s])) for s in seen]
                for s, e in zip(seen, raised, strict=True):
                    weights[b, h, t, s] = e / sum(raised)
                    y[b, h, t] += weights[b, h, t, s] * v[b, h // group, s]
    return y, weights


def pair(*, bias: bool = True, **settings: Any) -> tuple[MultiHeadAttention, nn.MultiheadAttention]:
    """Return our module and torch's with the same random weights and biases."""
    reference = nn.MultiheadAttention(24, 4, bias=bias, batch_first=True)
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = MultiHeadAttention(24, 4, bias=bias, **settings)
    ours.qkv.weight.data = reference.in_proj_weight.data.clone()
    if bias:
        ours.qkv.bias.data = reference.in_proj_bias.data.clone()
    ours.out.load_state_dict(reference.out_proj.state_dict())
    return ours, reference
