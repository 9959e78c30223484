"""Exported pages in headless Chromium: their logits, tokens and attention are those of minigpt."""

import base64
import hashlib
import json
import random
import re
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import random_texts
from exported import CHARACTERS, DEFAULTS, MODELS, SAMPLE, export, random_model
from small_runs import composed, one_line
from torch import Tensor

from minigpt import GPT, GPTConfig, generate, save_checkpoint
from minigpt.checkpoints.find import BEST, find_snapshots
from minigpt.checkpoints.init_from import Pretrained, find_pretrained
from minigpt.data.tokenizer import SEPARATOR, BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer
from minigpt.extras.conversations.encoding import CHATML, add_chat, chat_of, encode_chat
from minigpt.extras.huggingface.export_huggingface import export_model
from minigpt.extras.interpret.heads import attention_maps
from minigpt.extras.playground.export_html import MAX_PAGE_BYTES, PAGE, export_html, render
from minigpt.model.config import UP_PROJECTIONS
from minigpt.model.ops import ACTIVATIONS
from minigpt.utils.errors import UserError

SCORE = "return backend.score(backend.models[0], ...arguments)"
ATTENTION = "return [...await backend.attention(backend.models[0], ...arguments)]"
BYTES = [bytes([byte]) for byte in range(256)]
LOGITS = "const model = backend.newModel(); return arguments[0].map(id => [...model.step(id)])"


def sample_ids(run: Any, prompt: list[int], **settings: Any) -> list[int]:
    return [token["id"] for token in run(SAMPLE, prompt, {**DEFAULTS, **settings})]


@torch.no_grad()
def check_logits(run: Any, model: GPT, tokens: Tensor, script: str = LOGITS) -> None:
    found = torch.tensor(run(script, tokens.tolist()))
    torch.testing.assert_close(found, model(tokens[None])[0], rtol=0, atol=1e-3)


# Others compute what these do, or have tests below
SAME = {"GPT-2, untied", "Llama", "Llama 3, scaled rope", "shared layers", "smear"}


@pytest.mark.parametrize("name", sorted({*MODELS} - SAME))
def test_logits_and_greedy_text_equal_those_of_the_model(name, open_page, tmp_path):
    model = random_model(**MODELS[name])
    run = open_page(export(model, CHARACTERS, tmp_path))
    T = model.config.block_size
    tokens = torch.randint(0, 101, (T,), generator=torch.Generator().manual_seed(1))
    check_logits(run, model, tokens)
    ids = tokens.tolist()
    # A text that grows beyond the context, and one that is longer before
    for prompt, n in ((ids[-8:], 36), (ids * 2, 4)):
        (sample,) = generate(model, prompt, max_new_tokens=n, temperature=0, tokenizer=CHARACTERS)
        assert sample_ids(run, prompt, max_tokens=n, temperature=0) == sample.tokens


@pytest.mark.parametrize("name", ["shared layers", "GPT-2, untied"])
def test_a_page_holds_each_tensor_once_also_of_snapshots(name, open_page, tmp_path):
    model = random_model(**MODELS[name])
    snapshot = random_model(**MODELS[name], seed=1)
    save_checkpoint(snapshot, CHARACTERS, tmp_path / "first")
    snapshots = {0: tmp_path / "first", 1: tmp_path / "first"}
    page = export(model, CHARACTERS, tmp_path, snapshots=snapshots)
    text = page.read_text(encoding="utf-8")
    (weights,) = re.findall('id="weights">(.*?)</script>', text, re.DOTALL)
    sizes = [len(base64.b64decode(line)) for line in weights.split("\n")]
    assert sizes == [4 * model.num_params()] * 3
    run = open_page(page)
    for at, expected in (("@1", snapshot), ("", model)):
        script = LOGITS.replace("newModel()", f"newModel('model{at}')")
        check_logits(run, expected, torch.arange(40), script)


def test_float16_changes_the_logits_little(open_page, tmp_path):
    model = random_model(**MODELS["fast_cpu"])
    run = open_page(export(model, CHARACTERS, tmp_path, "float16"))
    expected = model(torch.arange(30)[None])[0].detach()
    difference = torch.tensor(run(LOGITS, [*range(30)])) - expected
    assert difference.pow(2).mean().sqrt() < 2e-3 * expected.std()


