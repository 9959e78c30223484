"""Tokenizers, against nanoGPT's ids, UTF-8, and a reference byte-pair encoding."""

import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import regex
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minigpt.config import GPTConfig
from minigpt.data.pieces import token_pieces
from minigpt.data.tokenizer import (
    PATTERNS,
    SEPARATOR,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    encode_prompt,
    from_dict,
)
from minigpt.generation import generate, score
from minigpt.model import GPT
from minigpt.utils.errors import UserError

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)  # all of Unicode but surrogates
WORDS = (
    """the cat sat on the mat, the rat sat on the cat; that's what the cats' mat is for!
Ünï©ödé 漢字 漢字 😀 😀😀 Ελληνικά Ελληνικά 1234 12345   spaces\n\n\n
"""
    * 3
)


@cache
def tokenizer_of(name):
    """Build a tokenizer of each kind."""
    if name == "bpe":
        return BPETokenizer.train([WORDS, Path(__file__).read_text(encoding="utf-8")], 700)
    return {"byte": ByteTokenizer(), "char": CharTokenizer.of(WORDS)}[name]


def all_bytes(*more):
    """Return the tokens of `to_dict`: all bytes and some more."""
    import base64

    return " ".join(base64.b64encode(token).decode() for token in (*(bytes([i]) for i in range(256)), *more))


def bpe_dict(**changes):
    described = {"name": "bpe", "tokens": all_bytes(b"ab"), "special": {SEPARATOR: 257}, "separated": False}
    return {key: value for key, value in (described | changes).items() if value is not KeyError}


def nanogpt_stoi(text):
    chars = sorted(set(text))
    return {ch: i for i, ch in enumerate(chars)}


@given(st.data(), TEXTS)
def test_decode_inverts_encode(data, corpus):
    tokenizer = CharTokenizer.of(corpus)
    text = data.draw(st.text(st.sampled_from(sorted(set(corpus)))))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(TEXTS)
def test_char_ids_equal_those_of_nanogpt(text):
    stoi = nanogpt_stoi(text)
    tokenizer = CharTokenizer.of(text)
    assert tokenizer.encode(text).tolist() == [stoi[ch] for ch in text]
    assert tokenizer.vocab_size == len(stoi)
    assert tokenizer.decode(list(range(len(stoi)))) == "".join(stoi)


@pytest.mark.parametrize("kind", [list, np.array, lambda ids: np.array(ids, dtype=np.uint16)])
def test_ids_are_decoded_from_lists_and_arrays(kind):
    assert CharTokenizer("abc").decode(kind([2, 0, 1, 0])) == "caba"


def test_invalid_char_ids_decode_to_the_replacement_character():
    assert CharTokenizer("abc").decode([0, 3, 2, 64, -1]) == "a\ufffdc\ufffd\ufffd"


def test_an_empty_text_has_no_ids():
    tokenizer = CharTokenizer("abc")
    assert len(tokenizer.encode("")) == 0
    assert tokenizer.decode([]) == ""


def test_one_error_lists_all_unknown_characters():
    with pytest.raises(UserError) as error:
        CharTokenizer("acz").encode("czb~a😀\tb")  # b lies between known characters, ~ and 😀 beyond them
    message = str(error.value)
    for unknown in ("'b'", "'~'", "'😀'", r"'\t'"):  # as they are, but for what moves a cursor
        assert message.count(unknown) == 1
    for known in ("'a'", "'c'", "'z'"):
        assert known not in message


def test_a_text_in_another_script_gives_a_short_error():
    with pytest.raises(UserError) as error:
        CharTokenizer("abc").encode("".join(map(chr, range(0x4E00, 0x5E00))))
    assert len(str(error.value)) < 300


@given(TEXTS)
def test_a_char_tokenizer_round_trips_through_json(text):
    tokenizer = CharTokenizer.of(text)
    again = from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert again.vocab_size == tokenizer.vocab_size
    assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert again.decode(again.encode(text)) == text


