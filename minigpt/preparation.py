"""From documents to token files: split, tokenised by several processes, written in shards.

The text is read in one order and its tokens are written in that order, whoever made them, so the shards are
the same for any number of processes. A journal notes what is on disk as it grows, and a run that was killed
carries on from its last entry. A finished folder appears under its name at once, keyed by the text, the
tokenizer and the split, so a changed text or tokenizer never meets stale tokens.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from minigpt import corpus as corpora
from minigpt import encodings, sources
from minigpt import tokenizer as tokenizers
from minigpt.corpus import FORMAT, META, SPLITS, Corpus, shard_files
from minigpt.documents import Piece
from minigpt.errors import RunError, UserError, warn
from minigpt.files import whole
from minigpt.shards import Shards
from minigpt.sources import Part, Source
from minigpt.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, Ids, Tokenizer, token_dtype

TRAIN, VAL = 0, 1
_JOURNAL, _START = "journal.json", "start.json"
_UNIT = 1 << 20  # characters that are tokenised at a time
_NOTED = 1 << 24  # tokens between two entries of the journal
_SMALL = 1 << 24  # bytes of text that one process tokenises sooner than others have started
_SCANNED = 1 << 24  # tokens looked at at a time


def corpus_of(data: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> Corpus:
    """The token files that the groups data and tokenizer of a configuration mean, made now if there are none.

    Raises:
        UserError: there is no such text, or it cannot be tokenised so.
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
        return corpora.from_bins(train, val, make_tokenizer(tokenizer, folder, "", ()), folder / sources.KNOWN)
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
        processes: that tokenise; None is as many as there are cores.

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


def report(corpus: Corpus) -> dict[str, str]:
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


@dataclass
class _Read:
    """How much was read of all documents, and of each split."""

    index: int = 0  # documents begun
    documents: list[int] = field(default_factory=lambda: [0, 0])
    bytes: list[int] = field(default_factory=lambda: [0, 0])


@dataclass(frozen=True)
class _Mark:
    """A place in the text: so many pieces into a part, and what was read before that part."""

    part: int = 0
    pieces: int = 0
    read: _Read = field(default_factory=_Read)


@dataclass(frozen=True)
class _Unit:
    """Texts that are tokenised together."""

    items: list[tuple[int, bool, str]]  # split, whether a separator stands before, text
    documents: tuple[list[int], list[int]]  # checksums of the documents of each split that end here
    after: _Mark
    position: int  # bytes read, for the progress bar


