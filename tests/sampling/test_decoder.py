"""The decoders against `GPT.forward`, for every architecture, and for models that were changed."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from architectures import (
    ARCHITECTURES,
    EVERY,
    architectures,
    as_alone,
    close,
    every_architecture,
    make,
    tokens,
)
from extras.playground.test_engine import collect
from extras.playground.test_engine import serve as serve_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from tolerance import assert_near, terms_of
from torch import Tensor, nn
from torch.nn.utils import parametrize

from minigpt.extras.playground.engine import SampleRequest
from minigpt.model.attention import KVCache
from minigpt.model.changes import find_change
from minigpt.model.evaluation import evaluation
from minigpt.model.gpt import GPT, MLP
from minigpt.model.ops import ACTIVATIONS
from minigpt.sampling.decoder import Decoder
from minigpt.sampling.fast.fast_decoder import FastDecoder
from minigpt.sampling.fast.graph_decoder import GraphDecoder
from minigpt.sampling.filters import PerSampleRNG, draw
from minigpt.sampling.generation import decoder_class, generate, score
from minigpt.sampling.settings import SamplingSettings

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
    error = (whole - exact).square().mean()
    assert (reduced - exact).square().mean() < 2 * error + more * exact.square().mean()


def memory(value: Any) -> int:
    # Return the bytes of the tensors that a decoder holds beside its model
    if isinstance(value, Tensor):
        return value.untyped_storage().nbytes()
    if isinstance(value, list | tuple):
        return sum(map(memory, value))
    if isinstance(value, GPT) or not hasattr(value, "__dict__"):
        return 0
    return sum(map(memory, vars(value).values()))


BLOCK = 16
PROMPTS = [[4], [7, 2, 2, 9, 11, 0]]
Changed = Callable[[GPT], Any]


class LoRALinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input.sum(dim=-1, keepdim=True)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.config = getattr(inner, "config", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs).flip(-1)


class Tagged(Tensor):
    """As tensors of quantized weights."""


compiled = partial(torch.compile, backend="eager")


def change(statement: Changed) -> Changed:
    return lambda model: (statement(model), model)[1]


def edit(path: str, new: Callable[[Any], Any]) -> Changed:
    # Set an attribute, or a module, to a function of what it was
    name, _, key = path.rpartition(".")

    def changed(model: GPT) -> GPT:
        module = model.get_submodule(name)
        setattr(module, key, new(getattr(module, key, None)))
        return model

    return changed


def hook(name: str, function: Callable[[Tensor], Tensor]) -> Changed:
    return change(
        lambda m: m.get_submodule(name).register_forward_hook(lambda module, args, x: function(x))
    )


def subclass(**methods: Any) -> Changed:

    def changed(model: GPT) -> GPT:
        other = type("Subclass", (GPT,), methods)(model.config).eval()
        other.load_state_dict(model.state_dict())
        return other

    return changed


CHANGES: dict[str, Changed] = {
    "LoRA": edit("blocks.1.mlp.up.__class__", lambda old: LoRALinear),
    "a forward hook": hook("blocks.0.mlp", torch.neg),
    "a hook on later positions": hook(
        "blocks.0", lambda x: torch.cat((x[:, :10], -3 * x[:, 10:]), dim=1)
    ),
    "a hook on the last position": hook(
        "blocks.0", lambda x: torch.cat((x[:, :-1], -3 * x[:, -1:]), dim=1)
    ),
    "a forward pre-hook": change(
        lambda m: m.blocks[1].mlp.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    ),
    "a replaced forward": edit("blocks.0.mlp.forward", lambda old: torch.sin),
    "replaced logits": change(lambda m: setattr(m, "logits", lambda x: m.lm_head(x))),
    "a replaced activation": edit("blocks.0.mlp.activation", lambda old: torch.sin),
    "an edited rotary table": change(lambda m: m.rotary.mul_(0.5)),
    "a subclass": subclass(),
    "a subclass with other logits": subclass(logits=lambda m, x: GPT.logits(m, x.flip(-1))),
    "a forward without a cache": subclass(
        forward=lambda m, tokens: GPT.forward(m, tokens).flip(-1)
    ),
    "a forward that ignores the cache": subclass(
        forward=lambda m, tokens, cache=None: GPT.forward(m, tokens).flip(-1)
    ),
    "parametrize": change(
        lambda m: parametrize.register_parametrization(m.blocks[0].mlp.up, "weight", nn.Tanh())
    ),
    "a wrapped block": edit("blocks.1", Wrapped),
    "one more block": change(lambda m: m.blocks.append(copy.deepcopy(m.blocks[0]))),
    "a bias of the head": edit("lm_head", lambda head: nn.Linear(32, 23)),
    "a subclass of tensors": edit(
        "blocks.0.mlp.up.weight", lambda w: nn.Parameter(w.detach().as_subclass(Tagged))
    ),
    "a wrapped model": Wrapped,
    "a hook on a compiled block": lambda m: hook("blocks.0", torch.neg)(
        edit("blocks.0", compiled)(m)
    ),
}
WITHOUT_EFFECT = ("a subclass", "a subclass of tensors")
PLAIN: dict[str, Changed] = {
    "as built": lambda m: m,
    "copied": copy.deepcopy,
    "compiled": compiled,
    "compiled in place": change(lambda m: m.compile(backend="eager")),
    "compiled by block": lambda m: edit("blocks.0", compiled)(edit("blocks.1", compiled)(m)),
    "a tied layer": change(lambda m: setattr(m.blocks[1].mlp, "up", m.blocks[0].mlp.up)),
    "another config": edit("config", lambda config: replace(config, logit_softcap=0.5)),
    "other dropout": edit("blocks.0.mlp.dropout", lambda old: 0.3),
    "a further attribute": edit("tokenizer", lambda old: "a name"),
    "float64": change(lambda m: m.double()),
}
COMPILED = pytest.mark.xdist_group("compiled")  # one worker imports torch's compiler
DRAWN: dict[str, Any] = {"seed": 3, "top_k": 7}


@pytest.mark.parametrize(
    "how",
    [pytest.param(how, marks=COMPILED if "compiled" in how else ()) for how in (*CHANGES, *PLAIN)],
)
def test_a_model_is_decoded_by_its_own_logits_and_fast_if_it_is_not_changed(how: str):
    model = (CHANGES | PLAIN)[how](rope())
    assert decoder_class(model) is (FastDecoder if how in PLAIN else Decoder)
    found = drawn(model, **DRAWN)
    assert found == expected(model, PROMPTS, 8, **DRAWN)
    if how in CHANGES:
        assert (found == unchanged()) == (how in WITHOUT_EFFECT)
    assert len(generate(model, [3] * 30, max_new_tokens=10)[0].tokens) == 10  # a window is halved
    text = [*PROMPTS[1], *found[1]]
    with evaluation():
        logprobs = model(torch.tensor([text[:-1]]))[0].log_softmax(-1)
    own = logprobs[range(len(text) - 1), text[1:]].float()
    torch.testing.assert_close(score(model, text[1:], text[:1]).logprobs, own)


@cache
def unchanged() -> list[list[int]]:
    return drawn(rope(), **DRAWN)


@pytest.mark.parametrize("settings", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_a_hook_that_changes_nothing_changes_no_text_beyond_the_block(settings: dict[str, Any]):
    model = make(**settings)
    options = {"max_new_tokens": BLOCK + 2, "num_samples": 2, "logprobs": True}
    prompts = [[4], [3] * 30]
    before = generate(model, prompts, **options)
    model.blocks[0].register_forward_hook(lambda module, args, x: x)
    assert decoder_class(model) is Decoder
    for one, other in zip(before, generate(model, prompts, **options), strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, rel=1e-3, abs=1e-3)


def test_the_server_generates_from_a_changed_model():
    model = CHANGES["LoRA"](rope())
    prompts = [*PROMPTS, PROMPTS[0]]
    requests = [SampleRequest(prompt, 5 + i, seed=i) for i, prompt in enumerate(prompts)]
    found = serve_engine(model, lambda engine: collect(engine.generate(*requests)), max_running=2)
    for i, request in enumerate(requests):
        own = [token.id for token in found if token.sample == i]
        assert own == expected(model, [request.prompt], request.max_new_tokens, seed=i)[0]


@pytest.mark.parametrize(("kind", "name"), [(GPT, "logits"), (nn.Linear, "forward")])
def test_methods_that_are_replaced_in_their_class_are_used(
    kind: type, name: str, monkeypatch: pytest.MonkeyPatch
):
    own = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda *args, **kwargs: -own(*args, **kwargs))
    assert_decoded_by_own_logits(rope())


def test_a_global_hook_is_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(nn.modules.module._global_forward_hooks, 0, lambda module, args, x: 2 * x)
    assert_decoded_by_own_logits(rope())


def test_classes_and_activations_that_are_replaced_before_a_model_is_built_are_used(
    monkeypatch: pytest.MonkeyPatch,
):
    class Negative(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return -super().forward(x)

    with monkeypatch.context() as patch:
        patch.setattr("minigpt.model.gpt.MLP", Negative)
        assert_decoded_by_own_logits(rope(norm_eps=1e-4))  # a config that no other test has
    monkeypatch.setitem(ACTIVATIONS, "gelu", torch.sin)
    assert_decoded_by_own_logits(rope(norm_eps=2e-4))


def test_shared_blocks_are_decoded_fast_until_one_is_replaced():
    model = rope(n_layer=4, layer_repeats=2)
    assert find_change(model) is None
    model.blocks[2] = copy.deepcopy(model.blocks[2])
    nn.init.normal_(model.blocks[2].mlp.up.weight)
    assert find_change(model) == "model.blocks.2 is no longer shared"
    assert_decoded_by_own_logits(model)


def test_a_model_under_ddp_is_decoded_as_its_module():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        model = nn.parallel.DistributedDataParallel(rope())
        assert drawn(model, **DRAWN) == unchanged()
        assert score(model, [1, 2], [3]).nats == score(rope(), [1, 2], [3]).nats
    finally:
        torch.distributed.destroy_process_group()


def test_what_is_no_language_model_of_minigpt_is_refused():
    pairs = subclass(forward=lambda m, ids: (GPT.forward(m, ids), None))(make())
    for model in (nn.Sequential(make()), pairs):
        refused(
            r"^[^\n]*must [^\n]*, got (Sequential|tuple)[^\n]*$",
            generate,
            model,
            [3],
            max_new_tokens=1,
        )


def rope(**settings: Any) -> GPT:
    return make(position="rope", **settings)


def drawn(model: Any, **options: Any) -> list[list[int]]:
    return [sample.tokens for sample in generate(model, PROMPTS, max_new_tokens=8, **options)]


def assert_decoded_by_own_logits(model: GPT) -> None:
    assert drawn(model, temperature=0) == expected(model, PROMPTS, 8, temperature=0)


def expected(
    model: Any, prompts: list[list[int]], n: int, seed: int = 0, **settings: Any
) -> list[list[int]]:
    # Draw one sample per prompt from the logits of its whole text
    texts = []
    for prompt in prompts:
        text = [*prompt]
        uniforms = PerSampleRNG([seed], torch.device("cpu"))
        for j in range(n):
            with evaluation():
                logits = model(torch.tensor([text]))[:, -1].float()
            text.append(int(draw(logits, SamplingSettings(**settings), uniforms.number(j))))
        texts.append(text[-n:])
    return texts
