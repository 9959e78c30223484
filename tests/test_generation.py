"""Generation against loops without a cache, stop strings, reproducibility, and scores."""

import inspect
import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from tolerance import assert_near, rounding, terms_of
from torch import nn
from transformers import RepetitionPenaltyLogitsProcessor

from minigpt.config import GPTConfig
from minigpt.generation import Sample, generate, score, stream
from minigpt.model import GPT
from minigpt.sampling import Sampling
from minigpt.utils.errors import RunError, UserError

ARCHITECTURES = {
    "gpt2": {},
    "llama": {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False, "n_kv_head": 2},
    "qwen3": {"position": "rope", "qk_norm": True, "qk_norm_weights": True, "norm_eps": 1e-6, "n_kv_head": 2},
    "multi-query": {"position": "none", "n_kv_head": 1, "qk_norm": True, "head_dim": 10},
    "modern": {"position": "rope", "norm": "rmsnorm_noscale", "ngram": 3, "smear": 2},
    "post-norm": {"norm_position": "post", "activation": "relu2", "tie_embeddings": False},
}
architectures = pytest.mark.parametrize("settings", ARCHITECTURES.values(), ids=ARCHITECTURES)


@architectures
@pytest.mark.parametrize("chunk", [1, 3, 7, 15])
def test_a_chunked_prefill_with_a_cache_gives_the_logits_of_one_forward(settings: dict[str, Any], chunk: int):
    model = make(**settings)
    tokens = torch.randint(23, (3, 16))
    cache = model.new_cache(3)
    parts = [model(tokens[:, i : i + chunk], cache=cache) for i in range(0, 16, chunk)]
    assert_near(torch.cat(parts, 1), model(tokens), terms=terms_of(model.config))


@pytest.mark.parametrize("penalty", [0.7, 1.3, 3.0])
def test_a_repetition_penalty_covers_prompt_and_generated_tokens(penalty: float):
    model, prompts = make(), [[5, 1, 19], [2, 2, 7, 0, 11, 12]]
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
        model.wte.weight.data[token] *= 2 * bare[0].max() / bare[0, token]  # no penalty makes it a tie
        best = processor(torch.tensor([long]), model(torch.tensor([long[-16:]]))[:, -1]).argmax()
        assert texts(model, long, max_new_tokens=1, temperature=0, repetition_penalty=penalty) == [[best]]


def test_a_sample_does_not_depend_on_the_batch_size():
    model, prompt = make(position="rope"), [3, 7]
    many = texts(model, prompt, max_new_tokens=40, seed=7, num_samples=5)
    assert [len(text) for text in many] == [40] * 5
    assert len({tuple(text) for text in many}) == 5
    for i, text in enumerate(many):
        assert texts(model, prompt, max_new_tokens=40, seed=7, num_samples=i + 1)[i] == text
        assert texts(model, prompt, max_new_tokens=40, seed=7 + i) == [text]
    assert len(texts(model, prompt, max_new_tokens=1, seed=2**63 - 1, num_samples=2)) == 2


@architectures
def test_a_batch_of_prompts_gives_the_samples_of_each_prompt_alone(settings: dict[str, Any]):
    model, prompts = make(**settings), [[3, 7], [1], [3, 7], list(range(20))]
    options = {"max_new_tokens": 45, "num_samples": 2, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.2}
    together = generate(model, prompts, **options, logprobs=True)
    assert len(together) == 8
    for i, prompt in enumerate(prompts):
        alone = generate(model, prompt, **options, logprobs=True)
        for one, other in zip(together[2 * i : 2 * i + 2], alone, strict=True):
            assert one.tokens == other.tokens
            assert_near(one.logprobs, other.logprobs, terms=terms_of(model.config))
    assert together[0].tokens == together[4].tokens != together[2].tokens


def test_sampling_neither_uses_nor_changes_the_global_random_state():
    model = make(dropout=0.5).train()
    drawn = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        expected = torch.rand(3)
        torch.manual_seed(seed)
        drawn.append(texts(model, [3], max_new_tokens=20, num_samples=2))
        assert torch.equal(torch.rand(3), expected)
    assert drawn[0] == drawn[1]


