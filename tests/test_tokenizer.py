"""Characters to ids and back, against nanoGPT's own numbering."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minigpt.errors import UserError
from minigpt.tokenizer import CharTokenizer, encode_prompt, from_dict

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)  # all of Unicode but surrogates


def nanogpt_stoi(text):
    chars = sorted(set(text))
    return {ch: i for i, ch in enumerate(chars)}


@given(st.data(), TEXTS)
def test_decoding_undoes_encoding(data, corpus):
    tokenizer = CharTokenizer.of(corpus)
    text = data.draw(st.text(st.sampled_from(sorted(set(corpus)))))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(TEXTS)
def test_ids_are_those_of_nanogpt_in_code_point_order(text):
    stoi = nanogpt_stoi(text)
    tokenizer = CharTokenizer.of(text)
    assert tokenizer.encode(text).tolist() == [stoi[ch] for ch in text]
    assert tokenizer.vocab_size == len(stoi)
    assert tokenizer.decode(list(range(len(stoi)))) == "".join(stoi)


@pytest.mark.parametrize("kind", [list, np.array, lambda ids: np.array(ids, dtype=np.uint16)])
def test_ids_are_decoded_from_lists_and_arrays(kind):
    assert CharTokenizer("abc").decode(kind([2, 0, 1, 0])) == "caba"


def test_ids_that_no_character_has_become_the_replacement_character():
    assert CharTokenizer("abc").decode([0, 3, 2, 64, -1]) == "a\ufffdc\ufffd\ufffd"


def test_an_empty_text_has_no_ids_and_no_ids_are_an_empty_text():
    tokenizer = CharTokenizer("abc")
    assert len(tokenizer.encode("")) == 0
    assert tokenizer.decode([]) == ""


def test_all_unknown_characters_are_named_in_one_error():
    with pytest.raises(UserError) as error:
        CharTokenizer("acz").encode("czb~a😀\tb")  # b lies between known characters, ~ and 😀 beyond them
    message = str(error.value)
    for unknown in ("'b'", "'~'", r"'\U0001f600'", r"'\t'"):
        assert message.count(unknown) == 1
    for known in ("'a'", "'c'", "'z'"):
        assert known not in message


def test_a_text_in_another_script_is_refused_with_a_short_line():
    with pytest.raises(UserError) as error:
        CharTokenizer("abc").encode("".join(map(chr, range(0x4E00, 0x5E00))))
    assert len(str(error.value)) < 300


@given(TEXTS)
def test_a_tokenizer_survives_json(text):
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
    ],
    ids=str,
)
def test_what_does_not_describe_a_tokenizer_is_refused(garbage):
    with pytest.raises(UserError):
        from_dict(garbage)


def test_a_prompt_is_encoded_as_it_is():
    tokenizer = CharTokenizer("\nab")
    assert encode_prompt(tokenizer, "ba\n").tolist() == [2, 1, 0]
    with pytest.raises(UserError, match="'x'"):
        encode_prompt(tokenizer, "abx")


@pytest.mark.parametrize(("alphabet", "first"), [("\t\nab", 1), ("ab", 0)], ids=["newline", "no newline"])
def test_an_empty_prompt_begins_from_a_new_line_or_from_the_first_id(alphabet, first):
    assert encode_prompt(CharTokenizer(alphabet), "").tolist() == [first]