def test_a_seed_gives_the_samples_of_generate(open_page, tmp_path):
    model = random_model()
    run = open_page(export(model, CHARACTERS, tmp_path))
    filters = {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "temperature": 1.3}
    for settings, seed in product((filters, {"temperature": 1e-6}), (0, 2**32 + 5)):
        each = {"seed": seed, **settings}
        (sample,) = generate(model, [1, 2], max_new_tokens=45, tokenizer=CHARACTERS, **each)
        assert sample_ids(run, [1, 2], max_tokens=45, **each) == sample.tokens


def test_ids_without_a_token_are_never_drawn(open_page, tmp_path):
    tokenizer = BPETokenizer("bpe", [*BYTES, None, b"ab", None], {SEPARATOR: 300})
    model = random_model(vocab_size=320)
    model.lm_head.weight.data[256:] *= 3  # they would be most of a text
    run = open_page(export(model, tokenizer, tmp_path))
    for settings in ({}, {"temperature": 0}, {"top_k": 20, "temperature": 3}):
        (sample,) = generate(model, [1, 2], max_new_tokens=45, tokenizer=tokenizer, **settings)
        assert sample_ids(run, [1, 2], max_tokens=45, **settings) == sample.tokens
        assert {*sample.tokens} <= {*range(256), 257, 300}


def make_tokenizer(name: str, texts: list[str]) -> Tokenizer:
    if name == "byte":
        return ByteTokenizer()
    if name == "char":
        return CharTokenizer("".join(sorted(set("".join(texts)))))
    tokens = BPETokenizer.train(texts, 700).tokens
    return BPETokenizer(name, tokens, {SEPARATOR: len(tokens)})


@pytest.mark.parametrize("name", ["byte", "char", "gpt2", "cl100k_base", "o200k_base"])
def test_texts_are_encoded_and_decoded_as_by_minigpt(name, open_page, tmp_path):
    texts = random_texts(200)
    known = [text.replace("\ud800", "") for text in texts]
    tokenizer = make_tokenizer(name, known)
    texts = known if name == "char" else texts
    model = random_model(vocab_size=tokenizer.vocab_size + 1, n_layer=1)
    run = open_page(export(model, tokenizer, tmp_path))
    assert not run("return 'toWellFormed' in String.prototype")  # which older browsers lack
    assert name == "char" or any("\ud800" in text for text in texts)
    encode = "return JSON.parse(arguments[0]).map(text => backend.tokenizer.encode(text))"
    encoded = run(encode, json.dumps(texts))  # JSON in ASCII can contain lone surrogates
    assert encoded == [tokenizer.encode(text).tolist() for text in texts]
    rng = random.Random(1)
    # With invalid UTF-8
    ids = encoded + [rng.choices(range(tokenizer.vocab_size + 1), k=20) for _ in range(200)]
    decoded = run("return arguments[0].map(ids => backend.tokenizer.decode(ids))", ids)
    assert decoded == [tokenizer.decode(tokens) for tokens in ids]
    assert run("return backend.data.tokenizer.start") == tokenizer.start.tolist()


@pytest.mark.parametrize("name", ["byte", "char", "gpt2", "without marks"])
def test_questions_are_encoded_as_by_minigpt(name, open_page, tmp_path):
    names = ["<|im_start|>", "<|im_end|>", SEPARATOR, "<|im_", "end|>"]
    parts = [*names, "$&", "\ufdd4", " ", "\n", "é😀", "  a", "it's", "12"]
    rng = random.Random(2)
    texts = ["", *("".join(rng.choices(parts, k=5)) for _ in range(200))]
    others = [text.replace("\ud800", "") for text in random_texts(200)]
    alphabet = [*texts, *others, CHATML["template"]]
    if name == "without marks":  # as of weights that are trained on
        tokens = BPETokenizer.train(alphabet, 700).tokens
        tokenizer = BPETokenizer("bpe", tokens, {SEPARATOR: len(tokens)}, separated=True)
        add_chat(tokenizer, chat_of(tokenizer))
    else:
        tokenizer = make_tokenizer(name, alphabet)
        add_chat(tokenizer, CHATML | {"marks": ["<|im_", *CHATML["marks"]]})
    model = random_model(vocab_size=tokenizer.vocab_size, n_layer=1)
    run = open_page(export(model, tokenizer, tmp_path))
    asked = run("return arguments[0].map(text => backend.tokenizer.ask(text))", texts)
    questions = [[{"role": "user", "content": text}] for text in texts]
    assert asked == [encode_chat(tokenizer, question) for question in questions]
    parsed = run("return arguments[0].map(text => backend.tokenizer.parse(text))", texts)
    assert parsed == [tokenizer.parse(text).tolist() for text in texts]
    assert run("return backend.data.description.chat")


