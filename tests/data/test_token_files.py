"""Token files, against numpy; batches: each window once per epoch, on any number of ranks."""

import io
import math
import os
import re
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from corpora import corpus_of, folder_of, on_disk, prepare, rows, write_files
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from small_runs import composed

from minigpt.data import batches as module
from minigpt.data import token_files
from minigpt.data.batches import Batches, ValidationBatches, WindowOrder, permute
from minigpt.data.token_files import Corpus, Split
from minigpt.data.tokenizer import SEPARATOR, BPETokenizer, ByteTokenizer, CharTokenizer
from minigpt.extras.corpora import token_bins
from minigpt.extras.corpora.token_parts import TokenParts
from minigpt.runs.run_config import RunConfig
from minigpt.runs.trainer import TokenDataModule
from minigpt.utils.errors import UserError

TEXT = "a text that is prepared, broken and prepared again"
AB = BPETokenizer("bpe", [*(bytes([i]) for i in range(256)), None, b"ab"], {SEPARATOR: 256})
BPE = {"name": "bpe", "vocab_size": 260}
IDS = [sorted(set(TEXT)).index(character) for character in TEXT]
RANDOM_IDS = np.random.default_rng(0).integers(0, 256, 6000).astype(np.uint16)
SPREAD = np.random.default_rng(1).integers(1, 256, (2, 100))  # ids of bytes


def ids_of(corpus):
    return [corpus.tokens(split)[:].tolist() for split in ("train", "val")]


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 60), st.sampled_from(["uint16", "uint32"]), st.data())
def test_slices_and_windows_of_several_files_equal_those_of_an_array(length, dtype, data):
    array = np.random.default_rng(length).integers(0, 1 << 16, length).astype(dtype)
    bound = st.integers(-70, 70)
    begin = data.draw(st.none() | bound)
    end = data.draw(st.none() | bound)
    ends = sorted(data.draw(st.lists(st.integers(0, length), min_size=3, max_size=3)))
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.bin" for i in range(4)]
        for file, part in zip(files, np.split(array, ends), strict=True):
            part.tofile(file)
        tokens = TokenParts(files, dtype, 1 << 16)
        assert len(tokens) == len(array)
        np.testing.assert_array_equal(tokens[begin:end], array[begin:end], strict=True)
        index = np.arange(length - length % 2).reshape(2, -1)[:, data.draw(bound) :]
        np.testing.assert_array_equal(tokens[index], array[index], strict=True)


def test_a_prepared_corpus_is_loaded_and_cannot_be_changed(tmp_path):
    corpus = prepare(TEXT, tmp_path)
    loaded = token_files.load(folder_of(corpus))
    assert (corpus.name, corpus.dtype) == ("mine.txt", "uint16")
    assert replace(loaded, tokenizer=None) == replace(corpus, tokenizer=None)
    assert loaded.tokenizer.to_dict() == corpus.tokenizer.to_dict()
    for split in ("train", "val"):
        loaded.tokens(split)[:5][0] = 0
    assert on_disk(loaded) == ids_of(loaded) == [IDS[:45], IDS[45:]]
    refused(r"validation split has 5 tokens, .* 6; .*model\.block_size", loaded.check_length, 5)


@pytest.mark.parametrize(
    ("texts", "fraction", "proposed"),
    [
        (["x" * 300], 0.1, "0.28"),
        (["x" * 11] * 20, 0.1, "0.35"),
        (["x" * 300], 0.9, "0.72"),
        (["x" * 150], 0.3, None),
    ],
)
def test_a_split_that_is_too_short_is_refused_with_a_share_that_is_long_enough(
    tmp_path, texts, fraction, proposed
):
    def check(**changes):
        prepare(rows(texts), tmp_path, "byte", name="mine.jsonl", **changes).check_length(64)

    message = r"but a window needs .* = 65; .*a smaller model\.block_size"
    error = refused(message, check, val_fraction=fraction)
    proposals = re.findall(r"set data\.val_fraction=([\d.]+),", str(error))
    assert proposals == ([proposed] if proposed else [])
    for share in proposals:
        check(val_fraction=float(share))


