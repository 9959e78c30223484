"""Token files: what training reads, and what they were made from.

A split is shards of equally many tokens, raw arrays that `numpy.memmap` and other tools read, beside a
`meta.json` that says what they hold. nanoGPT's `train.bin` and `val.bin` are read in place.
"""

import hashlib
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from minigpt.data import tokenizer as tokenizers
from minigpt.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer
from minigpt.utils.errors import UserError
from minigpt.utils.files import checksums, read_json

FORMAT = 2
META = "meta.json"
SPLITS = ("train", "val")
_OPEN = 256  # shards that are mapped at a time: each holds a file descriptor
_SCANNED = 1 << 24  # tokens looked at at a time

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Split:
    """The token files of one split, and what is in them."""

    files: tuple[Path, ...]
    tokens: int
    bytes: int
    documents: int


@dataclass(frozen=True)
class Corpus:
    """Token files of two splits, their tokenizer, and what they were made from.

    Args:
        sha256: of the text.
        shard_tokens: tokens of every file but a split's last.
        made: how `preparation` made them; empty for other tools' files.
    """

    name: str
    sha256: str
    stand_in: bool
    tokenizer: Tokenizer
    dtype: str
    shard_tokens: int
    train: Split
    val: Split
    made: Mapping[str, Any]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={getattr(self, name).tokens:,} tokens" for name in SPLITS)
        return f"Corpus({self.name!r}, {sizes}, {self.tokenizer})"

    @property
    def val_bytes_per_token(self) -> float:
        return self.val.bytes / self.val.tokens

    def check_length(self, block_size: int) -> None:
        """Raises UserError where a split has not one window of `block_size` tokens and the next token."""
        for name, split in (("training", self.train), ("validation", self.val)):
            if split.tokens <= block_size:
                raise UserError(
                    f"the {name} split has {split.tokens} tokens, not one block of {block_size} and its next token; "
                    f"use a longer text or a smaller model.block_size"
                )

    def tokens(self, split: str) -> "Tokens":
        """The token ids of "train" or "val", (N,), read from disk where they are asked for."""
        part = self.train if split == "train" else self.val
        return Tokens(part.files, self.dtype, self.shard_tokens, part.tokens, self.tokenizer.vocab_size)


