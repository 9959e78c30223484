"""The decoders against `GPT.forward`, for every architecture and beyond `block_size`."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generation import ARCHITECTURES, architectures, make
from tolerance import assert_near, terms_of
from torch import Tensor

from minigpt.model.attention import KVCache
from minigpt.model.gpt import GPT
from minigpt.model.ops import ACTIVATIONS
from minigpt.sampling.decoder import Decoder
from minigpt.sampling.fast.fast_decoder import FastDecoder
from minigpt.sampling.fast.graph_decoder import GraphDecoder

EVERY = {
    **ARCHITECTURES,
    **{f"{activation}, biases": {"activation": activation} for activation in ACTIVATIONS},
    "weights of qk_norm": {**ARCHITECTURES["qwen3"], "norm_eps": 0.1},
    "soft cap": {"logit_softcap": 0.7},
    "scaled rope": {"position": "rope", "rope_factor": 4.0, "rope_original_block_size": 8},
    "wide heads": {"position": "rope", "head_dim": 12, "rope_base": 100.0},
    "long ngram": {"ngram": 5, "ngram_buckets": 50, "smear": 3, "position": "none"},
    "embed_norm": {"embed_norm": True, "ngram": 2, "smear": 1},
    "mup, post-norm": {
        "parametrization": "mup",
        "norm_position": "post",
        "position": "rope",
        "qk_norm": True,
    },
}


KINDS = (FastDecoder, GraphDecoder)  # on a CPU, GraphDecoder runs the steps that it would record
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("changes", EVERY.values(), ids=EVERY)
def test_samples_of_a_batch_have_the_logits_of_gpt_forward(
    changes: dict[str, Any], kind: type[FastDecoder]
):
    model, texts, lengths = make(**changes), [tokens(n + 7) for n in (3, 1, 9)], (3, 1, 9)
    before = copy.deepcopy(model)
    for text, n, logits in zip(texts, lengths, decode(model, texts, lengths, kind), strict=True):
        close(model, logits, model(torch.tensor([text]))[0, n - 1 :])
    assert all(
        map(
            torch.equal,
            (*model.parameters(), *model.buffers()),
            (*before.parameters(), *before.buffers()),
        )
    )


def test_several_samples_share_one_prefill_of_their_prompt(monkeypatch: pytest.MonkeyPatch):
    model, read, append = make(position="rope", ngram=3, smear=2), list[int](), KVCache.append
    monkeypatch.setattr(
        KVCache,
        "append",
        lambda cache, k, v: read.append(k[..., 0, 0].numel()) or append(cache, k, v),
    )
    FastDecoder(model, [tokens(5), tokens(2)], 3, 20)
    assert 0 < sum(read) <= (5 + 2) * model.config.n_layer


def test_a_prompt_takes_the_memory_of_its_length(monkeypatch: pytest.MonkeyPatch):
    lengths, init = list[int](), KVCache.__init__

    def measure(cache: KVCache, shape: tuple[int, int, int, int], **options: Any) -> None:
        lengths.append(shape[2])
        init(cache, shape, **options)

    monkeypatch.setattr(KVCache, "__init__", measure)
    FastDecoder(make(position="rope", block_size=4096), [tokens(5)], 2, 3)
    assert max(lengths) == 4


@kinds
@pytest.mark.parametrize("changes", [{"smear": 2, "ngram": 3}, {"position": "rope"}], ids=str)
def test_memory_is_constant_beyond_block_size(changes: dict[str, Any], kind: type[FastDecoder]):
    decoder, held = kind(make(**changes), [tokens(n) for n in (3, 16, 7)], 1, 10**15), []
    for _ in range(6 * 16):
        decoder.step(torch.randint(23, (3,)))
        held.append(memory(decoder))
    assert max(held[2 * 16 :]) == max(held[: 2 * 16])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    changes=st.tuples(st.sampled_from([*EVERY.values()]), st.sampled_from([*EVERY.values()])),
    block_size=st.integers(1, 9),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    steps=st.integers(0, 25),
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
    model = make(
        **{"n_embd": 8, "ngram_buckets": 11, **changes[0], **changes[1]}, block_size=block_size
    ).double()
    texts = [tokens(n + steps) for n in lengths]
    for text, n, logits in zip(texts, lengths, decode(model, texts, lengths, kind), strict=True):
        # In 64 bits but for the sines of rotary positions.
        assert_near(
            logits, as_alone(model, text, n), terms=terms_of(model.config), dtype=torch.float32
        )


@architectures
def test_bfloat16_decoding_is_as_close_to_float32_as_gpt_forward(settings: dict[str, Any]):
    text, model = tokens(16), make(**settings)
    exact = model(torch.tensor([text]))[0, 2:]
    model = model.bfloat16()
    logits, whole = decode(model, [text], [3])[0], model(torch.tensor([text]))[0, 2:]
    assert logits.dtype == whole.dtype == torch.bfloat16
    assert (logits - exact).square().mean() < 2 * (
        whole - exact
    ).square().mean() + 1e-3 * exact.square().mean()
    assert decode(model, [text[:3] + tokens(40), text + tokens(40)], [3, 16]).isfinite().all()


@pytest.mark.parametrize("is_amd", [True, False])
def test_large_matrices_give_the_logits_of_gpt_forward_on_every_cpu(
    is_amd: bool, monkeypatch: pytest.MonkeyPatch
):
    bmm, sliced, model = torch.bmm, [], make(n_embd=384, n_inner=515)
    monkeypatch.setattr("minigpt.sampling.fast.fast_decoder._IS_AMD", is_amd)
    monkeypatch.setattr(torch, "bmm", lambda *args: sliced.append(args) or bmm(*args))
    for B in (3, 4):
        text = torch.randint(23, (B, 12))
        logits = decode(model, text.tolist(), [3] * B)
        assert_near(logits, model(text)[:, 2:], terms=terms_of(model.config))
        assert bool(sliced) == (is_amd and B < 4)
        with torch.autocast("cpu", torch.bfloat16):
            reduced, whole = decode(model, text.tolist(), [3] * B), model(text)[:, 2:]
        assert (reduced - logits).square().mean() < 2 * (whole - logits).square().mean()
        sliced.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_samples_are_as_exact_as_gpt_forward(kind: type[FastDecoder]):
    model, text = make(position="rope", qk_norm=True), torch.randint(23, (3, 12))
    logits = model(text)[:, 2:]
    with torch.autocast("cpu", torch.bfloat16):
        reduced, whole = decode(model, text.tolist(), [3] * 3, kind), model(text)[:, 2:]
    assert (reduced - logits).square().mean() < 2 * (whole - logits).square().mean()


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def tokens(n: int) -> list[int]:
    return torch.randint(23, (n,)).tolist()


def decode(
    model: GPT,
    texts: list[list[int]],
    lengths: Sequence[int],
    kind: type[Decoder] = FastDecoder,
) -> Tensor:
    """The logits (B, 1 + following, V) after the prompt of each text, its first tokens, and after each that follows."""
    pairs = list(zip(texts, lengths, strict=True))
    steps = torch.tensor([text[n:] for text, n in pairs]).long().T  # (steps, B)
    decoder = kind(model, [text[:n] for text, n in pairs], 1, len(steps) + 1)
    last = torch.tensor([text[n - 1] for text, n in pairs])
    return torch.stack([decoder.step(step).clone() for step in (last, *steps)], dim=1)


def as_alone(model: GPT, text: list[int], n: int) -> Tensor:
    """The logits (1 + following, V) after the prompt, the first n tokens, and after each token that
    follows.

    A full window is cropped to its newer half.
    """
    block_size = model.config.block_size
    context = text[:n][-block_size:]
    logits = [model(torch.tensor([context]))[0, -1]]
    for token in text[n:]:
        context = [*context, token]
        if len(context) > block_size:
            context = context[-max(1, block_size // 2) :]
        logits.append(model(torch.tensor([context]))[0, -1])
    return torch.stack(logits)


def close(model: GPT, logits: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.1
    assert_near(logits, expected, terms=terms_of(model.config))


def memory(value: Any) -> int:
    """Bytes of the tensors that a decoder holds beside its model."""
    if isinstance(value, Tensor):
        return value.untyped_storage().nbytes()
    if isinstance(value, GPT) or not (
        isinstance(value, list | tuple) or hasattr(value, "__dict__")
    ):
        return 0
    return sum(map(memory, value if isinstance(value, list | tuple) else vars(value).values()))
