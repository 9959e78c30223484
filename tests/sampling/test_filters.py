"""Filters against the logits processors of Hugging Face, and draws against probabilities."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minigpt.sampling.filters import draw, filter_logits
from minigpt.sampling.settings import SamplingSettings

# Hugging Face's, in the order in which ours are documented to act, and values.
PROCESSORS: dict[str, tuple[Callable[[Any], Any], st.SearchStrategy[Any]]] = {
    "repetition_penalty": (RepetitionPenaltyLogitsProcessor, st.floats(0.2, 5)),
    "temperature": (TemperatureLogitsWarper, st.floats(0.05, 10)),
    "top_k": (TopKLogitsWarper, st.integers(1, 40)),
    "top_p": (TopPLogitsWarper, st.floats(0.01, 1)),
    "min_p": (MinPLogitsWarper, st.floats(0, 1)),
}
VALUES = {name: values for name, (_, values) in PROCESSORS.items()}
CHOSEN = st.fixed_dictionaries({}, optional=VALUES)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(chosen=CHOSEN, seed=st.integers(0, 10**6), n_seen=st.integers(1, 8))
def test_filters_equal_those_of_hugging_face_in_the_same_order(
    chosen: dict[str, Any], seed: int, n_seen: int
):
    generator = torch.Generator().manual_seed(seed)
    # In 64 bits, rounding moves no token across the edge of a filter.
    logits = expected = 2 * torch.randn(3, 30, generator=generator, dtype=torch.float64)
    text = torch.randint(30, (3, n_seen), generator=generator)
    for name, (processor, _) in PROCESSORS.items():
        if name in chosen:
            expected = processor(chosen[name])(text, expected)
    seen = torch.zeros(3, 30, dtype=torch.bool).scatter(1, text, True)
    ours = filter_logits(logits, SamplingSettings(**chosen), seen)
    assert torch.equal(ours.isneginf(), expected.isneginf())
    assert_close(ours.softmax(-1), expected.softmax(-1))


def test_top_k_keeps_exactly_k_tokens_where_they_tie():
    few = torch.tensor([[0.0, 2.0, 2.0, 2.0, 1.0]])  # the first k of three that tie, then one more
    for top_k in (1, 3, 10):
        sampling = SamplingSettings(top_k=top_k, top_p=0.99)
        kept = filter_logits(torch.zeros(3, 11), sampling).isfinite()
        assert kept.sum(-1).tolist() == [top_k] * 3
        kept = filter_logits(few, SamplingSettings(top_k=top_k)).isfinite()
        assert kept.sum() == min(top_k, 5)
        assert not kept[0, 0] or top_k >= 5


@pytest.mark.parametrize(
    "values",
    [
        *({"temperature": temperature} for temperature in (0, 1e-6, 1e-40, 5e-324)),
        *({"temperature": 0, "top_p": 0.3}, {"top_p": 1e-30}, {"top_k": 1}, {"min_p": 1.0}),
    ],
    ids=str,
)
def test_extreme_values_keep_the_most_likely_token(values: dict[str, Any]):
    logits = torch.randn(400, 50)
    uniform = torch.rand(400)
    assert torch.equal(draw(logits, SamplingSettings(**values), uniform), logits.argmax(-1))


NAN = float("nan")
INF = float("inf")
EXTREMES: dict[str, tuple[Any, ...]] = {
    "temperature": (1.0, 0.0, 5e-324, 1e-300, 1e-38, 0.0099, 1e38, 1e300),
    "top_k": (None, 1, 2**63 - 1),
    "top_p": (None, 5e-324, 1e-40, 1 - 2.0**-53),
    "min_p": (None, 5e-324, 1 - 2.0**-53, 1.0),
    "repetition_penalty": (1.0, 0.01, 100.0),
}


@pytest.mark.parametrize("penalty", EXTREMES["repetition_penalty"])
def test_the_most_likely_token_is_kept_and_one_with_probability_drawn_whatever_the_values(
    penalty: float,
):
    of_sizes = [torch.randn(30), torch.zeros(30), 1e30 * torch.randn(30)]
    logits = torch.stack([*of_sizes, -1e4 - torch.arange(30.0)])
    logits[0, 3:9] = logits[0].max()  # ties
    logits[:, 20:] -= INF
    seen = torch.rand(4, 30) < 0.5
    # Each row with the smallest and the largest number below 1
    both = torch.cat((logits, logits))  # (8, V)
    uniforms = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64).repeat_interleave(4)
    before = filter_logits(logits, SamplingSettings(0, repetition_penalty=penalty), seen)
    likeliest = before == before.amax(-1, keepdim=True)
    for values in product(*list(EXTREMES.values())[:-1]):
        sampling = SamplingSettings(*values, penalty)
        kept = filter_logits(logits, sampling, seen)
        assert (kept.isfinite() & likeliest).any(-1).all()
        drawn = draw(both, sampling, uniforms, torch.cat((seen, seen)))
        assert drawn.max() < 20
        assert kept.softmax(-1).repeat(2, 1).gather(-1, drawn[:, None]).all()


@pytest.mark.parametrize(
    "values", [{"temperature": 0}, {}, {"temperature": 1e-3, "top_k": 2}, {"top_p": 0.5}], ids=str
)
@pytest.mark.parametrize("unused", [None, torch.tensor([0.0, 0.0, -INF, 0.0])], ids=["", "unused"])
def test_no_token_is_drawn_from_logits_that_are_nan_or_infinite(
    values: dict[str, Any], unused: torch.Tensor | None
):
    wrong = [
        [NAN, 1, 2, 3],
        [1, 2, NAN, 3],
        [1, 2, 3, INF],
        [1, 2, INF, 3],
        [-INF, -INF, -INF, -INF],
        [NAN, -INF, 0, INF],
    ]
    logits = torch.tensor(wrong + [[-INF, 1, 0, -INF], [-3e38, 3e38, -INF, -INF]])
    for penalty in (1.0, 2.0):
        sampling = SamplingSettings(repetition_penalty=penalty, **values)
        drawn = draw(logits, sampling, torch.rand(8), torch.rand(8, 4) < 0.5, unused)
        assert (drawn == 4).tolist() == [True] * 6 + [False] * 2


def test_top_p_keeps_no_token_after_those_that_reach_it_exactly():
    assert filter_logits(torch.zeros(1, 4), SamplingSettings(top_p=0.5)).isfinite().sum() == 2


def test_temperature_zero_takes_the_first_of_tied_tokens():
    tied = torch.full((1, 50), -1.0)
    tied[0, 7::2] = 3.0
    assert draw(tied, SamplingSettings(0, top_k=3), torch.zeros(1)).tolist() == [7]


def test_a_draw_inverts_the_cumulative_distribution():
    logits = torch.tensor([0.125, 0.5, 0.0, 0.25, 0.125]).log()
    uniform = torch.tensor([0.0, 0.12, 0.13, 0.5, 0.62, 0.63, 0.87, 0.88, 0.999])
    drawn = draw(logits.expand(9, -1), SamplingSettings(), uniform)
    assert drawn.tolist() == [0, 0, 1, 1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize("values", [{}, {"top_p": 0.5}, {"temperature": 0.01}], ids=str)
def test_a_token_without_probability_is_never_drawn(values: dict[str, Any]):
    sampling = SamplingSettings(**values)
    for spread, V in product((0.1, 30.0, 300.0), (2, 10, 300)):
        logits = spread * torch.randn(1, V)
        logits[torch.rand(1, V) < 0.5] = float("-inf")
        logits[0, int(torch.randint(V, (1,)))] = 0.0
        possible = filter_logits(logits, sampling).softmax(-1)[0] > 0
        # The last are the largest below 1 of 32 and of 64 bits.
        uniforms = torch.tensor([0.0, 0.5, 1 - 2.0**-24, 1 - 2.0**-53], dtype=torch.float64)
        assert possible[draw(logits.expand(4, V), sampling, uniforms)].all()


def test_a_draw_from_a_large_vocabulary_is_exact_in_float64():
    # Equally likely, so token i has [i/V, (i+1)/V): 32 bits round its ends by hundredths of it.
    V = 100_003
    expected = torch.arange(V - 1 - 16 * 5_003, V, 5_003)
    logits = torch.zeros(1, V).expand(len(expected), V)
    for inside in (0.001, 0.999):
        uniform = (expected.double() + inside) / V
        assert torch.equal(draw(logits, SamplingSettings(), uniform), expected)
