"""Tokenizers, against nanoGPT's ids, UTF-8, and a reference byte-pair encoding."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import make_model
from refusals import refused

from minigpt.data.tokenizer import (
    SEPARATOR,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    encode_prompt,
    from_dict,
)
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