def test_prompts_are_tensors_or_sequences_alone_or_in_a_list():
    model = make()
    expected = texts(model, [3, 7], max_new_tokens=20)
    for prompt in (torch.tensor([3, 7]), torch.tensor([3, 7], dtype=torch.int32), (3, 7), [[3, 7]], [(3, 7)]):
        assert texts(model, prompt, max_new_tokens=20) == expected
    for prompts in ([torch.tensor([3, 7]), [1]], [[3, 7], (1,)], (torch.tensor([3, 7]), torch.tensor([1]))):
        both = texts(model, prompts, max_new_tokens=20)
        assert both == [*expected, *texts(model, [1], max_new_tokens=20)]


@architectures
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0}, {"temperature": 2.5}, {"top_k": 3, "repetition_penalty": 2.0}, {"top_p": 0.5}],
    ids=str,
)
def test_logprobs_are_those_of_the_model_before_filters(settings: dict[str, Any], options: dict[str, Any]):
    model, prompts = make(**settings), [[5, 1, 19], [4]]
    for i, sample in enumerate(generate(model, prompts, max_new_tokens=13, num_samples=2, logprobs=True, **options)):
        text = torch.tensor([*prompts[i // 2], *sample.tokens])
        expected = model(text[None, :-1])[0].double().log_softmax(-1).gather(-1, text[1:, None])[-13:, 0]
        assert_near(torch.tensor(sample.logprobs), expected.float(), terms=terms_of(model.config))


def test_stream_yields_the_tokens_of_generate_step_by_step():
    model, options = make(), {"num_samples": 3, "top_k": 5, "logprobs": True}
    whole = generate(model, [3, 7], max_new_tokens=20, **options)
    steps = list(islice(stream(model, [3, 7], max_new_tokens=10**12, **options), 20))
    for i, one in enumerate(whole):
        assert [(step.tokens[i], step.logprobs[i]) for step in steps] == [*zip(one.tokens, one.logprobs, strict=True)]
    assert {type(number) for step in steps for number in step.tokens + step.logprobs} == {int, float}
    assert [step.stopped for step in steps] == [[False] * 3] * 20
    assert next(stream(model, [3, 7], max_new_tokens=1)).logprobs == []


def test_generate_passes_every_setting_to_stream():
    model, base = make(vocab_size=12), {"max_new_tokens": 30}
    changed = {"temperature": 3.0, "top_k": 2, "top_p": 0.3, "min_p": 0.4, "repetition_penalty": 3.0, "stop": ["a"]}
    changed |= {"tokenizer": Letters(), "seed": 5, "num_samples": 2, "logprobs": True}
    settings = {*inspect.signature(stream).parameters, *inspect.signature(Sampling).parameters} - {"filters"}
    assert {"model", "prompts", *base, *changed} == settings == {*inspect.signature(generate).parameters}
    plain = generate(model, [3, 7], **base)
    for name, value in changed.items():
        options = base | {name: value} | ({"tokenizer": Letters()} if name == "stop" else {})
        whole, steps = generate(model, [3, 7], **options), list(stream(model, [3, 7], **options))
        assert len(steps[0].tokens) == len(whole)
        for i, sample in enumerate(whole):
            assert sample.tokens == [step.tokens[i] for step in steps[: len(sample.tokens)]]
        assert whole != plain, name


@pytest.mark.parametrize(
    "stop",
    [
        ["b"],
        ["ab"],  # of one token, or of two
        ["dab", "bad"],
        ["abc", "bcab", "cabd", "b d"],
        ["é"],  # of two tokens of a byte each
        ["aé", "éd", "dé"],
        [2],
        [0, "ddd", 19, "cc"],
        ["zzz"],
        [22],
        ["dd", "d"],  # both in one token: the first ends it
        [9],  # an incomplete character
    ],
    ids=str,
)
@pytest.mark.parametrize("num_samples", [1, 8])
def test_a_sample_ends_with_the_token_that_completes_a_stop_string(stop: list[str | int], num_samples: int):
    model = make(vocab_size=len(Letters.TOKENS))
    model.lm_head.weight.data *= 0.1
    options = {"max_new_tokens": 120, "num_samples": num_samples, "seed": 11, "logprobs": True}
    free = generate(model, [[3, 1, 2], [0]], tokenizer=Letters(), **options)
    stopped = generate(model, [[3, 1, 2], [0]], stop=stop, tokenizer=Letters(), **options)
    expected = [ended(sample, stop) for sample in free]
    for one, other in zip(stopped, expected, strict=True):
        assert (one.tokens, one.reason, one.text) == (other.tokens, other.reason, other.text)
        assert_near(torch.tensor(one.logprobs), torch.tensor(other.logprobs), terms=terms_of(model.config))
    if stop not in (["zzz"], [22], ["dd", "d"]) and num_samples == 8:
        assert len({len(sample.tokens) for sample in stopped}) > 2  # each at its own time


def test_stream_reports_stopped_samples_and_ends_when_all_have_stopped():
    model = make(vocab_size=len(Letters.TOKENS))
    model.lm_head.weight.data *= 0.1
    options = {"max_new_tokens": 120, "num_samples": 4, "seed": 11}
    ends = [len(ended(sample, ["dab", 0]).tokens) for sample in generate(model, [3], **options)]
    assert len(set(ends)) > 1
    steps = list(stream(model, [3], stop=["dab", 0], tokenizer=Letters(), **options))
    assert len(steps) == max(ends)
    for i, step in enumerate(steps):
        assert step.stopped == [end <= i + 1 for end in ends]


def test_the_last_of_max_new_tokens_can_complete_a_stop_string():
    model = make(vocab_size=len(Letters.TOKENS))
    (free,) = texts(model, [3], max_new_tokens=10, seed=2)
    first = free.index(free[-1]) + 1
    for n, reason in ((first - 1, "length"), (first, "stop"), (first + 5, "stop")):
        (sample,) = generate(model, [3], max_new_tokens=n, seed=2, stop=[free[-1]])
        assert (sample.reason, sample.tokens) == (reason, free[: min(n, first)])


def test_a_stop_string_in_the_prompt_does_not_stop_the_sample():
    model = make(vocab_size=len(Letters.TOKENS))
    nn.init.zeros_(model.wte.weight)  # every token is as likely
    options = {"max_new_tokens": 60, "tokenizer": Letters()}
    for seed in range(5):
        (free,) = generate(model, [0, 1, 0, 1], seed=seed, **options)
        (sample,) = generate(model, [0, 1, 0, 1], seed=seed, stop=["aba", "bab"], **options)
        assert sample.tokens == ended(free, ["aba", "bab"]).tokens


@pytest.mark.parametrize("stop", ["abc", ["a", ""], [1.5], [None], [b"a"], 5, None, [["a"]]], ids=str)
def test_an_invalid_stop_list_is_refused(stop: Any):
    with pytest.raises(UserError, match="stop"):
        generate(make(), [3], max_new_tokens=3, stop=stop, tokenizer=Letters())


def test_stop_strings_need_a_tokenizer_and_stop_ids_do_not():
    with pytest.raises(UserError, match="tokenizer"):
        generate(make(), [3], max_new_tokens=3, stop=["a"])
    assert len(generate(make(), [3], max_new_tokens=3, stop=list(range(23)))[0].tokens) == 1


@pytest.mark.parametrize("training", [True, False])
def test_the_training_mode_of_the_model_is_restored(training: bool):
    model = make(dropout=0.5).train(training)

    def check_mode() -> None:
        assert {module.training for module in model.modules()} == {training}

    steps = stream(model, [3], max_new_tokens=20)
    check_mode()
    next(steps)
    assert not model.training
    steps.close()
    check_mode()
    generate(model, [3], max_new_tokens=20)
    check_mode()
    score(model, [3] * 40, [3])
    check_mode()
    model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score(model, [3], [3])
    check_mode()


def test_gradients_are_enabled_between_the_steps_of_a_stream():
    model = make()
    for _ in stream(model, [3], max_new_tokens=2):
        assert torch.is_grad_enabled()
    model(torch.tensor([[3]]), torch.tensor([[4]])).backward()
    assert model.wte.weight.grad is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_new_tokens", 0), ("num_samples", 2.5), ("seed", -1), ("seed", 2**64), ("temperature", None)],
)
def test_a_setting_out_of_range_is_refused_before_the_first_step(name: str, value: object):
    for function in (generate, stream):
        with pytest.raises(UserError, match=f"^{name} must be .*, got {re.escape(str(value))}$"):
            function(make(), [3], **{"max_new_tokens": 3, name: value})


NO_PROMPTS = [[], [[1], []], [3, 23], [-1], torch.tensor([1.0, 2.0]), 3, "abc", None, [[1, 2], 3], [True]]


@pytest.mark.parametrize("prompt", NO_PROMPTS, ids=str)
def test_invalid_token_ids_are_refused(prompt: Any):
    with pytest.raises(UserError, match="prompt"):
        generate(make(), prompt, max_new_tokens=3)
    for text, start in ((prompt, [3]), ([3], prompt)):
        with pytest.raises(UserError, match="prompt"):
            score(make(), text, start)


@architectures
def test_score_returns_the_logprob_and_rank_of_each_token(settings: dict[str, Any]):
    model, start, text = make(**settings), [5, 1], torch.randint(23, (14,)).tolist()
    found = score(model, text, start)
    assert not found.logprobs.requires_grad
    p = model(torch.tensor([[*start, *text[:-1]]]))[0, 1:].double().softmax(-1)
    own = p[range(14), text]
    assert_near(found.logprobs, own.log().float(), terms=terms_of(model.config))
    assert found.ranks.tolist() == [int((row > one).sum()) for row, one in zip(p, own, strict=True)]
    assert len(set(found.ranks.tolist())) > 5
    assert found.nats == pytest.approx(-own.log().sum().item(), rel=1e-5)
    loss = model(torch.tensor([[*start, *text[:-1]]]), torch.tensor([[-100, *text]]), reduction="sum")
    assert found.nats == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 16])
