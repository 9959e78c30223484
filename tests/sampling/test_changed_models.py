"""A model that its user changed is decoded as `model(tokens)` computes it, or refused in one line."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import permutations
from threading import Event, get_ident
from typing import Any

import pytest
import torch
from extras.playground.test_engine import collect
from extras.playground.test_engine import serve as serve_engine
from test_generation import ARCHITECTURES, make
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
from minigpt.sampling.generation import decoder_class, generate, score, stream
from minigpt.sampling.settings import SamplingSettings
from minigpt.utils.errors import UserError

BLOCK = 16
PROMPTS = [[5, 1, 19], [4], [7, 2, 2, 9, 11, 0]]
Changed = Callable[[GPT], Any]


class LoRALinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input.sum(dim=-1, keepdim=True)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.config = inner, getattr(inner, "config", None)

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
    return change(
        lambda m: setattr(
            m.get_submodule(name), key, new(getattr(m.get_submodule(name), key, None))
        )
    )


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


@pytest.mark.parametrize(
    "how",
    [pytest.param(how, marks=COMPILED if "compiled" in how else ()) for how in (*CHANGES, *PLAIN)],
)
def test_a_model_is_decoded_by_its_own_logits_and_fast_if_it_is_not_changed(how: str):
    make_new, options = (CHANGES | PLAIN)[how], {"num_samples": 2, "seed": 3, "top_k": 7}
    model = make_new(rope())
    assert decoder_class(model) is (FastDecoder if how in PLAIN else Decoder)
    found = [sample.tokens for sample in generate(model, PROMPTS, max_new_tokens=8, **options)]
    assert found == expected(model, PROMPTS, 8, **options)
    assert len(generate(model, [3] * 30, max_new_tokens=2 * BLOCK)[0].tokens) == 2 * BLOCK
    text = [*PROMPTS[2], *found[-1]]
    with evaluation():
        logprobs = model(torch.tensor([text[:-1]]))[0].log_softmax(-1)
    own = logprobs[range(len(text) - 1), text[1:]].float()
    torch.testing.assert_close(score(model, text[1:], text[:1]).logprobs, own)
    if how in CHANGES:
        unchanged = [
            sample.tokens for sample in generate(rope(), PROMPTS, max_new_tokens=8, **options)
        ]
        assert (found == unchanged) == (how in WITHOUT_EFFECT)


@pytest.mark.parametrize("settings", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_a_hook_that_changes_nothing_changes_no_text_beyond_the_block(settings: dict[str, Any]):
    model, options = make(**settings), {"max_new_tokens": 3 * BLOCK, "logprobs": True}
    prompts = [*PROMPTS, [3] * 30]
    before = generate(model, prompts, **options)
    model.blocks[0].register_forward_hook(lambda module, args, x: x)
    assert decoder_class(model) is Decoder
    for one, other in zip(before, generate(model, prompts, **options), strict=True):
        assert one.tokens == other.tokens
        torch.testing.assert_close(
            torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("before", [True, False])
def test_cudnn_attention_is_as_the_user_set_it_after_calls_that_overlap(
    before: bool, monkeypatch: pytest.MonkeyPatch
):
    at_start = torch.backends.cuda.cudnn_sdp_enabled()
    for meanwhile in (None, True):
        torch.backends.cuda.enable_cudnn_sdp(before)
        first, second = evaluation(), evaluation()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        if meanwhile:
            torch.backends.cuda.enable_cudnn_sdp(True)
        second.__exit__(None, None, None)
        assert torch.backends.cuda.cudnn_sdp_enabled() == (meanwhile or before)
    torch.backends.cuda.enable_cudnn_sdp(at_start)


class Backend:
    """Compile without changes; `threads` are those that ran the compiled code."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            self.threads.append(get_ident())
            return graph(*args)

        return run


@COMPILED
def test_a_model_trains_compiled_while_a_thread_samples_from_another():
    backend, inside, trained = Backend(), Event(), Event()

    def wait(module: nn.Module, args: Any) -> None:
        inside.set()
        assert trained.wait(60)

    def sample() -> int:
        next(stream(sampled, [3], max_new_tokens=9))  # and no further
        score(sampled, [3], [1])
        model(tokens, tokens)
        return get_ident()

    sampled, model = (
        torch.compile(rope(n_layer=1), backend=backend, fullgraph=True) for _ in range(2)
    )
    sampled.blocks[0].register_forward_pre_hook(wait)
    tokens = torch.randint(23, (2, BLOCK))
    with ThreadPoolExecutor(1) as pool:
        sampling = pool.submit(sample)
        assert inside.wait(60)
        for _ in range(3):
            model(tokens, tokens).backward()
        assert backend.threads == [get_ident()] * 3
        trained.set()
        sampler = sampling.result()
    assert backend.threads[3:] == [sampler]
    assert model.wte.weight.grad is not None


