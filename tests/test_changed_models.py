"""A model that its user changed is decoded as `model(tokens)` computes it, or refused in one line."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from serve.test_engine import collect
from serve.test_engine import serve as serve_engine
from test_generation import make
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from minigpt.attention import rotary_table
from minigpt.decoder import Decoder, make_decoder
from minigpt.fast_decoder import FastDecoder
from minigpt.generation import generate, score
from minigpt.model import GPT, MLP, Block
from minigpt.ops import ACTIVATIONS
from minigpt.sampling import PerSampleRNG, Sampling
from minigpt.serve.engine import SampleRequest
from minigpt.structure import find_change, uncompiled
from minigpt.utils.errors import UserError

BLOCK = 16
PROMPTS = [[5, 1, 19], [4], [7, 2, 2, 9, 11, 0]]


class LoRALinear(nn.Linear):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.load_state_dict(linear.state_dict())
        self.a = nn.Parameter(torch.randn(2, linear.in_features))
        self.b = nn.Parameter(torch.randn(linear.out_features, 2))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input @ self.a.T @ self.b.T


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs).flip(-1)

    @property
    def config(self) -> Any:
        return self.inner.config


class SiLU(nn.Module):
    """An MLP of another class, with the same names of weights."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.up, self.down = mlp.up, mlp.down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Subclass(GPT):
    pass


class OtherLogits(GPT):
    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x.flip(-1))


class OtherEmbedding(GPT):
    def embed(self, tokens: Tensor, positions: Any, cache: Any) -> Tensor:
        return super().embed(tokens, positions, cache) + torch.arange(32) / 8


class WithoutCache(GPT):
    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens).flip(-1)


class IgnoresCache(GPT):
    def forward(self, tokens: Any, *args: Any, cache: Any = None, **kwargs: Any) -> Tensor:
        return super().forward(tokens).flip(-1)


class Mean(GPT):
    """Looks at the whole text without the cache."""

    def embed(self, tokens: Tensor, positions: Any, cache: Any) -> Tensor:
        x = super().embed(tokens, positions, cache)
        return x + x.cumsum(dim=1) / torch.arange(1, x.size(1) + 1)[:, None]


class Tagged(Tensor):
    """A subclass of tensors, as those of quantized weights."""


def change(statement: Callable[[GPT], Any]) -> Callable[[GPT], nn.Module]:
    def changed(model: GPT) -> nn.Module:
        statement(model)
        return model

    return changed


def become(kind: type[GPT]) -> Callable[[GPT], nn.Module]:
    def changed(model: GPT) -> nn.Module:
        other = kind(model.config).eval()
        other.load_state_dict(model.state_dict())
        return other

    return changed


def replace_module(name: str, make_new: Callable[[Any], nn.Module]) -> Callable[[GPT], nn.Module]:
    return change(lambda model: model.set_submodule(name, make_new(model.get_submodule(name)).eval()))


def parameter(module: Any, name: str, kind: Callable[[Tensor], Any]) -> Any:
    return setattr(module, name, kind(getattr(module, name).detach()))


def negative(*args: Any) -> Tensor:
    return -args[-1]


def at_position(index: int) -> Callable[..., Tensor]:
    def hook(module: Any, args: Any, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, index] *= -3
        return x

    return hook


def from_position(begin: int) -> Callable[..., Tensor]:
    return lambda module, args, x: torch.cat((x[:, :begin], -3 * x[:, begin:]), dim=1)


