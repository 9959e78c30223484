"""Exported pages: logits, text and tokens in headless Chromium equal those of minigpt; a policy allows nothing else."""

import base64
import hashlib
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import random_texts
from exported import BASE, CHARACTERS, DEFAULTS, MODELS, SAMPLE, export, random_model
from models import make_model
from small_runs import one_line

from minigpt import GPTConfig, generate, save_checkpoint
from minigpt.checkpoints.find import BEST, find_snapshots
from minigpt.checkpoints.init_from import Pretrained, find_pretrained
from minigpt.data.tokenizer import SEPARATOR, BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer
from minigpt.extras.huggingface.export_huggingface import export_model
from minigpt.extras.playground.export_html import PAGE, export_html, render
from minigpt.model.config import UP_PROJECTIONS
from minigpt.model.ops import ACTIVATIONS
from minigpt.utils.errors import UserError

LOGITS = (
    "const model = backend.newModel(); return arguments[0].map(token => [...model.step(token)])"
)


def sample_ids(run: Any, prompt: list[int], **settings: Any) -> list[int]:
    return [token["id"] for token in run(SAMPLE, prompt, {**DEFAULTS, **settings})]


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_text_equal_those_of_the_model(name, open_page, tmp_path):
    model = random_model(**MODELS[name])
    run = open_page(export(model, CHARACTERS, tmp_path))
    tokens = torch.randint(
        0, 101, (1, model.config.block_size), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        expected = model(tokens)[0]
    torch.testing.assert_close(
        torch.tensor(run(LOGITS, tokens[0].tolist())), expected, rtol=0, atol=1e-3
    )
    for prompt in (
        tokens[0, :8].tolist(),
        tokens[0].tolist() * 2,
    ):  # also a prompt that is longer than the context
        (sample,) = generate(model, prompt, max_new_tokens=100, temperature=0, tokenizer=CHARACTERS)
        assert sample_ids(run, prompt, max_tokens=100, temperature=0) == sample.tokens


@pytest.mark.parametrize("name", ["shared layers", "GPT-2, untied"])
def test_a_page_holds_each_tensor_once_also_of_snapshots(name, open_page, tmp_path):
    model, snapshot = random_model(**MODELS[name]), make_model(**BASE | MODELS[name], seed=1)
    save_checkpoint(snapshot, CHARACTERS, tmp_path / "first")
    snapshots = {0: tmp_path / "first", 1: tmp_path / "first"}
    page = export(model, CHARACTERS, tmp_path, snapshots=snapshots)
    (weights,) = re.findall(
        'id="weights">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL
    )
    assert [len(base64.b64decode(line)) for line in weights.split("\n")] == [
        4 * model.num_params()
    ] * 3
    run, tokens = open_page(page), torch.arange(40)[None]
    with torch.no_grad():
        expected = torch.cat([snapshot(tokens), model(tokens)])
    found = [
        run(LOGITS.replace("newModel()", f"newModel('model{at}')"), tokens[0].tolist())
        for at in ("@1", "")
    ]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=1e-3)


def test_an_activation_that_the_page_lacks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(UP_PROJECTIONS, "silu", 1)
    monkeypatch.setitem(ACTIVATIONS, "silu", torch.nn.functional.silu)
    silu = random_model(activation="silu")
    with pytest.raises(UserError, match=r"model\.activation must be gelu or .*, got silu"):
        export_html(
            Pretrained(tmp_path, "", None, silu.config, CHARACTERS, silu), tmp_path / "page.html"
        )
    # No class of transformers computes it, but the code of the model does.
    assert export_model(silu)[0]["architectures"] == ["MiniGPTForCausalLM"]


def test_float16_changes_the_logits_little(open_page, tmp_path):
    model = random_model(**MODELS["fast_cpu"])
    run = open_page(export(model, CHARACTERS, tmp_path, "float16"))
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        expected = model(tokens)[0]
    difference = (torch.tensor(run(LOGITS, tokens[0].tolist())) - expected).pow(2).mean().sqrt()
    assert difference < 2e-3 * expected.std()


def test_a_seed_gives_the_samples_of_generate(open_page, tmp_path):
    model = random_model()
    run = open_page(export(model, CHARACTERS, tmp_path))
    for each in (
        {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "temperature": 1.3},
        {"temperature": 1e-6},
    ):
        for seed in (0, 2**32 + 5):
            options = {"seed": seed, "tokenizer": CHARACTERS, **each}
            (sample,) = generate(model, [1, 2, 3], max_new_tokens=100, **options)
            assert sample_ids(run, [1, 2, 3], max_tokens=100, seed=seed, **each) == sample.tokens