@COMPILED
@pytest.mark.parametrize(
    "error", [(None, None, None), (ValueError, ValueError(), None)], ids=["", "with an error"]
)
def test_two_threads_and_the_user_leave_torchs_compiler_as_it_was_in_any_order(error: Any):
    backend, orders = (
        Backend(),
        set(permutations([0, 0, 1, 1, 2, 2])),
    )  # who enters, and at the second time exits
    function = torch.compile(lambda x: x + 1, backend=backend)

    def is_compiled() -> bool:
        backend.threads.clear()
        function(torch.ones(2))
        return backend.threads == [get_ident()]

    assert is_compiled()
    with (
        ThreadPoolExecutor(1) as one,
        ThreadPoolExecutor(1) as other,
        ThreadPoolExecutor(1) as user,
    ):
        for order in orders:
            entered: dict[int, Any] = {}
            for who in order:
                thread = (one, other, user)[who]
                if who in entered:
                    thread.submit(entered.pop(who).__exit__, *error).exception()
                    assert thread.submit(is_compiled).result()
                else:
                    new = (
                        torch.compiler.set_stance("fail_on_recompile")
                        if thread is user
                        else evaluation()
                    )
                    thread.submit(new.__enter__).result()
                    assert thread.submit(is_compiled).result() == (thread is user)
                    entered[who] = new
            assert is_compiled()
    try:
        with evaluation():
            torch.compiler.set_stance("force_eager")  # for good
        assert not is_compiled()
    finally:
        torch.compiler.set_stance("default")


@COMPILED
def test_a_torch_without_the_private_stance_evaluates_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr("torch._dynamo.eval_frame._stance")
    for _ in range(2):
        with evaluation():
            pass


@COMPILED
def test_texts_of_many_lengths_are_generated_and_scored_without_compilation():
    def backend(graph: Any, inputs: Any) -> Any:
        raise AssertionError("compiled")

    model = torch.compile(rope(), backend=backend)
    for length in (3, 7, 20):
        generate(model, [1] * length, max_new_tokens=3)
        score(model, [1] * length, [2])


def test_the_server_generates_from_a_changed_model():
    model = CHANGES["LoRA"](rope())
    requests = [
        SampleRequest(prompt, 5 + i, seed=i) for i, prompt in enumerate([*PROMPTS, PROMPTS[0]])
    ]
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
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
    )
    try:
        model = nn.parallel.DistributedDataParallel(rope())
        assert generate(model, PROMPTS, max_new_tokens=8) == generate(
            rope(), PROMPTS, max_new_tokens=8
        )
        assert score(model, [1, 2], [3]).nats == score(rope(), [1, 2], [3]).nats
    finally:
        torch.distributed.destroy_process_group()


def test_what_is_no_language_model_of_minigpt_is_refused():
    for model in (
        nn.Sequential(make()),
        subclass(forward=lambda m, ids: (GPT.forward(m, ids), None))(make()),
    ):
        with pytest.raises(UserError, match=r"^[^\n]*must [^\n]*, got (Sequential|tuple)[^\n]*$"):
            generate(model, [3], max_new_tokens=1)


def rope(**settings: Any) -> GPT:
    return make(position="rope", **settings)


def assert_decoded_by_own_logits(model: nn.Module) -> None:
    found = [sample.tokens for sample in generate(model, PROMPTS, max_new_tokens=8, temperature=0)]
    assert found == expected(model, PROMPTS, 8, temperature=0)


def expected(
    model: Any,
    prompts: list[list[int]],
    n: int,
    num_samples: int = 1,
    seed: int = 0,
    **settings: Any,
) -> list[list[int]]:
    """Draw each sample from the logits of its whole text."""
    texts = [list(prompt) for prompt in prompts for _ in range(num_samples)]
    for i, text in enumerate(texts):
        uniforms = PerSampleRNG([seed + i % num_samples], torch.device("cpu"))
        for j in range(n):
            with evaluation():
                logits = model(torch.tensor([text]))[:, -1].float()
            text.append(int(draw(logits, SamplingSettings(**settings), uniforms.number(j))))
    return [text[-n:] for text in texts]