CHANGES: dict[str, Callable[[GPT], nn.Module]] = {
    "LoRA": replace_module("blocks.1.mlp.up", LoRALinear),
    "LoRA in the attention": replace_module("blocks.0.attention.qkv", LoRALinear),
    "a forward hook": change(lambda m: m.blocks[0].mlp.register_forward_hook(negative)),
    "a hook on the first position": change(lambda m: m.blocks[0].register_forward_hook(at_position(0))),
    "a hook on later positions": change(lambda m: m.blocks[0].register_forward_hook(from_position(10))),
    "a hook on the last position": change(lambda m: m.blocks[0].register_forward_hook(at_position(-1))),
    "a forward pre-hook": change(
        lambda m: m.blocks[1].mlp.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    ),
    "a hook on a block": change(lambda m: m.blocks[0].register_forward_hook(negative)),
    "a hook on the logits": change(lambda m: m.register_forward_hook(negative)),
    "a replaced forward": change(lambda m: setattr(m.blocks[0].mlp, "forward", lambda x: x.sin())),
    "a replaced forward of a norm": change(lambda m: setattr(m.final_norm, "forward", lambda x: x.sin())),
    "a replaced private method": change(
        lambda m: setattr(m.blocks[0].attention, "_project", lambda x, rotary: _projected(m.blocks[0].attention, x))
    ),
    "replaced logits": change(lambda m: setattr(m, "logits", lambda x: m.lm_head(x))),
    "a replaced activation": change(lambda m: setattr(m.blocks[0].mlp, "activation", torch.sin)),
    "another scale": change(lambda m: setattr(m.blocks[0].attention, "scale", 2.0)),
    "another epsilon": change(lambda m: setattr(m.blocks[0].norm_1, "eps", 3.0)),
    "not pre-norm": change(lambda m: setattr(m.blocks[0], "pre_norm", False)),
    "an edited rotary table": change(lambda m: m.rotary.mul_(0.5)),
    "another rotary table": change(lambda m: setattr(m, "rotary", rotary_table(BLOCK, 8, 100.0))),
    "a subclass": become(Subclass),
    "a subclass with other logits": become(OtherLogits),
    "a subclass with another embedding": become(OtherEmbedding),
    "a forward without a cache": become(WithoutCache),
    "a forward that ignores the cache": become(IgnoresCache),
    "an embedding that needs the whole text": become(Mean),
    "parametrize": change(lambda m: parametrize.register_parametrization(m.blocks[0].mlp.up, "weight", Double())),
    "weight norm": change(lambda m: parametrizations.weight_norm(m.blocks[1].mlp.down)),
    "a wrapped module": replace_module("blocks.0.mlp", Wrapped),
    "a wrapped head": replace_module("lm_head", Wrapped),
    "a wrapped block": replace_module("blocks.1", Wrapped),
    "another MLP": replace_module("blocks.0.mlp", SiLU),
    "one more norm": replace_module("blocks.0.mlp.down", lambda down: nn.Sequential(down, nn.LayerNorm(32))),
    "one more block": change(lambda m: m.blocks.append(copy.deepcopy(m.blocks[0]))),
    "a removed block": change(lambda m: m.blocks.pop(0)),
    "an identity": replace_module("blocks.0.mlp", lambda mlp: nn.Identity()),
    "a bias of the head": replace_module("lm_head", lambda head: nn.Linear(32, 23)),
    "a subclass of tensors": change(
        lambda m: parameter(m.blocks[0].mlp.up, "weight", lambda w: nn.Parameter(w.as_subclass(Tagged)))
    ),
    "a wrapped model": Wrapped,
    "a compiled LoRA": lambda m: torch.compile(CHANGES["LoRA"](m), backend="eager"),
    "a hook on a compiled block": change(
        lambda m: (
            m.blocks.__setitem__(0, torch.compile(m.blocks[0], backend="eager")),
            m.blocks[0].register_forward_hook(negative),
        )
    ),
}
WITHOUT_EFFECT = ("a subclass", "a subclass of tensors", "weight norm")
WITHOUT_CACHE = (
    *("a hook on the first position", "a hook on later positions", "a hook on the last position", "one more block"),
    *("a forward without a cache", "a forward that ignores the cache", "an embedding that needs the whole text"),
    "a wrapped model",
)
PLAIN: dict[str, Callable[[GPT], nn.Module]] = {
    "as built": lambda m: m,
    "copied": copy.deepcopy,
    "compiled": lambda m: torch.compile(m, backend="eager"),
    "compiled in place": change(lambda m: m.compile(backend="eager")),
    "compiled by block": change(
        lambda m: [m.blocks.__setitem__(i, torch.compile(block, backend="eager")) for i, block in enumerate(m.blocks)]
    ),
    "in place by block": change(lambda m: [block.compile(backend="eager") for block in m.blocks]),
    "data parallel": nn.DataParallel,
    "an untied head": change(lambda m: parameter(m.lm_head, "weight", lambda w: nn.Parameter(w.flip(0)))),
    "a tied layer": change(lambda m: setattr(m.blocks[1].mlp, "up", m.blocks[0].mlp.up)),
    "another config": change(lambda m: setattr(m, "config", replace(m.config, logit_softcap=0.5))),
    "frozen": change(lambda m: m.requires_grad_(False)),
    "other dropout": change(lambda m: setattr(m.blocks[0].mlp, "dropout", 0.3)),
    "a further attribute": change(lambda m: setattr(m, "tokenizer", "a name")),
    "float64": change(lambda m: m.double()),
}


