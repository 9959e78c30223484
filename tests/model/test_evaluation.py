"""`evaluation`: modes, cuDNN's attention and torch's compiler, also in calls that overlap."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import permutations
from threading import Event, get_ident
from typing import Any

import pytest
import torch
from architectures import make
from torch import nn

from minigpt.model.evaluation import evaluation
from minigpt.sampling.generation import generate, score, stream

BLOCK = 16
COMPILED = pytest.mark.xdist_group("compiled")  # one worker imports torch's compiler


def test_evaluations_that_overlap_restore_each_mode_when_the_last_one_ends():
    model = make(dropout=0.5).train()
    model.blocks[1].eval()  # as a user who finetunes the other blocks
    modes = [module.training for module in model.modules()]
    for calls in ([evaluation(model)], [evaluation(model.blocks[0]), evaluation(model)]):
        for call in calls:
            call.__enter__()
        for call in calls:
            assert not any(module.training for module in model.modules())
            call.__exit__(None, None, None)
        assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("before", [True, False])
def test_cudnn_attention_is_as_the_user_set_it_after_calls_that_overlap(before: bool):
    at_start = torch.backends.cuda.cudnn_sdp_enabled()
    for meanwhile in (None, True):
        torch.backends.cuda.enable_cudnn_sdp(before)
        first = evaluation()
        second = evaluation()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        if meanwhile:
            torch.backends.cuda.enable_cudnn_sdp(True)
        second.__exit__(None, None, None)
        assert torch.backends.cuda.cudnn_sdp_enabled() == (meanwhile or before)
    torch.backends.cuda.enable_cudnn_sdp(at_start)


@COMPILED
def test_a_model_trains_compiled_while_a_thread_samples_from_another():
    backend = Backend()
    inside = Event()
    trained = Event()
    build = partial(torch.compile, backend=backend, fullgraph=True)
    model = build(make(position="rope", n_layer=1))
    sampled = build(make(position="rope", n_layer=1))
    tokens = torch.randint(23, (2, BLOCK))

    def wait(module: nn.Module, args: Any) -> None:
        inside.set()
        assert trained.wait(60)

    def sample() -> int:
        next(stream(sampled, [3], max_new_tokens=9))  # and no further
        score(sampled, [3], [1])
        model(tokens, tokens)
        return get_ident()

    sampled.blocks[0].register_forward_pre_hook(wait)
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


class Backend:
    """Compile without changes; `threads` are those that ran the compiled code."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.threads.append(get_ident())
            return graph(*args)

        return run


@COMPILED
def test_two_threads_and_the_user_leave_torchs_compiler_as_it_was_in_any_order():
    backend = Backend()
    function = torch.compile(lambda x: x + 1, backend=backend)
    pools = [ThreadPoolExecutor(1) for _ in range(3)]
    user = pools[2]

    def is_compiled() -> bool:
        backend.threads.clear()
        function(torch.ones(2))
        return backend.threads == [get_ident()]

    assert is_compiled()
    # Who enters, and at the second time exits, without an error or with one
    for i, order in enumerate(sorted(set(permutations([0, 0, 1, 1, 2, 2])))):
        error: Any = (ValueError, ValueError(), None) if i % 2 else (None, None, None)
        entered: dict[int, Any] = {}
        for who in order:
            thread = pools[who]
            if who in entered:
                thread.submit(entered.pop(who).__exit__, *error).exception()
                assert thread.submit(is_compiled).result()
                continue
            is_user = thread is user
            new = torch.compiler.set_stance("fail_on_recompile") if is_user else evaluation()
            thread.submit(new.__enter__).result()
            assert thread.submit(is_compiled).result() == is_user
            entered[who] = new
        assert is_compiled()
    for pool in pools:
        pool.shutdown()
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

    model = torch.compile(make(position="rope"), backend=backend)
    for length in (3, 7, 20):
        generate(model, [1] * length, max_new_tokens=3)
        score(model, [1] * length, [2])