@pytest.mark.parametrize(
    "garbage",
    [
        {},
        {"name": "char"},
        {"alphabet": "ab"},
        {"name": "bpe", "alphabet": "ab"},
        {"name": ["char"], "alphabet": "ab"},
        {"name": "char", "alphabet": None},
        {"name": "char", "alphabet": ["a", "b"]},
        {"name": "char", "alphabet": ""},
        {"name": "char", "alphabet": "ba"},
        {"name": "char", "alphabet": "aab"},
        None,
        [],
        "byte",
        {"name": "Byte"},
        {"name": None},
        {"name": "bpe"},
        {"name": "gpt2"},
        {"name": "gpt5", "tokens": all_bytes(), "special": {SEPARATOR: 256}, "separated": False},
        bpe_dict(tokens=KeyError),
        bpe_dict(tokens=None),
        bpe_dict(tokens=[]),
        bpe_dict(tokens=""),
        bpe_dict(tokens="YQ=="),  # one byte of 256
        bpe_dict(tokens=all_bytes() + " %%%"),
        bpe_dict(tokens=all_bytes() + " Y"),
        bpe_dict(tokens=all_bytes() + " é"),
        bpe_dict(special=KeyError),
        bpe_dict(special=None),
        bpe_dict(special=[SEPARATOR]),
        bpe_dict(special={}),
        bpe_dict(special={"<|other|>": 257}),
        bpe_dict(special={SEPARATOR: "257"}),
        bpe_dict(special={SEPARATOR: 257.0}),
        bpe_dict(special={SEPARATOR: True}),
        bpe_dict(special={SEPARATOR: -1}),
        bpe_dict(special={SEPARATOR: 1 << 40}),
        bpe_dict(special={SEPARATOR: 97}),  # the id of a byte
        bpe_dict(special={SEPARATOR: 257, "<|other|>": 257}),
        bpe_dict(special={SEPARATOR: 257, 7: 258}),
        bpe_dict(separated=KeyError),
        bpe_dict(separated=1),
    ],
    ids=lambda garbage: f"{garbage!r:.60}",
)
def test_from_dict_rejects_invalid_values(garbage):
    with pytest.raises(UserError):
        from_dict(garbage)


def test_encode_prompt_encodes_the_prompt():
    tokenizer = CharTokenizer("\nab")
    assert encode_prompt(tokenizer, "ba\n").tolist() == [2, 1, 0]
    with pytest.raises(UserError, match="'x'"):
        encode_prompt(tokenizer, "abx")


@pytest.mark.parametrize(("alphabet", "first"), [("\t\nab", 1), ("ab", 0)], ids=["newline", "no newline"])
def test_an_empty_prompt_is_a_new_line_or_the_first_id(alphabet, first):
    assert encode_prompt(CharTokenizer(alphabet), "").tolist() == [first]


# Long texts of any script


@pytest.mark.parametrize("scripts", ["αβγδε漢字語 \n", "aé漢😀\U0010ffff", "\x00~\xff", "\u0100\uffff"])
def test_ids_of_long_texts_equal_a_dictionary_lookup(scripts):
    stoi = nanogpt_stoi(scripts)
    tokenizer = CharTokenizer.of(scripts)
    choose = np.random.default_rng(0).choice
    for length in (32_767, 32_768, 32_769, 100_001):
        text = "".join(choose(list(scripts), size=length))
        ids = tokenizer.encode(text)
        assert ids.tolist() == [stoi[character] for character in text]
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("place", [0, 32_767, 32_768, 99_999])
def test_one_unknown_character_in_a_long_text_raises(place):
    text = "α" * place + "ω" + "α" * (99_999 - place)
    with pytest.raises(UserError, match="'ω'"):
        CharTokenizer("αβ漢").encode(text)


# Bytes and byte-pair encodings


@pytest.mark.parametrize("name", ["char", "byte", "bpe"])
@pytest.mark.filterwarnings("error")  # torch's, of arrays that cannot be written
def test_the_model_takes_encoded_arrays(name):
    tokenizer = tokenizer_of(name)
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=tokenizer.vocab_size, block_size=8, n_layer=1, n_head=1, n_embd=8)).eval()
    ids = tokenizer.encode("the cat")
    longs = torch.tensor([ids.tolist()])
    logits, loss = model(longs), model(longs[:, :-1], longs[:, 1:])
    for batch in (ids[None], torch.as_tensor(ids)[None], torch.as_tensor(ids.astype("int32"))[None]):
        assert torch.equal(model(batch), logits)
        assert torch.equal(model(batch[:, :-1], batch[:, 1:]), loss)
    assert generate(model, ids, max_new_tokens=5) == generate(model, longs[0], max_new_tokens=5)
    scores = [score(model, row, tokenizer.start).logprobs for row in (ids, longs[0])]
    assert torch.equal(*scores)
    for wrong in (ids, ids[None].astype(float), ids[None, None]):
        with pytest.raises(ValueError, match=r"token ids must be integers \(B, T\), got "):
            model(wrong)


