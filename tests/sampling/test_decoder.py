"""The decoders against `GPT.forward`, for every architecture and beyond `block_size`."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from architectures import EVERY, architectures, as_alone, close, every_architecture, make, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_near, terms_of
from torch import Tensor

from minigpt.model.attention import KVCache
from minigpt.model.gpt import GPT
from minigpt.sampling.decoder import Decoder
from minigpt.sampling.fast.fast_decoder import FastDecoder
from minigpt.sampling.fast.graph_decoder import GraphDecoder

KINDS = (FastDecoder, GraphDecoder)  # on a CPU, GraphDecoder runs the steps that it would record
kinds = pytest.mark.parametrize("kind", KINDS)


@architectures
def test_a_chunked_prefill_with_a_cache_gives_the_logits_of_one_forward(settings: dict[str, Any]):
    model = make(**settings)
    text = torch.randint(23, (3, 16))
    expected = model(text)
    for chunk in (1, 7, 15):
        cache = model.new_cache(3)
        parts = [model(text[:, i : i + chunk], cache=cache) for i in range(0, 16, chunk)]
        assert_near(torch.cat(parts, 1), expected, terms=terms_of(model.config))


@every_architecture
def test_samples_of_a_batch_have_the_logits_of_gpt_forward(settings: dict[str, Any]):
    model = make(**settings)
    lengths = (3, 1, 9)
    texts = [tokens(n + 7) for n in lengths]
    before = copy.deepcopy(model)
    for kind in KINDS:
        found = zip(texts, lengths, decode(model, texts, lengths, kind), strict=True)
        for text, n, logits in found:
            close(model, logits, model(torch.tensor([text]))[0, n - 1 :])
    tensors = zip(model.state_dict().values(), before.state_dict().values(), strict=True)
    assert all(torch.equal(*pair) for pair in tensors)


def test_several_samples_share_one_prefill_in_the_memory_of_their_prompt(
    monkeypatch: pytest.MonkeyPatch,
):
    model = make(position="rope", ngram=3, smear=2, block_size=4096)
    read = list[int]()
    slots = list[int]()
    append = KVCache.append
    init = KVCache.__init__

    def appended(cache: KVCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        read.append(k[..., 0, 0].numel())
        return append(cache, k, v)

    def allocated(cache: KVCache, shape: tuple[int, int, int, int], **options: Any) -> None:
        slots.append(shape[2])
        init(cache, shape, **options)

    monkeypatch.setattr(KVCache, "append", appended)
    monkeypatch.setattr(KVCache, "__init__", allocated)
    FastDecoder(model, [tokens(5), tokens(2)], 3, 20)
    assert 0 < sum(read) <= (5 + 2) * model.config.n_layer
    assert max(slots) == 4


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (FastDecoder, {"smear": 2, "ngram": 3}),
        (FastDecoder, {"position": "rope"}),
        (GraphDecoder, {"smear": 2, "ngram": 3}),
    ],
)
def test_memory_is_constant_beyond_block_size(kind: type[FastDecoder], changes: dict[str, Any]):
    decoder = kind(make(**changes, block_size=8), [tokens(n) for n in (3, 8, 5)], 1, 10**15)
    held = []
    for _ in range(6 * 8):
        decoder.step(torch.randint(23, (3,)))
        held.append(memory(decoder))
    assert max(held[2 * 8 :]) == max(held[: 2 * 8])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    changes=st.tuples(st.sampled_from([*EVERY.values()]), st.sampled_from([*EVERY.values()])),
    block_size=st.integers(1, 9),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    steps=st.integers(0, 16),
    kind=st.sampled_from(KINDS),
)
def test_any_architecture_decodes_any_prompts_as_gpt_forward(
    changes: Any,
    block_size: int,
    lengths: list[int],
    steps: int,
    kind: type[FastDecoder],
):
    # In 64 bits: without a norm that helps, small heads and squares make much of rounding.
    config = {"n_embd": 8, "ngram_buckets": 11, **changes[0], **changes[1]}
    model = make(**config, block_size=block_size).double()
    texts = [tokens(n + steps) for n in lengths]
    for text, n, logits in zip(texts, lengths, decode(model, texts, lengths, kind), strict=True):
        # In 64 bits but for the sines of rotary positions.
        options: Any = {"terms": terms_of(model.config), "dtype": torch.float32}
        assert_near(logits, as_alone(model, text, n), **options)


@architectures
def test_bfloat16_decoding_is_as_close_to_float32_as_gpt_forward(settings: dict[str, Any]):
    text = tokens(16)
    model = make(**settings)
    exact = model(torch.tensor([text]))[0, 2:]
    model = model.bfloat16()
    logits = decode(model, [text], [3])[0]
    assert logits.dtype == torch.bfloat16
    assert_as_exact(logits, model(torch.tensor([text]))[0, 2:], exact, more=1e-3)
    assert decode(model, [text[:3] + tokens(18), text + tokens(18)], [3, 16]).isfinite().all()


@pytest.mark.parametrize("is_amd", [True, False])
def test_large_matrices_give_the_logits_of_gpt_forward_on_every_cpu(
    is_amd: bool, monkeypatch: pytest.MonkeyPatch
):
    bmm = torch.bmm
    sliced = list[Any]()
    model = make(n_layer=1, n_embd=384, n_inner=515)
    monkeypatch.setattr("minigpt.sampling.fast.fast_decoder._IS_AMD", is_amd)
    monkeypatch.setattr(torch, "bmm", lambda *args: sliced.append(args) or bmm(*args))
    for B in (3, 4):
        text = torch.randint(23, (B, 8))
        logits = decode(model, text.tolist(), [3] * B)
        assert_near(logits, model(text)[:, 2:], terms=terms_of(model.config))
        assert bool(sliced) == (is_amd and B < 4)
        with torch.autocast("cpu", torch.bfloat16):
            assert_as_exact(decode(model, text.tolist(), [3] * B), model(text)[:, 2:], logits)
        sliced.clear()


@kinds
def test_under_autocast_samples_are_as_exact_as_gpt_forward(kind: type[FastDecoder]):
    model = make(position="rope", qk_norm=True)
    text = torch.randint(23, (3, 12))
    logits = model(text)[:, 2:]
    with torch.autocast("cpu", torch.bfloat16):
        assert_as_exact(decode(model, text.tolist(), [3] * 3, kind), model(text)[:, 2:], logits)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def decode(
    model: GPT,
    texts: list[list[int]],
    lengths: Sequence[int],
    kind: type[Decoder] = FastDecoder,
) -> Tensor:
    """Return logits (B, 1 + following, V): after each prompt, the first tokens of a text, and each
    token that follows.
    """
    pairs = list(zip(texts, lengths, strict=True))
    steps = torch.tensor([text[n - 1 :] for text, n in pairs]).T  # (1 + following, B)
    decoder = kind(model, [text[:n] for text, n in pairs], 1, len(steps))
    return torch.stack([decoder.step(step).clone() for step in steps], dim=1)


def assert_as_exact(reduced: Tensor, whole: Tensor, exact: Tensor, more: float = 0.0) -> None:
    """Assert that decoding in fewer bits has at most twice the mean squared error of `forward`."""
    error = (whole - exact).square().mean()
    assert (reduced - exact).square().mean() < 2 * error + more * exact.square().mean()


def memory(value: Any) -> int:
    """Return the bytes of the tensors that a decoder holds beside its model."""
    if isinstance(value, Tensor):
        return value.untyped_storage().nbytes()
    if isinstance(value, list | tuple):
        return sum(map(memory, value))
    if isinstance(value, GPT) or not hasattr(value, "__dict__"):
        return 0
    return sum(map(memory, vars(value).values()))