def test_no_share_is_proposed_for_a_validation_text_of_its_own(tmp_path):
    (tmp_path / "val.txt").write_text("short")
    corpus = prepare("long " * 100, tmp_path, "byte", val_path=f"{tmp_path}/val.txt")
    error = refused("the validation split has 5 tokens", corpus.check_length, 64)
    assert "val_fraction" not in str(error)


def test_broken_token_files_raise_and_are_rewritten_once_removed(tmp_path):
    for spoil in (
        lambda folder: os.truncate(folder / "train.bin", 89),
        lambda folder: (folder / "val.bin").unlink(),
        lambda folder: (folder / "meta.json").write_text('{"dtype": "uint64"}'),
    ):
        corpus = prepare(TEXT, tmp_path)
        assert ids_of(corpus) == [IDS[:45], IDS[45:]]
        folder = folder_of(corpus)
        spoil(folder)
        message = rf"broken token files .* remove {folder}"
        refused(message, token_files.load, folder)
        refused(message, prepare, TEXT, tmp_path)
        shutil.rmtree(folder)


def raw(ids, dtype="<u2"):
    return np.array(ids).astype(dtype).tobytes()


def bins(folder, *contents):
    write_files(folder, dict(zip(("train.bin", "val.bin"), contents, strict=True)))
    return {"train_bin": f"{folder}/train.bin", "val_bin": f"{folder}/val.bin"}


def read_bins(folder, train, val, tokenizer=None):
    return token_bins.load_bins(bins(folder, train, val), tokenizer or ByteTokenizer(), folder)


def llm_c(ids, dtype="<u2", magic=20240520, version=1, n=100):
    # Write as https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py does
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, n
    return header.tobytes() + ids.astype(dtype).tobytes()


def npy(ids, dtype="<u2"):
    content = io.BytesIO()
    np.save(content, ids.astype(dtype))
    return content.getvalue()


def test_nanogpts_files_are_read_in_place_with_the_bytes_of_their_tokens_but_separators(
    tmp_path, monkeypatch
):
    train = [*"to train on é".encode()]
    val = [*"to validate on é".encode()]
    corpus = corpus_of(None, tmp_path / "data", "byte", **bins(tmp_path, raw(train), raw(val)))
    assert corpus.train.files == [tmp_path / "train.bin"]
    assert corpus.val.files == [tmp_path / "val.bin"]
    assert ids_of(corpus) == [train, val]
    assert corpus.train.tokens == len(train)
    assert corpus.val.tokens == corpus.val.bytes == len(val)
    monkeypatch.setattr(token_bins, "_SCAN_TOKENS", 3)
    corpus = read_bins(tmp_path, raw([1, 2]), raw([97, 256, 257, 256]), AB)
    assert (corpus.val.bytes, corpus.val.tokens, corpus.val.documents) == (3, 4, 2)
    assert corpus.tokenizer.start.tolist() == [256]
    assert read_bins(tmp_path, raw([1, 2]), raw([97, 257]), AB).tokenizer.start.tolist() == [10]


def test_ids_of_another_width_or_after_a_header_are_read_as_they_are(tmp_path):
    written = [(partial(raw, dtype=f"<u{width}"), 8 * width) for width in (2, 4, 8)]
    written += [(partial(npy, dtype="<u1"), 8), (partial(npy, dtype="<i8"), 64)]
    written += [(llm_c, 16), (partial(llm_c, dtype="<u4", magic=20240801, version=7), 32)]
    for write, bits in written:
        corpus = read_bins(tmp_path, *map(write, SPREAD))
        assert (corpus.dtype, corpus.val.bytes) == (f"uint{bits}", 100)
        for split, ids in zip(("train", "val"), SPREAD, strict=True):
            tokens = corpus.tokens(split)
            assert tokens[:].tolist() == tokens[np.arange(100)].tolist() == ids.tolist()


