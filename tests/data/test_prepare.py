"""Prepared token files, against nanoGPT's prepare.py, numpy, and the text itself."""

import errno
import gzip
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt.data import prepare as preparation
from minigpt.data import readers, splits, token_files
from minigpt.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
DATA_DIR = os.environ.get("MINIGPT_DATA_DIR")
SHAKESPEARE = Path(DATA_DIR or "", "tinyshakespeare.txt")
needs_shakespeare = pytest.mark.skipif(
    not (DATA_DIR and SHAKESPEARE.is_file()), reason="MINIGPT_DATA_DIR names no folder with tinyshakespeare.txt"
)
needs_gpt2 = pytest.mark.skipif(not os.environ.get("TIKTOKEN_CACHE_DIR"), reason="TIKTOKEN_CACHE_DIR is not set")
UNICODE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff"), min_size=1)
STORIES = st.lists(st.text("abc é€😀\n", max_size=12), min_size=2, max_size=12).filter(
    lambda stories: sum(map(bool, stories)) > 1
)
BPE = {"name": "bpe", "vocab_size": 300}


def values(name):
    return yaml.safe_load((ROOT / f"configs/data/{name}.yaml").read_text())


def corpus_of(path, folder, tokenizer="char", **changes):
    """Prepare files with the values of configs/data/text.yaml and these changes."""
    tokenizer = tokenizer if isinstance(tokenizer, dict) else {"name": tokenizer}
    return preparation.load_corpus(values("text") | {"path": str(path), "folder": str(folder)} | changes, tokenizer)


def prepare(content, folder, tokenizer="char", *, name="mine.txt", **changes):
    """Prepare a file with this content."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return corpus_of(folder / name, folder, tokenizer, **changes)


def rows(texts):
    """Format documents as JSON Lines."""
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def stories(number, seed=0):
    """Return distinct texts of a few words each."""
    random = np.random.default_rng(seed)
    words = "the quick brown fox jumps over a lazy dog and it's 42 naïve owls, don't they see? yes!\\n"
    return [f"{seed}.{i} " + " ".join(random.choice(words.split(" "), random.integers(3, 30))) for i in range(number)]


def folder_of(corpus):
    return corpus.train.shards[0].file.parent


def on_disk(corpus):
    """Read the ids of both splits with numpy."""
    return [np.fromfile(folder_of(corpus) / f"{split}.bin", corpus.dtype).tolist() for split in ("train", "val")]


def texts_on_disk(corpus):
    return [corpus.tokenizer.decode(ids) for ids in on_disk(corpus)]


def all_on_disk(corpus):
    train, val = on_disk(corpus)
    return train + val


def in_folder(corpus):
    """Return the content of a folder of token files."""
    return {file.name: file.read_bytes() for file in folder_of(corpus).iterdir()}


def nanogpt(text):
    """Return the ids of both splits as in nanoGPT's prepare.py."""
    n = len(text)
    stoi = {ch: i for i, ch in enumerate(sorted(set(text)))}
    halves = text[: int(n * 0.9)], text[int(n * 0.9) :]
    return [[stoi[ch] for ch in half] for half in halves]


def leftovers(folder):
    return [path for path in (folder / "tokens").rglob("*") if path.suffix != ".lock"]


# The text.


@pytest.mark.parametrize("path", ["missing.txt", "."])
def test_a_path_without_a_text_raises_with_the_path(tmp_path, path):
    with pytest.raises(UserError, match=r"data\.path=.*" + re.escape(str(tmp_path / path))):
        corpus_of(tmp_path / path, tmp_path)


def test_a_tilde_expands_to_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.txt").write_bytes(b"mine")
    corpus = corpus_of("~/own.txt", tmp_path)
    assert corpus.tokenizer.decode(all_on_disk(corpus)) == "mine"


def test_a_missing_path_raises_with_the_config_key(tmp_path):
    with pytest.raises(UserError, match=r"data\.path is not set"):
        preparation.load_corpus(values("text") | {"folder": str(tmp_path)}, {"name": "char"})