# Which texts of a document, whose index in the corpus is given, are for which split. `begin`: characters before.
Assign = Callable[[int, int, int, Piece], list[tuple[int, str]]]


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
        units = _units(parts, sizes, _assign(made, start["cut"], len(source.parts)), journal.mark)
        large = 0 in sizes or sum(sizes) > _SMALL
        read = sum(sizes[: journal.mark.part])
        with (
            tqdm(total=sum(sizes) or None, initial=read, unit="B", unit_scale=True, delay=1, disable=None) as bar,
            _tokenising(tokenizer, processes if large else 1) as tokenise,
        ):
            for unit, ids in tokenise(units):
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
        self.file, self.mark = folder / _JOURNAL, _Mark(part, pieces, _Read(**read))
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
        _write(folder / _JOURNAL, {"mark": [0, 0, asdict(_Read())], "lengths": [0, 0, 0, 0]})

    @staticmethod
    def worth(folder: Path) -> bool:
        """Whether there is anything to carry on from."""
        with suppress(OSError, ValueError):
            return any(json.loads((folder / _JOURNAL).read_text(encoding="utf-8"))["lengths"])
        return False

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    def append(self, unit: _Unit, ids: Sequence[Ids]) -> None:
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
        lengths, alphabet = _survey(parts, by_character)
        if not sum(lengths):
            raise UserError(f"{source.name} is empty; give a text with something in it")
        if "val_fraction" in made:
            cut = _cut(lengths, made["val_fraction"])
    assign = _assign(made, cut, len(source.parts))
    training = (
        text
        for unit in _units(source.parts, source.sizes, assign, _Mark())
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


def _survey(parts: Sequence[Part], by_character: bool) -> tuple[Sequence[int], str]:
    """How many characters every document has, and if asked, which ones there are."""
    lengths, seen = array("Q"), np.zeros(0x110000, dtype=bool)
    for part in parts:
        for piece in part():
            if piece.first:
                lengths.append(0)
            lengths[-1] += len(piece.text)
            if by_character:
                seen[np.frombuffer(piece.text.encode("utf-32-le"), dtype="<u4")] = True
    seen[ord("\n")] |= len(lengths) > 1  # what separates documents
    return lengths, "".join(map(chr, np.flatnonzero(seen)))


def _cut(lengths: Sequence[int], val_fraction: float) -> tuple[int, int]:
    """The document and the character in it that the validation split begins with."""
    starts = np.cumsum([0, *lengths])
    wanted = int(starts[-1] * (1 - val_fraction))
    if len(lengths) == 1:
        return 0, wanted
    return int(np.abs(starts[1:-1] - wanted).argmin()) + 1, 0  # a document is never cut in two where there are more


def _assign(made: Mapping[str, Any], cut: Sequence[int], first_val_part: int) -> Assign:
    """The rule that splits the documents."""
    document, character = cut

    def own(part: int, index: int, begin: int, piece: Piece) -> list[tuple[int, str]]:
        return [(VAL if part >= first_val_part else TRAIN, piece.text)]

    def fraction(part: int, index: int, begin: int, piece: Piece) -> list[tuple[int, str]]:
        if index != document:
            return [(VAL if index > document else TRAIN, piece.text)]
        here = max(0, character - begin)
        return [(TRAIN, piece.text[:here]), (VAL, piece.text[here:])]

    now = TRAIN

    def by_checksum(part: int, index: int, begin: int, piece: Piece) -> list[tuple[int, str]]:
        nonlocal now
        if piece.first:
            begins = hashlib.blake2b(piece.text.encode(), digest_size=8).digest()
            now = VAL if int.from_bytes(begins, "little") < made["val_fraction"] * 2**64 else TRAIN
        return [(now, piece.text)]

    return {"fraction": fraction, "document": by_checksum}.get(made.get("split", ""), own)


def _units(parts: Sequence[Part], sizes: Sequence[int], assign: Assign, mark: _Mark) -> Iterator[_Unit]:
    """The texts from a mark on, with their splits; a unit does not reach across parts."""
    read, position = deepcopy(mark.read), sum(sizes[: mark.part])
    for part in range(mark.part, len(parts)):
        before, done, begin = deepcopy(read), mark.pieces if part == mark.part else 0, 0
        items: list[tuple[int, bool, str]] = []
        ended: tuple[list[int], list[int]] = ([], [])
        open_: dict[int, Any] = {}  # the checksums of the document that is being read, a split each

        def end() -> None:
            for split, checksum in open_.items():  # noqa: B023
                ended[split].append(int.from_bytes(checksum.digest(), "little"))  # noqa: B023
            open_.clear()  # noqa: B023

        size = count = 0
        for count, piece in enumerate(parts[part](), 1):
            if piece.first:
                end()
                read.index, begin = read.index + 1, 0
            for split, text in assign(part, read.index - 1, begin, piece):
                if not text:
                    continue
                separated = split not in open_ and read.documents[split] > 0
                if split not in open_:
                    open_[split] = hashlib.blake2b(digest_size=8)
                    read.documents[split] += 1
                content = text.encode()
                open_[split].update(content)
                read.bytes[split] += len(content)
                items.append((split, separated, text))
            begin, size = begin + len(piece.text), size + len(piece.text)
            if count <= done or size >= _UNIT:
                if count > done:  # else a killed run tokenised it
                    yield _Unit(items, ended, _Mark(part, count, before), position + piece.read)
                items, ended, size = [], ([], []), 0
        end()
        position += sizes[part]
        yield _Unit(items, ended, _Mark(part + 1, 0, deepcopy(read)), position)


@contextmanager
def _tokenising(
    tokenizer: Tokenizer, processes: int
) -> Iterator[Callable[[Iterable[_Unit]], Iterator[tuple[_Unit, list[Ids]]]]]:
    """A function that tokenises units in their order, a few ahead of the one that is asked for."""
    if processes == 1 or not isinstance(tokenizer, BPETokenizer):  # the others are faster than handing a text over
        yield lambda units: ((unit, _encode(tokenizer, unit.items)) for unit in units)
        return
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer.to_dict(),),
    )

    def ordered(units: Iterable[_Unit]) -> Iterator[tuple[_Unit, list[Ids]]]:
        ahead: deque[tuple[_Unit, Future[list[Ids]]]] = deque()
        try:
            for unit in units:
                ahead.append((unit, pool.submit(_work, unit.items)))
                if len(ahead) > 2 * processes:
                    first, ids = ahead.popleft()
                    yield first, ids.result()
            for first, ids in ahead:
                yield first, ids.result()
        except BrokenProcessPool as error:
            raise RunError(
                "a process that tokenises was killed (out of memory?); start again to carry on, with fewer "
                "data.processes where memory is short"
            ) from error

    try:
        yield ordered
    finally:
        pool.shutdown(cancel_futures=True)


_of_worker: Tokenizer  # of a process that tokenises


def _start_worker(tokenizer: Mapping[str, Any]) -> None:
    global _of_worker
    _of_worker = tokenizers.from_dict(tokenizer)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that hands out the work ends in order
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(items: Sequence[tuple[int, bool, str]]) -> list[Ids]:
    return _encode(_of_worker, items)


def _encode(tokenizer: Tokenizer, items: Sequence[tuple[int, bool, str]]) -> list[Ids]:
    """The ids of texts, a row for each split."""
    rows: list[list[Ids]] = [[], []]
    for split, separated, text in items:
        if separated:
            rows[split].append(tokenizer.separator)
        rows[split].append(tokenizer.encode(text))
    dtype = token_dtype(tokenizer.vocab_size)
    return [np.concatenate(row).astype(dtype, copy=False) if row else np.empty(0, dtype) for row in rows]


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
    used, checksum = np.zeros(tokenizer.vocab_size, dtype=bool), hashlib.sha256()
    for row, name in zip(journal.rows, SPLITS, strict=False):
        for file in shard_files(partial, name, row.length, row.size):
            ids = np.memmap(file, dtype=row.dtype, mode="r")
            for begin in range(0, len(ids), _SCANNED):
                used[ids[begin : begin + _SCANNED]] = True
                checksum.update(ids[begin : begin + _SCANNED].data)
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
            "tokens_sha256": checksum.hexdigest(),
            "seconds": time.monotonic() - began,
        },
        "tokenizer": described,
    }
    _write(partial / META, meta)
    for file in (partial / _JOURNAL, partial / _START, *partial.glob("*-documents-*.bin")):
        file.unlink()


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
    with whole(file) as partial:
        partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
