"""The model in the page: its tokens, samples and attention, and a page that stays responsive."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import CHARACTERS, DEFAULTS, MODELS, SAMPLE, export, random_model

from minigpt import generate
from minigpt.data.tokenizer import SEPARATOR, BPETokenizer, ByteTokenizer
from minigpt.extras.interpret.heads import attention_maps

SCORE = "return backend.score(backend.models[0], ...arguments)"
ATTENTION = "return [...await backend.attention(backend.models[0], ...arguments)]"


def random_ids(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 95, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def answers(run: Any, requests: list[tuple[str, Any]], before: str = "") -> list[Any]:
    """The results of scripts with arguments, one after another; `before` is run before each."""
    calls = [
        f"{before} found.push(await (async function() {{{script}}})(...{json.dumps(arguments)}));"
        for script, arguments in requests
    ]
    return run(f"return (async () => {{const found = []; {' '.join(calls)} return found;}})()")


@pytest.mark.parametrize("name", ["fast_cpu", "an odd number of learned positions", "one position"])
def test_a_request_after_others_gives_what_it_gives_alone(
    name: str, open_page: Any, tmp_path: Path
) -> None:
    """The cache holds texts that begin as the next one or not, and are longer than the context."""
    model = random_model(**MODELS[name])
    run = open_page(export(model, CHARACTERS, tmp_path))
    a = random_ids(45)
    b = random_ids(45, seed=2)
    texts = [a[:30], a[:30], a[:35], a[:20], a[:20] + b[:5], a[:1], b[:10], a, a[:42], a + b]
    texts += [b[:40], b[:39] + a]
    requests: list[tuple[str, Any]] = []
    for i, text in enumerate(texts):
        requests += [(SCORE, [text]), (ATTENTION, [text, 1, None])]
        requests += [(SAMPLE, [text, {**DEFAULTS, "max_tokens": 3 + i % 3}])]
    after_others = answers(run, requests)
    alone = answers(run, requests, before="backend.idle = [];")
    assert after_others == alone
    if model.config.block_size > 32:
        (scored,) = answers(run, [(SCORE, [a[:30] + [token["id"] for token in alone[2]]])])
        assert scored[30:] == alone[2]
    last = torch.tensor(a[:20][-model.config.block_size :])
    expected = attention_maps(model, last)[1].mean(0).flatten()
    (found,) = answers(run, [(ATTENTION, [a[:20], 1, None])])
    assert found == pytest.approx(expected.tolist(), abs=1e-4)


def test_requests_at_the_same_time_do_not_disturb_each_other(
    open_page: Any, tmp_path: Path
) -> None:
    model = random_model()
    run = open_page(export(model, CHARACTERS, tmp_path))
    together = f"""
    const [prompts, settings] = arguments, sample = function() {{{SAMPLE}}};
    return Promise.all(prompts.map(prompt => sample(prompt, settings)));"""
    prompts = [random_ids(20), random_ids(20, seed=2), random_ids(20)]
    samples = generate(model, prompts, max_new_tokens=30, tokenizer=CHARACTERS)
    for n in (15, 15, 30):  # the second and third time with caches
        found = run(together, prompts, {**DEFAULTS, "max_tokens": n})
        for tokens, sample in zip(found, samples, strict=True):
            assert [token["id"] for token in tokens] == sample.tokens[:n]


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
    reasons = set()
    for seed in range(5):
        settings: dict[str, Any] = {"temperature": 2.0, "seed": seed}
        (sample,) = generate(model, [256], max_new_tokens=80, stop=[256], **settings)
        tokens = run(SAMPLE, [], {**DEFAULTS, "max_tokens": 80, **settings})
        reasons.add(sample.reason)
        ends = [256] if sample.reason == "stop" else []
        assert [token["id"] for token in tokens] + ends == sample.tokens
    assert "stop" in reasons


WORK = {
    "score": "backend.score(model, Array(1e6).fill(1), signal)",
    "attention": "backend.attention(model, Array(40).fill(1), 0, 0, signal)",
    "generate": """(async () => {
        for await (const _ of backend.generate(model, [], settings, signal)) seen++;
    })()""",
}


def test_abort_ends_the_work_and_the_page_can_work_meanwhile(
    open_page: Any, tmp_path: Path
) -> None:
    run = open_page(export(random_model(), CHARACTERS, tmp_path))
    script = """
    const prototype = Object.getPrototypeOf(backend.newModel()), {forward} = prototype;
    let count = 0, seen = 0;  // tokens that are read, and generated
    prototype.forward = function(token) {
      count++;
      const until = performance.now() + 10;  // is slow
      while (performance.now() < until);
      return forward.call(this, token);
    };
    const controller = new AbortController(), {signal} = controller, [model] = backend.models;
    const settings = {...arguments[0], max_tokens: 1e6};
    setTimeout(() => controller.abort(), 60);
    return WORK.then(() => "ended", error => error.name).then(async how => {
      const before = count;
      await new Promise(resolve => setTimeout(resolve, 100));
      prototype.forward = forward;
      return [how, before, count, seen];
    });"""
    for name, work in WORK.items():
        how, before, after, seen = run(script.replace("WORK", work), DEFAULTS)
        assert how == ("ended" if name == "generate" else "AbortError")
        assert 0 < before == after < (40 if name == "attention" else 1000)
        assert (seen > 0) == (name == "generate")