def test_special_tokens_are_shown_by_their_names_and_end_an_answer(open_page, tmp_path):
    tokenizer = ByteTokenizer()
    add_chat(tokenizer, CHATML)
    model = random_model(vocab_size=258)
    run = open_page(export(model, tokenizer, tmp_path))
    shown = run(SCORE, "é<|im_end|><|im_start|>")
    assert [(token["id"], token["text"]) for token in shown] == [
        *((0xC3, ""), (0xA9, "é")),
        *((257, "<|im_end|>"), (256, "<|im_start|>")),
    ]
    samples = generate(model, [[1, 2]] * 40, max_new_tokens=60, stop=[257], tokenizer=tokenizer)
    seed = next(i for i, sample in enumerate(samples) if 256 in sample.tokens)
    expected = samples[seed].tokens
    settings = {**DEFAULTS, "max_tokens": 60, "seed": seed}
    tokens = run(SAMPLE, [1, 2], settings)
    assert [token["id"] for token in tokens] == [i for i in expected if i != 257]
    named = [token["text"] for token in tokens if token["id"] == 256]
    assert named == ["<|im_start|>"] * expected.count(256)
    answer = run(SAMPLE, [1, 2], {**settings, "chat": True})
    assert answer == tokens[: expected.index(256)]


def test_the_script_writes_the_page_and_snapshots(call, trained, tmp_path):
    flags = ("--to", "html", "--out", "pages/model.html", "--weights", "float32", "--snapshots")
    exported = call("export.py", str(trained()), *flags)
    steps = [*find_snapshots(trained())]
    assert f" and {len(steps)} of its {len(steps)} snapshots; open it in" in exported.stdout
    alone = shutil.copy(trained() / BEST, tmp_path)
    refused = one_line(call("export.py", alone, "--to", "html", "--out", "new.html", "--snapshots"))
    assert refused == f"error: --snapshots: {tmp_path} has no snapshots; leave it out"
    assert not Path("new.html").exists()
    page = (tmp_path / "pages/model.html").read_text(encoding="utf-8")
    assert " in float32: " in page
    assert f'"steps":{steps}'.replace(" ", "") in page


def test_a_page_has_room_for_snapshots_of_the_recipe_of_make_train():
    model = composed("experiment=fast_cpu").model
    config = GPTConfig(**{**model, "vocab_size": 65})  # of tiny shakespeare
    in_base64 = 2 * config.num_params() * 4 / 3  # bytes, in float16
    assert 7 * in_base64 < MAX_PAGE_BYTES  # the model, and the six of docs/playground.md


def test_snapshots_are_exported_when_the_token_files_of_the_run_are_gone(call, train, tmp_path):
    run = train("callbacks.snapshots.count=3", "max_steps=2").folder
    (tmp_path / "data").rename(tmp_path / "moved")
    exported = call("export.py", str(run), "--to", "html", "--out", "page.html", "--snapshots")
    assert (exported.returncode, "and 3 of its 3 snapshots" in exported.stdout) == (0, True)
    warning = "warning: the page has no curves of what was learned when: "
    assert re.match(f"{warning}.*the token files of the run", exported.stderr.splitlines()[-1])
    page = Path("page.html").read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*)</script>', page)
    assert (json.loads(data)["history"]["steps"], json.loads(data)["learned"]) == ([0, 1, 2], [])


