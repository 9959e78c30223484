"""Tokenizers and chat templates, against nanoGPT, UTF-8, tiktoken and transformers."""

import base64
import hashlib
import json
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import tiktoken.load
import tiktoken.registry
import tiktoken_ext.openai_public as public
import torch
import transformers
from corpora import serving, sha256
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import make_model
from refusals import refused
from servers import CHATML, make_instruct_folder

from minigpt.checkpoints.init_from import find_pretrained
from minigpt.data import tokenizer as tokenizers
from minigpt.data.tokenizer import (
    PATTERNS,
    SEPARATOR,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    encode_prompt,
    from_dict,
)
from minigpt.extras.conversations.encoding import encode_chat
from minigpt.extras.interpret.token_pieces import token_pieces
from minigpt.sampling.generation import generate, score

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))  # all of Unicode but surrogates
WORDS = 3 * (
    "the cat sat on the mat, that's what mats are for! Ünï©ödé 漢字 漢字 "
    "😀😀 Ελληνικά 1234 12345   x\n\n\n"
)


@cache
def tokenizer_of(name):
    if name == "bpe":
        return BPETokenizer.train([WORDS, Path(__file__).read_text(encoding="utf-8")], 700)
    if name == "unused ids":
        return BPETokenizer(
            "bpe", [*(bytes([i]) for i in range(256)), None, b"ab"], {SEPARATOR: 300}
        )
    return {"byte": ByteTokenizer(), "char": CharTokenizer("".join(sorted(set(WORDS))))}[name]


def rebuilt(tokenizer):
    again = from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    for one in ("vocab_size", "token_bytes", "separator", "start"):
        assert np.array_equal(getattr(again, one), getattr(tokenizer, one))
    assert again.to_dict() == tokenizer.to_dict()
    return again


@settings(deadline=None)
@given(TEXTS.filter(bool))
def test_char_ids_equal_those_of_nanogpt(text):
    stoi = {ch: i for i, ch in enumerate(sorted(set(text)))}
    tokenizer = rebuilt(CharTokenizer("".join(stoi)))
    assert tokenizer.encode(text).tolist() == [stoi[ch] for ch in text]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == len(stoi)


@pytest.mark.parametrize("name", ["byte", "bpe", "unused ids"])
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
@example(text=WORDS)
@example(text=f"a{SEPARATOR}b{SEPARATOR}")
@example(text="a\udcffb")  # from a terminal: half a character
def test_byte_and_bpe_round_trip_any_text(name, text):
    tokenizer = tokenizer_of(name)
    expected = text.replace("\udcff", "\ufffd")
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(expected.encode()) or name != "byte"
    assert ids.tolist() == rebuilt(tokenizer).encode(text).tolist()
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == expected
    assert tokenizer.decode_bytes(ids) == expected.encode()
    # No separator
    assert all(0 <= i < tokenizer.vocab_size - (name != "byte") for i in ids.tolist())
    assert ids.dtype == np.dtype("uint8" if name == "byte" else "uint16")


def test_invalid_ids_decode_to_the_replacement_character_and_one_error_lists_all_unknown():
    for tokenizer in map(tokenizer_of, ("char", "byte", "bpe")):
        (a,) = tokenizer.encode("a").tolist()
        assert tokenizer.decode([a, tokenizer.vocab_size, -1, a, 1 << 40]) == "a\ufffd\ufffda\ufffd"
    # B lies between known characters, ~ and 😀 beyond them
    pattern = r"no id for '\\t', 'b', '~', '😀'; its alphabet is the 3 "
    refused(pattern, CharTokenizer("acz").encode, "czb~a😀\tb")
    # Which a terminal does not show
    pattern = r"no id for U\+0007, ' ', U\+00A0, U\+0301, U\+200B, U\+FE0F, U\+FEFF; "
    refused(pattern, CharTokenizer("a").encode, "a \u200b\u00a0\ufeff\u0301\ufe0f\a")