@needs_shakespeare
def test_tiny_shakespeare_has_the_splits_and_ids_of_nanogpt(tmp_path):
    (tmp_path / "mine.txt").write_bytes(SHAKESPEARE.read_bytes())
    corpus = corpus_of(tmp_path / "mine.txt", tmp_path, **_named())
    assert corpus.name == "tinyshakespeare"  # by its checksum
    assert (corpus.tokenizer.vocab_size, corpus.dtype) == (65, "uint16")
    assert (corpus.train.tokens, corpus.val.tokens, corpus.val.bytes) == (1_003_854, 111_540, 111_540)
    assert on_disk(corpus) == nanogpt(SHAKESPEARE.read_text(encoding="utf-8"))


@needs_shakespeare
@needs_gpt2
def test_tiny_shakespeare_has_the_number_of_gpt2_tokens_in_nanogpts_readme(tmp_path):
    import tiktoken

    corpus = corpus_of(SHAKESPEARE, tmp_path, "gpt2")
    assert (corpus.train.tokens, corpus.val.tokens) == (301_966, 36_059)
    text = SHAKESPEARE.read_text(encoding="utf-8")
    cut = int(len(text) * 0.9)
    assert on_disk(corpus) == [tiktoken.get_encoding("gpt2").encode_ordinary(half) for half in (text[:cut], text[cut:])]


@needs_shakespeare
def test_a_changed_copy_does_not_get_the_name_of_tiny_shakespeare(tmp_path):
    (tmp_path / "tinyshakespeare.txt").write_bytes(SHAKESPEARE.read_bytes() + b"\n")
    assert corpus_of(tmp_path / "tinyshakespeare.txt", tmp_path, **_named()).name == "tinyshakespeare.txt"


def _named():
    """Return the data group of configs/data/shakespeare_char.yaml."""
    return values("shakespeare_char")["data"]


# One document.


@settings(deadline=None, max_examples=60)
@given(UNICODE, st.integers(1, 9))
def test_reading_in_chunks_does_not_change_the_ids(text, chunk):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for constant in ("_BLOCK_BYTES", "_MAX_CHUNK_CHARS"):
            patch.setattr(readers, constant, chunk)  # characters of several bytes lie across the chunks
        patch.setattr(splits, "_BATCH_CHARS", chunk)
        corpus = prepare(text, Path(folder))
        expected = nanogpt(text)
        assert on_disk(corpus) == expected
        assert [corpus.train.tokens, corpus.val.tokens] == [len(split) for split in expected]
        assert corpus.val.bytes == len(text[int(len(text) * 0.9) :].encode())


@settings(deadline=None, max_examples=20)
@given(st.text(" \n\t'abcdeABC12.é€", min_size=400, max_size=600), st.integers(2, 60))
def test_bpe_ids_of_a_chunked_text_equal_those_of_each_whole_split(text, chunk):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(readers, "_BLOCK_BYTES", chunk)
        patch.setattr(splits, "_BATCH_CHARS", 50)
        corpus = prepare(text * 3, Path(folder), BPE | {"vocab_size": 259}, val_fraction=0.3)
        cut = int(len(text) * 3 * 0.7)
        halves = text * 3
        expected = [corpus.tokenizer.encode(half).tolist() for half in (halves[:cut], halves[cut:])]
        assert on_disk(corpus) == expected


def test_bpe_ids_of_chunked_prose_equal_those_of_each_whole_split(tmp_path, monkeypatch):
    text = "\n".join(stories(300))
    monkeypatch.setattr(readers, "_BLOCK_BYTES", 100)
    monkeypatch.setattr(splits, "_BATCH_CHARS", 100)
    corpus = prepare(text, tmp_path, BPE)
    cut = int(len(text) * 0.9)
    assert on_disk(corpus) == [corpus.tokenizer.encode(half).tolist() for half in (text[:cut], text[cut:])]
    assert texts_on_disk(corpus) == [text[:cut], text[cut:]]
    assert (corpus.train.bytes, corpus.val.bytes) == (len(text[:cut].encode()), len(text[cut:].encode()))


