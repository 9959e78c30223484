"""The model in the page: tokens, samples and attention equal those of minigpt, and the page stays responsive."""

from pathlib import Path
from typing import Any

import pytest
import torch
from exported import CHARACTERS, DEFAULTS, MODELS, SAMPLE, export, random_model

from minigpt import GPT, generate
from minigpt.data.tokenizer import SEPARATOR, BPETokenizer, ByteTokenizer
from minigpt.generation import score
from minigpt.interpret.heads import attention_maps

SCORE = "return backend.score(backend.models[0], ...arguments)"
ATTENTION = "return backend.attention(backend.models[0], ...arguments).then(weights => [...weights])"
# Count the tokens that are read, in `count`.
COUNT = """
const prototype = Object.getPrototypeOf(backend.newModel()), {forward} = prototype;
globalThis.count = 0;
prototype.forward = function(token) { count++; return forward.call(this, token); };
"""
ARCHITECTURES = [
    "GPT-2",
    "Llama, one key-value head",
    "Qwen3",
    "Llama 3, scaled rope",
    "NanoChat",
    "n-grams",
    "fast_cpu",
]


def random_ids(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 95, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_tokens(found: list[dict[str, Any]], model: GPT, ids: list[int]) -> None:
    """Check ids, log-probabilities, ranks and alternatives of a text."""
    rated = score(model, ids[1:], ids[:1], n_top=10)
    first, *rest = found
    assert [token["id"] for token in found] == ids
    assert (first["logprob"], first["top"]) == (None, [])
    assert [token["logprob"] for token in rest] == pytest.approx(rated.logprobs.tolist(), abs=1e-3)
    assert [token["rank"] for token in rest] == rated.ranks.tolist()
    for token, top in zip(rest, rated.top, strict=True):
        assert [other["id"] for other in token["top"]] == [other for other, _ in top]
        assert [other["logprob"] for other in token["top"]] == pytest.approx([value for _, value in top], abs=1e-3)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_and_attention_are_those_of_the_model(name: str, open_page: Any, tmp_path: Path) -> None:
    model = random_model(**MODELS[name])
    run = open_page(export(model, CHARACTERS, tmp_path))
    ids = random_ids(30)
    assert_tokens(run(SCORE, ids), model, ids)
    expected = attention_maps(model, torch.tensor(ids))
    for layer, head in ((0, 0), (0, 2), (1, 3), (1, None), (0, None)):
        weights = torch.tensor(run(ATTENTION, ids, layer, head)).view(30, 30)
        of_head = expected[layer].mean(0) if head is None else expected[layer, head]
        torch.testing.assert_close(weights, of_head, rtol=0, atol=1e-4)


def test_attention_is_that_of_the_last_tokens_of_a_long_text(open_page: Any, tmp_path: Path) -> None:
    for position in ("learned", "rope"):
        model = random_model(position=position)
        run = open_page(export(model, CHARACTERS, tmp_path / position))
        ids = random_ids(100)
        expected = attention_maps(model, torch.tensor(ids[-40:]))[1, 2]
        weights = torch.tensor(run(ATTENTION, ids, 1, 2)).view(40, 40)
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-4)


def test_generated_tokens_have_the_scores_of_their_text(open_page: Any, tmp_path: Path) -> None:
    model = random_model()
    run = open_page(export(model, CHARACTERS, tmp_path))
    prompt = random_ids(10)
    tokens = run(SAMPLE, prompt, {**DEFAULTS, "max_tokens": 25, "temperature": 1.5, "top_k": 40})
    ids = [token["id"] for token in tokens]
    assert_tokens(run(SCORE, prompt) + tokens, model, prompt + ids)
    assert run(SCORE, prompt + ids)[10:] == tokens


@pytest.mark.parametrize("name", ["fast_cpu", "an odd number of learned positions", "smear", "one position"])
def test_a_request_after_others_gives_what_it_gives_alone(name: str, open_page: Any, tmp_path: Path) -> None:
    """The cache holds other texts, which begin as the next one does or not, and can be longer than the context."""
    model = random_model(**MODELS[name])
    run = open_page(export(model, CHARACTERS, tmp_path))
    a, b = random_ids(60), random_ids(60, seed=2)
    texts = [a[:30], a[:30], a[:35], a[:20], a[:20] + b[:5], a[:1], b[:10], a, a[:50], a + b, b[:40], b[:39] + a]
    requests: list[tuple[str, Any]] = []
    for i, text in enumerate(texts):
        requests += [(SCORE, [text]), (ATTENTION, [text, 1, None])]
        requests += [(SAMPLE, [text, {**DEFAULTS, "max_tokens": 3 + i}])]
    after_others = [run(script, *arguments) for script, arguments in requests]
    forget = "backend.idle = [];"
    assert after_others == [run(forget + script, *arguments) for script, arguments in requests]