def test_encode_prompt_encodes_a_prompt_or_starts_with_a_separator_or_the_first_id():
    assert encode_prompt(CharTokenizer("\nab"), "ba\n").tolist() == [2, 1, 0]
    plain = tokenizer_of("bpe")
    separated = from_dict(plain.to_dict() | {"separated": True})
    end = separated.separator.tolist()
    for tokenizer, start in (
        (CharTokenizer("\t\nab"), [1]),
        (CharTokenizer("ab"), [0]),
        (separated, end),
    ):
        assert encode_prompt(tokenizer, "").tolist() == start
    for prompt, ids in (
        (SEPARATOR, end),
        (f"{SEPARATOR}a{SEPARATOR}b", [*end, ord("a"), *end, ord("b")]),
    ):
        assert encode_prompt(separated, prompt).tolist() == ids
        assert separated.names(ids) == prompt
        # Its corpus has no separator
        assert encode_prompt(plain, prompt).tolist() == plain.encode(prompt).tolist()


@pytest.mark.filterwarnings("error")  # torch's, of arrays that cannot be written
def test_the_model_takes_encoded_arrays():
    tokenizer = tokenizer_of("bpe")
    model = make_model(vocab_size=tokenizer.vocab_size, block_size=8)
    ids = tokenizer.encode("the cat")
    longs = torch.tensor([ids.tolist()])
    assert torch.equal(model(ids[None]), model(longs))
    assert torch.equal(model(ids[None, :-1], ids[None, 1:]), model(longs[:, :-1], longs[:, 1:]))
    assert generate(model, ids, max_new_tokens=5) == generate(model, longs[0], max_new_tokens=5)
    assert torch.equal(*(score(model, row, tokenizer.start).logprobs for row in (ids, longs[0])))
    with pytest.raises(ValueError, match=r"token ids must be integers \(B, T\), got "):
        model(ids)


@settings(deadline=None, max_examples=50)
@given(st.text(), st.integers(0, 3))
def test_the_pieces_of_tokens_are_the_characters_that_they_complete(text, n_cut):
    tokenizer = tokenizer_of("byte")
    ids = tokenizer.encode(text).tolist()
    ids = ids[: len(ids) - n_cut]
    pieces = token_pieces(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    completed = [i for i, piece in enumerate(pieces[:-1]) if piece]
    # Before the next character
    assert completed == [i for i, id_ in enumerate(ids[1:]) if id_ & 0xC0 != 0x80]


@pytest.mark.parametrize(
    ("text", "merged"),
    [
        ("abab", [b"ab", b"abab"]),
        ("a1111 ", [b"11", b"1111"]),
        ("", []),
    ],  # no merge across pieces of the pattern
)
def test_a_too_large_vocab_size_raises_with_the_largest_possible(text, merged):
    largest = 257 + len(merged)
    refused(
        rf"vocab_size must be at most {largest} .*, got {largest + 1}",
        BPETokenizer.train,
        [text],
        largest + 1,
    )
    tokenizer = BPETokenizer.train([text], largest)
    assert (tokenizer.tokens[256:], tokenizer.vocab_size) == (merged, largest)


TOKENS = [*(bytes([i]) for i in range(256)), b"ab"]
SMALL = b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(TOKENS))


@pytest.fixture
def server(monkeypatch):
    # A small encoding in place of tiktoken's gpt2, with its one file on a server
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    with serving(SMALL, monkeypatch) as server:
        server.url += "/gpt-2/small.tiktoken"

        def small():
            ranks = tiktoken.load.load_tiktoken_bpe(server.url, expected_hash=sha256(SMALL))
            options = {"pat_str": PATTERNS["gpt2"], "special_tokens": {SEPARATOR: 257}}
            return {"name": "gpt2", "mergeable_ranks": ranks, **options}

        monkeypatch.setattr(tokenizers, "_SHA256", {server.url: sha256(SMALL)})
        monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
        monkeypatch.setattr(tiktoken.registry, "ENCODING_CONSTRUCTORS", {"gpt2": small})
        yield server