def test_line_ends_are_preserved(tmp_path):
    text = "one\r\ntwo\rthree\n\n"
    corpus = prepare(text, tmp_path)
    assert corpus.tokenizer.decode(all_on_disk(corpus)) == text


def test_bytes_per_token_count_utf8(tmp_path):
    corpus = prepare("abcdefghijklmnop" + "é€😀a", tmp_path, val_fraction=0.2)
    assert corpus.val_bytes_per_token == (2 + 3 + 4 + 1) / 4


@pytest.mark.parametrize(("characters", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_ids_have_16_bits_if_they_fit(tmp_path, characters, dtype):
    points = np.random.default_rng(0).permutation(np.arange(0x10000, 0x10000 + characters))
    corpus = prepare("".join(map(chr, points)), tmp_path)
    assert corpus.tokenizer.vocab_size == characters
    assert corpus.dtype == dtype
    assert all_on_disk(corpus) == (points - 0x10000).tolist()
    assert (folder_of(corpus) / "train.bin").stat().st_size == corpus.train.tokens * np.dtype(dtype).itemsize


def test_without_a_validation_split_its_tokens_are_empty(tmp_path):
    corpus = prepare("all of it is for training", tmp_path, val_fraction=0)
    assert len(corpus.tokens("val")) == 0
    assert len(corpus.tokens("val")[:]) == 0
    assert len(corpus.tokens("train")) == len("all of it is for training")
    assert {file.name for file in folder_of(corpus).iterdir()} == {"meta.json", "train.bin", "val.bin"}


def test_an_empty_file_raises_with_its_name(tmp_path):
    for tokenizer in ("char", "byte", BPE):
        with pytest.raises(UserError, match=r"mine\.txt is empty"):
            prepare(b"", tmp_path, tokenizer)
    assert leftovers(tmp_path) == []


def test_a_text_with_too_few_pairs_raises_with_the_largest_vocab_size(tmp_path):
    text = "a b c d e f g hi hi jk jkl jkl"
    with pytest.raises(UserError, match=r"tokenizer\.vocab_size must be at most \d+ for .*, got 300") as refused:
        prepare(text, tmp_path, BPE)
    assert leftovers(tmp_path) == []
    most = int(re.search(r"at most (\d+)", str(refused.value))[1])
    corpus = prepare(text, tmp_path, BPE | {"vocab_size": most})
    assert corpus.tokenizer.vocab_size == most > 257
    assert "".join(texts_on_disk(corpus)) == text
    with pytest.raises(UserError, match=f"must be at most {most} "):
        prepare(text, tmp_path, BPE | {"vocab_size": most + 1})


@settings(deadline=None, max_examples=50)
@given(
    st.text("aé€😀", max_size=20), st.sampled_from([b"\xff", b"\xe2\x82", b"\xc3", b"\xf0\x9f\x98"]), st.integers(1, 9)
)
def test_a_bad_byte_raises_with_its_offset_for_any_block_size(text, bad, chunk):
    content = text.encode() + bad + b"abc"
    with pytest.raises(UnicodeDecodeError) as expected:
        content.decode()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(readers, "_BLOCK_BYTES", chunk)
        with pytest.raises(UserError, match=rf"mine.txt is not UTF-8.*offset {expected.value.start}\b"):
            prepare(content, Path(folder))
        assert leftovers(Path(folder)) == []


def test_a_file_truncated_within_a_character_raises(tmp_path):
    with pytest.raises(UserError, match=r"mine.txt is not UTF-8.*offset 9\b"):
        prepare("it costs €".encode()[:-1], tmp_path)
    assert leftovers(tmp_path) == []


# Several documents.


@settings(deadline=None, max_examples=50)
@given(STORIES, st.sampled_from([0.1, 0.3, 0.5]))
def test_several_documents_are_cut_at_the_nearest_start_of_a_document(texts, val_fraction):
    total = sum(map(len, texts))
    wanted = int(total * (1 - val_fraction))
    starts = np.cumsum([len(text) for text in texts])[:-1]  # of every document but the first
    nearest = int(np.abs(starts - wanted).min())
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare(rows(texts), Path(folder), "byte", name="mine.jsonl", val_fraction=val_fraction)
        train, val = (bytes(ids).decode() for ids in on_disk(corpus))
    splits = [(texts[:cut], texts[cut:]) for cut in range(1, len(texts))]
    near = [split for split, start in zip(splits, starts, strict=True) if abs(int(start) - wanted) == nearest]
    assert (train, val) in [tuple("\n".join(filter(None, part)) for part in split) for split in near]


@pytest.mark.parametrize("tokenizer", ["char", "byte", BPE], ids=str)
@pytest.mark.parametrize("unit", [1, 1 << 20])
def test_separators_are_between_documents_only(tmp_path, monkeypatch, tokenizer, unit):
    monkeypatch.setattr(splits, "_BATCH_CHARS", unit)
    texts = ["", *stories(40), "", *stories(20, seed=1), ""]
    corpus = prepare(rows(texts), tmp_path, tokenizer, name="mine.jsonl", val_fraction=0.3)
    texts = [text for text in texts if text]
    separator = [corpus.tokenizer.vocab_size - 1] if tokenizer is BPE else corpus.tokenizer.encode("\n").tolist()
    begun, expected = 0, []
    for split in (corpus.train, corpus.val):
        here = texts[begun : begun + split.documents]
        begun += split.documents
        ids = [i for text in here for i in (*separator, *corpus.tokenizer.encode(text).tolist())]
        expected.append(ids[1:])
        assert split.bytes == len("".join(here).encode())
    assert begun == len(texts)
    assert on_disk(corpus) == expected


def test_an_empty_prompt_is_the_separator_only_if_the_corpus_has_it(tmp_path):
    several = prepare(rows(stories(50)), tmp_path / "several", BPE, name="mine.jsonl")
    assert several.tokenizer.start.tolist() == [299]
    one = prepare("\n".join(stories(50)), tmp_path / "one", BPE)
    assert one.tokenizer.decode(one.tokenizer.start) == "\n"


def test_the_documents_of_a_folder_are_sorted_by_file_name(tmp_path):
    first, second, third = stories(3)
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "in/b.jsonl").write_text(rows([second]))
    (tmp_path / "in/a.txt.gz").write_bytes(gzip.compress(first.encode()))
    (tmp_path / "in/deep/c.md").write_text(third)
    corpus = corpus_of(tmp_path / "in", tmp_path, "byte", val_fraction=0.2)
    assert texts_on_disk(corpus) == [f"{first}\n{second}", third]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from("abcdefghijklmnopqrst"), min_size=30, max_size=80), st.sampled_from([0.3, 0.5]))
