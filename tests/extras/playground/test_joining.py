"""Decoders whose samples join and leave, against `GPT.forward`, for every architecture."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
from architectures import EVERY, architectures, as_alone, close, make, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_near, terms_of
from torch import Tensor

from minigpt.extras.playground.joining import (
    FastJoiningDecoder,
    GraphJoiningDecoder,
    JoiningDecoder,
)
from minigpt.model.gpt import GPT

# With an empty batch in between
VISITS = [(0, 3, 20), (2, 25, 4), (2, 1, 9), (5, 16, 30), (7, 2, 0), (20, 9, 12), (40, 16, 3)]
VISITS += [(40, 1, 20)]
KINDS = (FastJoiningDecoder, GraphJoiningDecoder)  # on a CPU, steps are not recorded
kinds = pytest.mark.parametrize("kind", KINDS)


# Every architecture with the fast decoder, and some with that of graphs
PAIRS = [*product(EVERY, KINDS[:1]), *product(("qwen3", "modern", "long ngram"), KINDS[1:])]
OTHER_PAIRS = [pair for pair in product(EVERY, KINDS) if pair not in PAIRS]
SLOW_PAIRS = [pytest.param(*pair, marks=pytest.mark.slow) for pair in OTHER_PAIRS]


@pytest.mark.parametrize(("name", "kind"), PAIRS + SLOW_PAIRS)
def test_samples_have_the_logits_of_gpt_forward_in_a_batch_that_others_join_and_leave(
    name: str, kind: type[FastJoiningDecoder]
):
    model = make(**EVERY[name])
    before = copy.deepcopy(model)
    for text, n, logits in join_and_leave(model, VISITS, kind(model)):
        close(model, logits, as_alone(model, text, n))
    tensors = zip(model.state_dict().values(), before.state_dict().values(), strict=True)
    assert all(torch.equal(*pair) for pair in tensors)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    changes=st.tuples(st.sampled_from([*EVERY.values()]), st.sampled_from([*EVERY.values()])),
    block_size=st.integers(1, 9),
    visits=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 12), st.integers(0, 25)), max_size=5
    ),
    kind=st.sampled_from(KINDS),
)
def test_samples_of_any_architecture_join_and_leave(
    changes: Any,
    block_size: int,
    visits: list[tuple[int, int, int]],
    kind: type[FastJoiningDecoder],
):
    # In 64 bits: without a norm that helps, small heads and squares make much of rounding.
    small = {"n_embd": 8, "ngram_buckets": 11}
    model = make(**{**small, **changes[0], **changes[1], "block_size": block_size}).double()
    # But for the sines of rotary positions
    options: Any = {"terms": terms_of(model.config), "dtype": torch.float32}
    for text, n, logits in join_and_leave(model, visits, kind(model)):
        assert_near(logits, as_alone(model, text, n), **options)


@architectures
@pytest.mark.parametrize("block_size", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_the_decoder_for_every_model_reads_the_windows_of_the_fast_one(
    settings: dict[str, Any], block_size: int
):
    model = make(**settings, block_size=block_size)
    for text, n, logits in join_and_leave(model, VISITS, JoiningDecoder(model)):
        close(model, logits, as_alone(model, text, n))


@kinds
def test_a_sample_with_nan_leaves_none_in_its_row(kind: type[FastJoiningDecoder]):
    model = make(position="rope", tie_embeddings=False)
    model.wte.weight.data[22] = float("nan")
    decoder = kind(model)
    decoder.add([1] * 12)
    for n_steps in (1, 60):  # in 60 steps the window moves to the front of the cache, with NaN
        decoder.add([22] * 14)
        for _ in range(n_steps):
            has_nan = decoder.step(torch.tensor([1, 22])).isnan().any(dim=1)
            assert has_nan.tolist() == [False, True]
        decoder.drop(1)
        # In the row of the NaN, shorter than the other sample: its older slots are masked
        decoder.add([1, 2])
        assert decoder.step(torch.tensor([1, 2])).isfinite().all()
        decoder.drop(1)


def test_a_recorded_step_reads_the_same_memory_when_a_sample_leaves_and_another_joins():
    decoder = GraphJoiningDecoder(make(smear=2, ngram=3))
    for prompt in ([1, 2, 3], [4]):
        decoder.add(prompt)
    decoder.step(torch.tensor([3, 4]))
    recorded: Any = decoder._step

    def addresses() -> list[int]:
        inputs = (recorded.inputs.last_embeddings, recorded.inputs.last_tokens)
        return [x.data_ptr() for x in (*inputs, *recorded.layers, recorded.tokens, recorded.slot)]

    before = addresses()
    decoder.drop(0)
    decoder.add([5, 6])
    decoder.step(torch.tensor([4, 6]))
    assert decoder._step is recorded
    assert addresses() == before


@kinds
def test_a_sample_that_joins_and_leaves_between_two_steps_changes_no_other(
    kind: type[FastJoiningDecoder],
):
    alone, visited = (kind(make(smear=2, ngram=3)) for _ in range(2))
    for decoder in (alone, visited):
        for prompt in ([1, 2, 3], [4]):
            decoder.add(prompt)
        decoder.step(torch.tensor([3, 4]))
    visited.add([5, 6])
    visited.drop(2)
    for token in (7, 8):
        expected = alone.step(torch.tensor([token, token]))
        assert_near(visited.step(torch.tensor([token, token])), expected, terms=16)


def join_and_leave(
    model: GPT, visits: list[tuple[int, int, int]], decoder: JoiningDecoder
) -> list[tuple[list[int], int, Tensor]]:
    """The text, the length of its prompt and the logits of samples that join and leave.

    Args:
        visits: (step, n, m) of a sample that joins at a step with a prompt of n tokens and leaves
            after m more.
    """
    texts = [tokens(n + m) for _, n, m in visits]
    found: list[list[Tensor]] = [[] for _ in visits]
    rows = list[int]()
    for step in range(max((start + m + 1 for start, _, m in visits), default=0)):
        for i, (start, n, _) in enumerate(visits):
            if start == step:
                decoder.add(texts[i][:n])
                rows.append(i)
        if rows:
            last = [texts[i][visits[i][1] - 1 + len(found[i])] for i in rows]
            logits = decoder.step(torch.tensor(last))
        for row in reversed(range(len(rows))):
            found[rows[row]].append(logits[row].clone())
            if len(found[rows[row]]) == visits[rows[row]][2] + 1:
                decoder.drop(row)
                rows[row] = rows[-1]
                rows.pop()
    return [
        (text, n, torch.stack(logits))
        for text, (_, n, _), logits in zip(texts, visits, found, strict=True)
    ]
