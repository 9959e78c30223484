"""Token files, against numpy."""

import io
import os
import re
import shutil
import tempfile
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import corpus_of, folder_of, prepare
from hypothesis import given, settings
from hypothesis import strategies as st
from test_batches import batches

from minigpt.data import token_files
from minigpt.data.checksums import token_files_checksum
from minigpt.data.token_files import Tokens
from minigpt.data.tokenizer import SEPARATOR, BPETokenizer, ByteTokenizer
from minigpt.utils.errors import UserError

TEXT = "a text that is prepared, broken and prepared again"
AB = BPETokenizer("bpe", [*(bytes([i]) for i in range(256)), None, b"ab"], {SEPARATOR: 256})
IDS = [sorted(set(TEXT)).index(character) for character in TEXT]


def files_of(corpus):
    return [*corpus.train.files, *corpus.val.files]


# Files as an array.


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 60), st.sampled_from(["uint16", "uint32"]), st.data())
def test_slices_and_windows_of_several_files_equal_those_of_an_array(length, dtype, data):
    array = np.random.default_rng(length).integers(0, 1 << 16, length).astype(dtype)
    bound = st.none() | st.integers(-70, 70)
    begin, end = data.draw(bound), data.draw(bound)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.bin" for i in range(4)]
        ends = sorted(data.draw(st.lists(st.integers(0, length), min_size=3, max_size=3)))
        for file, part in zip(files, np.split(array, ends), strict=True):
            part.tofile(file)
        tokens = Tokens(files, dtype, 1 << 16)
        assert len(tokens) == len(array)
        np.testing.assert_array_equal(tokens[begin:end], array[begin:end], strict=True)
        if len(array):
            width = data.draw(st.integers(1, len(array)))
            begins = data.draw(st.lists(st.integers(0, len(array) - width), max_size=8))
            index = np.array(begins, dtype=np.int64)[:, None] + np.arange(width)
            np.testing.assert_array_equal(tokens[index], array[index], strict=True)


# The folder of a prepared corpus.


def test_a_prepared_corpus_is_loaded_and_cannot_be_changed(tmp_path):
    corpus = prepare(TEXT, tmp_path)
    folder = folder_of(corpus)
    loaded = token_files.load(folder)
    assert (loaded.name, loaded.dtype, loaded.provenance) == ("mine.txt", "uint16", corpus.provenance)
    assert files_of(loaded) == [folder / "train.bin", folder / "val.bin"]
    assert (loaded.train.tokens, loaded.train.bytes, loaded.train.documents) == (45, 45, 1)
    assert (loaded.val.tokens, loaded.val.bytes, loaded.val.documents) == (5, 5, 1)
    assert loaded.tokenizer.to_dict() == corpus.tokenizer.to_dict()
    for split, ids in (("train", IDS[:45]), ("val", IDS[45:])):
        tokens = loaded.tokens(split)
        tokens[:5][0] = 0
        tokens[np.arange(5)[None]][0] = 0
        assert tokens[:].tolist() == np.fromfile(folder / f"{split}.bin", np.uint16).tolist() == ids


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: os.truncate(folder / "train.bin", 89),
        lambda folder: (folder / "val.bin").unlink(),
        lambda folder: (folder / "meta.json").write_text('{"name": "mi'),
        lambda folder: (folder / "meta.json").write_text('{"dtype": "uint64"}'),
    ],
    ids=["a file cut short by a byte", "a split lost", "meta.json cut short", "no such dtype"],
)
def test_broken_token_files_raise_and_are_rewritten_once_removed(tmp_path, spoil):
    folder = folder_of(prepare(TEXT, tmp_path))
    spoil(folder)
    for read in (lambda: token_files.load(folder), lambda: prepare(TEXT, tmp_path)):
        with pytest.raises(UserError, match=re.escape(f"remove {folder}")):
            read()
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="broken token files"):
        token_files.load(folder)
    corpus = prepare(TEXT, tmp_path)
    assert [*corpus.tokens("train")[:], *corpus.tokens("val")[:]] == IDS


@pytest.mark.parametrize(("val_fraction", "split"), [(0.4, "validation"), (0.6, "training")])
def test_each_split_must_have_block_size_plus_one_tokens(tmp_path, val_fraction, split):
    corpus = prepare("0123456789" * 2, tmp_path, val_fraction=val_fraction)
    corpus.check_length(7)
    with pytest.raises(UserError, match=rf"{split} split has 8 tokens.*model\.block_size"):
        corpus.check_length(8)