def test_split_document_keeps_equal_documents_in_one_split_and_the_order(texts, val_fraction):
    texts = [f"{text}!" for text in texts] + ["u!", "v!", "w!", "x!", "y!", "z!"]
    with tempfile.TemporaryDirectory() as folder:
        changes = {"split": "document", "val_fraction": val_fraction}
        corpus = prepare(rows(texts), Path(folder), "byte", name="mine.jsonl", **changes)
        train, val = (text.split("\n") for text in texts_on_disk(corpus))
        duplicates = corpus.provenance["duplicates"]
    assert not set(train) & set(val)
    assert train == [text for text in texts if text in set(train)]
    assert val == [text for text in texts if text in set(val)]
    assert len(train) + len(val) == len(texts)
    assert duplicates == 0


def test_split_document_selects_about_val_fraction_and_is_stable_per_document(tmp_path):
    texts = stories(2000)
    changes = {"name": "mine.jsonl", "split": "document"}
    corpora = [
        prepare(rows(text), tmp_path / f"{i}", BPE, val_fraction=fraction, **changes)
        for i, (text, fraction) in enumerate([(texts, 0.1), (texts[::-1][:1500], 0.1), (texts, 0.2)])
    ]
    first, fewer, more = (
        {split.decode() for split in _documents(ids, one.tokenizer)}
        for one, (_, ids) in zip(corpora, map(on_disk, corpora), strict=True)
    )
    assert 150 < len(first) == corpora[0].val.documents < 250  # 200, give or take four standard deviations
    assert fewer == first & set(texts[::-1][:1500])
    assert first < more


