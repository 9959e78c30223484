"""From documents to token files: split, tokenized by several processes, written in shards.

The text is read in one order and its tokens are written in that order, whoever made them, so the shards are
the same for any number of processes. A journal notes what is on disk as it grows, and a run that was killed
carries on from its last entry. A finished folder appears under its name at once, keyed by the text, the
tokenizer and the split, so a changed text or tokenizer never meets stale tokens.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from minigpt.data import encodings, sources
from minigpt.data import token_files as corpora
from minigpt.data import tokenizer as tokenizers
from minigpt.data.shards import Shards
from minigpt.data.sources import Source
from minigpt.data.splits import (
    TRAIN,
    Cursor,
    Progress,
    TokenizeBatch,
    assign_by,
    cut_by_fraction,
    scan_corpus,
    tokenize_batches,
)
from minigpt.data.token_files import FORMAT, META, SPLITS, Corpus, shard_files
from minigpt.data.tokenize_workers import tokenizing
from minigpt.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, Ids, Tokenizer, token_dtype
from minigpt.utils.errors import UserError
from minigpt.utils.files import atomic_write
from minigpt.utils.terminal import warn

_JOURNAL, _START = "journal.json", "start.json"
_NOTED = 1 << 24  # tokens between two entries of the journal
_SCANNED = 1 << 20  # tokens looked at at a time: numpy makes eight bytes of each
_SMALL = 1 << 24  # bytes of text that one process tokenizes sooner than others have started


def load_corpus(data: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> Corpus:
    """The token files that the groups data and tokenizer of a configuration mean, made now if there are none.

    Raises:
        UserError: there is no such text, or it cannot be tokenized so.
    """
    folder = Path(data["folder"])
    bins = [data["train_bin"], data["val_bin"]]
    if bins != [None, None]:
        if None in bins:
            raise UserError("data.train_bin and data.val_bin belong together; set both, or neither")
        train, val = (Path(file).expanduser() for file in bins)
        if tokenizer["name"] in (CharTokenizer.name, BPETokenizer.trained):
            raise UserError(
                f"tokenizer={tokenizer['name']} is made from a text, and data.train_bin= holds only ids; "
                f"say whose ids they are: tokenizer=gpt2, say, or byte"
            )
        return corpora.from_bins(train, val, make_tokenizer(tokenizer, folder, "", ()), folder / sources.CHECKSUM_CACHE)
    source, own_val = sources.find(data)
    settings = {key: data[key] for key in ("split", "val_fraction", "shard_tokens", "processes")}
    return prepare(source, own_val, tokenizer=tokenizer, folder=folder, **settings)


def prepare(
    source: Source,
    own_val: Source | None,
    *,
    tokenizer: Mapping[str, Any],
    split: str,
    val_fraction: float,
    shard_tokens: int,
    processes: int | None,
    folder: Path,
) -> Corpus:
    """Token files of a source, from the cache below `folder` or written now.

    Args:
        own_val: documents to validate on; None takes a part of the source.
        tokenizer: its name, and what it is made with.
        split: "fraction" takes the last `val_fraction` of the characters, where there are several documents from the
            beginning of one; "document" takes documents by the checksum of how they begin, so equal ones stay together.
        shard_tokens: tokens of a file.
        processes: that tokenize; None is as many as there are cores.

    Raises:
        UserError: the text is empty or damaged, does not suffice for the tokenizer, or `folder` cannot be written.
    """
    taken = {"val_sha256": own_val.sha256} if own_val else {"split": split, "val_fraction": val_fraction}
    made = {"source_sha256": source.sha256, "tokenizer": dict(tokenizer)} | taken
    key = hashlib.sha256(json.dumps([FORMAT, made, shard_tokens], sort_keys=True).encode()).hexdigest()
    target = folder / "tokens" / f"{source.name[:40]}-{key[:12]}"
    if not (target / META).is_file():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with _alone(target):
                if not (target / META).is_file():  # nobody made it while this process waited
                    _make(source, own_val, made, shard_tokens, processes or _cores(), target)
        except OSError as error:
            if error.filename is not None and not Path(error.filename).is_relative_to(folder):
                raise
            reason = (error.strerror or str(error)).lower()
            raise UserError(
                f"token files cannot be written to {folder} ({reason}); make room there, or choose another folder "
                f"with data.folder=…"
            ) from error
    return corpora.load(target)


def describe_corpus(corpus: Corpus) -> dict[str, str]:
    """What token files hold, for people: a name and a value a line."""
    made, rows = corpus.made, {}
    rows["corpus"] = corpus.name
    for name, split in zip(("training", "validation"), (corpus.train, corpus.val), strict=True):
        rows[name] = f"{split.documents:,} documents, {split.bytes:,} bytes, {split.tokens:,} tokens"
    total = corpus.train.tokens + corpus.val.tokens
    if made:
        rows["bytes per token"] = f"{(corpus.train.bytes + corpus.val.bytes) / max(1, total):.3f}"
        used, size = made["used_ids"], corpus.tokenizer.vocab_size
        rows["vocabulary"] = f"{size:,} ids, {used:,} of them in use ({used / size:.1%})"
        rows["in both splits"] = f"{made['duplicates']:,} documents"
        rows["checksum"] = f"{made['tokens_sha256']} (of the ids)"
        rows["files"] = (
            f"{len(corpus.train.files)} + {len(corpus.val.files)} of {corpus.dtype}, {made['seconds']:.1f} s"
        )
    rows["folder"] = str(corpus.val.files[0].parent if corpus.val.files else corpus.train.files[0].parent)
    return rows


def _make(
    source: Source,
    own_val: Source | None,
    made: Mapping[str, Any],
    shard_tokens: int,
    processes: int,
    target: Path,
) -> None:
    """Write token files beside `target`, and rename their folder when it is whole."""
    began = time.monotonic()
    partial = target.with_name(f"{target.name}.partial")
    parts = [*source.parts, *(own_val.parts if own_val else ())]
    sizes = [*source.sizes, *(own_val.sizes if own_val else ())]
    try:
        if not (partial / _JOURNAL).is_file():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            _begin(partial, source, own_val, made, target.parents[1])
        start = json.loads((partial / _START).read_text(encoding="utf-8"))
        tokenizer = tokenizers.from_dict(start["tokenizer"])
        journal = _Journal(partial, token_dtype(tokenizer.vocab_size), shard_tokens)
        units = tokenize_batches(parts, sizes, assign_by(made, start["cut"], len(source.parts)), journal.mark)
        large = 0 in sizes or sum(sizes) > _SMALL
        read = sum(sizes[: journal.mark.part])
        with (
            tqdm(total=sum(sizes) or None, initial=read, unit="B", unit_scale=True, delay=1, disable=None) as bar,
            tokenizing(tokenizer, processes if large else 1) as tokenize,
        ):
            for unit, ids in tokenize((unit, unit.items) for unit in units):
                journal.append(unit, ids)
                bar.update(unit.position - bar.n)
        journal.close()
        _finish(partial, source, own_val, made, journal, tokenizer, began)
        shutil.rmtree(target, ignore_errors=True)  # a folder without its meta.json
        partial.rename(target)
    except BaseException as error:
        # What was noted is worth carrying on from, unless it is the text that is wrong.
        if isinstance(error, UserError) or not _Journal.worth(partial):
            shutil.rmtree(partial, ignore_errors=True)
        raise


class _Journal:
    """The growing files of a folder, and how far the text was read for what is safely in them.

    Four rows grow: the tokens of each split, and the checksums of its documents.
    """

    def __init__(self, folder: Path, dtype: str, shard_tokens: int) -> None:
        noted = json.loads((folder / _JOURNAL).read_text(encoding="utf-8"))
        part, pieces, read = noted["mark"]
        self.file, self.mark = folder / _JOURNAL, Cursor(part, pieces, Progress(**read))
        self.noted = sum(noted["lengths"])
        kinds = [(name, dtype, shard_tokens) for name in SPLITS] + [
            (f"{name}-documents", "<u8", 1 << 62) for name in SPLITS
        ]
        self.rows = [
            Shards(folder, name, dtype=kind, size=size, length=length)
            for (name, kind, size), length in zip(kinds, noted["lengths"], strict=True)
        ]

    @staticmethod
    def begin(folder: Path) -> None:
        _write(folder / _JOURNAL, {"mark": [0, 0, asdict(Progress())], "lengths": [0, 0, 0, 0]})

    @staticmethod
    def worth(folder: Path) -> bool:
        """Whether there is anything to carry on from."""
        with suppress(OSError, ValueError):
            return any(json.loads((folder / _JOURNAL).read_text(encoding="utf-8"))["lengths"])
        return False

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    def append(self, unit: TokenizeBatch, ids: Sequence[Ids]) -> None:
        self.mark = unit.after
        for row, numbers in zip(self.rows[:2], ids, strict=True):
            row.append(numbers)
        for row, checksums in zip(self.rows[2:], unit.documents, strict=True):
            row.append(checksums)
        if sum(self.lengths) - self.noted >= _NOTED:
            for row in self.rows:
                row.sync()
            self.noted = sum(self.lengths)
            mark = [self.mark.part, self.mark.pieces, asdict(self.mark.read)]
            _write(self.file, {"mark": mark, "lengths": self.lengths})

    def close(self) -> None:
        for row in self.rows:
            row.close()


def _begin(partial: Path, source: Source, own_val: Source | None, made: Mapping[str, Any], folder: Path) -> None:
    """Find out where the text is cut, make the tokenizer, and write both down."""
    settings = made["tokenizer"]
    by_character = settings["name"] == CharTokenizer.name
    cut, alphabet = (0, 0), ""
    if made.get("split") == "fraction" or by_character:
        parts = [*source.parts, *(own_val.parts if own_val and by_character else ())]
        lengths, alphabet = scan_corpus(parts, by_character)
        if not sum(lengths):
            raise UserError(f"{source.name} is empty; give a text with something in it")
        if "val_fraction" in made:
            cut = cut_by_fraction(lengths, made["val_fraction"])
    assign = assign_by(made, cut, len(source.parts))
    training = (
        text
        for unit in tokenize_batches(source.parts, source.sizes, assign, Cursor())
        for split, _, text in unit.items
        if split == TRAIN
    )
    tokenizer = make_tokenizer(settings, folder, alphabet, training)
    _write(partial / _START, {"tokenizer": tokenizer.to_dict(), "cut": cut})
    _Journal.begin(partial)


def make_tokenizer(settings: Mapping[str, Any], folder: Path, alphabet: str, training: Iterable[str]) -> Tokenizer:
    """The tokenizer of a configuration.

    Args:
        folder: where tiktoken's files are kept, unless TIKTOKEN_CACHE_DIR says where.
        alphabet: of the corpus, for characters.
        training: texts of the training split, for a trained one.

    Raises:
        UserError: its files cannot be had, or the text does not suffice.
    """
    name = settings["name"]
    if name == CharTokenizer.name:
        return CharTokenizer.of(alphabet)
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    if name == BPETokenizer.trained:
        return BPETokenizer.train(training, settings["vocab_size"])
    return encodings.encoding(name, folder / "tiktoken")


def _finish(
    partial: Path,
    source: Source,
    own_val: Source | None,
    made: Mapping[str, Any],
    journal: _Journal,
    tokenizer: Tokenizer,
    began: float,
) -> None:
    """Look at what was written, say what it is in `meta.json`, and remove what only the making needed."""
    *tokens, _, _ = journal.lengths
    read = journal.mark.read
    if not sum(tokens):
        raise UserError(f"{source.name} is empty; give a text with something in it")
    if made.get("split") == "document" and 0 in tokens:
        empty = "training" if tokens[TRAIN] == 0 else "validation"
        raise UserError(
            f"none of the {read.index} documents is for {empty}; with so few use data.split=fraction, "
            f"another data.val_fraction, or data.val_path=…"
        )
    shards = [
        np.memmap(file, dtype=row.dtype, mode="r")
        for row, name in zip(journal.rows, SPLITS, strict=False)
        for file in shard_files(partial, name, row.length, row.size)
    ]
    with ThreadPoolExecutor(1) as beside:
        checksum = beside.submit(_checksum, shards)
        used = np.zeros(tokenizer.vocab_size, dtype=bool)
        for ids in shards:
            for begin in range(0, len(ids), _SCANNED):
                used[ids[begin : begin + _SCANNED]] = True
    training, validation = (
        np.fromfile(file, dtype="<u8") if (file := partial / f"{name}-documents-00000.bin").exists() else np.empty(0)
        for name in SPLITS
    )
    duplicates = int(np.isin(training, validation).sum())
    if duplicates:
        warn(f"{duplicates:,} documents of {source.name} for training are also for validation, word for word")
    described = tokenizer.to_dict()
    if isinstance(tokenizer, BPETokenizer):
        described["separated"] = read.documents[TRAIN] > 1
    splits = {
        name: {"documents": read.documents[i], "bytes": read.bytes[i], "tokens": tokens[i]}
        for i, name in enumerate(SPLITS)
    }
    meta = {
        "format": FORMAT,
        "name": source.name,
        "sha256": sources.checksum(source, own_val),
        "stand_in": source.stand_in,
        "dtype": journal.rows[TRAIN].dtype.name,
        "shard_tokens": journal.rows[TRAIN].size,
        **splits,
        "made": {
            **made,
            "used_ids": int(used.sum()),
            "duplicates": duplicates,
            "tokens_sha256": checksum.result(),
            "seconds": time.monotonic() - began,
        },
        "tokenizer": described,
    }
    _write(partial / META, meta)
    for file in (partial / _JOURNAL, partial / _START, *partial.glob("*-documents-*.bin")):
        file.unlink()


def _checksum(shards: Iterable[np.memmap[Any, Any]]) -> str:
    """Of the ids one after the other."""
    checksum = hashlib.sha256()
    for ids in shards:
        checksum.update(ids.data)
    return checksum.hexdigest()


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """One process makes a folder; others wait for it."""
    lock = FileLock(f"{target}.lock")
    try:
        lock.acquire(timeout=2)
    except Timeout:
        warn(f"another process prepares {target.name}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _write(file: Path, values: Mapping[str, Any]) -> None:
    with atomic_write(file) as partial:
        partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
