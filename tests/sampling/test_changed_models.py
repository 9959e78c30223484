"""A model that its user changed is decoded as `model(tokens)` computes it, or refused."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, make
from extras.playground.test_engine import collect
from extras.playground.test_engine import serve as serve_engine
from torch import Tensor, nn
from torch.nn.utils import parametrize

from minigpt.extras.playground.engine import SampleRequest
from minigpt.model.changes import find_change
from minigpt.model.evaluation import evaluation
from minigpt.model.gpt import GPT, MLP
from minigpt.model.ops import ACTIVATIONS
from minigpt.sampling.decoder import Decoder
from minigpt.sampling.fast.fast_decoder import FastDecoder
from minigpt.sampling.filters import PerSampleRNG, draw
from minigpt.sampling.generation import decoder_class, generate, score
from minigpt.sampling.settings import SamplingSettings
from minigpt.utils.errors import UserError

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
    """Set an attribute, or a module, to a function of what it was."""
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
    """Move the weights to a model of a subclass of GPT with these methods."""

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
        with pytest.raises(UserError, match=r"^[^\n]*must [^\n]*, got (Sequential|tuple)[^\n]*$"):
            generate(model, [3], max_new_tokens=1)


def rope(**settings: Any) -> GPT:
    return make(position="rope", **settings)


def drawn(model: Any, **options: Any) -> list[list[int]]:
    return [sample.tokens for sample in generate(model, PROMPTS, max_new_tokens=8, **options)]


def assert_decoded_by_own_logits(model: GPT) -> None:
    assert drawn(model, temperature=0) == expected(model, PROMPTS, 8, temperature=0)


def expected(
    model: Any, prompts: list[list[int]], n: int, seed: int = 0, **settings: Any
) -> list[list[int]]:
    """Draw one sample per prompt from the logits of its whole text."""
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
