"""Generation against loops without a cache; filters, draws and scores against references."""

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, make, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from models import overlap
from refusals import refused
from tolerance import assert_near, rounding, terms_of
from torch import Tensor
from torch.testing import assert_close
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minigpt.model.gpt import GPT
from minigpt.sampling.decoder import Decoder
from minigpt.sampling.fast.fast_decoder import FastDecoder
from minigpt.sampling.fast.graph_decoder import GraphDecoder
from minigpt.sampling.filters import draw, filter_logits
from minigpt.sampling.generation import Sample, generate, score, stream
from minigpt.sampling.settings import SamplingSettings
from minigpt.utils.errors import RunError


def test_a_repetition_penalty_covers_prompt_and_generated_tokens():
    model = make()
    prompts = [[5, 1, 19], [2, 2, 7, 0, 11, 12]]
    processor = RepetitionPenaltyLogitsProcessor(3.0)
    expected = []
    for prompt in prompts:
        text = torch.tensor([prompt])
        while text.size(1) < len(prompt) + 10:
            chosen = processor(text, model(text)[:, -1]).argmax(-1, keepdim=True)
            text = torch.cat((text, chosen), dim=1)
        expected.append(text[0, len(prompt) :].tolist())
    options = {"max_new_tokens": 10, "temperature": 0}
    assert texts(model, prompts, repetition_penalty=3.0, **options) == expected
    assert texts(model, prompts, **options) != expected
    long = [9, *[3] * 30]  # what is no longer read was in the text all the same
    options = {"max_new_tokens": 1, "temperature": 0, "repetition_penalty": 3.0}
    for token in (9, 3):
        bare = model(torch.tensor([long[-16:]]))[:, -1]
        # No penalty makes it a tie
        model.wte.weight.data[token] *= 2 * bare[0].max() / bare[0, token]
        best = processor(torch.tensor([long]), model(torch.tensor([long[-16:]]))[:, -1]).argmax()
        assert texts(model, long, **options) == [[best]]