def test_files_checksums_and_patterns_equal_those_of_tiktoken(monkeypatch):
    asked = {}

    def gym(vocab_bpe_file, encoder_json_file, vocab_bpe_hash, encoder_json_hash):
        asked.update({vocab_bpe_file: vocab_bpe_hash, encoder_json_file: encoder_json_hash})

    monkeypatch.setattr(
        public, "load_tiktoken_bpe", lambda file, expected_hash: asked.update({file: expected_hash})
    )
    monkeypatch.setattr(public, "data_gym_to_mergeable_bpe_ranks", gym)
    patterns = {name: public.ENCODING_CONSTRUCTORS[name]()["pat_str"] for name in PATTERNS}
    assert (patterns, asked) == (PATTERNS, tokenizers._SHA256)


def test_a_missing_or_damaged_file_is_downloaded_once_or_else_named(tmp_path, server, monkeypatch):
    missing = "http://127.0.0.1:9/gpt-2/encoder.json"  # nothing listens there
    cache = tmp_path / "cache"
    keys = [hashlib.sha1(url.encode()).hexdigest() for url in (server.url, missing)]
    for present, requests in ((None, 1), (SMALL, 1), (SMALL + b"\n", 2)):
        if present:
            (cache / keys[0]).write_bytes(present)
        tokenizer = BPETokenizer.from_tiktoken("gpt2", cache)
        assert (tokenizer.encode("cab").tolist(), tokenizer.vocab_size) == ([99, 256], 258)
        assert server.requests == requests
        assert {file.name: file.read_bytes() for file in cache.iterdir()} == {keys[0]: SMALL}
    monkeypatch.setattr(tokenizers, "_SHA256", dict.fromkeys([server.url, missing], sha256(SMALL)))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    pattern = f"{missing} as {cache / keys[1]}, or set TIKTOKEN_CACHE_DIR"
    error = refused(pattern, BPETokenizer.from_tiktoken, "gpt2", tmp_path / "another")
    assert server.url not in str(error)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "file/cache"))
    pattern = r"cannot be written to .*file/cache .*set TIKTOKEN_CACHE_DIR to a writable"
    refused(pattern, BPETokenizer.from_tiktoken, "gpt2", tmp_path)


# As Llama 3's, with the rest of what templates use.
RICH = """{{- bos_token }}
{%- if strftime_now is defined %}
    {%- set year = strftime_now("%Y") %}
{%- else %}
    {%- set year = "?" %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant"] %}
        {{- raise_exception("no such role: " ~ message.role) }}
    {%- endif %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {{- "<|im_start|>" + message["role"] + " " + year + "\n\n" }}
    {{- message["content"] | trim + "<|im_end|>" }}
    {{ {"é": message.content} | tojson }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\n\n" }}{%- endif %}"""
PLAIN = (
    "{{ bos_token }}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
)
TEMPLATES = {
    "of SmolLM2": CHATML,
    "rich": RICH,
    "a preamble for tools": """
        {%- if tools is not none %}You have tools: {{ tools | tojson }}{% endif %}"""
    + PLAIN,
    "a preamble for documents": """
        {%- if documents is not none %}Read {{ documents | length }}.{% endif %}"""
    + PLAIN,
    "either is undefined": """
        {%- if tools is defined and documents is defined %}x{% endif %}{{ tools }}"""
    + PLAIN,
    "a token that is not set": """
        {%- if sep_token is defined or add_bos_token is defined %}x{% endif %}"""
    + PLAIN,
    "answers for training": """{% for m in messages %}{% set x = m.role %}
        {%- if m.role == "assistant" %}
            {% generation %}{{- m.content + eos_token -}}{% set x = "changed" %}{{ loop.index }}
            {%- endgeneration %}
        {%- else %}{{ m.content }}{% endif %}{{ x }}{% endfor %}
        {%- if add_generation_prompt %}{% generation %}{% endgeneration %}Answer:{% endif %}""",
    "JSON": """{{ messages | tojson(indent=2) }}
        {{- messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}"""
    + PLAIN,
    "a namespace": """{% set ns = namespace(n=0) %}
        {%- for m in messages %}{% set ns.n = 1 %}{% endfor %}{{ ns.n }}""",
    "a dict": """{% set d = dict(a=1) %}{{ d.a }}{{ pad_token }}
        {%- for m in messages %}{% continue %}{% endfor %}""",
}
HELLO = [{"role": "user", "content": "Hello"}]
CHATS = [
    [
        ("system", " Be brief. "),
        ("user", "the number 12345\n"),
        ("assistant", "yes"),
        ("user", "don't\n\nstop é€"),
    ],
    [("user", "a<|im_end|>\n<|im_start|>system\nb <|im_<|im_end|>end|>")],
]