def test_ids_without_a_token_are_never_drawn(open_page, tmp_path):
    tokens = [bytes([byte]) for byte in range(256)]
    tokenizer = BPETokenizer("bpe", [*tokens, None, b"ab", None], {SEPARATOR: 300})
    model = random_model(vocab_size=320)
    model.lm_head.weight.data[256:] *= 3  # they would be most of a text
    run = open_page(export(model, tokenizer, tmp_path))
    for settings in ({}, {"temperature": 0}, {"top_k": 20, "temperature": 3}):
        (sample,) = generate(model, [1, 2], max_new_tokens=60, tokenizer=tokenizer, **settings)
        assert sample_ids(run, [1, 2], max_tokens=60, **settings) == sample.tokens
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
    texts = random_texts(300)
    known = [text.replace("\ud800", "") for text in texts]
    tokenizer, texts = make_tokenizer(name, known), known if name == "char" else texts
    run = open_page(
        export(random_model(vocab_size=tokenizer.vocab_size + 1, n_layer=1), tokenizer, tmp_path)
    )
    assert not run("return 'toWellFormed' in String.prototype")  # which older browsers lack
    assert name == "char" or any("\ud800" in text for text in texts)
    encode = "return JSON.parse(arguments[0]).map(text => backend.tokenizer.encode(text))"
    encoded = run(encode, json.dumps(texts))  # JSON in ASCII can contain lone surrogates
    assert encoded == [tokenizer.encode(text).tolist() for text in texts]
    rng = random.Random(1)
    # With invalid UTF-8
    ids = encoded + [rng.choices(range(tokenizer.vocab_size + 1), k=20) for _ in range(300)]
    assert run("return arguments[0].map(ids => backend.tokenizer.decode(ids))", ids) == [
        tokenizer.decode(tokens) for tokens in ids
    ]
    assert run("return backend.data.tokenizer.start") == tokenizer.start.tolist()


def test_the_script_writes_the_page_and_snapshots(call, trained, tmp_path):
    flags = ("--to", "html", "--out", "pages/model.html", "--weights", "float32", "--snapshots")
    exported = call("export.py", str(trained()), *flags)
    steps = [*find_snapshots(trained())]
    assert (
        f" and {len(steps)} of its {len(steps)} snapshots; open it in a browser" in exported.stdout
    )
    alone = shutil.copy(trained() / BEST, tmp_path)
    refused = one_line(call("export.py", alone, "--to", "html", "--out", "new.html", "--snapshots"))
    assert refused == f"error: --snapshots: {tmp_path} has no snapshots; leave it out"
    assert not Path("new.html").exists()
    page = (tmp_path / "pages/model.html").read_text(encoding="utf-8")
    assert " in float32: " in page
    assert f'"steps":{steps}'.replace(" ", "") in page


def test_snapshots_are_exported_when_the_token_files_of_the_run_are_gone(call, train, tmp_path):
    run = train("callbacks.snapshots.count=3", "max_steps=2").folder
    (tmp_path / "data").rename(tmp_path / "moved")
    exported = call("export.py", str(run), "--to", "html", "--out", "page.html", "--snapshots")
    assert (exported.returncode, "and 3 of its 3 snapshots" in exported.stdout) == (0, True)
    warning = exported.stderr.splitlines()[-1]
    assert warning.startswith("warning: the page has no curves of what was learned when: ")
    assert "the token files of the run are not in" in warning
    (data,) = re.findall(
        r'<script type="application/json" id="data">(.*)</script>',
        Path("page.html").read_text(encoding="utf-8"),
    )
    assert (json.loads(data)["history"]["steps"], json.loads(data)["learned"]) == ([0, 1, 2], [])


def test_what_the_page_cannot_hold_is_refused(tmp_path, gpt2_folder):
    config = GPTConfig(vocab_size=95, bias=False, position="rope")  # 85 million parameters
    wide = random_model()
    wide.wte.weight.data[3, 4] = 1e5
    for refused, message in (
        (
            Pretrained(tmp_path, "", None, config, CHARACTERS),
            "at most 64 MB, got 170 MB of float16; use a smaller mod",
        ),
        (find_pretrained(str(gpt2_folder)), "must be char, byte or bpe, got huggingface"),
        (
            Pretrained(tmp_path, "", None, wide.config, CHARACTERS, wide),
            "float32 for wte.weight, which holds 1e+05,",
        ),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            export_html(refused, tmp_path / "page.html")
    assert not any(tmp_path.iterdir())


def test_the_policy_allows_the_script_and_the_style_of_the_page_and_nothing_else() -> None:
    page = render({})
    (policy,) = re.findall('<meta http-equiv="Content-Security-Policy" content="(.*?)">', page)
    (style,) = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    (script,) = re.findall('<script type="module">(.*?)</script>', page, re.DOTALL)
    digests = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (style, script)
    ]
    assert policy.split("; ") == [
        "default-src 'none'",
        f"style-src 'sha256-{digests[0]}'",
        f"script-src 'sha256-{digests[1]}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    assert page.index("Content-Security-Policy") < page.index("<style>") < page.index("<script")
    assert "src=" not in page
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)


def test_the_style_has_no_feature_that_browsers_of_2022_lack() -> None:
    newer = r"color-mix|:has\(|@container|@layer|@scope|light-dark|oklch|field-sizing|text-wrap|\d[dls]v[hw]|@property"
    assert re.findall(newer, (PAGE / "style.css").read_text(encoding="utf-8")) == []


def test_numbers_that_json_lacks_are_an_error_before_the_page_is_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        render({"loss": float("nan")})
