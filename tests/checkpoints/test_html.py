"""Exported pages in headless Chromium: logits, text and tokens equal those of minigpt, and a reader can use them."""

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contrast import text_contrasts

from minigpt import GPT, GPTConfig, generate
from minigpt.checkpoints.export_html import export_html
from minigpt.checkpoints.models import save_checkpoint
from minigpt.checkpoints.pretrained import find_pretrained
from minigpt.data.tokenizer import (
    SEPARATOR,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
)
from minigpt.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
CHARACTERS = CharTokenizer.of(map(chr, range(32, 127)))  # 95 ids
BASE = {"block_size": 40, "vocab_size": 101, "n_layer": 2, "n_head": 4, "n_embd": 32}
LLAMA = {"norm": "rmsnorm", "position": "rope", "bias": False, "activation": "swiglu"}
SCALED = {"rope_base": 300.0, "rope_factor": 4.0, "rope_original_block_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "GPT-2": {"activation": "gelu_tanh"},
    "GPT-2, untied": {"tie_embeddings": False, "n_inner": 42},
    "nanoGPT, without biases": {"bias": False},
    "one position": {"block_size": 1},
    "an odd number of learned positions": {"block_size": 7, "smear": 1, "ngram": 3, "ngram_buckets": 50},
    "one rotary position": {"block_size": 1, "position": "rope"},
    "no positions": {"position": "none", "activation": "relu"},
    "rope, and biases of queries, keys and values": {"position": "rope", "bias": False, "qkv_bias": True},
    "Llama": {**LLAMA, "tie_embeddings": False},
    "Llama, one key-value head": {**LLAMA, "n_kv_head": 1, "norm_eps": 1e-2},
    "Llama, a wider head": {**LLAMA, "n_kv_head": 2, "head_dim": 10, "n_inner": 40},
    "Llama 3, scaled rope": {**LLAMA, **SCALED},
    "Llama 3, scaled rope of other factors": {
        **{**LLAMA, **SCALED},
        **{"rope_low_freq_factor": 0.5, "rope_high_freq_factor": 2.0},
    },
    "Qwen3": {**LLAMA, "qk_norm": True, "qk_norm_weights": True, "n_kv_head": 2},
    "NanoChat": {
        **{**LLAMA, "norm": "rmsnorm_noscale", "activation": "relu2", "qk_norm": True, "embed_norm": True},
        "logit_softcap": 2.0,
    },
    "post-norm": {"norm_position": "post"},
    "post-norm with rope": {"norm_position": "post", **LLAMA},
    "mup": {"parametrization": "mup", "base_n_embd": 24, "base_head_dim": 4},
    "n-grams": {"position": "none", "ngram": 5, "ngram_buckets": 1009, "ngram_dim": 6},
    "smear": {"position": "rope", "smear": 3},
    "fast_cpu": {
        **{"position": "rope", "norm": "rmsnorm_noscale", "bias": False, "activation": "relu2", "qk_norm": True},
        **{"tie_embeddings": False, "ngram": 5, "ngram_buckets": 512, "smear": 2, "embed_norm": True},
    },
}
CHOICES: dict[str, list[Any]] = {
    "position": ["learned", "rope", "none"],
    "norm": ["layernorm", "rmsnorm", "rmsnorm_noscale"],
    "norm_position": ["pre", "post"],
    "activation": ["gelu", "gelu_tanh", "relu", "relu2", "swiglu"],
    "n_kv_head": [None, 1, 2],
    "head_dim": [None, 6],
    "logit_softcap": [None, 3.0],
    "parametrization": ["standard", "mup"],
    "qkv_bias": [None, True, False],
    "ngram": [0, 2, 4],
    "smear": [0, 1, 2],
    **{name: [True, False] for name in ("bias", "qk_norm", "tie_embeddings", "embed_norm")},
}
MODELS |= {
    f"random {i}": {name: rng.choice(values) for name, values in CHOICES.items()}
    for i in range(12)
    for rng in [random.Random(i)]
}