# nanoGPT's files.


def bins(folder, train, val):
    """Write two files of 16-bit ids or bytes."""
    files = folder / "train.bin", folder / "val.bin"
    for file, ids in zip(files, (train, val), strict=True):
        file.write_bytes(ids if isinstance(ids, bytes) else np.array(ids, dtype=np.uint16).tobytes())
    return {"train_bin": str(files[0]), "val_bin": str(files[1])}


def read_bins(folder, train, val, tokenizer=None):
    return token_files.load_bins(bins(folder, train, val), tokenizer or ByteTokenizer(), folder / "checksums.json")


def test_nanogpts_files_are_read_in_place(tmp_path):
    train, val = "to train on é".encode(), "to validate on é".encode()
    corpus = corpus_of(None, tmp_path / "data", "byte", **bins(tmp_path, [*train], [*val]))
    assert files_of(corpus) == [tmp_path / "train.bin", tmp_path / "val.bin"]
    assert corpus.tokens("train")[:].tolist() == [*train]
    assert corpus.tokens("val")[:].tolist() == [*val]
    assert (corpus.train.tokens, corpus.val.tokens, corpus.val.bytes) == (len(train), len(val), len(val))
    assert (corpus.name, corpus.dtype) == ("train.bin", "uint16")
    assert not (tmp_path / "data/tokens").exists()


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path):
    for name, ids in (("1", [1, 2]), ("[1]", [3, 4])):
        np.array(ids, np.uint16).tofile(tmp_path / f"{name}.bin")
    both = dict.fromkeys(("train_bin", "val_bin"), f"{tmp_path}/[1].bin")
    assert corpus_of(None, tmp_path / "data", "byte", **both).tokens("train")[:].tolist() == [3, 4]


def test_bytes_of_tokens_are_counted_without_separators(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "_SCAN_TOKENS", 3)
    corpus = read_bins(tmp_path, [1, 2], [97, 256, 257, 256], AB)
    assert (corpus.val.bytes, corpus.val.tokens, corpus.val.documents) == (3, 4, 2)
    assert corpus.tokenizer.start.tolist() == [256]
    without = read_bins(tmp_path, [1, 2], [97, 257], AB)
    assert (without.val.bytes, without.val.documents) == (3, 0)
    assert without.tokenizer.start.tolist() == [10]


@pytest.mark.parametrize("name", ["train", "val"])
def test_a_missing_or_odd_file_raises_with_the_config_key(tmp_path, name):
    good = {"train": [1, 2], "val": [3, 4]}
    for content in (b"", b"abc"):
        with pytest.raises(UserError, match=rf"data\.{name}_bin=.* has {len(content)} bytes, not .*16-bit"):
            read_bins(tmp_path, **good | {name: content})
    files = bins(tmp_path, **good)
    (tmp_path / f"{name}.bin").unlink()
    with pytest.raises(UserError, match=rf"data\.{name}_bin=.*{name}\.bin is not a file"):
        corpus_of(None, tmp_path, "byte", **files)
    with pytest.raises(UserError, match=r"data\.train_bin and data\.val_bin must be set together"):
        corpus_of(None, tmp_path, "byte", **files | {f"{name}_bin": None})


def test_nanogpts_files_with_a_tokenizer_built_from_text_raise(tmp_path):
    for tokenizer in ({"name": "char"}, {"name": "bpe", "vocab_size": 300}):
        with pytest.raises(UserError, match=rf"tokenizer={tokenizer['name']} .*tokenizer=gpt2"):
            corpus_of(None, tmp_path, tokenizer, **bins(tmp_path, [1, 2], [3, 4]))


# Other widths, and headers.

SPREAD = np.random.default_rng(1).integers(1, 256, (2, 100))  # ids of bytes


def llm_c(ids, dtype="<u2", magic=20240520, version=1, n=100):
    """Write as https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py does."""
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, n
    return header.tobytes() + ids.astype(dtype).tobytes()


def npy(ids, dtype="<u2"):
    np.save(content := io.BytesIO(), ids.astype(dtype))
    return content.getvalue()


