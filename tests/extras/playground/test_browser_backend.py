"""The model in the page: tokens, samples and attention equal those of minigpt, and the page stays responsive."""

from pathlib import Path
from typing import Any

import pytest
import torch
from exported import CHARACTERS, DEFAULTS, MODELS, SAMPLE, export, random_model

from minigpt import generate
from minigpt.data.tokenizer import SEPARATOR, BPETokenizer, ByteTokenizer
from minigpt.extras.interpret.heads import attention_maps

SCORE = "return backend.score(backend.models[0], ...arguments)"
ATTENTION = (
    "return backend.attention(backend.models[0], ...arguments).then(weights => [...weights])"
)


def random_ids(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 95, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", ["fast_cpu", "an odd number of learned positions", "one position"])
def test_a_request_after_others_gives_what_it_gives_alone(
    name: str, open_page: Any, tmp_path: Path
) -> None:
    """The cache holds other texts, which begin as the next one does or not, and can be longer than the context."""
    model = random_model(**MODELS[name])
    run = open_page(export(model, CHARACTERS, tmp_path))
    a, b = random_ids(60), random_ids(60, seed=2)
    texts = [
        a[:30],
        a[:30],
        a[:35],
        a[:20],
        a[:20] + b[:5],
        a[:1],
        b[:10],
        a,
        a[:50],
        a + b,
        b[:40],
        b[:39] + a,
    ]
    requests: list[tuple[str, Any]] = []
    for i, text in enumerate(texts):
        requests += [(SCORE, [text]), (ATTENTION, [text, 1, None])]
        requests += [(SAMPLE, [text, {**DEFAULTS, "max_tokens": 3 + i}])]
    after_others = [run(script, *arguments) for script, arguments in requests]
    forget = "backend.idle = [];"
    alone = [run(forget + script, *arguments) for script, arguments in requests]
    assert after_others == alone
    if model.config.block_size > 32:
        assert run(SCORE, a[:30] + [token["id"] for token in alone[2]])[30:] == alone[2]
    expected = (
        attention_maps(model, torch.tensor(a[:20][-model.config.block_size :]))[1].mean(0).flatten()
    )
    assert run(ATTENTION, a[:20], 1, None) == pytest.approx(expected.tolist(), abs=1e-4)


def test_requests_at_the_same_time_do_not_disturb_each_other(
    open_page: Any, tmp_path: Path
) -> None:
    model = random_model()
    run = open_page(export(model, CHARACTERS, tmp_path))
    together = f"""
    const [prompts, settings] = arguments, sample = function() {{{SAMPLE}}};
    return Promise.all(prompts.map(prompt => sample(prompt, settings)));"""
    prompts = [random_ids(20), random_ids(20, seed=2), random_ids(20)]
    samples = generate(model, prompts, max_new_tokens=100, tokenizer=CHARACTERS)
    for n in (15, 15, 100):  # the second and third time with caches
        found = run(together, prompts, {**DEFAULTS, "max_tokens": n})
        assert [[token["id"] for token in tokens] for tokens in found] == [
            sample.tokens[:n] for sample in samples
        ]


def test_the_texts_of_tokens_are_the_characters_that_they_complete(
    open_page: Any, tmp_path: Path
) -> None:
    run = open_page(export(random_model(vocab_size=256), ByteTokenizer(), tmp_path))
    texts = [token["text"] for token in run(SCORE, "aé😀")]
    assert texts == ["a", "", "é", "", "", "", "😀"]
    assert run(SCORE, "") == []
    cut = list("é😀".encode())[:-1]
    assert [token["text"] for token in run(SCORE, cut)] == ["", "é", "", "", "\ufffd"]
    assert all(other["text"] for token in run(SCORE, "abc")[1:] for other in token["top"])
    # The first may complete the character
    rest = run(SAMPLE, cut, {**DEFAULTS, "max_tokens": 50, "temperature": 3})
    decoded = bytes([*cut, *(token["id"] for token in rest)]).decode(errors="replace")
    assert "é" + "".join(token["text"] for token in rest) == decoded


def test_an_empty_prompt_starts_a_document_which_the_separator_ends(
    open_page: Any, tmp_path: Path
) -> None:
    tokenizer = BPETokenizer(
        "bpe", [bytes([byte]) for byte in range(256)], {SEPARATOR: 256}, separated=True
    )
    model = random_model(vocab_size=257)
    run = open_page(export(model, tokenizer, tmp_path))
    ended = 0
    for seed in range(5):
        (sample,) = generate(
            model, [256], max_new_tokens=200, seed=seed, temperature=2.0, stop=[256]
        )
        tokens = run(SAMPLE, [], {**DEFAULTS, "max_tokens": 200, "seed": seed, "temperature": 2})
        ended += sample.reason == "stop"
        assert [token["id"] for token in tokens] == sample.tokens[
            : -1 if sample.reason == "stop" else None
        ]
    assert ended


WORK = {
    "score": "backend.score(model, Array(1e6).fill(1), signal)",
    "attention": "backend.attention(model, Array(40).fill(1), 0, 0, signal)",
    "generate": "(async () => { for await (const _ of backend.generate(model, [], settings, signal)) seen++; })()",
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_abort_ends_the_work_and_the_page_can_work_meanwhile(
    work: str, open_page: Any, tmp_path: Path
) -> None:
    run = open_page(export(random_model(), CHARACTERS, tmp_path))
    script = f"""
    const prototype = Object.getPrototypeOf(backend.newModel()), {{forward}} = prototype;
    let count = 0, seen = 0;  // tokens that are read, and generated
    prototype.forward = function(token) {{
      count++;
      const until = performance.now() + 10;  // is slow
      while (performance.now() < until);
      return forward.call(this, token);
    }};
    const controller = new AbortController(), {{signal}} = controller, settings = {{...arguments[0], max_tokens: 1e6}};
    const [model] = backend.models;
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