def test_what_the_page_cannot_hold_is_refused(tmp_path, gpt2_folder, monkeypatch):
    monkeypatch.setitem(UP_PROJECTIONS, "silu", 1)
    monkeypatch.setitem(ACTIVATIONS, "silu", torch.nn.functional.silu)
    silu = random_model(activation="silu")
    # No class of transformers computes it, but the code of the model does
    assert export_model(silu)[0]["architectures"] == ["MiniGPTForCausalLM"]
    config = GPTConfig(vocab_size=95, bias=False, position="rope")  # 85 million parameters
    wide = random_model()
    wide.wte.weight.data[3, 4] = 1e5
    large = Pretrained(tmp_path, "", None, config, CHARACTERS)
    sources = {
        "at most 64 MB, got 170 MB of float16; use a smaller mod": large,
        "model.activation must be gelu or ": replace(large, config=silu.config, model=silu),
        "must be char, byte or bpe, got huggingface": find_pretrained(str(gpt2_folder)),
        "float32 for wte.weight, which holds 1e+05,": replace(
            large, config=wide.config, model=wide
        ),
    }
    for message, refused in sources.items():
        with pytest.raises(UserError, match=re.escape(message)):
            export_html(refused, tmp_path / "page.html")
    assert not any(tmp_path.iterdir())


def test_the_policy_allows_the_script_and_the_style_of_the_page_and_nothing_else() -> None:
    page = render({})
    (policy,) = re.findall('<meta http-equiv="Content-Security-Policy" content="(.*?)">', page)
    allowed = ["default-src 'none'"]
    for name, tag in (("style", "style"), ("script", 'script type="module"')):
        (text,) = re.findall(f"<{tag}>(.*?)</{name}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        allowed.append(f"{name}-src 'sha256-{digest}'")
    allowed += ["img-src data:", "base-uri 'none'", "form-action 'none'"]
    assert policy.split("; ") == allowed
    assert page.index("Content-Security-Policy") < page.index("<style>") < page.index("<script")
    assert "src=" not in page
    assert not re.search(r"^(import|export)\b", text, re.MULTILINE)


def test_the_style_has_no_feature_that_browsers_of_2022_lack() -> None:
    newer = r"color-mix|:has\(|@container|@layer|@scope|light-dark|oklch|field-sizing|text-wrap"
    newer += r"|\d[dls]v[hw]|@property"
    assert re.findall(newer, (PAGE / "style.css").read_text(encoding="utf-8")) == []


def test_numbers_that_json_lacks_are_an_error_before_the_page_is_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        render({"loss": float("nan")})


def random_ids(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 95, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# The results of scripts with arguments, one after another; `before` is run before each
def answers(run: Any, requests: list[tuple[str, Any]], before: str = "") -> list[Any]:
    calls = [
        f"{before} found.push(await (async function() {{{script}}})(...{json.dumps(arguments)}));"
        for script, arguments in requests
    ]
    return run(f"return (async () => {{const found = []; {' '.join(calls)} return found;}})()")


# The cache holds texts that begin as the next one or not, and are longer than the context
@pytest.mark.parametrize("name", ["fast_cpu", "an odd number of learned positions"])
def test_a_request_after_others_gives_what_it_gives_alone(
    name: str, open_page: Any, tmp_path: Path
) -> None:
    model = random_model(**MODELS[name])
    run = open_page(export(model, CHARACTERS, tmp_path))
    a = random_ids(45)
    b = random_ids(45, seed=2)
    texts = [a[:30], a[:30], a[:35], a[:20] + b[:5], a[:1], a, a[:42], b[:39] + a]
    requests: list[tuple[str, Any]] = []
    for i, text in enumerate(texts):
        sampled = (SAMPLE, [text, {**DEFAULTS, "max_tokens": 3 + i % 3}])
        requests += [(SCORE, [text]), (ATTENTION, [text, 1, None]), sampled]
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
    assert [token["text"] for token in run(SCORE, "aé😀")] == ["a", "", "é", "", "", "", "😀"]
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
    tokenizer = BPETokenizer("bpe", BYTES, {SEPARATOR: 256}, separated=True)
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