# Learned positions, rotary ones, and inputs that depend on earlier tokens
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "modern"])
def test_a_sample_depends_on_its_prompt_and_its_seed_alone(name: str):
    model = make(**ARCHITECTURES[name])
    prompts = [[3, 7], [1], [3, 7], list(range(20))]
    options = {"max_new_tokens": 24, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": True}
    together = generate(model, prompts, num_samples=2, seed=5, **options)
    assert len({tuple(sample.tokens) for sample in together}) == 6  # two prompts are equal
    for i in (0, 3, 5, 6):
        (alone,) = generate(model, prompts[i // 2], seed=5 + i % 2, **options)
        assert together[i].tokens == alone.tokens
        assert_logprobs(model, together[i], Tensor(alone.logprobs))
    assert generate(model, [3, 7], num_samples=3, seed=5, **options)[1].tokens == together[1].tokens


def test_sampling_neither_uses_nor_changes_the_global_random_state():
    model = make(dropout=0.5).train()
    drawn = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        expected = torch.rand(3)
        torch.manual_seed(seed)
        drawn.append(texts(model, [3], max_new_tokens=9, seed=2**63 - 1, num_samples=2))
        assert torch.equal(torch.rand(3), expected)
    assert drawn[0] == drawn[1]


def test_prompts_are_tensors_or_sequences_alone_or_in_a_list():
    model = make()
    a = torch.tensor([3, 7])
    b = torch.tensor([1])
    arrays = (a.numpy(), [*a.numpy()], [a.numpy()], tuple(map(np.array, (3, 7))))
    tensors = (a, a.int(), [*a], [[*a]], (3, a[1]), [a[0], 7])
    expected = texts(model, [[3, 7], [1]], max_new_tokens=6)
    for prompt in (*tensors, (3, 7), [(3, 7)], range(3, 8, 4), *arrays):
        assert texts(model, prompt, max_new_tokens=6) == expected[:1]
    for prompts in ([a, [1]], (a, b)):
        assert texts(model, prompts, max_new_tokens=6) == expected


def test_stream_yields_the_tokens_of_generate_and_every_setting_changes_them():
    model = make(vocab_size=12)
    plain = generate(model, [3, 7], max_new_tokens=12)
    changed = {"top_k": 2, "top_p": 0.3, "min_p": 0.4, "tokenizer": Letters()}
    changed |= {"temperature": 3.0, "repetition_penalty": 3.0, "seed": 5}
    changed |= {"num_samples": 2, "logprobs": True}
    one_each = [{name: value} for name, value in changed.items()]
    for options in ({}, *one_each, {"stop": ["a"], "tokenizer": Letters()}):
        whole = generate(model, [3, 7], max_new_tokens=12, **options)
        steps = list(stream(model, [3, 7], max_new_tokens=12, **options))
        assert len(steps[0].tokens) == len(whole)
        for i, sample in enumerate(whole):
            assert sample.tokens == [step.tokens[i] for step in steps[: len(sample.tokens)]]
            found = [step.logprobs[i] for step in steps if step.logprobs]
            assert sample.logprobs == found
        assert (whole == plain) == (not options), options


STOP_PROMPTS = [[0, 1, 0, 1], [0]]


@cache
def unstopped() -> tuple[GPT, dict[str, Any], list[Sample]]:
    # Return a model of the tokens of `Letters`, options, and its samples without a stop string
    model = make(vocab_size=len(Letters.TOKENS))
    model.lm_head.weight.data *= 0.1
    options = {"max_new_tokens": 120, "num_samples": 4, "seed": 11, "logprobs": True}
    options["tokenizer"] = Letters()
    return model, options, generate(model, STOP_PROMPTS, **options)


@pytest.mark.parametrize(
    "stop",
    [
        ["abc", "bcab", "cabd", "b d"],  # ab is of one token, or of two
        ["é", "dé"],  # é is of two tokens of a byte each
        [0, "ddd", 19, "cc"],
        ["aba", "bab"],  # and not with the end of the prompt
        ["d", "dd"],  # both in one token: the first ends it
    ],
    ids=str,
)
def test_a_sample_ends_with_the_token_that_completes_a_stop_string(stop: list[str | int]):
    model, options, whole = unstopped()
    expected = [ended(sample, stop) for sample in whole]
    stopped = generate(model, STOP_PROMPTS, stop=stop, **options)
    for one, other in zip(stopped, expected, strict=True):
        assert (one.tokens, one.reason, one.text) == (other.tokens, other.reason, other.text)
        assert_logprobs(model, one, Tensor(other.logprobs))
    ends = [len(sample.tokens) if sample.reason == "stop" else 121 for sample in expected]
    assert len(set(ends)) > 2  # each at its own time
    for i, step in enumerate(stream(model, STOP_PROMPTS, stop=stop, **options), 1):
        assert step.stopped == [end <= i for end in ends]
    assert i == min(120, max(ends))


def test_a_text_completes_the_character_within_which_its_prompt_ends():
    model = make(vocab_size=len(Letters.TOKENS))
    second_byte = torch.zeros(len(Letters.TOKENS)).index_fill(0, torch.tensor([10]), 1e3)
    model.lm_head.register_forward_hook(lambda module, args, logits: logits + second_byte)
    found = generate(model, [[0], [0, 9]], max_new_tokens=1, tokenizer=Letters())
    assert [sample.text for sample in found] == ["\ufffd", "é"]


def test_stop_strings_need_a_tokenizer_and_stop_ids_do_not():
    refused("tokenizer", generate, make(), [3], max_new_tokens=3, stop=["a"])
    assert len(generate(make(), [3], max_new_tokens=3, stop=list(range(23)))[0].tokens) == 1


@pytest.mark.parametrize("training", [True, False])
def test_a_model_stays_in_its_mode_and_can_be_trained(training: bool):
    model = make(dropout=0.5).train(training)
    for _ in stream(model, [3], max_new_tokens=18):
        assert torch.is_grad_enabled()
        assert {module.training for module in model.modules()} == {training}
    generate(model, [3], max_new_tokens=2)
    score(model, [3] * 40, [3])
    model(torch.tensor([[3]]), torch.tensor([[4]])).backward()
    assert model.wte.weight.grad is not None


@pytest.mark.parametrize("is_changed", [False, True])
def test_no_step_has_dropout_whatever_other_calls_end_or_the_user_does_meanwhile(is_changed: bool):
    model = make(dropout=0.5)
    if is_changed:
        model.blocks[0].register_forward_hook(lambda module, args, x: x)
    calls = [partial(stream, model, [id], max_new_tokens=n) for id, n in ((3, 3), (5, 20))]
    expected = [[step.tokens[0] for step in calls[0]()], [step.tokens[0] for step in calls[1]()]]
    model.train()
    streams = [call() for call in calls]
    found: list[list[int]] = [[], []]
    for i in (0, 1, 0, 1, 0):  # the first one ends
        found[i] += next(streams[i]).tokens
    score(model, [1, 2], [3])
    model.eval()
    found[1] += next(streams[1]).tokens
    model.train()
    for step in streams[1]:
        found[1] += step.tokens
    assert found == expected


def test_scores_in_several_threads_have_no_dropout():
    model = make(dropout=0.5)
    calls = [partial(score, model, text, [3]) for text in ([1, 2, 7], [4, 5])]
    expected = [call() for call in calls]
    model.train()
    for found, own in zip(overlap(model, *calls), expected, strict=True):
        assert torch.equal(found.logprobs, own.logprobs)
    assert all(module.training for module in model.modules())


HOLES = [0, 3, 4, 9, 22, 38]


@pytest.mark.parametrize(
    ("known", "options"),
    [
        (HOLES, {}),
        (HOLES, {"temperature": 0}),
        (HOLES, {"top_k": 5, "repetition_penalty": 2.0, "temperature": 2.5, "top_p": 0.5}),
        (range(12), {}),
        (range(40), {}),
    ],
    ids=str,
)
def test_ids_without_a_token_are_never_drawn_and_logprobs_are_those_before_filters(
    known: Sequence[int], options: dict[str, Any]
):
    model = make(vocab_size=40)
    tokenizer: Any = Letters(known)
    options = {"max_new_tokens": 20, "num_samples": 4, "logprobs": True, **options}
    found = generate(model, [3], tokenizer=tokenizer, **options)
    # As from a model that excludes the ids itself.
    unused = torch.full((40,), float("-inf")).index_fill(0, torch.tensor([*known]), 0.0)
    hook = model.lm_head.register_forward_hook(lambda module, args, logits: logits + unused)
    expected = generate(model, [3], **options)
    hook.remove()
    assert [sample.tokens for sample in found] == [sample.tokens for sample in expected]
    for sample in found:  # under the model, with all its ids
        assert {*sample.tokens} <= {*known}
        scored = score(model, sample.tokens[:16], [3]).logprobs
        assert_near(Tensor(sample.logprobs[:16]), scored, terms=terms_of(model.config))


OUT_OF_RANGE: list[tuple[str, object]] = [
    *(("max_new_tokens", 0), ("num_samples", 2.5), ("seed", -1), ("temperature", -0.1)),
    *(("top_k", 0), ("top_p", 0), ("min_p", 1.1)),
    *(("repetition_penalty", 0.0), ("repetition_penalty", 1e300)),
    *((name, float("nan")) for name in vars(SamplingSettings())),
    *((name, "0.5") for name in vars(SamplingSettings())),
    *(("stop", stop) for stop in ("abc", ["a", ""], [1.5], [True], [-5], 5)),
]


def test_a_setting_out_of_range_is_refused_before_the_first_step():
    model = make()
    for name, value in OUT_OF_RANGE:
        given: Any = {"max_new_tokens": 3, "tokenizer": Letters(), name: value}
        for function in (generate, stream):
            match = f"^{name} must be .*, got {re.escape(str(value))}$"
            refused(match, function, model, [3], **given)


def test_invalid_token_ids_are_refused():
    model = make()
    tensors = [torch.tensor(x) for x in (True, 1.0, -1, 23)]
    arrays = [x.numpy()[()] for x in tensors]
    items = (*tensors, *arrays, 1.0, True, 23, -1, None, "a", [3])
    sequences = [[3, item] for item in items]
    wholes = ([], [[1], []], torch.tensor([1.0, 2.0]), 3, "abc", None, range(0))
    for prompt in (*wholes, *tensors, *sequences):
        given: Any = prompt
        refused("prompt", generate, model, given, max_new_tokens=3)
        for text, start in ((given, [3]), ([3], given)):
            refused("prompt", score, model, text, start)


GREEDY = {"temperature": 0}


@pytest.mark.parametrize(
    ("kind", "n_before", "options"),
    [
        (Decoder, 0, {}),
        (Decoder, 2, GREEDY),
        (FastDecoder, 0, GREEDY),
        (FastDecoder, 2, {}),
        (FastDecoder, 2, GREEDY | {"repetition_penalty": 2.0}),
        (GraphDecoder, 0, GREEDY | {"repetition_penalty": 2.0}),
        (GraphDecoder, 2, {}),
    ],
)
def test_nan_logits_raise_an_error_at_their_step(
    kind: type, n_before: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("minigpt.sampling.generation.decoder_class", lambda model: kind)
    model = make(position="rope", tie_embeddings=False)
    text = [3, *generate(model, [3], max_new_tokens=3, **options)[0].tokens]
    at = next(i for i in range(n_before, 4) if text[i] not in text[:i])
    model.wte.weight.data[text[at]] = float("nan")
    tokenizer: Any = Letters(range(23))
    steps = stream(model, [3], max_new_tokens=20, tokenizer=tokenizer, **options)
    assert [next(steps).tokens for _ in range(at)] == [[token] for token in text[1 : at + 1]]
    with pytest.raises(RunError, match="logits are NaN or infinite"):
        next(steps)


def test_a_model_whose_values_overflow_in_float16_is_an_error_that_names_float32():
    model = make(norm="rmsnorm")
    model.blocks[0].mlp.down.weight.data.sign_().mul_(6e4)  # float16 has values up to 65,504
    generate(model, [3], max_new_tokens=2)
    assert all(weight.isfinite().all() for weight in model.half().parameters())
    with pytest.raises(RunError, match="float16; try float32"):
        generate(model, [3], max_new_tokens=2)


def texts(model: GPT, prompts: Any, **options: Any) -> list[list[int]]:
    return [sample.tokens for sample in generate(model, prompts, **options)]


def assert_logprobs(model: GPT, sample: Sample, expected: Tensor) -> None:
    assert_near(Tensor(sample.logprobs), expected, terms=terms_of(model.config))


class Letters:
    """A tokenizer of letters and pairs of letters, and of the two bytes of é."""

    TOKENS = [b"a", b"b", b"c", b"d", b" ", b"ab", b"ca", b"bc", b"dd", b"\xc3", b"\xa9", b"ad"]

    def __init__(self, known: Sequence[int] = range(len(TOKENS))) -> None:
        self.token_bytes = {i: self.decode_bytes([i]) for i in known}

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.TOKENS[i] if i < len(self.TOKENS) else b"?" for i in ids)


def ended(sample: Sample, stop: list[str | int]) -> Sample:
    # Return what a sample is if its text or one of its tokens stops it
    sought = [one.encode() for one in stop if isinstance(one, str)]
    for n in range(1, len(sample.tokens) + 1):
        text = Letters().decode_bytes(sample.tokens[:n])
        ends = [text.find(one) + len(one) for one in sought if one in text]
        if sample.tokens[n - 1] in stop or ends:
            shown = text[: min(ends, default=len(text))].decode(errors="replace")
            return Sample(sample.tokens[:n], sample.logprobs[:n], "stop", shown)
    return sample


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
    logits = torch.tensor([*wrong, [-INF, 1, 0, -INF], [-3e38, 3e38, -INF, -INF]])
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


@pytest.mark.parametrize("settings", [{}, ARCHITECTURES["modern"]], ids=["gpt2", "modern"])
def test_score_returns_the_logprob_and_rank_of_each_token(settings: dict[str, Any]):
    model = make(**settings)
    start = [5, 1]
    text = tokens(14)
    found = score(model, text, start, n_top=3)
    assert not found.logprobs.requires_grad
    logits = model(torch.tensor([[*start, *text[:-1]]]))
    logprobs = logits[0, 1:].double().log_softmax(-1)
    own = logprobs[range(14), text]
    assert_near(found.logprobs, own.float(), terms=terms_of(model.config))
    assert found.ranks.tolist() == (logprobs > own[:, None]).sum(-1).tolist()
    assert found.nats == pytest.approx(-own.sum().item(), rel=1e-5)
    values, ids = logprobs.topk(3)
    top = Tensor(found.top)  # (14, 3, 2)
    assert torch.equal(top[..., 0].long(), ids)
    assert_near(top[..., 1], values.float(), logits, terms=200)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_every_token_of_a_long_text_is_scored_with_at_least_half_a_block_of_context(
    block_size: int,
):
    model = make(block_size=block_size)
    read = list[int]()
    model.register_forward_hook(lambda module, given, logits: read.append(given[0].numel()))
    for n_start, n_text in ((1, 50), (15, 1), (16, 50), (40, 50)):
        ids = torch.tensor(tokens(n_start + n_text))
        read.clear()
        found = score(model, ids[n_start:], ids[:n_start])
        assert len(found.logprobs) == len(found.ranks) == n_text
        assert sum(read) <= 2 * len(ids) + block_size
        assert len(read) <= 2 * len(ids) / block_size + 2
        # The log-probabilities after each n tokens of the text, by n
        after = {}
        for n in range(1, min(block_size, len(ids)) + 1):
            with torch.no_grad():
                after[n] = model(ids.unfold(0, n, 1))[:, -1].log_softmax(-1)
        scored = zip(range(n_start, len(ids)), found.logprobs, found.ranks, strict=True)
        for i, logprob, rank in scored:
            contexts = range(min(i, (block_size + 1) // 2), min(i, block_size) + 1)
            ranks = []
            for n in contexts:
                row = after[n][i - n]
                own = row[ids[i]]
                if (own - logprob).abs() < rounding(row, terms=terms_of(model.config)):
                    ranks.append((row > own).sum())
            assert rank in ranks, f"token {i} was not scored after {contexts}"