def test_wide_ids_are_recognized_after_and_among_many_zeros_and_have_32_bits_in_a_large_vocabulary(
    tmp_path,
):
    for zeros in (np.zeros(5000, int), np.where(np.arange(5000) % 7, 0, 200)):
        corpus = read_bins(tmp_path, *[raw([*zeros, *SPREAD[0]], "<u4")] * 2)
        assert (corpus.dtype, corpus.train.tokens) == ("uint32", 5100)
    large = BPETokenizer("bpe", [bytes([i]) for i in range(256)], {SEPARATOR: 256})
    large.vocab_size = 100_000
    train, val = np.random.default_rng(0).integers(0, 100_000, (2, 100))
    corpus = read_bins(tmp_path, raw(train, "<u4"), raw(val, "<u4"), large)
    assert ids_of(corpus) == [train.tolist(), val.tolist()]
    refused(
        r"val\.bin has a token id .* its ids have another width",
        read_bins,
        tmp_path,
        raw(train),
        raw(val),
        large,
    )


REFUSED = {
    "half an id": (lambda ids: b"abc", "has 3 bytes, not an array of 16-bit ids"),
    "ids outside the vocabulary": (lambda ids: raw(ids + 256, "<u4"), "no ids of this tokenizer"),
    "two dimensions": (
        lambda ids: npy(ids.reshape(10, 10)),
        r"array of integers \(N,\), got uint16 \(10, 10",
    ),
    "floats": (partial(npy, dtype="<f4"), "must be an array of integers .*, got float32"),
    "objects": (partial(npy, dtype=object), "cannot be read by NumPy"),
    "half a file of llm.c": (lambda ids: llm_c(ids)[:-2], "not a complete token file of llm.c"),
    "an unknown version": (partial(llm_c, version=2), "not a complete token file of llm.c"),
    "a text": (
        lambda ids: ("à la carte " * 999).encode(),
        "is a text, not an array of ids; set data.path",
    ),
}


@pytest.mark.parametrize(("write", "problem"), REFUSED.values(), ids=REFUSED)
def test_files_that_are_not_ids_are_refused_with_the_config_key(tmp_path, write, problem):
    for name, ids in (("train", SPREAD), ("val", SPREAD[::-1])):
        contents = {"train": raw(SPREAD[0]), "val": raw(SPREAD[1])} | {name: write(ids[0])}
        refused(rf"data\.{name}_bin=\S*{name}\.bin .*{problem}", read_bins, tmp_path, **contents)


def test_settings_that_do_not_fit_token_files_are_refused(tmp_path):
    refused(
        r"data\.train_bin and data\.val_bin must have ids of one width",
        read_bins,
        tmp_path,
        raw(SPREAD[0]),
        raw(SPREAD[1], "<u4"),
    )
    files = bins(tmp_path, raw([1, 2]), raw([3, 4]))
    for name, changes, problem in (
        ("byte", {"train_bin": None}, r"data\.train_bin and data\.val_bin must be set together"),
        ("byte", {"val_bin": f"{tmp_path}/none.bin"}, r"data\.val_bin=.*none\.bin is not a file"),
        ("char", {}, "tokenizer=char .*tokenizer=gpt2"),
    ):
        refused(problem, corpus_of, None, tmp_path, name, **files | changes)