def test_a_text_is_read_from_the_first_change_on(open_page: Any, tmp_path: Path) -> None:
    run = open_page(export(random_model(), CHARACTERS, tmp_path))
    run(COUNT)
    ids, settings = random_ids(30), {**DEFAULTS, "max_tokens": 5}

    def counted(script: str, *arguments: Any) -> int:
        before = run("return count")
        run(script, *arguments)
        return run("return count") - before

    assert counted(SCORE, ids) == 30
    assert counted(SCORE, ids) == 0
    assert counted(SAMPLE, ids, settings) == 5
    assert counted(SCORE, [*ids, 1]) <= 2  # and the last token before it, for its logits
    assert counted(SCORE, [*ids[:20], 1, 2]) <= 3
    assert counted(SCORE, [*ids[:20], 1, 2, 3]) == 1
    assert counted(ATTENTION, ids, 0, 0) == 30  # once, to record the weights
    assert counted(ATTENTION, ids, 1, None) == 0
    assert counted(SCORE, [*ids, 5]) == 1
    assert counted(ATTENTION, [*ids, 5], 1, 2) == 0


def test_requests_at_the_same_time_do_not_disturb_each_other(open_page: Any, tmp_path: Path) -> None:
    model = random_model()
    run = open_page(export(model, CHARACTERS, tmp_path))
    together = f"""
    const [prompts, settings] = arguments, sample = function() {{{SAMPLE}}};
    return Promise.all(prompts.map(prompt => sample(prompt, settings)));"""
    prompts = [random_ids(20), random_ids(20, seed=2), random_ids(20)]
    found = run(together, prompts, {**DEFAULTS, "max_tokens": 1000})
    samples = generate(model, prompts, max_new_tokens=1000)
    assert [[token["id"] for token in tokens] for tokens in found] == [sample.tokens for sample in samples]


def test_the_texts_of_tokens_are_the_characters_that_they_complete(open_page: Any, tmp_path: Path) -> None:
    run = open_page(export(random_model(vocab_size=256), ByteTokenizer(), tmp_path))
    texts = [token["text"] for token in run(SCORE, "aé😀")]
    assert texts == ["a", "", "é", "", "", "", "😀"]
    assert run(SCORE, "") == []
    cut = list("é😀".encode())[:-1]
    assert [token["text"] for token in run(SCORE, cut)] == ["", "é", "", "", "\ufffd"]
    assert all(other["text"] for token in run(SCORE, "abc")[1:] for other in token["top"])
    rest = run(SAMPLE, cut, {**DEFAULTS, "max_tokens": 50, "temperature": 3})  # the first may complete the character
    decoded = bytes([*cut, *(token["id"] for token in rest)]).decode(errors="replace")
    assert "é" + "".join(token["text"] for token in rest) == decoded


def test_an_empty_prompt_starts_a_document_which_the_separator_ends(open_page: Any, tmp_path: Path) -> None:
    tokenizer = BPETokenizer("bpe", [bytes([byte]) for byte in range(256)], {SEPARATOR: 256}, separated=True)
    model = random_model(vocab_size=257)
    run = open_page(export(model, tokenizer, tmp_path))
    ended = 0
    for seed in range(5):
        (sample,) = generate(model, [256], max_new_tokens=200, seed=seed, temperature=2.0, stop=[256])
        tokens = run(SAMPLE, [], {**DEFAULTS, "max_tokens": 200, "seed": seed, "temperature": 2})
        ended += sample.reason == "stop"
        assert [token["id"] for token in tokens] == sample.tokens[: -1 if sample.reason == "stop" else None]
    assert ended


@pytest.mark.parametrize(
    "work",
    [
        "backend.score(model, Array(1e6).fill(1), signal)",
        "backend.attention(model, Array(40).fill(1), 0, 0, signal)",
        "(async () => { for await (const token of backend.generate(model, [], settings, signal)) seen++; })()",
    ],
    ids=["score", "attention", "generate"],
)
def test_abort_ends_the_work(work: str, open_page: Any, tmp_path: Path) -> None:
    run = open_page(export(random_model(), CHARACTERS, tmp_path))
    slow = "const until = performance.now() + 10; while (performance.now() < until);"  # per token
    script = f"""
    {COUNT.replace("count++;", f"count++; {slow}")}
    const controller = new AbortController(), {{signal}} = controller, settings = {{...arguments[0], max_tokens: 1e6}};
    const [model] = backend.models;
    let seen = 0;
    setTimeout(() => controller.abort(), 60);
    return {work}.then(() => "ended", error => error.name).then(async how => {{
      const before = count;
      await new Promise(resolve => setTimeout(resolve, 100));
      return [how, before, count, seen];
    }});"""
    how, before, after, seen = run(script, DEFAULTS)
    assert how == ("ended" if "generate" in work else "AbortError")
    assert 0 < before == after < (40 if "attention" in work else 1000)
    assert (seen > 0) == ("generate" in work)


def test_the_page_can_work_while_the_model_does(open_page: Any, tmp_path: Path) -> None:
    run = open_page(export(random_model(), CHARACTERS, tmp_path))
    script = f"""
    let turns = 0;
    const timer = setInterval(() => {{ turns++; }});
    const sample = function() {{{SAMPLE}}};
    return sample([], arguments[0]).then(() => {{ clearInterval(timer); return turns; }});"""
    assert run(script, {**DEFAULTS, "max_tokens": 10000}) > 5