def test_split_document_keeps_a_chunked_document_in_one_split(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_BLOCK_BYTES", 100)
    texts = ["\n".join(stories(9, seed)) for seed in range(20)]
    (tmp_path / "in").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / f"in/{i:02}.txt").write_text(text)
    corpus = corpus_of(tmp_path / "in", tmp_path, BPE, split="document", val_fraction=0.4)
    train, val = ({text.decode() for text in _documents(ids, corpus.tokenizer)} for ids in on_disk(corpus))
    assert train | val == set(texts)
    assert (len(train), len(val)) == (corpus.train.documents, corpus.val.documents)
    assert len(train) + len(val) == len(texts)


def _documents(ids, tokenizer):
    """Return the documents between separators."""
    ends = [i for i, one in enumerate(ids) if one == tokenizer.separator[0]]
    return [
        tokenizer.decode_bytes(ids[a:b])
        for a, b in zip([0, *(end + 1 for end in ends)], [*ends, len(ids)], strict=True)
    ]


def test_split_document_with_too_few_documents_raises(tmp_path):
    with pytest.raises(UserError, match=r"none of the 1 documents.*data\.split=fraction"):
        prepare("only one", tmp_path, split="document")
    assert leftovers(tmp_path) == []


def test_a_separate_validation_text_is_the_validation_split(tmp_path):
    train, val = stories(30), stories(20, seed=1)
    (tmp_path / "val.jsonl").write_text(rows(val))
    own = {"name": "mine.jsonl", "val_path": str(tmp_path / "val.jsonl")}
    corpus = prepare(rows(train), tmp_path, "byte", **own)
    assert texts_on_disk(corpus) == ["\n".join(train), "\n".join(val)]
    assert (corpus.train.documents, corpus.val.documents) == (30, 20)
    alone = prepare(rows(train), tmp_path, "byte", name="mine.jsonl")
    assert corpus.sha256 != alone.sha256
    assert folder_of(corpus) != folder_of(alone)
    again = prepare(rows(train), tmp_path, "byte", **own, val_fraction=0.3)  # has no effect with val_path
    assert folder_of(again) == folder_of(corpus)
    (tmp_path / "val.jsonl").write_text(rows(["another text"]))
    assert texts_on_disk(prepare(rows(train), tmp_path, "byte", **own)) == ["\n".join(train), "another text"]


def test_the_alphabet_includes_a_separate_validation_text(tmp_path):
    (tmp_path / "val.txt").write_text("ξξξξξξ")
    corpus = prepare("abc", tmp_path, val_path=str(tmp_path / "val.txt"))
    assert corpus.tokenizer.alphabet == "\nabcξ"
    assert texts_on_disk(corpus) == ["abc", "ξξξξξξ"]


@pytest.mark.parametrize(
    ("split", "name"),
    [("fraction", "mine.txt"), ("fraction", "mine.jsonl"), ("document", "mine.jsonl"), ("val_path", "mine.txt")],
)
def test_bpe_is_trained_on_the_training_split_alone(tmp_path, split, name):
    runs = [chr(0x4E00 + i) * 200 for i in range(30)]  # all equally frequent; each has a last byte of its own
    (tmp_path / "val.txt").write_text("".join(runs[20:]))
    content = rows(runs) if name == "mine.jsonl" else "".join(runs[:20] if split == "val_path" else runs)
    changes = {"val_path": str(tmp_path / "val.txt")} if split == "val_path" else {"split": split}
    corpus = prepare(content, tmp_path, BPE | {"vocab_size": 330}, name=name, val_fraction=0.3, **changes)
    train, val = (set("".join(runs)) & set(text) for text in texts_on_disk(corpus))
    merged = b"".join(corpus.tokenizer.tokens[256:])
    assert {run[0] for run in runs if run.encode()[2] in merged} == train
    assert len(val - train) > 3