@pytest.mark.parametrize("name", ["char", "bpe", "byte"])
def test_prepared_token_files_are_the_same_corpus_without_their_text(tmp_path, name):
    tokenizer = {"name": name} | ({"vocab_size": 260} if name == "bpe" else {})
    text = rows([TEXT, TEXT + "!"] * 9)
    corpus = prepare(text, tmp_path, tokenizer, name="mine.jsonl", val_fraction=0.3)
    (tmp_path / "mine.jsonl").unlink()
    bins = {f"{split}_bin": str(folder_of(corpus) / f"{split}.bin") for split in ("train", "val")}
    lists = {key: [file] for key, file in bins.items()}
    same = [(tokenizer, bins), (tokenizer, lists), ("prepared", bins)]
    for one, files in [*same, (corpus.tokenizer.to_dict(), bins)]:
        each = corpus_of(None, tmp_path, one, **files)
        assert replace(each, tokenizer=None) == replace(corpus, tokenizer=None)
        assert each.tokenizer.to_dict() == corpus.tokenizer.to_dict()
    others = ["char", "byte", "gpt2", BPE, BPE | {"vocab_size": 261}, CharTokenizer("ab").to_dict()]
    for other in others:
        if other not in (name, tokenizer):
            way_out = "init_from needs" if other == others[-1] else "tokenizer=prepared"
            was = rf"{name}.*, as in {folder_of(corpus)}/meta\.json, got .*; {way_out}"
            refused(was, corpus_of, None, tmp_path, other, **bins)
    (folder_of(corpus) / "meta.json").write_text('{"vocab_size": 256}')  # of another tool
    if name != "bpe":
        assert corpus_of(None, tmp_path, "byte", **bins).provenance == {}
    refused(r"tokenizer=prepared .*tokenizer=gpt2", corpus_of, None, tmp_path, "prepared", **bins)


def test_token_files_of_several_tokenizers_are_refused(tmp_path):
    made = {name: folder_of(prepare(TEXT * 9, tmp_path, name)) for name in ("char", "byte")}
    for train, val in (("char", "byte"), ("byte", "char"), ("*", "byte")):
        bins = {
            "train_bin": f"{made.get(train, tmp_path / 'tokens/*')}/train.bin",
            "val_bin": f"{made[val]}/val.bin",
        }
        refused(
            rf"^{made['char']} has token files of another tokenizer; ",
            corpus_of,
            None,
            tmp_path,
            "byte",
            **bins,
        )
    other = tmp_path / "other"
    other.mkdir()
    (made["byte"] / "val.bin").rename(other / "val.bin")  # without the description of its folder
    bins = {"train_bin": f"{made['byte']}/train.bin", "val_bin": f"{other}/val.bin"}
    assert corpus_of(None, tmp_path, "byte", **bins).val.tokens == 45


def write_parts(folder, n=12, ids=RANDOM_IDS):
    folder.mkdir(exist_ok=True)
    ends = np.sort(np.random.default_rng(n).choice(np.arange(1, len(ids)), n - 1, replace=False))
    for i, part in enumerate(np.split(ids, ends)):
        part.tofile(folder / f"train_{i:04}.bin")
    ids[:200].tofile(folder / "val.bin")
    return {"train_bin": f"{folder}/train_*.bin", "val_bin": [f"{folder}/val.bin"]}


def test_the_checksum_of_many_files_depends_on_a_sample_of_their_content_and_not_on_their_place(
    tmp_path,
):
    both = [write_parts(tmp_path / name, n=130) for name in "ab"]
    assert len({corpus_of(None, tmp_path, "byte", **each).sha256 for each in both}) == 1
    train = sorted(tmp_path.glob("a/train_*.bin"))
    val = [tmp_path / "a/val.bin"]
    before = token_bins.split_checksums(train, val, None)
    assert token_bins.split_checksums(train[1:], val, None) != before
    changed = 0
    for file in train:
        content = file.read_bytes()
        file.write_bytes(raw(np.frombuffer(content, np.uint16) ^ 1))
        changed += token_bins.split_checksums(train, val, None) != before
        file.write_bytes(content)
    assert changed == 64
    # More than a sample; the content of one file is read whole
    ones = [raw([1] * 100_000 + [end]) for end in (3, 4)]
    assert len({read_bins(tmp_path, one, raw([4, 5])).sha256 for one in ones}) == 2