@pytest.mark.parametrize(
    ("write", "dtype"),
    [
        *((lambda ids, width=width: ids.astype(f"<i{width}").tobytes(), f"uint{8 * width}") for width in (2, 4, 8)),
        *((partial(npy, dtype=f"<{kind}"), f"uint{8 * int(kind[1])}") for kind in ("u1", "u2", "i4", "i8")),
        (llm_c, "uint16"),
        (partial(llm_c, dtype="<u4", magic=20240801, version=7), "uint32"),
    ],
    ids=["2 bytes", "4 bytes", "8 bytes", "npy 1", "npy 2", "npy 4", "npy 8", "llm.c GPT-2", "llm.c Llama 3"],
)
def test_ids_of_another_width_or_after_a_header_are_read_as_they_are(tmp_path, write, dtype):
    corpus = read_bins(tmp_path, *map(write, SPREAD))
    assert (corpus.dtype, corpus.train.tokens, corpus.val.tokens, corpus.val.bytes) == (dtype, 100, 100, 100)
    windows = np.arange(90)[:, None] + np.arange(10)
    for split, ids in zip(("train", "val"), SPREAD, strict=True):
        tokens = corpus.tokens(split)
        assert tokens[:].tolist() == ids.tolist()
        np.testing.assert_array_equal(tokens[windows], ids[windows])


def test_wide_ids_are_recognized_after_and_among_many_zeros(tmp_path):
    for i, zeros in enumerate((np.zeros(5000, int), np.where(np.arange(5000) % 7, 0, 200))):
        ids = np.concatenate((zeros, SPREAD[0]))
        corpus = read_bins(tmp_path, *[ids.astype("<u4").tobytes()] * 2)
        assert (corpus.dtype, corpus.train.tokens) == ("uint32", len(ids)), i


def test_files_of_several_headers_are_one_array(tmp_path):
    for i, content in enumerate((llm_c(SPREAD[0]), npy(SPREAD[1]), SPREAD[0].astype("<u2").tobytes())):
        (tmp_path / f"{i}.bin").write_bytes(content)
    both = dict.fromkeys(("train_bin", "val_bin"), f"{tmp_path}/*.bin")
    tokens = corpus_of(None, tmp_path / "data", "byte", **both).tokens("train")
    assert tokens[:].tolist() == tokens[np.arange(300)].tolist() == [*SPREAD[0], *SPREAD[1], *SPREAD[0]]


def test_ids_of_a_large_vocabulary_have_32_bits(tmp_path):
    large = BPETokenizer("bpe", [bytes([i]) for i in range(256)], {SEPARATOR: 256})
    large.vocab_size = 100_000
    train, val = (np.random.default_rng(i).integers(0, 100_000, 100) for i in range(2))
    corpus = read_bins(tmp_path, train.astype("<u4").tobytes(), val.astype("<u4").tobytes(), large)
    assert (corpus.tokens("train")[:].tolist(), corpus.tokens("val")[:].tolist()) == (train.tolist(), val.tolist())
    with pytest.raises(UserError, match=r"val\.bin has a token id .* its ids have another width"):
        read_bins(tmp_path, *(ids.astype("<u2").tobytes() for ids in (train, val)), large)


def torch_file(ids):
    torch.save(torch.tensor(np.tile(ids, 99)), content := io.BytesIO())
    return content.getvalue()


REFUSED = {
    "ids outside the vocabulary": (lambda ids: (ids + 256).astype("<u4").tobytes(), "no ids of this tokenizer"),
    "big-endian ids": (lambda ids: ids.astype(">u4").tobytes(), "no ids of this tokenizer"),
    "a file of torch": (torch_file, "(no ids of this tokenizer|not an array of .*ids)"),
    "two dimensions": (
        lambda ids: npy(ids.reshape(10, 10)),
        r"must be an array of integers \(N,\), got uint16 \(10, 10",
    ),
    "floats": (partial(npy, dtype="<f4"), "must be an array of integers .*, got float32"),
    "a big-endian array": (partial(npy, dtype=">u2"), "must be an array of integers .*, got >u2"),
    "objects": (partial(npy, dtype=object), "cannot be read by NumPy"),
    "half an array": (lambda ids: npy(ids)[:200], "cannot be read by NumPy"),
    "half a file of llm.c": (lambda ids: llm_c(ids)[:-2], "not a complete token file of llm.c"),
    "an evaluation of llm.c": (partial(llm_c, magic=20240522), "not a complete token file of llm.c"),
    "an unknown version": (partial(llm_c, version=2), "not a complete token file of llm.c"),
    "a text": (lambda ids: ("à la carte " * 999).encode(), "is a text, not an array of ids; set data.path"),
}


