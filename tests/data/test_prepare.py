"""Prepared token files, against nanoGPT's prepare.py, numpy, and the text itself."""

import os
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import accumulate, islice
from pathlib import Path

import numpy as np
import pytest
from corpora import (
    SHAKESPEARE,
    corpus_of,
    folder_of,
    nanogpt,
    needs_shakespeare,
    on_disk,
    prepare,
    rows,
    stories,
    texts_on_disk,
    values,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from refusals import refused

from minigpt.data import prepare as preparation
from minigpt.data import readers
from minigpt.data.tokenizer import token_dtype
from minigpt.extras.huggingface import whole_documents

UNICODE = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\ufeff"), min_size=2
)
BPE = {"name": "bpe", "vocab_size": 300}


def in_folder(corpus):
    return {file.name: file.read_bytes() for file in folder_of(corpus).iterdir()}


def leftovers(folder):
    return [path for path in (folder / "tokens").rglob("*") if path.suffix != ".lock"]


def in_parts(patch, chars):
    patch.setattr(readers, "_BLOCK_BYTES", chars)
    patch.setattr(preparation, "_BATCH_CHARS", chars)


def test_a_separator_gives_the_ids_of_the_same_documents_in_json_lines(tmp_path, capsys):
    texts = stories(40)
    plain = "\n<|endoftext|>\n".join(texts) + "\n<|endoftext|>\n"
    rowed = prepare(rows(texts), tmp_path, BPE, name="a.jsonl")
    separated = prepare(plain, tmp_path, BPE, separator="<|endoftext|>")
    assert on_disk(separated) == on_disk(rowed)
    assert (separated.val.documents, separated.val.bytes) == (rowed.val.documents, rowed.val.bytes)
    assert capsys.readouterr().err == ""
    one = prepare(plain, tmp_path, BPE)  # again, as one document
    assert one.train.documents == 1
    assert one.sha256 != separated.sha256
    assert "data.separator='<|endoftext|>' splits text files there" in capsys.readouterr().err


@needs_shakespeare
def test_tiny_shakespeare_has_the_splits_and_ids_of_nanogpt(tmp_path):
    text = SHAKESPEARE.read_text(encoding="utf-8")
    (tmp_path / "mine.txt").write_text(text, encoding="utf-8")
    corpus = corpus_of(tmp_path / "mine.txt", tmp_path, **values("shakespeare_char"))
    assert (corpus.name, corpus.tokenizer.vocab_size) == ("tinyshakespeare", 65)
    assert on_disk(corpus) == nanogpt(text)
    if os.environ.get("TIKTOKEN_CACHE_DIR"):
        import tiktoken

        encode = tiktoken.get_encoding("gpt2").encode_ordinary
        expected = [encode(text[:1_003_854]), encode(text[1_003_854:])]
        assert on_disk(corpus_of(SHAKESPEARE, tmp_path, "gpt2")) == expected


@settings(deadline=None, max_examples=30)
@given(UNICODE, st.integers(1, 9))
def test_reading_in_chunks_does_not_change_the_ids(text, chunk):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        in_parts(patch, chunk)  # characters of several bytes lie across the chunks
        patch.setattr(readers, "_MAX_CHUNK_CHARS", chunk)
        corpus = prepare(text, Path(folder))
        assert on_disk(corpus) == nanogpt(text)
        assert corpus.val.bytes == len(text[int(len(text) * 0.9) :].encode())


def test_ids_have_32_bits_if_they_do_not_fit_into_16(tmp_path):
    assert token_dtype(1 << 16) == "uint16"
    points = np.random.default_rng(0).permutation(np.arange(0x10000, 0x20001))
    corpus = prepare("".join(map(chr, points)), tmp_path)
    assert (corpus.tokenizer.vocab_size, corpus.dtype) == ((1 << 16) + 1, "uint32")
    train, val = on_disk(corpus)
    assert train + val == (points - 0x10000).tolist()