def test_an_id_outside_the_vocabulary_raises_with_its_file(tmp_path):
    settings = write_parts(tmp_path)
    np.array([1, 2, 256], dtype=np.uint16).tofile(tmp_path / "train_0005.bin")
    tokens = corpus_of(None, tmp_path, "byte", **settings).tokens("train")
    for index in (slice(None), np.arange(len(tokens))[None]):
        with pytest.raises(
            UserError, match=r"train_0005\.bin has a token id 256, outside the vocabulary of 256"
        ):
            tokens[index]
    write_parts(tmp_path, ids=RANDOM_IDS + 100)
    # Before training
    refused(
        r"val\.bin has a token id .*, outside the vocabulary",
        corpus_of,
        None,
        tmp_path,
        "byte",
        **settings,
    )


def test_the_validated_part_names_its_text_however_it_is_tokenized_and_whatever_is_trained_on(
    tmp_path,
):
    text = "".join(map(str, range(600)))
    write_files(tmp_path, {"mine.txt": text, "other.txt": text[::-1]})

    def part(name="mine.txt", tokenizer="char", **changes):
        return corpus_of(tmp_path / name, tmp_path, tokenizer, **changes).validated_part(8, 4, None)

    size = len(text) - int(0.9 * len(text))
    assert re.fullmatch(rf"all {size} bytes of text [0-9a-f]{{8}}", part())
    assert part() == part(tokenizer="byte") != part("other.txt")
    assert part() != part(val_fraction=0.2)
    one = {"val_path": f"{tmp_path}/mine.txt"}
    other = {"val_path": f"{tmp_path}/other.txt"}
    assert part("other.txt", **one) == part("mine.txt", **one) != part("mine.txt", **other)
    ids = [write_parts(tmp_path / f"{n}", n=n) for n in (3, 4)]
    corpora = [corpus_of(None, tmp_path, "byte", **each) for each in ids]
    assert len({corpus.validated_part(8, 4, None) for corpus in corpora}) == 1


def test_the_validated_part_is_that_of_the_batches_or_all(tmp_path):
    (tmp_path / "mine.txt").write_text("".join(map(str, range(600))), encoding="utf-8")
    corpus = corpus_of(tmp_path / "mine.txt", tmp_path, "char")
    n_windows = math.ceil((corpus.val.tokens - 1) / 8)
    assert corpus.validated_part(8, 4, 1000) == corpus.validated_part(8, 4, None)
    assert corpus.validated_part(8, 4, 2).startswith(f"8 of {n_windows} windows of 8 tokens in ")


CPU = torch.device("cpu")


def positions(n):  # tokens equal to their positions, so that a batch shows which windows it has
    return np.arange(n, dtype=np.uint32)


def batches(n=1000, *, block_size=8, seed=0, first=0, **changes):
    options = {"batch_size": 4, "rank": 0, "world_size": 1, "stop": 100, "repeat": 0} | changes
    return Batches(
        positions(n), WindowOrder(n, block_size, seed), first=lambda: first, device=CPU, **options
    )


def validation(n, **changes):
    options = {"block_size": 8, "batch_size": 3, "rank": 0, "world_size": 1} | changes
    return ValidationBatches(positions(n), device=CPU, **options)


def starts(batches):
    return [tokens[:, 0].tolist() for tokens, _ in batches]


def test_permute_gives_uncorrelated_permutations():
    keys = np.random.default_rng(0).integers(0, 1 << 64, (20, 4), dtype=np.uint64)
    for n in (1, 2, 3, 15, 16, 17, 65_537, 10_000):
        orders = [permute(np.arange(n), n, key) for key in keys]
        assert (np.sort(orders) == np.arange(n)).all()
    for order, other in zip(orders, orders[1:] + orders[:1], strict=True):
        assert (np.diff(order) == 1).mean() < 0.01  # by chance one in 10,000
        for uncorrelated in (np.arange(n), other):
            assert (order == uncorrelated).mean() < 0.01
            # Five standard deviations of the correlation of n independent draws.
            assert abs(np.corrcoef(order, uncorrelated)[0, 1]) < 5 / np.sqrt(n)


