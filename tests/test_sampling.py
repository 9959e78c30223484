"""Filters against the logits processors of Hugging Face, and draws against probabilities."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minigpt.sampling import PerSampleRNG, Sampling
from minigpt.utils.errors import UserError

# Hugging Face's, in the order in which ours are documented to act.
PROCESSORS: dict[str, Callable[[Any], Any]] = {
    "repetition_penalty": RepetitionPenaltyLogitsProcessor,
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.floats(0.2, 5),
    "temperature": st.floats(0.05, 10),
    "top_k": st.integers(1, 40),
    "top_p": st.floats(0.01, 1),
    "min_p": st.floats(0, 1),
}
LARGEST_BELOW_1 = 1 - 2.0**-24  # of 32-bit numbers


ALONE_OR_TOGETHER = st.fixed_dictionaries({}, optional=VALUES) | st.one_of(
    [st.fixed_dictionaries({name: values}) for name, values in VALUES.items()]
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(chosen=ALONE_OR_TOGETHER, seed=st.integers(0, 10**6), n_seen=st.integers(1, 8))
def test_filters_equal_those_of_hugging_face_in_the_same_order(chosen: dict[str, Any], seed: int, n_seen: int):
    logits, text, seen = given_text(seed, n_seen)
    expected = logits.clone()
    for name, processor in PROCESSORS.items():
        if name in chosen:
            expected = processor(chosen[name])(text, expected)
    ours = Sampling(**chosen).filter(logits, seen)
    assert torch.equal(ours.isneginf(), expected.isneginf())
    assert_close(ours.softmax(-1), expected.softmax(-1))


@pytest.mark.parametrize("top_k", [1, 2, 3, 10])
@pytest.mark.parametrize("others", [{}, {"temperature": 0.5}, {"top_p": 0.99}, {"min_p": 0.5}], ids=str)
def test_top_k_keeps_exactly_k_tokens_where_they_tie(top_k: int, others: dict[str, Any]):
    kept = Sampling(top_k=top_k, **others).filter(torch.zeros(3, 11)).isfinite()
    assert kept.sum(-1).tolist() == [top_k] * 3
    few = torch.tensor([[0.0, 2.0, 2.0, 2.0, 1.0]])  # the first k of three that tie, then one more
    kept = Sampling(top_k=top_k).filter(few).isfinite()
    assert kept.sum() == min(top_k, 5)
    assert not kept[0, 0] or top_k >= 5


def test_every_filter_keeps_at_least_one_token():
    logits = torch.randn(50, 30)
    for sampling in (Sampling(top_p=1e-30), Sampling(top_k=1), Sampling(min_p=1.0), Sampling(1e-3, 1, 1e-9, 1.0)):
        assert sampling.filter(logits).isfinite().nonzero()[:, 1].tolist() == logits.argmax(-1).tolist()


def test_temperature_zero_is_argmax_and_takes_the_first_of_tied_tokens():
    logits = torch.randn(400, 50)
    for sampling in (Sampling(0), Sampling(0.0, top_k=3), Sampling(0, top_p=0.3), Sampling(0, min_p=0.9)):
        assert torch.equal(sampling.draw(logits, torch.rand(400)), logits.argmax(-1))
        tied = torch.full((1, 50), -1.0)
        tied[0, 7::2] = 3.0
        assert sampling.draw(tied, torch.zeros(1)).tolist() == [7]
    near = torch.tensor([[1.0, torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)), 0.5]])
    assert Sampling(0).draw(near, torch.zeros(1)).tolist() == [1]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-40, 1e-50, 5e-324])
def test_the_smallest_temperatures_are_argmax(temperature: float):
    logits = torch.randn(400, 50)
    uniform = torch.rand(400)
    assert torch.equal(Sampling(temperature).draw(logits, uniform), logits.argmax(-1))


@pytest.mark.parametrize("penalty", [0.01, 100])
@pytest.mark.parametrize("temperature", [0, 1e-30, 1.0])
def test_extreme_repetition_penalties_give_finite_probabilities(penalty: float, temperature: float):
    everything = torch.ones(100, 30, dtype=torch.bool)
    for logits in (30 * torch.randn(100, 30), -torch.rand(100, 30) - 1):
        for seen in (torch.rand(100, 30) < 0.5, everything):
            sampling = Sampling(temperature, repetition_penalty=penalty)
            assert sampling.filter(logits, seen).softmax(-1).isfinite().all()
            drawn = sampling.draw(logits, torch.rand(100), seen)
            assert ((drawn >= 0) & (drawn < 30)).all()
            if temperature < 1:
                penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
                assert torch.equal(drawn, torch.where(seen, penalized, logits).argmax(-1))


def test_a_draw_inverts_the_cumulative_distribution():
    logits = torch.tensor([0.125, 0.5, 0.0, 0.25, 0.125]).log()
    uniform = torch.tensor([0.0, 0.12, 0.13, 0.5, 0.62, 0.63, 0.87, 0.88, 0.999])
    drawn = Sampling().draw(logits.expand(9, -1), uniform)
    assert drawn.tolist() == [0, 0, 1, 1, 1, 3, 3, 4, 4]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    V=st.integers(2, 300),
    spread=st.sampled_from([0.1, 1.0, 30.0, 300.0]),
    values=st.sampled_from([{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}, {"temperature": 0.01}]),
)
def test_a_token_without_probability_is_never_drawn(seed: int, V: int, spread: float, values: dict[str, Any]):
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(1, V, generator=generator)
    logits[torch.rand(1, V, generator=generator) < 0.5] = float("-inf")
    logits[0, int(torch.randint(V, (1,), generator=generator))] = 0.0
    possible = Sampling(**values).filter(logits).softmax(-1)[0] > 0
    for uniform in (0.0, 0.5, LARGEST_BELOW_1, 1 - 2.0**-53):
        for dtype in (torch.float32, torch.float64):
            if uniform <= LARGEST_BELOW_1 or dtype == torch.float64:
                drawn = int(Sampling(**values).draw(logits, torch.tensor([uniform], dtype=dtype)))
                assert possible[drawn]


def test_a_draw_from_a_large_vocabulary_is_exact_in_float64():
    V = 100_003  # equally likely, so token i has [i/V, (i+1)/V): 32 bits round its ends by several hundredths of it
    expected = np.arange(V - 1 - 16 * 5_003, V, 5_003)
    for inside in (0.001, 0.999):
        drawn = Sampling().draw(torch.zeros(1, V).expand(len(expected), V), torch.from_numpy((expected + inside) / V))
        assert drawn.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", -0.1), ("top_k", 0), ("top_k", 1.5), ("top_p", 0), ("top_p", 1.0001), ("min_p", 1.1)],
        *[("repetition_penalty", 0.0), ("repetition_penalty", 1e300), ("temperature", None)],
        *[(name, value) for name in PROCESSORS for value in (float("nan"), True, "0.5")],
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(name: str, value: object):
    with pytest.raises(UserError) as error:
        Sampling(**{name: value})
    assert re.fullmatch(rf"{name} must be .*, got {re.escape(str(value))}", str(error.value))


def test_the_numbers_of_a_generator_do_not_depend_on_the_others():
    together = rows(PerSampleRNG([5, 6, 7], torch.device("cpu")), 200)
    assert together.shape == (200, 3)
    for i, seed in enumerate((5, 6, 7)):
        assert torch.equal(rows(PerSampleRNG([seed], torch.device("cpu")), 200)[:, 0], together[:, i])


def rows(uniforms: PerSampleRNG, n: int) -> Tensor:
    """The next numbers of every generator, (n, generators)."""
    return torch.stack([uniforms.next() for _ in range(n)])


def given_text(seed: int, n_seen: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (3, 30), tokens that are in the texts (3, n_seen), and which these are (3, 30).

    In 64 bits, rounding moves no token across the edge of a filter.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(3, 30, generator=generator, dtype=torch.float64)
    text = torch.randint(30, (3, n_seen), generator=generator)
    return logits, text, torch.zeros(3, 30, dtype=torch.bool).scatter(1, text, True)