def test_an_unsuitable_text_raises_and_leaves_no_partial_files(tmp_path, monkeypatch):
    in_parts(monkeypatch, 300)
    empty = tmp_path / "empty.txt"
    empty.touch()
    by_document = {"split": "document"}
    none = "none of the 1 documents is for"
    for content, tokenizer, changes, problem in (
        ("", "char", {}, r"mine\.jsonl is empty"),
        (rows(["", ""]), "byte", by_document, r"mine\.jsonl is empty"),
        (rows(["a"]), "byte", {}, rf"{none} training;.*data\.val_fraction"),
        (rows(["only one"]), "char", by_document, rf"{none} validation;.*data\.split=f"),
        (rows(["", "only one"]), "byte", by_document, f"{none} validation"),
        (rows(["a text"]), "char", {"val_path": str(empty)}, r"empty\.txt is empty"),
        (rows(["a text"]), "byte", {"val_path": str(empty)}, r"empty\.txt is empty"),
        (rows(["", ""]), "byte", {"val_path": __file__}, r"mine\.jsonl is empty"),
        (rows(stories(300)) + "{", "byte", by_document, "line 301: not JSON"),
    ):
        refused(problem, prepare, content, tmp_path, tokenizer, name="mine.jsonl", **changes)
        assert leftovers(tmp_path) == []


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.text("abc é€😀\n", max_size=12), min_size=2, max_size=30),
    st.sampled_from([0.1, 0.3, 0.5, 0.8]),
)
def test_a_cut_is_at_the_start_of_a_document_that_leaves_each_split_its_share_within_a_fifth(
    texts, fraction
):
    size = sum(map(len, texts))
    wanted = int(size * (1 - fraction))
    assume(0 < wanted < size)
    starts = list(accumulate(map(len, texts[:-1])))
    nearest = min(abs(start - wanted) for start in starts)
    near = []
    if nearest <= min(wanted, size - wanted) / 5:
        near = [start for start in starts if abs(start - wanted) == nearest]
    with tempfile.TemporaryDirectory() as folder:
        given = {"name": "mine.jsonl", "val_fraction": fraction}
        corpus = prepare(rows(texts), Path(folder), "byte", **given)
        found = texts_on_disk(corpus)
    expected = []
    for cut in near or [wanted]:
        train = []
        val = []
        for begin, text in zip([0, *starts], texts, strict=True):
            inside = max(0, cut - begin)
            train.append(text[:inside])
            val.append(text[inside:])
        expected.append(["\n".join(filter(None, part)) for part in (train, val)])
    assert found in expected
    assert corpus.provenance.get("cut") == (None if near else "within a document")


@pytest.mark.parametrize(
    "sizes",
    [
        (10_000, 1_000_000),
        (1_000_000, 10_000),
        (5_000, 1_000_000),
        (3_000, 3_000),
        (2_000,) * 3,
        (0, 9_000),
        (9_000, 0),
    ],
)
def test_files_of_any_sizes_give_the_validation_split_its_share(tmp_path, sizes):
    for i, size in enumerate(sizes):
        (tmp_path / f"{i}.txt").write_text(("many words " * size)[:size], encoding="utf-8")
    corpus = corpus_of(tmp_path, tmp_path / "data", "byte")
    assert corpus.val.bytes == pytest.approx(0.1 * sum(sizes), abs=1)
    assert corpus.train.bytes + corpus.val.bytes == sum(sizes)


def test_split_document_selects_about_val_fraction_of_the_distinct_documents_whatever_else_there_is(
    tmp_path,
):
    texts = [*stories(1000), *stories(150)]  # 150 occur twice
    selected = []
    for documents, share in ((texts, 0.1), (texts[::-1][:750], 0.1), (texts, 0.2)):
        given = {"name": "a.jsonl", "split": "document", "val_fraction": share}
        corpus = prepare(rows(documents), tmp_path, "byte", **given)
        train, val = (text.split("\n") for text in texts_on_disk(corpus))
        selected.append(set(val))
        assert train == [text for text in documents if text not in selected[-1]]
        assert val == [text for text in documents if text in selected[-1]]
        assert corpus.provenance["duplicates"] == 0
    first, fewer, more = selected
    assert 60 < len(first) < 140  # 100, give or take four standard deviations
    assert fewer == first & set(texts[::-1][:750])
    assert first < more