@pytest.mark.parametrize(("n_start", "n_text"), [(1, 50), (15, 1), (16, 50), (40, 50)])
def test_every_token_of_a_long_text_is_scored_with_at_least_half_a_block_of_context(
    block_size: int, n_start: int, n_text: int
):
    model, ids = make(block_size=block_size), torch.randint(23, (n_start + n_text,)).tolist()
    read = []
    model.register_forward_hook(lambda module, given, logits: read.append(given[0].numel()))
    found = score(model, ids[n_start:], ids[:n_start])
    assert len(found.logprobs) == len(found.ranks) == n_text
    assert sum(read) <= 2 * len(ids) + block_size
    assert len(read) <= 2 * len(ids) / block_size + 2
    for i, logprob, rank in zip(range(n_start, len(ids)), found.logprobs, found.ranks, strict=True):
        least, most = min(i, (block_size + 1) // 2), min(i, block_size)
        for context in range(least, most + 1):
            row = model(torch.tensor([ids[i - context : i]]))[0, -1].log_softmax(-1)
            if (row[ids[i]] - logprob).abs() < rounding(row, terms=terms_of(model.config)) and (
                row > row[ids[i]]
            ).sum() == rank:
                break
        else:
            pytest.fail(f"token {i} was not scored after {least} to {most} tokens")


def make(**settings: Any) -> GPT:
    """A small model whose weights are large enough for its text to vary."""
    torch.manual_seed(1)
    shape = {"block_size": 16, "vocab_size": 23, "n_layer": 2, "n_head": 4, "n_embd": 32}
    model = GPT(GPTConfig(**{**shape, **settings})).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            parameter.data += 1
    return model


def texts(model: GPT, prompts: Any, **options: Any) -> list[list[int]]:
    return [sample.tokens for sample in generate(model, prompts, **options)]


class Letters:
    """A tokenizer of letters and pairs of letters, and of the two bytes of é."""

    TOKENS = [b"a", b"b", b"c", b"d", b" ", b"ab", b"ca", b"bc", b"dd", b"\xc3", b"\xa9", b"ad"]

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.TOKENS[i] if i < len(self.TOKENS) else b"?" for i in ids)


def ended(sample: Sample, stop: list[str | int]) -> Sample:
    """Return the sample cut after the first token that completes a stop string or is a stop id."""
    sought = [one.encode() for one in stop if isinstance(one, str)]
    for n in range(1, len(sample.tokens) + 1):
        text = Letters().decode_bytes(sample.tokens[:n])
        if sample.tokens[n - 1] in stop or any(one in text for one in sought):
            end = min((text.find(one) + len(one) for one in sought if one in text), default=len(text))
            return Sample(sample.tokens[:n], sample.logprobs[:n], "stop", text[:end].decode(errors="replace"))
    return sample


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_raise_an_error(temperature):
    model = GPT(GPTConfig(vocab_size=8, block_size=4, n_layer=1, n_head=1, n_embd=8))
    with torch.no_grad():
        model.wte.weight[3] = float("nan")
    with pytest.raises(RunError, match="logits are NaN or infinite"):
        generate(model, [3], max_new_tokens=2, temperature=temperature, seed=0)