@pytest.mark.parametrize("tokenizer", ["char", "byte", BPE], ids=str)
@pytest.mark.parametrize("split", ["fraction", "document"])
def test_the_figures_in_meta_json_equal_a_reference_count(tmp_path, tokenizer, split):
    texts = [f"{text} é漢😀" for text in stories(60)]
    texts += texts[-3:] * 2
    corpus = prepare(rows(texts), tmp_path, tokenizer, name="mine.jsonl", split=split, val_fraction=0.3)
    halves = [[text.decode() for text in _documents(ids, corpus.tokenizer)] for ids in on_disk(corpus)]
    assert sorted(halves[0] + halves[1]) == sorted(texts)
    meta = json.loads((folder_of(corpus) / "meta.json").read_text())
    for name, half, ids in zip(("train", "val"), halves, on_disk(corpus), strict=True):
        size = len("".join(half).encode())
        assert meta[name] == {"documents": len(half), "bytes": size, "tokens": len(ids)}
    assert corpus.val_bytes_per_token == len("".join(halves[1]).encode()) / len(on_disk(corpus)[1])
    assert meta["provenance"]["duplicates"] == sum(text in halves[1] for text in halves[0])
    total = len("".join(texts).encode())
    assert preparation.describe_corpus(corpus)["bytes per token"] == f"{total / len(all_on_disk(corpus)):.3f}"


def test_a_missing_validation_text_raises_with_the_config_key(tmp_path):
    with pytest.raises(UserError, match=r"data\.val_path=.*missing\.txt"):
        prepare("abc", tmp_path, val_path=str(tmp_path / "missing.txt"))


@pytest.mark.parametrize("unit", [1, 1 << 20])
def test_documents_in_both_splits_are_counted_with_a_warning(tmp_path, monkeypatch, capsys, unit):
    monkeypatch.setattr(splits, "_BATCH_CHARS", unit)
    texts = stories(50)
    (tmp_path / "val.jsonl").write_text(rows([texts[3], "new", *[texts[7]] * 3, texts[49]]))
    own = {"name": "mine.jsonl", "val_path": str(tmp_path / "val.jsonl")}
    corpus = prepare(rows([*texts, texts[3]]), tmp_path, "byte", **own)
    assert corpus.provenance["duplicates"] == 4  # in the training split; one occurs twice
    assert re.fullmatch(r"warning: 4 training documents of mine\.jsonl .*\n", capsys.readouterr().err)
    assert preparation.describe_corpus(corpus)["in both splits"] == "4 documents"
    assert not list(folder_of(corpus).glob("*documents*"))
    (tmp_path / "val.jsonl").write_text(rows(["new", texts[3][:-1]]))
    assert prepare(rows(texts), tmp_path, "byte", **own).provenance["duplicates"] == 0
    assert capsys.readouterr().err == ""


# Token files.


def test_token_files_are_byte_identical_for_any_number_of_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(splits, "_BATCH_CHARS", 700)
    text = rows(stories(300))
    one, two, four = (prepare(text, tmp_path / f"{n}", BPE, name="mine.jsonl", threads=n) for n in (1, 2, 4))
    assert in_folder(one) == in_folder(two) == in_folder(four)


def test_an_unchanged_text_is_not_prepared_again(tmp_path):
    first = prepare("the same text", tmp_path)
    before = {path: path.stat().st_mtime_ns for path in folder_of(first).iterdir()}
    again = prepare("the same text", tmp_path)
    assert folder_of(again) == folder_of(first)
    assert {path: path.stat().st_mtime_ns for path in folder_of(again).iterdir()} == before


@pytest.mark.parametrize(
    "changes", [{"content": "some texts"}, {"val_fraction": 0.2}, {"content": "some texu"}], ids=str
)
def test_a_changed_text_or_split_gets_new_token_files(tmp_path, changes):
    first = prepare("some text", tmp_path)
    values = {"content": "some text", "val_fraction": 0.1} | changes
    second = prepare(values["content"], tmp_path, val_fraction=values["val_fraction"])
    assert folder_of(second) != folder_of(first)
    assert second.tokenizer.decode(all_on_disk(second)) == values["content"]
    assert second.val.tokens == len(values["content"]) - int(len(values["content"]) * (1 - values["val_fraction"]))
    assert first.tokenizer.decode(all_on_disk(first)) == "some text"  # still there