@pytest.mark.parametrize("split", ["document", "fraction"])
def test_documents_of_several_chunks_are_whole_and_have_separators_between_them(
    tmp_path, monkeypatch, split
):
    in_parts(monkeypatch, 100)
    texts = ["", *("\n".join(stories(9, seed)) for seed in range(20)), "", *stories(20), ""]
    corpus = prepare(rows(texts), tmp_path, BPE, name="a.jsonl", split=split, val_fraction=0.4)
    found = []
    for part, ids in zip((corpus.train, corpus.val), on_disk(corpus), strict=True):
        documents = corpus.tokenizer.names(ids).split("<|endoftext|>")
        assert (part.documents, part.bytes) == (len(documents), len("".join(documents).encode()))
        found += documents
    if split == "document":
        found.sort(key=texts.index)
    assert found == [text for text in texts if text]
    assert corpus.tokenizer.names(corpus.tokenizer.start) == "<|endoftext|>"


def test_a_separate_validation_text_is_the_validation_split_and_its_documents_in_both_are_counted(
    tmp_path, capsys
):
    train = stories(30)
    val = stories(20, seed=1)
    file = tmp_path / "val.jsonl"

    def corpus(train, val, tokenizer="byte"):
        file.write_text(rows(val), encoding="utf-8")
        return prepare(rows(train), tmp_path, tokenizer, name="mine.jsonl", val_path=str(file))

    own = corpus(train, val)
    assert texts_on_disk(own) == ["\n".join(train), "\n".join(val)]
    assert own.sha256 != prepare(rows(train), tmp_path, "byte", name="mine.jsonl").sha256
    # The alphabet is that of both
    assert texts_on_disk(corpus(train, ["ξ"], "char")) == ["\n".join(train), "ξ"]
    assert capsys.readouterr().err == ""
    shared = corpus([*train, train[3]], [train[3], "new", *[train[7]] * 3, train[29]])
    assert shared.provenance["duplicates"] == 4  # in the training split; one occurs twice
    assert "warning: 4 training documents of mine.jsonl " in capsys.readouterr().err


@pytest.mark.parametrize("split", ["fraction", "document"])
def test_bpe_is_trained_on_the_training_split_alone(tmp_path, split):
    # All equally frequent; each has a last byte of its own
    runs = [chr(0x4E00 + i) * 200 for i in range(30)]
    content = "".join(runs) if split == "fraction" else rows(runs)
    name = "mine.txt" if split == "fraction" else "mine.jsonl"
    own = {"name": name, "val_fraction": 0.3, "split": split}
    corpus = prepare(content, tmp_path, BPE | {"vocab_size": 330}, **own)
    train, val = (set("".join(runs)) & set(text) for text in texts_on_disk(corpus))
    merged = b"".join(corpus.tokenizer.tokens[256:])
    assert {run[0] for run in runs if run.encode()[2] in merged} == train
    assert len(val - train) > 3


def test_token_files_are_byte_identical_for_any_number_of_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "_BATCH_CHARS", 700)
    text = rows(stories(300))
    found = {}
    for n in (1, 2, 4):
        found[n] = in_folder(prepare(text, tmp_path / f"{n}", BPE, name="mine.jsonl", threads=n))
    assert found[1] == found[2] == found[4]


def test_token_files_are_written_again_only_for_another_text_split_or_tokenizer(tmp_path):
    text = "\n".join(stories(100))
    first = folder_of(prepare(text, tmp_path, BPE, val_fraction=0.1))
    others = {
        folder_of(prepare(text, tmp_path, BPE, val_fraction=0.2)),
        folder_of(prepare(text[:-1] + "?", tmp_path, BPE)),
        folder_of(prepare(text, tmp_path, BPE | {"vocab_size": 301})),
    }
    assert len(others | {first}) == 4
    times = [file.stat().st_mtime_ns for file in first.iterdir()]
    assert folder_of(prepare(text, tmp_path, BPE)) == first
    assert [file.stat().st_mtime_ns for file in first.iterdir()] == times