@pytest.mark.parametrize("name", ["byte", "bpe"])
@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@example(text=WORDS)
@example(text=f"a{SEPARATOR}b{SEPARATOR}")
@example(text="'s'LL \t\r\n \u2028\x85\x1c \xa0  x")
def test_byte_and_bpe_round_trip_any_text(name, text):
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids.tolist()) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert all(0 <= i < tokenizer.vocab_size for i in ids.tolist())
    assert ids.dtype == np.dtype("uint8" if name == "byte" else "uint16")


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_ids_are_utf8(text):
    assert ByteTokenizer().encode(text).tolist() == list(text.encode())


@pytest.mark.parametrize("name", ["byte", "bpe"])
@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_and_bpe_tokenizers_round_trip_through_json(name, text):
    tokenizer = tokenizer_of(name)
    again = from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert again.to_dict() == tokenizer.to_dict()
    assert again.vocab_size == tokenizer.vocab_size
    assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert again.decode(again.encode(text)) == text
    assert again.separator.tolist() == tokenizer.separator.tolist()
    assert again.start.tolist() == tokenizer.start.tolist()


@pytest.mark.parametrize("name", ["byte", "bpe", "char"])
def test_ids_are_writable_for_torch(name):
    tokenizer = tokenizer_of(name)
    for ids in (tokenizer.encode("the cat"), tokenizer.encode(""), tokenizer.start, tokenizer.separator):
        assert ids.flags.writeable


@pytest.mark.parametrize("name", ["byte", "bpe"])
def test_lone_surrogates_are_encoded(name):
    """A terminal can send such characters in a prompt."""
    tokenizer = tokenizer_of(name)
    decoded = tokenizer.decode(tokenizer.encode("a\udcffb"))
    assert decoded[0] + decoded[-1] == "ab"


@pytest.mark.parametrize("name", ["byte", "bpe"])
def test_invalid_ids_decode_to_the_replacement_character(name):
    tokenizer = tokenizer_of(name)
    (a,) = tokenizer.encode("a").tolist()
    assert tokenizer.decode([a, tokenizer.vocab_size, -1, a, 1 << 40]) == "a\ufffd\ufffda\ufffd"