@pytest.mark.parametrize(("write", "problem"), REFUSED.values(), ids=REFUSED)
def test_files_that_are_not_ids_are_refused_with_the_config_key(tmp_path, write, problem):
    with pytest.raises(UserError, match=rf"data\.train_bin=\S*train\.bin .*{problem}") as error:
        read_bins(tmp_path, *map(write, SPREAD))
    assert "\n" not in str(error.value)


def test_splits_of_two_widths_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"data\.train_bin and data\.val_bin must have ids of one width"):
        read_bins(tmp_path, SPREAD[0].astype("<u2").tobytes(), SPREAD[1].astype("<u4").tobytes())


# Many files.

RANDOM_IDS = np.random.default_rng(0).integers(0, 256, 6000).astype(np.uint16)


def write_parts(folder, n=12, ids=RANDOM_IDS):
    """Write ids to `n` files of different sizes, and 200 of them to a validation file; return the settings."""
    folder.mkdir(exist_ok=True)
    ends = np.sort(np.random.default_rng(n).choice(np.arange(1, len(ids)), n - 1, replace=False))
    for i, part in enumerate(np.split(ids, ends)):
        part.tofile(folder / f"train_{i:04}.bin")
    ids[:200].tofile(folder / "val.bin")
    return {"train_bin": f"{folder}/train_*.bin", "val_bin": [f"{folder}/val.bin"]}


def test_many_files_have_the_batches_of_one_with_few_file_descriptors(tmp_path):
    files = write_parts(tmp_path, n=700)  # many are shorter than a window
    tokens = corpus_of(None, tmp_path, "byte", **files).tokens("train")
    assert np.array_equal(tokens[:], RANDOM_IDS)
    read, expected = (batches(6000, tokens=each, block_size=16) for each in (tokens, RANDOM_IDS))
    assert all(torch.equal(a, b) for a, b in zip(chain(*read), chain(*expected), strict=True))
    if os.path.isdir("/proc/self/fd"):
        assert len(os.listdir("/proc/self/fd")) < 600


def test_the_checksum_of_many_files_depends_on_their_content_and_not_on_their_place(tmp_path):
    settings = [write_parts(tmp_path / name, ids=ids) for name, ids in (("a", RANDOM_IDS), ("b", RANDOM_IDS))]
    settings += [settings[0] | {"train_bin": sorted(map(str, tmp_path.glob("a/train_*.bin")))}]
    settings += [write_parts(tmp_path / "c", ids=RANDOM_IDS ^ 1), settings[0] | {"train_bin": f"{tmp_path}/a/*1.bin"}]
    first, second, listed, *others = (corpus_of(None, tmp_path, "byte", **each).sha256 for each in settings)
    assert first == second == listed
    assert first not in others
    many = [1] * 100_000  # more than a sample; the content of one file is read whole
    assert read_bins(tmp_path, [*many, 3], [4, 5]).sha256 != read_bins(tmp_path, [*many, 4], [4, 5]).sha256


def test_the_checksum_of_many_files_samples_64_of_them_evenly(tmp_path):
    write_parts(tmp_path, n=130)
    train, val = sorted(tmp_path.glob("train_*.bin")), [tmp_path / "val.bin"]
    before, sampled = token_files_checksum(train, val, None), []
    for number, file in enumerate(train):
        content = file.read_bytes()
        file.write_bytes((np.frombuffer(content, np.uint16) ^ 1).tobytes())
        sampled += [number] * (token_files_checksum(train, val, None) != before)
        file.write_bytes(content)
    assert len(sampled) == 64
    assert {*np.diff([-1, *sampled, 130])} <= {1, 2, 3}


def test_an_id_outside_the_vocabulary_raises_with_its_file(tmp_path):
    settings = write_parts(tmp_path)
    np.array([1, 2, 256], dtype=np.uint16).tofile(tmp_path / "train_0005.bin")
    tokens = corpus_of(None, tmp_path, "byte", **settings).tokens("train")
    for index in (slice(None), np.arange(len(tokens))[None]):
        with pytest.raises(UserError, match=r"train_0005\.bin has a token id 256, outside the vocabulary of 256"):
            tokens[index]
    write_parts(tmp_path, ids=RANDOM_IDS + 100)
    with pytest.raises(UserError, match=r"val\.bin has a token id .*, outside the vocabulary"):  # before training
        corpus_of(None, tmp_path, "byte", **settings)