def epochs_of(order, number):
    return order.starts(np.arange(number * order.n_windows)).reshape(number, order.n_windows)


def counts_of(epochs, n, block_size):
    # Count how often each token is a target in each epoch, (epochs, n)
    counts = np.zeros((len(epochs), n), dtype=int)
    for row, starts in zip(counts, epochs, strict=True):
        np.add.at(row, starts[:, None] + np.arange(1, block_size + 1), 1)
    return counts


def test_all_orders_of_a_few_windows_are_equally_likely():
    # By their place in the text
    windows = epochs_of(WindowOrder(21, 8, seed=0), 3000).argsort().argsort()
    assert windows.shape == (3000, 3)
    deviation = np.sqrt(3000 / 3 * (1 - 1 / 3))  # of a count, when all are equally likely
    for position in range(3):
        assert abs(np.bincount(windows[:, position], minlength=3) - 1000).max() < 4.5 * deviation


def test_epochs_differ_in_order_and_offset_and_a_huge_text_needs_no_list_of_windows():
    epochs = epochs_of(WindowOrder(100_000, 64, seed=0), 20)
    assert len({tuple(row.argsort(kind="stable")) for row in epochs}) == 20
    for window in (20, 700, 1540):  # all but those near the ends
        assert len(set(np.sort(epochs)[:, window] % 64)) > 10
    huge = WindowOrder(10**12, 1024, seed=0).starts(np.arange(10_000) + 10**6)
    assert len(np.unique(huge)) == 10_000
    assert 0 <= huge.min() < 10**10 < 10**12 - 10**10 < huge.max() < 10**12 - 1024