@given(st.text(), st.integers(0, 3))
def test_the_pieces_of_tokens_are_the_characters_that_they_complete(text, n_cut):
    tokenizer = tokenizer_of("byte")
    ids = tokenizer.encode(text).tolist()
    ids = ids[: len(ids) - n_cut]
    pieces = token_pieces(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    last_bytes = [i for i, piece in enumerate(pieces[:-1]) if piece]
    assert last_bytes == [i for i, id_ in enumerate(ids[1:]) if id_ & 0xC0 != 0x80]  # before the next character


def test_the_separator_within_a_text_is_ordinary_text():
    tokenizer = tokenizer_of("bpe")
    ids = tokenizer.encode(f"a{SEPARATOR}b").tolist()
    assert tokenizer.separator.tolist() == [tokenizer.vocab_size - 1]
    assert tokenizer.vocab_size - 1 not in ids
    assert tokenizer.decode(ids) == f"a{SEPARATOR}b"
    assert tokenizer.decode([*ids, *tokenizer.separator.tolist(), *ids]) == f"a{SEPARATOR}b" * 2


def test_an_empty_bpe_prompt_is_the_separator_if_the_corpus_has_it():
    plain = tokenizer_of("bpe")
    separated = from_dict(plain.to_dict() | {"separated": True})
    assert plain.decode(encode_prompt(plain, "")) == "\n"
    assert encode_prompt(separated, "").tolist() == separated.separator.tolist()
    assert ByteTokenizer().decode(encode_prompt(ByteTokenizer(), "")) == "\n"


def test_a_long_text_without_a_space_is_encoded():
    for text in ("a" * 50_000, " " * 50_000 + "a", "1" * 50_000, "漢" * 20_000, "\n" * 50_000):
        assert tokenizer_of("bpe").decode(tokenizer_of("bpe").encode(text)) == text


# Training


def merge(word, pair, new):
    """Replace each occurrence of a pair in a word, from the left."""
    merged, i = [], 0
    while i < len(word):
        here = tuple(word[i : i + 2]) == pair
        merged.append(new if here else word[i])
        i += 2 if here else 1
    return merged


def counts_of(words):
    counts = Counter()
    for word, times in words:
        for pair in pairwise(word):
            counts[pair] += times
    return counts


def check_merges(texts, vocab_size):
    """Check that each merge of a trained encoding is of a most frequent pair (ties in any order)."""
    tokenizer = BPETokenizer.train(texts, vocab_size)
    assert tokenizer.vocab_size == vocab_size
    assert tokenizer.tokens[:256] == [bytes([i]) for i in range(256)]
    assert tokenizer.special == {SEPARATOR: vocab_size - 1}
    found = Counter(chunk for text in texts for chunk in regex.findall(PATTERNS["gpt2"], text))
    words = [([bytes([byte]) for byte in chunk.encode()], times) for chunk, times in found.items()]
    for token in tokenizer.tokens[256:]:
        counts = counts_of(words)
        most = max(counts.values())
        pairs = [pair for pair, times in counts.items() if times == most and b"".join(pair) == token]
        assert pairs, f"{token} is not the most frequent pair ({most} times)"
        words = [(merge(word, pairs[0], token), times) for word, times in words]
    total = sum(len(word) * times for word, times in words)
    assert sum(len(tokenizer.encode(text)) for text in texts) == total
    return counts_of(words)


@pytest.mark.parametrize("vocab_size", [257, 258, 270, 330])
def test_training_merges_the_most_frequent_pairs(vocab_size):
    check_merges([WORDS, "another text with the cat and the rat", ""], vocab_size)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("abc \n", max_size=60), min_size=1, max_size=4), st.integers(258, 262))
def test_training_of_any_text_merges_the_most_frequent_pairs(texts, vocab_size):
    texts = ["abcabc cab", *texts]
    check_merges(texts, vocab_size)


def test_a_text_without_ties_has_one_encoding():
    # abc 5 times, abd 3 times, xyz 4 times: ab (8), abc (5), xy or yz (4 each), xyz (4), abd (3)
    text = "abc " * 5 + "abd " * 3 + "xyz " * 4
    tokens = BPETokenizer.train([text.replace(" ", "\n")], 262).tokens[256:]
    assert tokens[:2] == [b"ab", b"abc"]
    assert tokens[2] in (b"xy", b"yz")
    assert tokens[3:] == [b"xyz", b"abd"]


def test_training_is_deterministic_across_processes():
    code = (
        "import sys, json; from minigpt.data.tokenizer import BPETokenizer; "
        "print(json.dumps(BPETokenizer.train([sys.stdin.read()] * 3, 500).to_dict()))"
    )
    text = WORDS + Path(__file__).read_text(encoding="utf-8")
    outputs = {
        subprocess.run(
            [sys.executable, "-X", "utf8", "-c", code],
            input=text,
            capture_output=True,
            encoding="utf-8",
            check=True,
            timeout=300,
            env=os.environ | {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads},
            cwd=Path(__file__).parents[2],
        ).stdout
        for seed, threads in (("0", "1"), ("4711", "4"))
    }
    assert outputs == {json.dumps(BPETokenizer.train([text] * 3, 500).to_dict()) + "\n"}


@pytest.mark.parametrize("text", [WORDS, "abab", "a", ""], ids=["words", "abab", "a", "nothing"])
def test_a_too_large_vocab_size_raises_with_the_largest_possible(text):
    with pytest.raises(UserError, match=r"tokenizer\.vocab_size must be .*, got 50000") as error:
        BPETokenizer.train([text], 50_000)
    largest = int(regex.search(r"at most (\d+)", str(error.value))[1])
    assert largest >= 257
    left = check_merges([text], largest)
    assert not left  # nothing is left to merge
    with pytest.raises(UserError, match=f"at most {largest} "):
        BPETokenizer.train([text], largest + 1)
