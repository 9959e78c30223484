"""The engine against `generate`: the tokens of a request do not depend on what else runs."""

import asyncio
import pkgutil
import re
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from itertools import chain, count, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_model
from tolerance import assert_near, terms_of

from minigpt.extras.playground.engine import Engine, QueueFull, SampleRequest, Token, TokenStream
from minigpt.model.gpt import GPT
from minigpt.sampling.decoder import Decoder
from minigpt.sampling.detokenizer import Detokenizer
from minigpt.sampling.fast.fast_decoder import FastDecoder
from minigpt.sampling.generation import generate, score
from minigpt.sampling.settings import SamplingSettings
from minigpt.utils.errors import RunError, UserError

QK_NORM = {"qk_norm": True, "qk_norm_weights": True}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "qwen3": {"position": "rope", "n_kv_head": 2, "activation": "swiglu", **QK_NORM},
    "multi-query": {"position": "none", "n_kv_head": 1, "head_dim": 10, "norm_position": "post"},
    "modern": {"position": "rope", "norm": "rmsnorm_noscale", "ngram": 3, "smear": 2},
}
SETTINGS = [
    {"temperature": 0},
    {},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.8, "min_p": 0.02},
    {"repetition_penalty": 1.3},
    {"temperature": 0, "repetition_penalty": 1.5},
]
PER_SLOT = 4 * 2 * 2 * 32  # bytes of keys and values of 2 layers
ENDLESS = SampleRequest([1, 2, 3], 10**9)


# A tokenizer of letters and pairs of letters, and of the two bytes of é
class Letters:
    TOKENS = [b"a", b"b", b"c", b"d", b" ", b"ab", b"ca", b"bc", b"dd", b"\xc3", b"\xa9", b"ad"]
    token_bytes = dict.fromkeys(range(23), b"?") | dict(enumerate(TOKENS))
    end_ids: list[int] = []

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.TOKENS[i] if i < len(self.TOKENS) else b"?" for i in ids)


def make(**settings: Any) -> GPT:
    return make_model(**{"n_head": 4, "n_embd": 32, "std": 0.3, "seed": 1, **settings})


def serve(model: GPT, use: Callable[[Engine], Awaitable[Any]], **limits: int) -> Any:
    async def run() -> Any:
        engine: Any = Engine(model, Letters())  # type: ignore[arg-type]
        vars(engine).update(limits)
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(run(), 300))


async def collect(stream: TokenStream) -> list[Token]:
    return [token async for token in stream]


async def collect_all(engine: Engine, requests: list[SampleRequest]) -> list[list[Token]]:
    return await asyncio.gather(*(collect(engine.generate(request)) for request in requests))


def assert_as_generate(model: GPT, request: SampleRequest, found: list[Token]) -> None:
    options = {"max_new_tokens": request.max_new_tokens, "stop": request.stop}
    options |= {"tokenizer": Letters(), "seed": request.seed, **vars(request.sampling)}
    (sample,) = generate(model, request.prompt, logprobs=True, **options)
    assert [token.id for token in found] == sample.tokens
    assert [token.reason for token in found] == [None] * (len(found) - 1) + [sample.reason]
    if request.n_top is None:
        assert all(token.logprob is None and token.top == [] for token in found)
        return
    logprobs = torch.tensor([token.logprob for token in found])
    assert_near(logprobs, torch.tensor(sample.logprobs), terms=terms_of(model.config))
    # Else the windows of `score` are others
    if len(request.prompt) + len(found) <= model.config.block_size:
        rated = score(model, sample.tokens, request.prompt, n_top=request.n_top)
        assert [token.rank for token in found] == rated.ranks.tolist()
        for token, top in zip(found, rated.top, strict=True):
            assert [i for i, _ in token.top] == [i for i, _ in top]
            assert [x for _, x in token.top] == pytest.approx([x for _, x in top], abs=1e-4)


def assert_all_as_generate(
    model: GPT, requests: list[SampleRequest], found: list[list[Token]]
) -> None:
    for request, tokens in zip(requests, found, strict=True):
        assert_as_generate(model, request, tokens)


# The requests and the bytes of the cache at each step
@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    step = FastDecoder.step
    sizes = []

    def measure(decoder: FastDecoder, tokens: torch.Tensor) -> torch.Tensor:
        logits = step(decoder, tokens)
        sizes.append((len(tokens), decoder._cache.nbytes))
        return logits

    monkeypatch.setattr(FastDecoder, "step", measure)
    return sizes