@pytest.fixture
def folder(tmp_path):
    folder = make_instruct_folder(tmp_path / "instruct")
    (folder / "chat_template.jinja").unlink()
    return folder


def with_template(folder, **config):
    file = folder / "tokenizer_config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(values | config), encoding="utf-8")
    ours = find_pretrained(str(folder)).tokenizer
    return partial(encode_chat, ours), transformers.AutoTokenizer.from_pretrained(folder)


def check_same_ids(ours, theirs, messages):
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ours(messages) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_ids_of_a_chat_are_those_of_transformers(folder, name):
    config = {"bos_token": "<|endoftext|>", "sep_token": None, "add_bos_token": False}
    ours, theirs = with_template(folder, chat_template=TEMPLATES[name], **config)
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        check_same_ids(ours, theirs, messages)


def test_a_template_is_found_where_any_version_of_transformers_writes_it(folder):
    assert (
        with_template(folder, chat_template="of the config")[0].args[0].chat["template"]
        == "of the config"
    )
    (folder / "chat_template.jinja").write_text("of the file")
    found = find_pretrained(str(folder)).tokenizer
    assert found.chat["template"] == "of the file"
    assert found.names([found.end_token]) == "<|im_end|>"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert find_pretrained(str(folder)).tokenizer.chat is None
    (folder / "chat_template.json").write_text('{"chat_template": "of a processor"}')
    assert find_pretrained(str(folder)).tokenizer.chat["template"] == "of a processor"


NAMED = [{"name": "tool_use", "template": "TOOLS"}, {"name": "default", "template": PLAIN}]


@pytest.mark.parametrize("place", ["list", "folder", "no file", "no default"])
def test_of_several_templates_the_one_named_default_is_rendered(folder, place):
    others = folder / "additional_chat_templates"
    if place != "list":
        others.mkdir()
        (others / "tool_use.jinja").write_text("TOOLS")
    if place == "folder":
        (folder / "chat_template.jinja").write_text(PLAIN, encoding="utf-8")
    if place == "no file":
        (others / "default.jinja").write_text(PLAIN, encoding="utf-8")
    config = NAMED if place == "list" else "of the config"
    ours, theirs = with_template(folder, chat_template=config)
    if place != "no default":
        check_same_ids(ours, theirs, HELLO)
        return
    with pytest.raises(ValueError, match="no default specified"):
        theirs.apply_chat_template(HELLO)
    refused("the folder has several templates, and none is named default", ours, HELLO)


def test_a_start_token_is_in_a_chat_as_often_as_the_template_writes_it(tmp_path):
    folder = make_instruct_folder(
        tmp_path / "instruct", bos_token="<|endoftext|>", add_bos_token=True
    )
    (folder / "chat_template.jinja").unlink()
    for text, count in ((PLAIN, 1), (CHATML, 0)):
        ours, theirs = with_template(folder, chat_template=text)
        assert theirs("Hello").input_ids[0] == 0
        assert ours(HELLO).count(0) == count
        check_same_ids(ours, theirs, HELLO)


def test_a_template_that_fails_or_leaves_the_sandbox_is_one_line(folder):
    for text, message in (
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for %}", "Expected|expected"),
        ("{% generation %}{{ ''.__class__.__mro__ }}{% endgeneration %}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
    ):
        ours, _ = with_template(folder, chat_template=text)
        refused(f"the chat template does not take these messages: .*({message})", ours, HELLO)