def test_another_tokenizer_gets_new_token_files(tmp_path):
    text = "\n".join(stories(100))
    kinds = ["char", "byte", BPE, BPE | {"vocab_size": 301}]
    corpora = [prepare(text, tmp_path, kind) for kind in kinds]
    assert len({folder_of(one) for one in corpora}) == len(kinds)
    assert [one.tokenizer.vocab_size for one in corpora] == [len(set(text)), 256, 300, 301]


# Failures.


def test_a_folder_that_is_not_writable_raises_with_its_path(tmp_path):
    (tmp_path / "mine.txt").write_text("a text")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=re.escape(f"cannot be written to {tmp_path}/file/data (not a directory)")):
        corpus_of(tmp_path / "mine.txt", tmp_path / "file/data")


def test_leftovers_of_a_killed_process_are_replaced(tmp_path):
    text = "whole or not at all"
    name = folder_of(prepare(text, tmp_path / "elsewhere")).name
    for left in (f"{name}.partial", name):  # a half-written folder, and a final one without its meta.json
        (tmp_path / "here/tokens" / left).mkdir(parents=True)
        (tmp_path / "here/tokens" / left / "train.bin").write_bytes(b"half")
    corpus = prepare(text, tmp_path / "here")
    assert on_disk(corpus) == nanogpt(text)
    assert [path.name for path in folder_of(corpus).parent.iterdir() if path.is_dir()] == [name]


PREPARE = """if True:
    import io, os, resource, signal, sys
    from pathlib import Path
    from minigpt.data import readers, splits
    from minigpt.data import prepare as preparation
    sys.path.insert(0, sys.argv[1])
    from test_prepare import corpus_of
    folder = Path(sys.argv[2])
"""


def python(program, *arguments):
    """Start a process that runs a program after PREPARE."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", PREPARE + program, str(ROOT / "tests/data"), *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


def test_a_full_disk_leaves_no_partial_files(tmp_path):
    (tmp_path / "long.txt").write_text("as long as this\n" * 1000)
    program = """
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))  # no file may grow beyond
    try:
        corpus_of(folder / "long.txt", folder)
    except preparation.UserError as error:
        print(error)
    """
    out, err = python(program, tmp_path).communicate()
    assert (err, out.count("\n")) == ("", 1)
    assert f"cannot be written to {tmp_path} ({os.strerror(errno.EFBIG).lower()})" in out
    assert leftovers(tmp_path) == []


def test_concurrent_preparations_write_the_files_once(tmp_path):
    text = "".join(map(chr, np.random.default_rng(0).integers(0x20, 0x2000, 1_000_000)))
    (tmp_path / "long.txt").write_text(text, encoding="utf-8", newline="")
    program = """
    import hashlib
    print("ready", flush=True)
    input()
    corpus = corpus_of(folder / "long.txt", folder)
    print(*(hashlib.sha256(corpus.tokens(split)[:].tobytes()).hexdigest() for split in ("train", "val")))
    """
    processes = [python(program, tmp_path) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.communicate()[0] for process in processes]
    expected = " ".join(hashlib.sha256(np.array(ids, dtype=np.uint16).tobytes()).hexdigest() for ids in nanogpt(text))
    assert answers == [f"{expected}\n"] * 3
    assert len([path for path in (tmp_path / "tokens").iterdir() if path.is_dir()]) == 1


KILLED = """
    left = int(sys.argv[3])
    readers._BLOCK_BYTES, splits._BATCH_CHARS, preparation._SYNC_BYTES = 400, 300, 1000
    tokenize = preparation.tokenize

    def rows(ids):
        global left
        for row in ids:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            yield row

    preparation.tokenize = lambda *args: map(rows, tokenize(*args))
    preparation.open = lambda file, mode: io.open(file, mode, buffering=0)  # a row is written before the next
    corpus_of(folder.parent / "in", folder, {"name": "bpe", "vocab_size": 300}, **eval(sys.argv[4]))
