"""Decoding against loops without a cache, against the distribution that it draws from, and its settings."""

import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from minigpt.config import GPTConfig
from minigpt.errors import UserError
from minigpt.generation import generate, stream
from minigpt.model import GPT

ARCHITECTURES = {
    "gpt2": {},
    "llama": {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False, "n_kv_head": 2},
    "multi-query": {"position": "none", "n_kv_head": 1, "qk_norm": True, "head_dim": 10},
    "modern": {"position": "rope", "norm": "rmsnorm_plain", "ngram": 3, "smear": 2},
    "post-norm": {"norm_position": "post", "activation": "relu2", "tie_embeddings": False},
}
architectures = pytest.mark.parametrize("settings", ARCHITECTURES.values(), ids=ARCHITECTURES)

# Chi-square of 10 degrees of freedom is above this once in a thousand.
CHI_SQUARE_10 = 29.588


@architectures
@pytest.mark.parametrize("chunk", [1, 3, 7, 15])
def test_reading_on_from_the_cache_gives_the_logits_of_reading_it_all(settings: dict[str, Any], chunk: int):
    model = make(**settings)
    tokens = torch.randint(23, (3, 16))
    cache = model.new_cache(3)
    parts = [model(tokens[:, i : i + chunk], cache=cache) for i in range(0, 16, chunk)]
    assert_close(torch.cat(parts, 1), model(tokens), atol=1e-5, rtol=1e-5)


@architectures
def test_greedy_decoding_takes_the_likeliest_token_of_a_loop_without_a_cache(settings: dict[str, Any]):
    model, prompt = make(**settings), torch.tensor([5, 1, 19])
    text = prompt
    for _ in range(13):
        text = torch.cat((text, model(text[None])[0, -1].argmax(keepdim=True)))
    assert len(set(text.tolist())) > 3
    assert generate(model, prompt, max_new_tokens=13, temperature=0).tolist() == [text[3:].tolist()]


@architectures
def test_five_contexts_of_text_are_those_of_a_loop_that_crops_to_the_newer_half(settings: dict[str, Any]):
    model, prompt = make(**settings), torch.tensor([5, 1, 19])
    context, text = prompt, []
    for _ in range(5 * 16):
        if len(context) > 16:
            context = context[-8:]
        text.append(model(context[None])[0, -1].argmax())
        context = torch.cat((context, text[-1][None]))
    assert generate(model, prompt, max_new_tokens=80, temperature=0)[0].tolist() == [int(token) for token in text]


def test_a_context_of_one_token_is_enough_to_go_on():
    model = make(block_size=1)
    text = [4]
    for _ in range(6):
        text.append(int(model(torch.tensor([[text[-1]]])).argmax()))
    assert generate(model, torch.tensor([4]), max_new_tokens=6, temperature=0)[0].tolist() == text[1:]


@pytest.mark.parametrize("length", [16, 17, 40])
def test_only_the_end_of_a_long_prompt_is_read(length: int):
    model, prompt = make(), torch.randint(23, (length,))
    expected = model(prompt[None, -16:])[0, -1].argmax()
    assert generate(model, prompt, max_new_tokens=1, temperature=0).item() == expected
    assert torch.equal(generate(model, prompt, max_new_tokens=20), generate(model, prompt[-16:], max_new_tokens=20))


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (3.0, None), (1.0, 4), (2.0, 4)])
def test_sampled_frequencies_are_those_of_the_softmax(temperature: float, top_k: int | None):
    model, prompt, n = make(vocab_size=11), torch.tensor([5, 1]), 3000
    model.head.weight.data *= 0.2
    logits = model(prompt[None])[0, -1].double() / temperature
    if top_k is not None:
        logits[logits.argsort()[:-top_k]] = float("-inf")
    expected = n * logits.softmax(-1)
    drawn = generate(model, prompt, max_new_tokens=1, temperature=temperature, top_k=top_k, num_samples=n)
    counts = torch.bincount(drawn[:, 0], minlength=11)
    possible = expected > 0
    assert expected[possible].min() > 5
    assert counts[~possible].sum() == 0
    assert ((counts - expected)[possible] ** 2 / expected[possible]).sum() < CHI_SQUARE_10


def test_the_tokens_of_one_sample_are_drawn_independently():
    model = make(vocab_size=11, tie_embeddings=False)
    nn.init.zeros_(model.head.weight)
    text = generate(model, torch.tensor([0]), max_new_tokens=1100)[0]
    counts = torch.bincount(text, minlength=11)
    assert ((counts - 100.0) ** 2 / 100).sum() < CHI_SQUARE_10
    assert 65 < (text[1:] == text[:-1]).sum() < 135  # a neighbour is equal once in eleven


def test_top_k_keeps_exactly_k_tokens_where_they_tie():
    model = make(vocab_size=11, tie_embeddings=False)
    nn.init.zeros_(model.head.weight)
    for top_k in (1, 3, 10):
        drawn = generate(model, torch.tensor([2]), max_new_tokens=1, top_k=top_k, num_samples=300)
        assert len(drawn.unique()) == top_k


def test_top_k_of_the_whole_vocabulary_or_more_changes_nothing():
    model, prompt = make(), torch.tensor([3])
    texts = [generate(model, prompt, max_new_tokens=30, top_k=top_k).tolist() for top_k in (None, 23, 1000)]
    assert texts[0] == texts[1] == texts[2]