@pytest.mark.parametrize("how", [*CHANGES, *PLAIN])
@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 3, "top_k": 7}], ids=["greedy", "sampled"])
def test_samples_are_those_of_the_models_own_logits(how: str, options: dict[str, Any]):
    model = (CHANGES | PLAIN)[how](rope())
    found = generate(model, PROMPTS, max_new_tokens=8, num_samples=2, **options)
    assert [sample.tokens for sample in found] == expected(model, PROMPTS, 8, 2, **options)
    if how in CHANGES and how not in WITHOUT_EFFECT:
        unchanged = generate(rope(), PROMPTS, max_new_tokens=8, num_samples=2, **options)
        assert [sample.tokens for sample in found] != [sample.tokens for sample in unchanged]
    long = generate(model, [3] * 30, max_new_tokens=2 * BLOCK, **options)
    assert len(long[0].tokens) == 2 * BLOCK
    model = getattr(model, "module", model)  # of data parallel
    text = [*PROMPTS[2], *found[-1].tokens]
    with uncompiled():
        p = model(torch.tensor([text[:-1]]))[0].log_softmax(-1).gather(-1, torch.tensor(text[1:])[:, None])[:, 0]
    torch.testing.assert_close(score(model, text[1:], text[:1]).logprobs, p.float())


def test_unchanged_models_are_decoded_fast_and_others_are_not():
    for how, make_model in PLAIN.items():
        assert isinstance(make_decoder(make_model(rope())), FastDecoder), how
    for how, make_model in CHANGES.items():
        assert isinstance(make_decoder(make_model(rope())), Decoder), how


def test_a_changed_model_reads_single_tokens_with_its_cache_if_that_gives_the_same_logits():
    for how, make_model in CHANGES.items():
        model, read = make_model(rope()), []
        model.get_submodule("inner" if how == "a wrapped model" else "wte").register_forward_pre_hook(
            lambda module, args, read=read: read.append(args[0].size(1))
        )
        generate(model, PROMPTS[2], max_new_tokens=8, num_samples=2)
        assert (read[-3:] == [1, 1, 1]) == (how not in WITHOUT_CACHE), how


@pytest.mark.parametrize("how", ["LoRA", "a forward hook", "a forward without a cache", "a hook on a block"])
def test_the_server_generates_from_a_changed_model(how: str):
    model = CHANGES[how](rope())
    requests = [SampleRequest(prompt, 5 + i, seed=i) for i, prompt in enumerate([*PROMPTS, PROMPTS[0]])]
    found = serve_engine(model, lambda engine: collect(engine.generate(*requests)), max_running=2)
    for i, request in enumerate(requests):
        own = [token.id for token in found if token.sample == i]
        assert own == expected(model, [request.prompt], request.max_new_tokens, 1, seed=i)[0]