def random_model(**values: Any) -> GPT:
    """Return a model with random weights, all nonzero."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**BASE, **values}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
    return model.eval()


def export(model: GPT, tokenizer: Tokenizer, folder: Path, weights: str = "float32") -> Path:
    save_checkpoint(model, tokenizer, folder / "model.safetensors")
    export_html(find_pretrained(folder / "model.safetensors"), folder / f"{weights}.html", weights)
    return folder / f"{weights}.html"


@pytest.fixture
def open_page(browser: Any) -> Any:
    """Return a function that opens a page and returns one that runs a script in it."""

    def open_(file: Path) -> Callable[..., Any]:
        browser.get(file.as_uri())
        return browser.execute_script

    browser.get_log("browser")
    yield open_
    assert browser.get_log("browser") == []  # no error, nothing blocked


LOGITS = "model.reset(); return arguments[0].map(token => [...model.step(token)])"
# The tokens that follow a prompt, with the given settings.
SAMPLE = "return [...generate(...arguments)].filter(token => token !== null)"
DEFAULTS = {"seed": 0, "temperature": 1, "topK": None, "topP": 1, "minP": 0}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_text_equal_those_of_the_model(name: str, open_page: Any, tmp_path: Path) -> None:
    model = random_model(**MODELS[name])
    run = open_page(export(model, CHARACTERS, tmp_path))
    tokens = torch.randint(0, 101, (1, model.config.block_size), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens)[0]
    torch.testing.assert_close(torch.tensor(run(LOGITS, tokens[0].tolist())), expected, rtol=0, atol=1e-3)
    prompt = tokens[0, :8].tolist()
    (sample,) = generate(model, prompt, max_new_tokens=200, temperature=0)
    assert run(SAMPLE, prompt, {**DEFAULTS, "count": 200, "temperature": 0}) == sample.tokens


def test_the_page_uses_every_value_of_the_configuration() -> None:
    source = (ROOT / "minigpt/checkpoints/page/model.js").read_text(encoding="utf-8")
    known_from_the_weights = {"bias", "qkv_bias", "qk_norm_weights", "n_inner"}
    used = {name for name in GPTConfig.__dataclass_fields__ if re.search(rf"\b{name}\b", source)}
    assert GPTConfig.__dataclass_fields__.keys() - used <= {"dropout"} | known_from_the_weights


def test_a_prompt_longer_than_the_context_is_read_from_its_last_tokens(open_page: Any, tmp_path: Path) -> None:
    for position in ("learned", "rope"):
        model = random_model(position=position, smear=2)
        run = open_page(export(model, CHARACTERS, (tmp_path / position)))
        prompt = torch.randint(0, 101, (100,), generator=torch.Generator().manual_seed(1)).tolist()
        (sample,) = generate(model, prompt, max_new_tokens=50, temperature=0)
        assert run(SAMPLE, prompt, {**DEFAULTS, "count": 50, "temperature": 0}) == sample.tokens


@pytest.mark.parametrize(("weights", "error"), [("float16", 2e-3), ("int8", 0.05)])
def test_smaller_formats_change_the_logits_little(weights: str, error: float, open_page: Any, tmp_path: Path) -> None:
    model = random_model(**MODELS["fast_cpu"])
    run = open_page(export(model, CHARACTERS, tmp_path, weights))
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        expected = model(tokens)[0]
    difference = (torch.tensor(run(LOGITS, tokens[0].tolist())) - expected).pow(2).mean().sqrt()
    assert difference < error * expected.std()
    assert f"in {weights}" in run("return document.body.innerText")


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.7, "temperature": 1.5},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "temperature": 1.3},
        {"temperature": 1e-6},
    ],
)
def test_a_seed_gives_the_samples_of_generate(settings: dict[str, Any], open_page: Any, tmp_path: Path) -> None:
    model = random_model()
    run = open_page(export(model, CHARACTERS, tmp_path))
    names = {"top_k": "topK", "top_p": "topP", "min_p": "minP"}
    values = {names.get(name, name): value for name, value in settings.items()}
    for seed in (0, 1337, 2**32 + 5):
        (sample,) = generate(model, [1, 2, 3], max_new_tokens=100, seed=seed, **settings)
        assert run(SAMPLE, [1, 2, 3], {**DEFAULTS, "count": 100, "seed": seed, **values}) == sample.tokens


def random_texts(count: int) -> list[str]:
    """Strings of words, spaces, digits, contractions, emojis, scripts and lone surrogates."""
    rng = random.Random(0)
    parts = [*" \n\t\r'aZ09é中ſK!/\u00a0\u0085\ufeff\u2028\u3000", "  ", "'s", "'LL", "'ſ", "don't", "WE'RE", "ǅ"]
    parts += [
        "123456",
        "\r\n",
        "\n\n ",
        "hello",
        " world",
        "👩‍👩‍👧",
        "e\u0301",
        "हिन्दी",
        "\ud800",
        "…",
        SEPARATOR,
        "//",
        "٣",
    ]
    return ["".join(rng.choices(parts, k=rng.randint(1, 30))) for _ in range(count)]


def byte_pairs(name: str) -> BPETokenizer:
    """A byte-pair encoding trained on the random texts, with the pattern of an encoding of tiktoken."""
    texts = [text.encode("utf-8", errors="ignore").decode() for text in random_texts(2000)]
    tokens = BPETokenizer.train(texts, 700).tokens
    return BPETokenizer(name, tokens, {SEPARATOR: len(tokens)})


@pytest.mark.parametrize("name", ["byte", "char", "bpe", "r50k_base", "cl100k_base", "o200k_base"])
def test_texts_are_encoded_and_decoded_as_by_minigpt(name: str, open_page: Any, tmp_path: Path) -> None:
    texts = random_texts(300)
    tokenizer: Tokenizer
    if name == "char":
        tokenizer, texts = CharTokenizer.of("".join(texts)), [text.replace("\ud800", "") for text in texts]
    else:
        tokenizer = ByteTokenizer() if name == "byte" else byte_pairs(name)
    model = random_model(vocab_size=tokenizer.vocab_size + 1, n_layer=1)
    run = open_page(export(model, tokenizer, tmp_path))
    encode = "return JSON.parse(arguments[0]).map(text => tokenizer.encode(text))"
    encoded = run(encode, json.dumps(texts))  # JSON in ASCII can contain lone surrogates
    assert encoded == [(tokenizer.encode(text) if text else tokenizer.start).tolist() for text in texts]
    rng = random.Random(1)
    ids = encoded + [rng.choices(range(tokenizer.vocab_size + 1), k=20) for _ in range(300)]  # with invalid UTF-8
    decode = (
        "return arguments[0].map(ids => {const d = tokenizer.decoder(); return ids.map(id => d(id)).join('') + d()})"
    )
    assert run(decode, ids) == [tokenizer.decode(tokens) for tokens in ids]
    assert run("return tokenizer.encode('')") == tokenizer.start.tolist()


class Reader:
    """A page in the browser, and the events of a person who uses it."""

    def __init__(self, browser: Any, file: Path) -> None:
        self.browser = browser
        self.resize(1280, 900)
        browser.get(file.as_uri())

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: str) -> None:
        features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", features)

    def find(self, id_: str) -> Any:
        return self.browser.find_element("id", id_)

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.browser).send_keys(*keys).perform()

    def write(self, id_: str, text: str) -> None:
        self.find(id_).clear()
        self.find(id_).send_keys(text)

    @property
    def text(self) -> str:
        return self.find("text").get_property("value")

    def wait_for(self, status: str) -> None:
        end = time.monotonic() + 60
        while self.find("status").text != status:
            assert time.monotonic() < end, self.find("status").text
            time.sleep(0.02)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[GPT, Path]:
    """A model of characters, and its page."""
    model = random_model(vocab_size=95)
    return model, export(model, CHARACTERS, tmp_path_factory.mktemp("page"))


@pytest.fixture
def reader(browser: Any, page: tuple[GPT, Path]) -> Any:
    browser.get_log("browser")
    yield Reader(browser, page[1])
    assert browser.get_log("browser") == []


def expected_text(model: GPT, prompt: str, **settings: Any) -> str:
    (sample,) = generate(model, CHARACTERS.encode(prompt), **settings)
    return prompt + CHARACTERS.decode(sample.tokens)


def test_the_button_continues_the_text_and_undo_takes_the_continuation_away(reader: Reader, page: Any) -> None:
    reader.find("text").send_keys("To be")
    reader.find("generate").click()
    reader.wait_for("Done.")
    first = expected_text(page[0], "To be", max_new_tokens=400, temperature=0.8, seed=1337)
    assert reader.text == first  # the defaults of scripts/sample.py
    assert re.fullmatch(r"400 tokens, \d+ tokens/s", reader.find("speed").text)
    reader.find("generate").click()
    reader.wait_for("Done.")
    assert reader.text.startswith(first)
    assert len(reader.text) == len(first) + 400
    reader.find("undo").click()
    assert reader.text == first
    assert not reader.find("undo").is_enabled()


def test_the_settings_are_those_of_the_samples(reader: Reader, page: Any) -> None:
    from selenium.webdriver import Keys

    reader.find("text").send_keys("Now")
    reader.find("temperature").send_keys(Keys.ARROW_RIGHT * 4)
    reader.find("top-p").send_keys(Keys.ARROW_LEFT * 2)
    reader.find("min-p").send_keys(Keys.ARROW_RIGHT * 3)
    for id_, value in (("top-k", "12"), ("tokens", "60"), ("seed", "7")):
        reader.write(id_, value)
    reader.find("generate").click()
    reader.wait_for("Done.")
    settings = {"temperature": 1.0, "top_p": 0.9, "min_p": 0.03, "top_k": 12, "max_new_tokens": 60, "seed": 7}
    assert reader.text == expected_text(page[0], "Now", **settings)


def test_the_page_works_by_keyboard(reader: Reader) -> None:
    from selenium.webdriver import Keys

    reader.press(Keys.TAB, "Hello")
    reader.write("tokens", "1000000")
    reader.press(Keys.CONTROL, Keys.ENTER)
    while len(reader.text) < 50:  # is written while it is generated
        time.sleep(0.02)
    assert reader.find("generate").text == "Stop"
    reader.press(Keys.NULL, Keys.ESCAPE)
    reader.wait_for("Stopped.")
    stopped = reader.text
    assert stopped.startswith("Hello")
    time.sleep(0.1)
    assert reader.text == stopped
    assert reader.find("generate").text == "Generate"


def test_the_stop_button_stops(reader: Reader) -> None:
    reader.write("tokens", "1000000")
    reader.find("generate").click()
    while not reader.text:
        time.sleep(0.02)
    reader.find("generate").click()
    reader.wait_for("Stopped.")


def test_an_unknown_character_is_an_error_that_names_it(reader: Reader) -> None:
    reader.find("text").send_keys("naïve")
    reader.find("generate").click()
    reader.wait_for('the model was trained without "ï"')
    assert reader.text == "naïve"
    assert not reader.find("undo").is_enabled()


def test_generation_ends_at_the_separator_of_documents(browser: Any, tmp_path: Path) -> None:
    tokenizer = byte_pairs("bpe")
    tokenizer.separated = True
    model = random_model(vocab_size=tokenizer.vocab_size, tie_embeddings=False, norm="layernorm")
    with torch.no_grad():  # the separator is the likeliest token
        model.final_norm.weight.zero_()
        model.final_norm.bias.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[tokenizer.end_token] = 1.0
    reader = Reader(browser, export(model, tokenizer, tmp_path))
    reader.find("text").send_keys("x")
    reader.find("generate").click()
    reader.wait_for("Done.")
    assert reader.text == "x"


def test_the_page_makes_no_request_and_its_policy_forbids_them(reader: Reader, page: Any) -> None:
    run = reader.browser.execute_script
    assert run("return performance.getEntriesByType('resource').length") == 0
    blocked = "const done = arguments[0]; fetch('https://example.com').then(() => done('sent'), () => done('blocked'))"
    assert reader.browser.execute_async_script(blocked) == "blocked"
    assert "Content Security Policy" in reader.browser.get_log("browser")[0]["message"]
    assert not re.findall(r"""(?:src|href|url)\s*[=(]""", page[1].read_text(encoding="utf-8"))


@pytest.mark.parametrize("width", [320, 390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_every_screen_and_has_contrast_in_both_schemes(reader: Reader, width: int, scheme: str) -> None:
    reader.resize(width, 740)
    reader.prefer(scheme)
    assert reader.browser.execute_script("return document.documentElement.scrollWidth") <= width
    background = reader.browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == (scheme == "dark")
    for prompt in ("é", "e"):  # an error, and the result
        reader.write("text", prompt)
        reader.find("generate").click()
        reader.wait_for('the model was trained without "é"' if prompt == "é" else "Done.")
        contrasts = text_contrasts(reader.browser)
        assert len(contrasts) > 12
        assert [(element, ratio) for element, ratio in contrasts if ratio < 4.5] == []


def test_hostile_tokens_do_not_run(browser: Any, tmp_path: Path) -> None:
    hostile = ["</script><script>document.title='broken'</script>", "<!--<script>", "{{script}}", "{{data}}"]
    base = [bytes([byte]) for byte in range(256)]
    tokenizer = BPETokenizer("bpe", [*base, *(text.encode() for text in hostile)], {SEPARATOR: 260})
    browser.get(export(random_model(vocab_size=261), tokenizer, tmp_path).as_uri())
    assert browser.title == "minigpt"
    decode = "const decode = tokenizer.decoder(); return arguments[0].map(id => decode(id))"
    assert browser.execute_script(decode, [256, 257, 258, 259]) == hostile
    assert browser.get_log("browser") == []


def test_the_script_writes_the_page_and_refuses_bad_input(tmp_path: Path) -> None:
    save_checkpoint(random_model(), CHARACTERS, tmp_path / "small.safetensors")

    def call(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, str(ROOT / "scripts/export.py"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    code, out, _ = call("small.safetensors", "--to", "html", "--out", "pages/model.html", "--weights", "int8")
    assert code == 0
    assert out.startswith("pages/model.html: 0.1 MB, the model of ")
    assert "float16" not in (tmp_path / "pages/model.html").read_text().partition("<script>")[0]
    code, _, error = call("small.safetensors", "--to", "safetensors", "--out", "x", "--weights", "int8")
    assert (code, error.count("\n")) == (2, 1)
    assert "--weights must be" in error


def test_a_large_model_and_a_tokenizer_of_hugging_face_are_refused(tmp_path: Path, gpt2_folder: Path) -> None:
    pytest.importorskip("tokenizers")
    config = GPTConfig(vocab_size=95, bias=False, position="rope")  # 85 million parameters
    path = tmp_path / "large.safetensors"
    save_checkpoint(GPT(config).half(), CHARACTERS, path)
    large = find_pretrained(path)
    with pytest.raises(UserError, match=r"at most 64 MB, got 170 MB of float16; use a smaller model or --weights int8"):
        export_html(large, tmp_path / "page.html")
    with pytest.raises(UserError, match=r"got 85 MB of int8; use a smaller model$"):
        export_html(large, tmp_path / "page.html", "int8")
    theirs = find_pretrained(str(gpt2_folder))
    assert isinstance(theirs.tokenizer, HuggingFaceTokenizer)
    with pytest.raises(UserError, match="must be char, byte or bpe, got huggingface"):
        export_html(theirs, tmp_path / "page.html")
    assert sorted(tmp_path.iterdir()) == [path]


def test_weights_beyond_float16_are_refused(tmp_path: Path) -> None:
    model = random_model()
    with torch.no_grad():
        model.wte.weight[3, 4] = 1e5
    with pytest.raises(UserError, match=r"--weights must be float32 for wte.weight, which holds 1e\+05, got float16"):
        export(model, CHARACTERS, tmp_path, "float16")
    assert not (tmp_path / "float16.html").exists()