"""


@pytest.fixture
def killed(tmp_path):
    """Prepare a folder of several files in a process that is killed before its n-th append: `killed(n, **changes)`."""
    (tmp_path / "in").mkdir()
    texts = stories(250)
    (tmp_path / "in/a.txt").write_text("\n".join(stories(150, seed=1)))
    (tmp_path / "in/b.jsonl").write_text(rows([*texts, "", *texts[:9]]))
    (tmp_path / "in/c.jsonl").write_text(rows([*stories(30, seed=2), *texts[100:140]]))

    def run(number, **changes):
        process = python(KILLED, tmp_path / "data", number, changes)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        (partial,) = (tmp_path / "data/tokens").glob("*.partial")
        return SimpleNamespace(partial=partial, noted=json.loads((partial / "journal.json").read_text()))

    return run


@pytest.mark.parametrize(
    "changes",
    [{}, {"split": "document", "val_fraction": 0.3}],
    ids=["fraction", "document"],
)
def test_a_killed_preparation_resumes_to_the_same_bytes(tmp_path, monkeypatch, killed, changes):
    monkeypatch.setattr(readers, "_BLOCK_BYTES", 400)
    monkeypatch.setattr(splits, "_BATCH_CHARS", 300)
    whole = corpus_of(tmp_path / "in", tmp_path / "whole", BPE, **changes)
    early = killed(90, **changes, threads=2)
    late = killed(101, **changes, threads=1)
    assert 0 < sum(early.noted["bytes"]) < sum(late.noted["bytes"])
    written = sum((late.partial / f"{split}.bin").stat().st_size for split in ("train", "val"))
    assert written > sum(late.noted["bytes"])
    monkeypatch.setattr(preparation, "_SYNC_BYTES", 1000)
    with open(late.partial / "train.bin", "rb") as first:  # kept open, so that no new file gets its inode
        corpus = corpus_of(tmp_path / "in", tmp_path / "data", BPE, **changes, threads=2)
        assert os.fstat(first.fileno()).st_ino == (folder_of(corpus) / "train.bin").stat().st_ino
    assert in_folder(corpus).keys() == in_folder(whole).keys()
    assert on_disk(corpus) == on_disk(whole)
    assert in_folder(corpus) == in_folder(whole)
    assert [path.name for path in (tmp_path / "data/tokens").iterdir() if path.is_dir()] == [folder_of(corpus).name]


def test_a_resumed_preparation_counts_the_documents_in_both_splits(tmp_path, monkeypatch, killed):
    whole = corpus_of(tmp_path / "in", tmp_path / "whole", BPE)
    assert whole.provenance["duplicates"] > 0
    killed(200)  # after most of the duplicates were read
    monkeypatch.setattr(readers, "_BLOCK_BYTES", 400)
    monkeypatch.setattr(splits, "_BATCH_CHARS", 300)
    corpus = corpus_of(tmp_path / "in", tmp_path / "data", BPE)
    assert corpus.provenance["duplicates"] == whole.provenance["duplicates"]


def test_a_damaged_text_leaves_no_partial_files(tmp_path, monkeypatch):
    monkeypatch.setattr(splits, "_BATCH_CHARS", 300)
    monkeypatch.setattr(preparation, "_SYNC_BYTES", 1000)
    with pytest.raises(UserError, match=r"line 301: not JSON"):
        prepare(rows(stories(300)) + "{", tmp_path, "byte", name="mine.jsonl", split="document")
    assert leftovers(tmp_path) == []


def test_prepared_token_files_load_again(tmp_path):
    corpus = prepare(rows(stories(50)), tmp_path, BPE, name="mine.jsonl")
    again = token_files.load(folder_of(corpus))
    assert (again.train, again.val, again.provenance) == (corpus.train, corpus.val, corpus.provenance)
    assert again.tokenizer.to_dict() == corpus.tokenizer.to_dict()