def test_one_likeliest_token_is_greedy_decoding():
    model, prompt = make(), torch.tensor([3])
    greedy = generate(model, prompt, max_new_tokens=30, temperature=0)
    assert torch.equal(generate(model, prompt, max_new_tokens=30, top_k=1, seed=8), greedy)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-40])
def test_the_smallest_temperatures_are_greedy_decoding(temperature: float):
    model, prompt = make(), torch.tensor([3])
    greedy = generate(model, prompt, max_new_tokens=30, temperature=0)
    assert torch.equal(generate(model, prompt, max_new_tokens=30, temperature=temperature), greedy)


def test_the_same_seed_gives_the_same_text_and_another_seed_another():
    model, prompt = make(), torch.tensor([3])
    first, again, other = (generate(model, prompt, max_new_tokens=30, seed=seed) for seed in (4, 4, 40))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_sample_is_the_same_text_however_many_run_beside_it():
    model, prompt = make(position="rope"), torch.tensor([3, 7])
    many = generate(model, prompt, max_new_tokens=40, seed=7, num_samples=5)
    assert many.shape == (5, 40)
    assert len({tuple(text) for text in many.tolist()}) == 5
    for i, text in enumerate(many):
        assert torch.equal(generate(model, prompt, max_new_tokens=40, seed=7, num_samples=i + 1)[i], text)
        assert torch.equal(generate(model, prompt, max_new_tokens=40, seed=7 + i)[0], text)


def test_a_shorter_text_is_the_beginning_of_a_longer_one():
    model, prompt = make(), torch.tensor([3])
    longer = generate(model, prompt, max_new_tokens=40, num_samples=2)
    assert torch.equal(generate(model, prompt, max_new_tokens=11, num_samples=2), longer[:, :11])


def test_sampling_leaves_the_random_state_of_training_alone():
    model = make(dropout=0.5).train()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    generate(model, torch.tensor([3]), max_new_tokens=20)
    assert torch.equal(torch.rand(3), expected)


def test_a_stream_yields_the_columns_of_generate_as_they_come():
    model, prompt = make(), torch.tensor([3, 7])
    whole = generate(model, prompt, max_new_tokens=20, num_samples=3, top_k=5)
    columns = stream(model, prompt, max_new_tokens=10**12, num_samples=3, top_k=5)
    for i, column in enumerate(islice(columns, 20)):
        assert torch.equal(column, whole[:, i])


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_in_the_mode_that_it_was_in(training: bool):
    model, prompt = make(dropout=0.5).train(training), torch.tensor([3])
    for use in (exhaust, abandon, fail):
        use(model, prompt)
        assert [module.training for module in model.modules()] == [training] * len(list(model.modules())), use


def test_dropout_does_not_act_on_samples_of_a_model_in_training():
    model, prompt = make(dropout=0.5), torch.tensor([3])
    expected = generate(model.eval(), prompt, max_new_tokens=30, temperature=0)
    assert torch.equal(generate(model.train(), prompt, max_new_tokens=30, temperature=0), expected)


def test_sampling_records_nothing_for_a_backward_pass():
    model = make()
    recorded = []
    model.register_forward_hook(lambda module, tokens, logits: recorded.append(logits.requires_grad))
    generate(model, torch.tensor([3]), max_new_tokens=5)
    assert recorded == [False] * 5


def test_whoever_reads_a_stream_can_go_on_training():
    model = make()
    for _ in stream(model, torch.tensor([3]), max_new_tokens=2):
        assert torch.is_grad_enabled()
    model(torch.tensor([[3]]), torch.tensor([[4]])).backward()
    assert model.wte.weight.grad is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("top_k", -5),
        ("seed", -1),
        ("num_samples", 0),
    ],
)
def test_an_impossible_setting_is_named(name: str, value: float):
    with pytest.raises(UserError, match=f"{name}={value} .* takes"):
        generate(make(), torch.tensor([3]), **{"max_new_tokens": 3, name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 1.5),
        ("max_new_tokens", None),
        ("temperature", None),
        ("top_k", 1.5),
        ("seed", 0.5),
        ("seed", 2**64),
        ("num_samples", 2.5),
    ],
)
def test_a_setting_of_another_kind_is_named(name: str, value: float | None):
    with pytest.raises(UserError, match=f"{name}={value} .* takes"):
        generate(make(), torch.tensor([3]), **{"max_new_tokens": 3, name: value})


@pytest.mark.parametrize("prompt", [torch.zeros(0, dtype=torch.long), torch.zeros(2, 2, dtype=torch.long)])
def test_a_prompt_that_is_not_a_row_of_tokens_is_refused(prompt: Tensor):
    with pytest.raises(UserError, match="prompt"):
        generate(make(), prompt, max_new_tokens=3)


def test_the_package_hands_out_the_function_generate_also_after_its_module_was_imported():
    code = "from minigpt import generate as one; import minigpt.generation; from minigpt import generate as other; "
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-c", f"{code}print(callable(one), callable(other))"]
    answer = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["True", "True"]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


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


def exhaust(model: GPT, prompt: Tensor) -> None:
    generate(model, prompt, max_new_tokens=20)


def abandon(model: GPT, prompt: Tensor) -> None:
    columns = stream(model, prompt, max_new_tokens=20)
    next(columns)
    columns.close()


def fail(model: GPT, prompt: Tensor) -> None:
    with pytest.raises(IndexError):
        generate(model, prompt + 1000, max_new_tokens=20)