@pytest.mark.parametrize("changes", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_requests_that_join_at_different_times_get_the_tokens_of_generate(changes: dict[str, Any]):
    model = make(**changes, vocab_size=12)
    rng = torch.Generator().manual_seed(0)
    requests = [
        SampleRequest(
            prompt=torch.randint(12, (n,), generator=rng).tolist(),
            max_new_tokens=7 + 5 * (i % 8),
            sampling=SamplingSettings(**SETTINGS[i % len(SETTINGS)]),
            stop=((), ("dab",), (3,), ("é", 11))[i % 4],
            seed=i,
            n_top=(0, 4, None, 9)[i % 4],
        )
        for i, n in enumerate((3, 16, 1, 25, 7, 2, 16, 16, 9, 4, 1, 30))
    ]

    async def both(engine: Engine) -> list[list[Token]]:
        first = engine.generate(requests[0])
        start = [await anext(first) for _ in range(3)]  # the others join while the first runs
        rest, others = await asyncio.gather(collect(first), collect_all(engine, requests[1:]))
        return [start + rest, *others]

    assert_all_as_generate(model, requests, serve(model, both, max_running=4))


def test_ids_without_a_token_are_never_drawn_whatever_the_settings():
    model = make(vocab_size=40)
    extreme = [{"top_p": 1e-320}, {"temperature": 1e300}]
    requests = [
        SampleRequest([3], 30, SamplingSettings(**each), seed=i)
        for each, i in product(SETTINGS + extreme, range(2))
    ]
    found = serve(model, lambda engine: collect_all(engine, requests))
    assert {token.id for token in chain(*found)} <= Letters.token_bytes.keys()
    assert_all_as_generate(model, requests, found)
    # The smallest top_p leaves the likeliest token
    assert [token.id for token in found[-4]] == [token.id for token in found[0]]


def test_closing_a_stream_frees_its_row():
    async def one_after_another(engine: Engine) -> list[Token]:
        for started in (True, False, True):
            stream = engine.generate(ENDLESS)
            if started:
                await anext(stream)
            await stream.aclose()
            assert await collect(stream) == []
        return await collect(engine.generate(SampleRequest([5], 4)))

    found = serve(make(), one_after_another, max_running=1)
    assert_as_generate(make(), SampleRequest([5], 4), found)


def test_too_many_requests_raise_at_once_until_one_ends():
    async def fill(engine: Engine) -> None:
        streams = [engine.generate(ENDLESS) for _ in range(3)]
        with pytest.raises(QueueFull):
            await engine.score([1, 2])
        await streams[2].aclose()
        assert len(await engine.score([1, 2])) == 2
        with pytest.raises(QueueFull):
            engine.generate(ENDLESS, ENDLESS)  # together or not at all

    serve(make(), fill, max_running=1, max_waiting=2)


def test_the_cache_grows_with_the_texts_and_not_with_the_context(sizes: list[tuple[int, int]]):
    model = make(position="rope", block_size=8192)
    short = [SampleRequest([1, 2, 3], 2, seed=i) for i in range(4)]
    serve(model, lambda engine: collect(engine.generate(*short)))
    assert max(nbytes for _, nbytes in sizes) <= 4 * 2 * 5 * PER_SLOT
    long = [SampleRequest([1, 2, 3], 40), SampleRequest([5] * 30, 4)]
    sizes.clear()
    serve(model, lambda engine: collect(engine.generate(*long)))
    assert max(nbytes for _, nbytes in sizes) <= 2 * 2 * 43 * PER_SLOT


@pytest.mark.parametrize("changes", [{}, {"position": "rope", "smear": 1, "ngram": 2}], ids=str)
def test_requests_wait_until_their_cache_fits(
    changes: dict[str, Any], sizes: list[tuple[int, int]]
):
    model = make(**changes, vocab_size=12)
    limit = 2 * 2 * 16 * PER_SLOT  # two samples of a whole window, or five of six tokens
    requests = [SampleRequest([1, 2, 3], 3, seed=i) for i in range(9)]
    requests += [SampleRequest([4, 2], 30 * (i % 2) + 5, seed=i) for i in range(5)]
    requests += [SampleRequest([7] * (3 * i + 1), 40, seed=i) for i in range(6)]
    found = serve(model, lambda engine: collect_all(engine, requests), max_cache_bytes=limit)
    assert_all_as_generate(model, requests, found)
    assert max(nbytes for _, nbytes in sizes) <= limit
    assert max(rows for rows, _ in sizes) == 5
    too_large = r"^the key-value cache of a sample must be at most 0 MB, got .* of 11 tokens"
    ten = [SampleRequest([1], 10)]
    with pytest.raises(UserError, match=too_large):
        serve(model, lambda engine: collect_all(engine, ten), max_cache_bytes=10 * PER_SLOT)


def test_a_long_request_waits_though_shorter_ones_of_its_prompt_join():
    model = make()
    lengths = (3, 3, 13, 3)
    requests = [SampleRequest([1 + i // 3], n, seed=i) for i, n in enumerate(lengths)]
    limit = 2 * 2 * 14 * PER_SLOT  # two samples as long as the third request
    found = serve(model, lambda engine: collect_all(engine, requests), max_cache_bytes=limit)
    assert_all_as_generate(model, requests, found)


def test_the_cache_may_take_a_quarter_of_the_memory():
    limit = serve(make(), lambda engine: asyncio.sleep(0, engine.max_cache_bytes))
    (total,) = re.findall(r"MemTotal: *(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"))
    assert 0 < limit <= int(total) * 1024 / 4


def test_nan_logits_end_their_request_alone():
    model = make(position="rope", tie_embeddings=False)
    with torch.no_grad():
        model.wte.weight[22] = float("nan")
    request = SampleRequest([1, 2, 3], 30, SamplingSettings(temperature=0))

    async def ask(engine: Engine) -> list[Token]:
        other = engine.generate(request)
        start = [await anext(other)]
        for temperature, n_top in ((1, 0), (1, None), (0, 0), (0, None)):
            nan = SampleRequest([1, 22], 5, SamplingSettings(temperature), n_top=n_top)
            with pytest.raises(RunError, match="NaN"):
                await collect(engine.generate(nan))
        with pytest.raises(RunError, match="NaN"):
            await engine.score([1, 22, 3])
        return start + await collect(other)

    assert_as_generate(model, request, serve(model, ask))


ENGINE = "minigpt.extras.playground.engine."
FAST = "minigpt.sampling.fast.fast_decoder.FastDecoder."
# What raises, when, and the request for which it does. Only that has token 23, never drawn.
FAULTS: dict[str, tuple[str, Callable[..., bool], dict[str, Any]]] = {
    "hook": ("", lambda module, args, x: 23 in args[0], {"prompt": [4, 23]}),
    "step": (FAST + "step", lambda decoder, tokens: 23 in tokens, {"prompt": [4, 23]}),
    "step at its end": (
        FAST + "_next_logits",
        lambda decoder, tokens, slot: 23 in tokens,
        {"prompt": [4, 23]},
    ),
    "prefill": (FAST + "_read", lambda decoder, texts, rows: [23] in texts, {"prompt": [23, 4]}),
    "draw": (
        ENGINE + "draw",
        lambda logits, sampling, *args: sampling.top_k == 9,
        {"sampling": SamplingSettings(top_k=9)},
    ),
    "score": (ENGINE + "score_logits", lambda logits, tokens, n_top: n_top == 9, {"n_top": 9}),
    "text": (
        ENGINE + "Detokenizer.append",
        lambda own, token, last: own.stop_ids == {9},
        {"stop": (9,)},
    ),
}


# Return the tokens of requests that run when another joins, and what becomes of that
async def join_late(
    engine: Engine, first: list[SampleRequest], late: SampleRequest
) -> tuple[list[list[Token]], Any]:
    streams = [engine.generate(request) for request in first]
    begun = [await anext(stream) for stream in streams]
    found = await asyncio.gather(
        *map(collect, (*streams, engine.generate(late))), return_exceptions=True
    )
    return [[token, *rest] for token, rest in zip(begun, found, strict=False)], found[-1]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_request_that_raises_fails_alone(fault: str, monkeypatch: pytest.MonkeyPatch):
    target, is_culprit, values = FAULTS[fault]
    model = make(vocab_size=24, position="rope", smear=1)
    raised = RuntimeError("of the culprit")
    function = pkgutil.resolve_name(target) if target else lambda *args: None

    def fail(*args: Any, **kwargs: Any) -> Any:
        if is_culprit(*args, **kwargs):
            raise raised
        return function(*args, **kwargs)

    monkeypatch.setattr(target, fail) if target else model.wte.register_forward_hook(fail)
    requests = [
        SampleRequest([1, 2, 3 + i], 6 + 5 * i, SamplingSettings(**each), seed=i, n_top=i)
        for i, each in enumerate(SETTINGS)
    ]
    culprit = SampleRequest(**{"prompt": [4], "max_new_tokens": 20, **values})
    found, error = serve(model, lambda engine: join_late(engine, requests, culprit))
    assert error is raised
    assert_all_as_generate(model, requests, found)


@pytest.mark.parametrize("is_changed", [False, True])
def test_requests_whose_steps_fail_together_get_their_tokens(
    is_changed: bool, monkeypatch: pytest.MonkeyPatch
):
    model = make(**ARCHITECTURES["modern"])
    calls = count()
    kind = Decoder if is_changed else FastDecoder
    if is_changed:
        model.blocks[0].register_forward_hook(lambda module, args, x: x)
    step = kind.step
    failed = list[weakref.ref[Any]]()
    sizes = list[int]()

    def lack_memory(decoder: Any, tokens: torch.Tensor) -> torch.Tensor:
        sizes.append(len(tokens))
        # The memory of a batch that failed is free before its requests step alone
        assert is_changed or all(ref() is None for ref in failed)
        logits = step(decoder, tokens)
        if len(tokens) > 1 and next(calls) % 3 == 2:
            sizes.append(0)
            failed.append(weakref.ref(decoder))
            raise RuntimeError("no memory")
        return logits

    requests = [
        SampleRequest([1, 2, 3 + i], 36, SamplingSettings(**each), seed=i)
        for i, each in enumerate(SETTINGS[::2])
    ]
    with monkeypatch.context() as patch:
        patch.setattr(kind, "step", lack_memory)
        found = serve(model, lambda engine: collect_all(engine, requests))
    assert next(calls) > 10
    assert {after for failed, after in pairwise(sizes) if failed == 0} == {1}
    assert_all_as_generate(model, requests, found)


def test_a_sample_that_ends_in_a_step_that_raises_later_has_no_more_tokens(
    monkeypatch: pytest.MonkeyPatch,
):
    model = make()
    append = Detokenizer.append
    calls = count()

    def fail_from_third_on(own: Detokenizer, token: int, *, last: bool = False) -> str:
        if own.stop_ids == {9} and next(calls) >= 2:
            raise RuntimeError("of the culprit")
        return append(own, token, last=last)

    monkeypatch.setattr(Detokenizer, "append", fail_from_third_on)
    pair = [SampleRequest([1], 3), SampleRequest([2], 9)]

    async def ask(engine: Engine) -> Any:
        streams = engine.generate(*pair), engine.generate(SampleRequest([3], 9, stop=(9,)))
        return await asyncio.gather(*map(collect, streams), return_exceptions=True)

    tokens, error = serve(model, ask)
    assert isinstance(error, RuntimeError)
    for i, request in enumerate(pair):
        assert_as_generate(model, request, [token for token in tokens if token.sample == i])


def test_a_text_is_scored_as_by_score_between_the_steps_of_other_requests(
    monkeypatch: pytest.MonkeyPatch,
):
    # Else all steps may be sent together, at the end
    monkeypatch.setattr("minigpt.extras.playground.engine._SEND_SECONDS", 0)
    model = make()
    text = torch.randint(23, (400,), generator=torch.Generator().manual_seed(0)).tolist()

    async def count_tokens(engine: Engine) -> tuple[list[Token], int]:
        async with aclosing(engine.generate(ENDLESS)) as other:
            await anext(other)
            scoring = asyncio.create_task(engine.score(text, n_top=3))
            n_tokens = 0
            while not scoring.done():
                await anext(other)
                n_tokens += 1
            return scoring.result(), n_tokens

    (first, *found), n_tokens = serve(model, count_tokens)
    assert n_tokens > 10  # of windows of 16 tokens
    expected = score(model, text[1:], text[:1], n_top=3)
    assert (first.logprob, first.top) == (None, [])
    assert [token.id for token in (first, *found)] == text
    assert [token.logprob for token in found] == expected.logprobs.tolist()
    assert [(token.rank, token.top) for token in found] == list(
        zip(expected.ranks, expected.top, strict=True)
    )
    for wrong in ([], [-1]):
        with pytest.raises(UserError):
            serve(model, lambda engine, wrong=wrong: engine.score(wrong))