@given(st.integers(1, 64), st.integers(1, 2000), st.integers(1, 9), st.integers(0, 2**32))
@settings(deadline=None, max_examples=30)
def test_each_epoch_has_every_token_but_the_first_as_a_target(block_size, more, batch_size, seed):
    n = block_size + more
    windows = WindowOrder(n, block_size, seed).n_windows
    given = {"block_size": block_size, "batch_size": batch_size, "seed": seed}
    run = batches(n, stop=-(-3 * windows // batch_size), **given)
    read = np.concatenate(starts(run))[: 3 * windows].reshape(3, windows)  # in the order of reading
    assert read.min() >= 0
    assert read.max() < n - block_size  # the last target is the token after the window
    counts = counts_of(read, n, block_size)
    assert counts[:, 0].max() == 0
    assert counts[:, 1:].min() == 1 or windows == 2
    twice = counts[:, 1:].sum(axis=1) - (n - 1)
    assert (twice >= block_size / 2).all()  # so many offsets
    assert (twice < 1.5 * block_size).all()


@pytest.mark.parametrize(
    ("n", "block_size", "most"),
    # Near an end, where two windows may overlap at 8 places: 9/8. In a short text the ends are
    # everywhere.
    [
        (20_000, 128, 9 / 8),
        (3071, 64, 9 / 8),
        (3071, 1024, 2.1),
        (360, 128, 2.1),
        (3072, 1024, 2.1),
        (130, 128, 2),
    ],
)
def test_over_epochs_all_targets_are_about_equally_frequent(n, block_size, most):
    epochs = epochs_of(WindowOrder(n, block_size, seed=1), 1000)
    counts = counts_of(epochs, n, block_size)[:, 1:].mean(axis=0)
    assert counts.min() >= 1
    # Standard deviations of a mean of ones and twos
    assert counts.max() <= most + 5 * 0.5 / np.sqrt(1000)


def test_batches_from_a_step_equal_those_of_a_run_from_the_start_and_repeat(monkeypatch):
    monkeypatch.setattr(module, "_ROWS_PER_LOOKUP", 32)  # eight batches at a time
    whole = starts(batches(stop=30))
    for k in (7, 8, 9, 30):
        assert starts(batches(stop=30, first=k)) == whole[k:]
    assert starts(batches(stop=30, seed=1)) != whole
    for repeat in (1, 3):
        repeated = starts(batches(repeat=repeat, first=5, stop=20))
        assert repeated == [whole[i % repeat] for i in range(5, 20)]


@pytest.mark.parametrize(("world_size", "sizes"), [(4, [3] * 4), (5, [3, 3, 2, 2, 2])])
def test_ranks_read_disjoint_parts_of_the_single_rank_batch_and_weights_correct_their_means(
    world_size, sizes
):
    spread = {"batch_size": 12, "world_size": world_size}
    shares = [batches(rank=rank, **spread) for rank in range(world_size)]
    for whole, *parts in zip(starts(batches(batch_size=12)), *map(starts, shares), strict=True):
        assert [len(part) for part in parts] == sizes
        assert sorted(start for part in parts for start in part) == sorted(whole)
        weighted = [share.weight * np.mean(part) for share, part in zip(shares, parts, strict=True)]
        assert np.mean(weighted) == pytest.approx(np.mean(whole))


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 16), st.integers(2, 300), st.integers(1, 9))
def test_validation_scores_every_target_once_on_any_number_of_ranks(block_size, n, batch_size):
    for world_size in (1, 2, 3):
        counts = set()
        scored = []
        for rank in range(world_size):
            given = {"block_size": block_size, "batch_size": batch_size, "world_size": world_size}
            share = validation(n, rank=rank, **given)
            read = list(share)
            counts |= {len(share), len(read)}
            for tokens, targets in read:
                assert tokens.shape == targets.shape == (len(tokens), block_size)
                assert len(tokens) > 0  # kernels and compiled models may refuse an empty batch
                inside = targets != -100
                assert torch.equal(targets[inside], tokens[inside] + 1)
                counted = tokens[:, :1] + torch.arange(block_size)
                assert torch.equal(tokens[inside], counted[inside])
                assert not (tokens[inside.any(dim=1), 0] % block_size).any()  # adjacent windows
                scored += targets[inside].tolist()
        assert len(counts) == 1  # a rank with one batch more would wait for the others
        assert sorted(scored) == list(range(1, n))


def test_a_maximum_of_batches_is_spread_evenly_over_the_validation_split():
    for n_batches, expected in (
        (1, [0, 32, 64]),
        (2, [0, 16, 32, 48, 64, 80]),
        (9, [*range(0, 96, 8)]),
    ):
        share = validation(97, n_batches=n_batches)
        assert [start for batch in starts(share) for start in batch] == expected


def test_a_trainer_gets_the_batches_of_its_settings_from_its_step(tmp_path):
    positions(500).astype(np.uint16).tofile(tmp_path / "train.bin")
    split = Split([tmp_path / "train.bin"], 500, 500, 1, 500)
    data = ["data.batch_size=4", "data.overfit_batches=3", "data.eval_batch_size=5"]
    steps = ["trainer.accumulate_grad_batches=5", "eval_batches=2", "max_steps=4", "seed=3"]
    run = RunConfig.from_hydra(composed(*data, *steps))
    corpus = Corpus("mine", "", CharTokenizer("".join(map(chr, range(500)))), split, split)
    module = TokenDataModule(corpus, run, block_size=8)
    strategy = SimpleNamespace(root_device=CPU)
    module.trainer = SimpleNamespace(world_size=2, global_rank=1, strategy=strategy, global_step=2)
    expected = batches(500, seed=3, rank=1, world_size=2, first=10, stop=20, repeat=3)
    assert starts(module.train_dataloader()) == starts(expected)
    validated = validation(500, batch_size=5, n_batches=2, rank=1, world_size=2)
    assert starts(module.val_dataloader()) == starts(validated)