class Tokens:
    """The shards of a split as one array (N,): `tokens[a:b]`, or `tokens[index]` for windows (B, T).

    What an index costs depends on the index, not on N. Raises UserError for ids outside the vocabulary.
    """

    def __init__(self, files: Sequence[Path], dtype: str, shard_tokens: int, length: int, vocab_size: int) -> None:
        self.dtype, self.length, self.shard_tokens = np.dtype(dtype), length, shard_tokens
        self.files, self.vocab_size = files, vocab_size
        self._shard = lru_cache(_OPEN)(lambda number: _mapped(files[number], dtype))
        self._only = self._shard(0) if len(files) == 1 else None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Array:
        if isinstance(index, slice):
            ids = self._slice(*index.indices(self.length))
        else:
            ids = self._windows(index) if self._only is None else self._only[index]
        if (largest := ids.max(initial=0)) >= self.vocab_size:
            where = self.files[0] if self._only is not None else self.files[0].parent
            raise UserError(
                f"{where} holds a token id {largest}, outside the vocabulary of {self.vocab_size}: "
                f"it is damaged, or another tokenizer's"
            )
        return ids

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self[:], dtype=dtype)

    def _slice(self, begin: int, end: int, step: int) -> Array:
        size, end = self.shard_tokens, max(begin, end)
        parts = []
        for i in range(begin // size, -(-end // size)):
            first, last = max(0, begin - i * size), min(size, end - i * size)
            offset = first * self.dtype.itemsize
            parts.append(np.fromfile(self.files[i], dtype=self.dtype, count=last - first, offset=offset))
        return np.concatenate(parts)[::step] if parts else np.empty(0, dtype=self.dtype)

    def _windows(self, index: Array) -> Array:
        size, width = self.shard_tokens, index.shape[1]
        first, last = index[:, 0] // size, index[:, -1] // size
        found = np.empty(index.shape, dtype=self.dtype)
        # The shards that windows begin in, go on in, and end in: at most a few more than there are windows.
        for number in np.unique(index[:, [*range(0, width, size), width - 1]] // size).tolist():
            shard = self._shard(number)
            rows = np.flatnonzero((first <= number) & (number <= last))
            inside = index[rows] - number * size
            here = (inside >= 0) & (inside < size)
            if here.all():
                found[rows] = shard[inside]
            else:  # windows across the end of a shard
                found[rows] = np.where(here, shard[inside.clip(0, len(shard) - 1)], found[rows])
        return found


def _mapped(file: Path, dtype: str) -> Array:
    """A file as an array. Windows lie anywhere in it, so the system need not read what lies around them."""
    with open(file, "rb") as content:
        pages = mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):
        pages.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(pages, dtype=dtype)


def load(folder: Path) -> Corpus:
    """Read what `preparation` wrote.

    Raises:
        UserError: a file is missing, cut short, or not what `meta.json` says.
    """
    try:
        meta = _meta(folder / META)
        itemsize, size = np.dtype(meta["dtype"]).itemsize, meta["shard_tokens"]
        splits = {}
        for name in SPLITS:
            files = []
            for i, file in enumerate(_shards(folder, name, meta[name]["tokens"], size)):
                wanted = min(size, meta[name]["tokens"] - i * size)
                if (found := file.stat().st_size) != wanted * itemsize:
                    raise UserError(f"{file} has {found} bytes, not the {wanted} tokens of its {META}")
                files.append(file)
            splits[name] = Split(tuple(files), **meta[name])
        return Corpus(
            tokenizer=tokenizers.from_dict(meta["tokenizer"]),
            made=meta["made"],
            train=splits["train"],
            val=splits["val"],
            **{field: meta[field] for field in ("name", "sha256", "stand_in", "dtype", "shard_tokens")},
        )
    except (UserError, OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise UserError(f"broken token files ({error}); remove {folder} and they are made anew") from error


def shard_files(folder: Path, split: str, tokens: int, shard_tokens: int) -> tuple[Path, ...]:
    """The files of a split of so many tokens."""
    return tuple(_shards(folder, split, tokens, shard_tokens))


def _shards(folder: Path, split: str, tokens: int, shard_tokens: int) -> Iterator[Path]:
    return (folder / f"{split}-{i:05}.bin" for i in range(-(-tokens // shard_tokens)))


def _meta(file: Path) -> dict[str, Any]:
    """What `meta.json` says, as far as it is used.

    Raises:
        ValueError, KeyError, TypeError: it is not what `preparation` writes.
    """
    meta = read_json(file)
    counts = {f"{name}.{key}": meta[name][key] for name in SPLITS for key in ("tokens", "bytes", "documents")}
    for key, value in {**counts, "shard_tokens": meta["shard_tokens"] - 1}.items():
        if not (type(value) is int and 0 <= value < 1 << 62):
            raise ValueError(f"{key} is no count")
    if meta["dtype"] not in ("uint16", "uint32"):
        raise ValueError("dtype is neither uint16 nor uint32")
    for key, kind in (("name", str), ("sha256", str), ("stand_in", bool), ("made", dict)):
        if not isinstance(meta[key], kind):
            raise ValueError(f"{key} is no {kind.__name__}")
    return dict(meta)


def from_bins(train_bin: Path, val_bin: Path, tokenizer: Tokenizer, known: Path | None = None) -> Corpus:
    """nanoGPT's token files, read where they are: arrays of 16-bit ids.

    Args:
        known: file that remembers checksums, so that large files are read for them once; None: nothing does.

    Raises:
        UserError: a file is missing or is no such array, an id is outside the vocabulary, or the ids tell nothing
            of the characters that they stand for.
    """
    if not isinstance(tokenizer, BPETokenizer | ByteTokenizer):
        raise UserError("data.train_bin= holds ids alone; say whose they are: tokenizer=gpt2, say (nanoGPT's), or byte")
    files = {"data.train_bin": train_bin, "data.val_bin": val_bin}
    for setting, file in files.items():
        if not file.is_file():
            raise UserError(f"{setting}={file} is not a file; give the path of a nanoGPT token file")
        if file.stat().st_size % 2 or not file.stat().st_size:
            raise UserError(f"{setting}={file} has {file.stat().st_size} bytes, not an array of 16-bit ids")
    vocab_size = tokenizer.vocab_size
    if isinstance(tokenizer, BPETokenizer):
        lengths, end = tokenizer.byte_lengths(), int(tokenizer.separator[0])
    else:
        lengths, end = np.ones(vocab_size, dtype=np.int64), None
    bytes_, ends = 0, 0
    val = Tokens([val_bin], "uint16", 1 << 62, val_bin.stat().st_size // 2, vocab_size)
    for begin in range(0, len(val), _SCANNED):
        ids = val[begin : begin + _SCANNED]
        bytes_ += int(lengths[ids].sum())
        ends += 0 if end is None else int((ids == end).sum())
    if isinstance(tokenizer, BPETokenizer) and ends:
        tokenizer = BPETokenizer.from_dict(tokenizer.to_dict() | {"separated": True})
    return Corpus(
        name=train_bin.name,
        sha256=hashlib.sha256("".join(checksums([train_bin, val_bin], known)).encode()).hexdigest(),
        stand_in=False,
        tokenizer=tokenizer,
        dtype="uint16",
        shard_tokens=1 << 62,
        train=Split((train_bin,), train_bin.stat().st_size // 2, 0, 0),
        val=Split((val_bin,), len(val), bytes_, ends),
        made={},
    )