def test_a_second_preparation_waits_for_the_first(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("a text that two prepare")
    write = preparation._write_corpus
    begun = []
    warned = threading.Event()

    def wait(*arguments):
        begun.append(arguments)
        assert warned.wait(300)
        write(*arguments)

    monkeypatch.setattr(preparation, "_write_corpus", wait)
    monkeypatch.setattr(preparation, "warn", lambda text: "waiting for it" in text and warned.set())
    with ThreadPoolExecutor(2) as pool:
        both = [*pool.map(corpus_of, [tmp_path / "text.txt"] * 2, [tmp_path] * 2)]
    assert [*map(on_disk, both)] == [nanogpt("a text that two prepare")] * 2
    assert len(begun) == 1


def test_an_interrupted_preparation_leaves_nothing_and_what_a_killed_one_leaves_is_not_used(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(preparation, "_BATCH_CHARS", 300)
    text = "\n".join(stories(50))
    tokens = tmp_path / "tokens"
    killed = tmp_path / "killed"
    tokenize = preparation.tokenize

    def interrupted(*arguments):
        yield from islice(tokenize(*arguments), 3)
        shutil.copytree(tokens, killed)  # what a killed process leaves
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "tokenize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(text, tmp_path, "byte")
    assert leftovers(tmp_path) == []
    shutil.rmtree(tokens)
    killed.rename(tokens)
    (partial,) = tokens.glob("*.partial")
    assert {file.name for file in partial.iterdir()} == {"train.bin", "val.bin"}
    (tokens / f".fox-{partial.name}").mkdir()  # of the user
    corpus = prepare(text, tmp_path, "byte")
    assert in_folder(corpus) == in_folder(prepare(text, tmp_path / "whole", "byte"))
    (tokens / f".fox-{partial.name}").rmdir()
    assert [path for path in leftovers(tmp_path) if path.is_dir()] == [folder_of(corpus)]


@pytest.mark.parametrize(
    "stem", ["訓" * 83, "𠀋" * 62, "🎉" * 62], ids=["3 bytes", "4 bytes", "emoji"]
)
def test_a_text_of_the_longest_name_is_prepared_on_a_host_of_the_longest_name(
    tmp_path, monkeypatch, stem
):
    monkeypatch.setattr("platform.node", lambda: "h" * 64)
    (tmp_path / f"{stem}.txt").write_text("the fox " * 100, encoding="utf-8")
    corpus = corpus_of(tmp_path / f"{stem}.txt", tmp_path)
    assert len(corpus.tokens("train")) + len(corpus.tokens("val")) == 800
    assert len(leftovers(tmp_path)) == 4  # the folder, both splits and meta.json


def test_a_folder_in_the_place_of_token_files_is_refused_and_stays(tmp_path):
    corpus = prepare("fox " * 100, tmp_path, "byte")
    (folder_of(corpus) / "meta.json").unlink()
    before = in_folder(corpus)
    message = f"{folder_of(corpus)} has files but no meta.json; remove it, or set data.fold"
    refused(message, prepare, "fox " * 100, tmp_path, "byte")
    assert in_folder(corpus) == before


def test_hosts_that_do_not_see_the_locks_of_each_other_prepare_the_same_files(
    tmp_path, monkeypatch
):
    # One host begins and ends while another is at work
    text = "\n".join(stories(50))
    hosts = iter(["one", "other", "whole"])
    monkeypatch.setattr(preparation, "_lock", lambda _: nullcontext())
    monkeypatch.setattr("platform.node", lambda: next(hosts))
    build = preparation._build_meta
    corpora = []

    def build_late(*arguments):
        monkeypatch.setattr(preparation, "_build_meta", build)
        corpora.append(prepare(text, tmp_path, "byte"))
        return build(*arguments)

    monkeypatch.setattr(preparation, "_build_meta", build_late)
    corpora.append(prepare(text, tmp_path, "byte"))
    whole = in_folder(prepare(text, tmp_path / "whole", "byte"))
    assert in_folder(corpora[0]) == in_folder(corpora[1]) == whole
    assert [path for path in leftovers(tmp_path) if path.is_dir()] == [folder_of(corpora[0])]


def test_long_documents_are_joined_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(whole_documents, "_MAX_JOINED_CHARS", 10)
    texts = ["abcdef", "ghi", "jkl", "mnopqrs", "t", "u"]
    chunks = [readers.TextChunk(text, text in ("abcdef", "t")) for text in texts]
    joined = whole_documents.join_chunks((preparation.TRAIN, chunk) for chunk in chunks)
    expected = [("abcdefghi", True), ("jklmnopqrs", False), ("tu", True)]
    assert [tuple(chunk) for _, chunk in joined] == expected
