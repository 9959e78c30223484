"""Generation against loops without a cache, stop strings, reproducibility, and scores."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from models import make_model, overlap
from tolerance import assert_near, rounding, terms_of
from transformers import RepetitionPenaltyLogitsProcessor

from minigpt.model.gpt import GPT
from minigpt.sampling.decoder import Decoder
from minigpt.sampling.fast.fast_decoder import FastDecoder
from minigpt.sampling.fast.graph_decoder import GraphDecoder
from minigpt.sampling.generation import Sample, generate, score, stream
from minigpt.sampling.settings import SamplingSettings
from minigpt.utils.errors import RunError, UserError

ARCHITECTURES = {
    "gpt2": {},
    "llama": {
        "position": "rope",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
        "n_kv_head": 2,
    },
    "qwen3": {
        "position": "rope",
        "qk_norm": True,
        "qk_norm_weights": True,
        "norm_eps": 1e-6,
        "n_kv_head": 2,
    },
    "multi-query": {"position": "none", "n_kv_head": 1, "qk_norm": True, "head_dim": 10},
    "modern": {"position": "rope", "norm": "rmsnorm_noscale", "ngram": 3, "smear": 2},
    "post-norm": {"norm_position": "post", "activation": "relu2", "tie_embeddings": False},
}
architectures = pytest.mark.parametrize("settings", ARCHITECTURES.values(), ids=ARCHITECTURES)


@architectures
def test_a_chunked_prefill_with_a_cache_gives_the_logits_of_one_forward(settings: dict[str, Any]):
    model, tokens = make(**settings), torch.randint(23, (3, 16))
    for chunk in (1, 3, 7, 15):
        cache = model.new_cache(3)
        parts = [model(tokens[:, i : i + chunk], cache=cache) for i in range(0, 16, chunk)]
        assert_near(torch.cat(parts, 1), model(tokens), terms=terms_of(model.config))


def test_a_repetition_penalty_covers_prompt_and_generated_tokens():
    model, prompts, penalty = make(), [[5, 1, 19], [2, 2, 7, 0, 11, 12]], 3.0
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    expected = []
    for prompt in prompts:
        text = torch.tensor([prompt])
        while text.size(1) < len(prompt) + 10:
            chosen = processor(text, model(text)[:, -1]).argmax(-1, keepdim=True)
            text = torch.cat((text, chosen), dim=1)
        expected.append(text[0, len(prompt) :].tolist())
    options = {"max_new_tokens": 10, "temperature": 0}
    assert texts(model, prompts, repetition_penalty=penalty, **options) == expected
    assert texts(model, prompts, **options) != expected
    long = [9, *[3] * 30]  # what is no longer read was in the text all the same
    for token in (9, 3):
        bare = model(torch.tensor([long[-16:]]))[:, -1]
        # No penalty makes it a tie
        model.wte.weight.data[token] *= 2 * bare[0].max() / bare[0, token]
        best = processor(torch.tensor([long]), model(torch.tensor([long[-16:]]))[:, -1]).argmax()
        assert texts(model, long, max_new_tokens=1, temperature=0, repetition_penalty=penalty) == [
            [best]
        ]


@architectures
def test_a_sample_depends_on_its_prompt_and_its_seed_alone(settings: dict[str, Any]):
    model, prompts = make(**settings), [[3, 7], [1], [3, 7], list(range(20))]
    options = {"max_new_tokens": 45, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": True}
    together = generate(model, prompts, num_samples=2, seed=5, **options)
    assert len({tuple(sample.tokens) for sample in together}) == 6  # two prompts are equal
    for i, sample in enumerate(together):
        (alone,) = generate(model, prompts[i // 2], seed=5 + i % 2, **options)
        assert sample.tokens == alone.tokens
        assert_near(
            torch.tensor(sample.logprobs),
            torch.tensor(alone.logprobs),
            terms=terms_of(model.config),
        )
    assert generate(model, [3, 7], num_samples=3, seed=5, **options)[1].tokens == together[1].tokens


def test_sampling_neither_uses_nor_changes_the_global_random_state():
    model = make(dropout=0.5).train()
    drawn = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        expected = torch.rand(3)
        torch.manual_seed(seed)
        drawn.append(texts(model, [3], max_new_tokens=20, seed=2**63 - 1, num_samples=2))
        assert torch.equal(torch.rand(3), expected)
    assert drawn[0] == drawn[1]


def test_prompts_are_tensors_or_sequences_alone_or_in_a_list():
    model, a, b = make(), torch.tensor([3, 7]), torch.tensor([1])
    arrays = (a.numpy(), [*a.numpy()], [a.numpy()], tuple(map(np.array, (3, 7))))
    for prompt in (
        a,
        a.int(),
        [*a],
        [[*a]],
        (3, a[1]),
        [a[0], 7],
        (3, 7),
        [(3, 7)],
        range(3, 8, 4),
        *arrays,
    ):
        assert texts(model, prompt, max_new_tokens=20) == texts(model, [[3, 7]], max_new_tokens=20)
    for prompts in ([a, [1]], (a, b)):
        assert texts(model, prompts, max_new_tokens=20) == texts(
            model, [[3, 7], [1]], max_new_tokens=20
        )


@architectures
def test_logprobs_are_those_of_the_model_before_filters(settings: dict[str, Any]):
    model, prompts = make(**settings), [[5, 1, 19], [4]]
    for options in (
        {},
        {"temperature": 0},
        {"top_k": 3, "repetition_penalty": 2.0, "temperature": 2.5, "top_p": 0.5},
    ):
        samples = generate(
            model, prompts, max_new_tokens=13, num_samples=2, logprobs=True, **options
        )
        for i, sample in enumerate(samples):
            text = torch.tensor([*prompts[i // 2], *sample.tokens])
            expected = (
                model(text[None, :-1])[0]
                .double()
                .log_softmax(-1)
                .gather(-1, text[1:, None])[-13:, 0]
            )
            assert_near(
                torch.tensor(sample.logprobs), expected.float(), terms=terms_of(model.config)
            )


def test_stream_yields_the_tokens_of_generate_and_every_setting_changes_them():
    model, changed = (
        make(vocab_size=12),
        {"top_k": 2, "top_p": 0.3, "min_p": 0.4, "tokenizer": Letters()},
    )
    changed |= {
        "temperature": 3.0,
        "repetition_penalty": 3.0,
        "seed": 5,
        "num_samples": 2,
        "logprobs": True,
    }
    plain = generate(model, [3, 7], max_new_tokens=30)
    for given in (
        {},
        *({name: value} for name, value in changed.items()),
        {"stop": ["a"], "tokenizer": Letters()},
    ):
        whole, steps = (
            list(function(model, [3, 7], max_new_tokens=30, **given))
            for function in (generate, stream)
        )
        assert len(steps[0].tokens) == len(whole)
        for i, sample in enumerate(whole):
            assert sample.tokens == [step.tokens[i] for step in steps[: len(sample.tokens)]]
            assert sample.logprobs == [
                logprob for step in steps for logprob in step.logprobs[i : i + 1]
            ]
        assert (whole == plain) == (not given), given


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
    model, prompts = make(vocab_size=len(Letters.TOKENS)), [[0, 1, 0, 1], [0]]
    model.lm_head.weight.data *= 0.1
    options = {
        "max_new_tokens": 120,
        "num_samples": 8,
        "seed": 11,
        "logprobs": True,
        "tokenizer": Letters(),
    }
    expected = [ended(sample, stop) for sample in generate(model, prompts, **options)]
    stopped = generate(model, prompts, stop=stop, **options)
    for one, other in zip(stopped, expected, strict=True):
        assert (one.tokens, one.reason, one.text) == (other.tokens, other.reason, other.text)
        assert_near(
            torch.tensor(one.logprobs), torch.tensor(other.logprobs), terms=terms_of(model.config)
        )
    ends = [len(sample.tokens) if sample.reason == "stop" else 121 for sample in expected]
    assert len(set(ends)) > 2  # each at its own time
    steps = stream(model, prompts, stop=stop, **options)
    assert [step.stopped for step in steps] == [
        [end <= i for end in ends] for i in range(1, min(120, max(ends)) + 1)
    ]


def test_stop_strings_need_a_tokenizer_and_stop_ids_do_not():
    with pytest.raises(UserError, match="tokenizer"):
        generate(make(), [3], max_new_tokens=3, stop=["a"])
    assert len(generate(make(), [3], max_new_tokens=3, stop=list(range(23)))[0].tokens) == 1


@pytest.mark.parametrize("training", [True, False])
def test_a_model_stays_in_its_mode_and_can_be_trained(training: bool):
    model = make(dropout=0.5).train(training)
    for _ in stream(model, [3], max_new_tokens=20):
        assert torch.is_grad_enabled()
        assert {module.training for module in model.modules()} == {training}
    generate(model, [3], max_new_tokens=20)
    score(model, [3] * 40, [3])
    model(torch.tensor([[3]]), torch.tensor([[4]])).backward()
    assert model.wte.weight.grad is not None


@pytest.mark.parametrize("is_changed", [False, True])
def test_no_step_has_dropout_whatever_other_calls_end_or_the_user_does_meanwhile(is_changed: bool):
    model = make(dropout=0.5)
    if is_changed:
        model.blocks[0].register_forward_hook(lambda module, args, x: x)
    expected = [texts(model, [prompt], max_new_tokens=n)[0] for prompt, n in ((3, 3), (5, 40))]
    streams = [stream(model.train(), [prompt], max_new_tokens=n) for prompt, n in ((3, 3), (5, 40))]
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


TOKENIZERS = {"the first ids": range(12), "holes": [0, 3, 4, 9, 22, 38], "all ids": range(40)}


@pytest.mark.parametrize("known", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0}, {"top_k": 5, "repetition_penalty": 2.0}], ids=str
)
def test_ids_without_a_token_are_never_drawn(known: Sequence[int], options: dict[str, Any]):
    model, tokenizer = make(vocab_size=40), Letters(known)
    options = {"max_new_tokens": 40, "num_samples": 8, "logprobs": True, **options}
    found = generate(model, [3], tokenizer=tokenizer, **options)  # type: ignore[arg-type]
    # As from a model that excludes the ids itself.
    unused = torch.full((40,), float("-inf")).index_fill(0, torch.tensor([*known]), 0.0)
    hook = model.lm_head.register_forward_hook(lambda module, args, logits: logits + unused)
    expected = generate(model, [3], **options)
    hook.remove()
    assert [sample.tokens for sample in found] == [sample.tokens for sample in expected]
    assert {token for sample in found for token in sample.tokens} <= {*known}
    for sample in found:  # under the model, with all its ids
        scored = score(model, sample.tokens[:16], [3]).logprobs
        assert_near(torch.tensor(sample.logprobs[:16]), scored, terms=terms_of(model.config))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("max_new_tokens", 0),
            ("num_samples", 2.5),
            ("seed", -1),
            ("temperature", -0.1),
            ("top_k", 0),
            ("top_p", 0),
        ),
        *(("min_p", 1.1), ("repetition_penalty", 0.0), ("repetition_penalty", 1e300)),
        *((name, value) for name in vars(SamplingSettings()) for value in (float("nan"), "0.5")),
        *(("stop", stop) for stop in ("abc", ["a", ""], [1.5], [True], [-5], 5)),
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_refused_before_the_first_step(name: str, value: object):
    for function in (generate, stream):
        with pytest.raises(UserError, match=f"^{name} must be .*, got {re.escape(str(value))}$"):
            function(make(), [3], **{"max_new_tokens": 3, "tokenizer": Letters(), name: value})


def test_invalid_token_ids_are_refused():
    tensors = [torch.tensor(x) for x in (True, 1.0, -1, 23)]
    sequences = [
        [3, item]
        for item in (*tensors, *(x.numpy()[()] for x in tensors), 1.0, True, 23, -1, None, "a", [3])
    ]
    for prompt in (
        [],
        [[1], []],
        torch.tensor([1.0, 2.0]),
        *tensors,
        3,
        "abc",
        None,
        range(0),
        *sequences,
    ):
        with pytest.raises(UserError, match="prompt"):
            generate(make(), prompt, max_new_tokens=3)
        for text, start in ((prompt, [3]), ([3], prompt)):
            with pytest.raises(UserError, match="prompt"):
                score(make(), text, start)


@architectures
def test_score_returns_the_logprob_and_rank_of_each_token(settings: dict[str, Any]):
    model, start, text = make(**settings), [5, 1], torch.randint(23, (14,)).tolist()
    found = score(model, text, start, n_top=3)
    assert not found.logprobs.requires_grad
    logits = model(torch.tensor([[*start, *text[:-1]]]))
    logprobs = logits[0, 1:].double().log_softmax(-1)
    own = logprobs[range(14), text]
    assert_near(found.logprobs, own.float(), terms=terms_of(model.config))
    assert found.ranks.tolist() == [
        int((row > one).sum()) for row, one in zip(logprobs, own, strict=True)
    ]
    assert found.nats == pytest.approx(-own.sum().item(), rel=1e-5)
    values, ids = logprobs.topk(3)
    assert [[i for i, _ in row] for row in found.top] == ids.tolist()
    assert_near(
        torch.tensor([[value for _, value in row] for row in found.top]),
        values.float(),
        logits,
        terms=200,
    )


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_every_token_of_a_long_text_is_scored_with_at_least_half_a_block_of_context(
    block_size: int,
):
    model, read = make(block_size=block_size), list[int]()
    terms = terms_of(model.config)
    for n_start, n_text in ((1, 50), (15, 1), (16, 50), (40, 50)):
        ids = torch.randint(23, (n_start + n_text,)).tolist()
        hook = model.register_forward_hook(
            lambda module, given, logits: read.append(given[0].numel())
        )
        found = score(model, ids[n_start:], ids[:n_start])
        hook.remove()
        assert len(found.logprobs) == len(found.ranks) == n_text
        assert sum(read) <= 2 * len(ids) + block_size
        assert len(read) <= 2 * len(ids) / block_size + 2
        read.clear()
        for i, logprob, rank in zip(
            range(n_start, len(ids)), found.logprobs, found.ranks, strict=True
        ):
            contexts = range(min(i, (block_size + 1) // 2), min(i, block_size) + 1)
            rows = [model(torch.tensor([ids[i - n : i]]))[0, -1].log_softmax(-1) for n in contexts]
            near = [
                row for row in rows if (row[ids[i]] - logprob).abs() < rounding(row, terms=terms)
            ]
            assert rank in [(row > row[ids[i]]).sum() for row in near], (
                f"token {i} was not scored after {contexts}"
            )


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"top_k": 3}, {"repetition_penalty": 2.0}], ids=str
)
def test_a_model_may_exclude_tokens(options: dict[str, Any]):
    model = make()
    first = generate(model, [3], max_new_tokens=1, temperature=0)[0].tokens[0]
    banned = torch.zeros(23).index_fill(0, torch.tensor([first]), float("-inf"))
    model.lm_head.register_forward_hook(lambda module, args, logits: logits + banned)
    assert first not in generate(model, [3], max_new_tokens=20, **options)[0].tokens


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {}, {"temperature": 0, "repetition_penalty": 2.0}], ids=str
)
@pytest.mark.parametrize("kind", [Decoder, FastDecoder, GraphDecoder])
@pytest.mark.parametrize("n_before", [0, 2])
def test_nan_logits_raise_an_error_at_their_step(
    n_before: int, kind: type, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("minigpt.sampling.generation.decoder_class", lambda model: kind)
    model = make(position="rope", tie_embeddings=False)
    text = [3, *generate(model, [3], max_new_tokens=3, **options)[0].tokens]
    at = next(i for i in range(n_before, 4) if text[i] not in text[:i])
    model.wte.weight.data[text[at]] = float("nan")
    steps = stream(model, [3], max_new_tokens=20, tokenizer=Letters(range(23)), **options)
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


def make(**settings: Any) -> GPT:
    """A small model whose weights are large enough for its text to vary."""
    return make_model(**{"n_head": 4, "n_embd": 32, "std": 0.3, "seed": 1, **settings})


def texts(model: GPT, prompts: Any, **options: Any) -> list[list[int]]:
    return [sample.tokens for sample in generate(model, prompts, **options)]


class Letters:
    """A tokenizer of letters and pairs of letters, and of the two bytes of é."""

    TOKENS = [b"a", b"b", b"c", b"d", b" ", b"ab", b"ca", b"bc", b"dd", b"\xc3", b"\xa9", b"ad"]

    def __init__(self, known: Sequence[int] = range(len(TOKENS))) -> None:
        self.token_bytes = {i: self.decode_bytes([i]) for i in known}

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.TOKENS[i] if i < len(self.TOKENS) else b"?" for i in ids)


def ended(sample: Sample, stop: list[str | int]) -> Sample:
    sought = [one.encode() for one in stop if isinstance(one, str)]
    for n in range(1, len(sample.tokens) + 1):
        text = Letters().decode_bytes(sample.tokens[:n])
        if sample.tokens[n - 1] in stop or any(one in text for one in sought):
            end = min(
                (text.find(one) + len(one) for one in sought if one in text), default=len(text)
            )
            return Sample(
                sample.tokens[:n], sample.logprobs[:n], "stop", text[:end].decode(errors="replace")
            )
    return sample