@pytest.mark.parametrize("target", [(MLP, "forward"), (Block, "forward"), (GPT, "logits"), (nn.Linear, "forward")])
def test_methods_that_are_replaced_in_their_class_are_used(target: tuple[type, str], monkeypatch: pytest.MonkeyPatch):
    generate(rope(), PROMPTS, max_new_tokens=1)
    kind, name = target
    own = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda *args, **kwargs: -own(*args, **kwargs))
    assert texts(rope()) == expected(rope(), PROMPTS, 8, 1, temperature=0)


def test_a_global_hook_is_run():
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, x: 2 * x)
    try:
        assert texts(rope()) == expected(rope(), PROMPTS, 8, 1, temperature=0)
    finally:
        handle.remove()


def test_classes_and_activations_that_are_replaced_before_a_model_is_built_are_used(monkeypatch: pytest.MonkeyPatch):
    class Negative(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return -super().forward(x)

    with monkeypatch.context() as patch:
        patch.setattr("minigpt.model.MLP", Negative)
        model = rope(norm_eps=1e-4)  # of a config that no other test has
        assert find_change(model)
        assert texts(model) == expected(model, PROMPTS, 8, 1, temperature=0)
    monkeypatch.setitem(ACTIVATIONS, "gelu", torch.sin)
    model = rope(norm_eps=2e-4)
    assert texts(model) == expected(model, PROMPTS, 8, 1, temperature=0)


def test_a_cache_of_a_changed_model_has_the_slots_that_its_samples_need():
    model = rope()
    model.blocks[0].register_forward_hook(lambda module, args, x: x)
    decoder: Any = make_decoder(model, [[1, 2]], 3, 4)
    (cache,) = (group.cache for group in decoder._groups)
    assert {layer.k.shape[::2] for layer in cache.layers} == {(3, 6)}  # samples and slots


def test_shared_blocks_are_decoded_fast_until_one_is_replaced():
    model = rope(n_layer=4, layer_repeats=2)
    assert find_change(model) is None
    model.blocks[2] = copy.deepcopy(model.blocks[2])
    nn.init.normal_(model.blocks[2].mlp.up.weight)
    assert find_change(model) == "model.blocks.2 is no longer shared"
    assert texts(model) == expected(model, PROMPTS, 8, 1, temperature=0)


def test_a_model_under_ddp_is_decoded_as_its_module():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        model = nn.parallel.DistributedDataParallel(rope())
        assert texts(model) == texts(rope())
        assert score(model, [1, 2], [3]).nats == score(rope(), [1, 2], [3]).nats
    finally:
        torch.distributed.destroy_process_group()


class Tuple(GPT):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs), None


@pytest.mark.parametrize(
    ("model", "got"),
    [(nn.Sequential(make()), "Sequential"), (become(Tuple)(make()), "tuple"), (nn.Linear(2, 2), "Linear")],
)
def test_what_is_no_language_model_of_minigpt_is_refused(model: nn.Module, got: str):
    with pytest.raises(UserError, match=f"^[^\n]*must [^\n]*, got {got}[^\n]*$"):
        generate(model, [3], max_new_tokens=1)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def rope(**settings: Any) -> GPT:
    return make(position="rope", **settings)


def texts(model: nn.Module) -> list[list[int]]:
    return [sample.tokens for sample in generate(model, PROMPTS, max_new_tokens=8, temperature=0)]


def expected(
    model: Any, prompts: list[list[int]], n: int, num_samples: int, seed: int = 0, **settings: Any
) -> list[list[int]]:
    """Draw each sample from the logits of its whole text."""
    found = []
    for prompt in prompts:
        for i in range(num_samples):
            text, uniforms = list(prompt), PerSampleRNG([seed + i], torch.device("cpu"))
            for _ in range(n):
                with uncompiled():
                    logits = model(torch.tensor([text]))[:, -1].float()
                text.append(int(Sampling(**settings).draw(logits, uniforms.next())))
            found.append(text[len(prompt) :])
    return found


def _projected(attention: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values without rotary positions."""
    return attention.qkv(x).view(x.size(0), -1, 12, 8).split(4, dim=2)
