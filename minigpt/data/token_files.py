"""Token files: the ids of a corpus on disk, as training reads them.

A split is raw arrays of equally many ids ("shards"), for `numpy.memmap` and other tools, beside a `meta.json` that
describes them. nanoGPT's `train.bin` and `val.bin` are read in place.
"""

import hashlib
import mmap
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from minigpt.data import tokenizer as tokenizers
from minigpt.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer
from minigpt.utils.checks import NON_NEGATIVE_INT, POSITIVE_INT, one_of
from minigpt.utils.errors import UserError, require
from minigpt.utils.files import checksums, read_json

FORMAT = 3
META = "meta.json"
SPLITS = ("train", "val")
_ONE_FILE = 1 << 62  # shard_tokens of files that are not sharded
_MAX_MAPPED_SHARDS = 256  # each holds a file descriptor
_SCAN_TOKENS = 1 << 20  # counted at a time

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Split:
    """The token files of one split and their size in tokens, bytes of UTF-8, and documents."""

    files: tuple[Path, ...]
    tokens: int
    bytes: int
    documents: int


@dataclass(frozen=True)
class Corpus:
    """Token files of two splits and their tokenizer.

    Args:
        sha256: of the text.
        stand_in: whether the text replaces one that could not be downloaded.
        shard_tokens: ids per file; the last file of a split may have fewer.
        provenance: settings and figures of `prepare.py`; empty for nanoGPT's files.
    """

    name: str
    sha256: str
    tokenizer: Tokenizer
    train: Split
    val: Split
    dtype: str = "uint16"
    shard_tokens: int = _ONE_FILE
    stand_in: bool = False
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={getattr(self, name).tokens:,} tokens" for name in SPLITS)
        return f"Corpus({self.name!r}, {sizes}, {self.tokenizer})"

    @property
    def val_bytes_per_token(self) -> float:
        """Bytes of UTF-8 per token of the validation split."""
        return self.val.bytes / self.val.tokens

    def check_length(self, block_size: int) -> None:
        """Raise UserError if a split is shorter than one window of `block_size` tokens and the next token."""
        for name, split in (("training", self.train), ("validation", self.val)):
            if split.tokens <= block_size:
                raise UserError(
                    f"the {name} split has {split.tokens} tokens, but a window needs model.block_size + 1 = "
                    f"{block_size + 1}; use a longer text or a smaller model.block_size"
                )

    def tokens(self, split: str) -> "Tokens":
        """Return the ids of "train" or "val", (N,), which are read from disk on access."""
        part: Split = getattr(self, split)
        return Tokens(part.files, self.dtype, self.shard_tokens, part.tokens, self.tokenizer.vocab_size)


class Tokens:
    """The shards of a split as one array (N,): `tokens[a:b]`, or `tokens[index]` for windows (B, T).

    The cost of an index does not depend on N. Raises UserError for ids outside the vocabulary.
    """

    def __init__(self, files: Sequence[Path], dtype: str, shard_tokens: int, length: int, vocab_size: int) -> None:
        self.dtype, self.length, self.shard_tokens = np.dtype(dtype), length, shard_tokens
        self.files, self.vocab_size = files, vocab_size
        self._shard = lru_cache(_MAX_MAPPED_SHARDS)(lambda i: _map(files[i], dtype))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Array:
        if isinstance(index, slice):
            ids = self._slice(*index.indices(self.length))
        else:
            ids = self._shard(0)[index] if len(self.files) == 1 else self._windows(index)
        if (largest := ids.max(initial=0)) >= self.vocab_size:
            where = self.files[0] if len(self.files) == 1 else self.files[0].parent
            raise UserError(
                f"{where} has a token id {largest}, outside the vocabulary of {self.vocab_size}; "
                f"the file is damaged, or of another tokenizer"
            )
        return ids

    def count_ids(self) -> Array:
        """Count how often each id occurs, (vocab_size,)."""
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for begin in range(0, len(self), _SCAN_TOKENS):
            counts += np.bincount(self[begin : begin + _SCAN_TOKENS], minlength=self.vocab_size)
        return counts

    def _slice(self, begin: int, end: int, step: int) -> Array:
        parts = [np.empty(0, dtype=self.dtype)]
        while begin < end:
            shard, first = divmod(begin, self.shard_tokens)
            count = min(end - begin, self.shard_tokens - first)
            offset = first * self.dtype.itemsize
            parts.append(np.fromfile(self.files[shard], dtype=self.dtype, count=count, offset=offset))
            begin += count
        return np.concatenate(parts)[::step]

    def _windows(self, index: Array) -> Array:
        shards, positions = np.divmod(index, self.shard_tokens)  # (B, T) each
        ids = np.empty(index.shape, dtype=self.dtype)
        for i in np.flatnonzero(np.bincount(shards.ravel())).tolist():
            rows = np.flatnonzero((shards[:, 0] <= i) & (i <= shards[:, -1]))  # windows that overlap shard i
            inside = shards[rows] == i
            ids[rows] = np.where(inside, self._shard(i)[np.where(inside, positions[rows], 0)], ids[rows])
        return ids


def _map(file: Path, dtype: str) -> Array:
    """Map a file without read-ahead, since windows are anywhere in it."""
    with open(file, "rb") as content:
        pages = mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):
        pages.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(pages, dtype=dtype)


def shard_file(folder: Path, split: str, index: int) -> Path:
    """Return the path of a shard."""
    return folder / f"{split}-{index:05}.bin"


def load(folder: Path) -> Corpus:
    """Load the token files that `prepare.py` wrote.

    Raises:
        UserError: a file is missing, or does not have the size in `meta.json`.
    """
    try:
        meta = read_json(folder / META)
        require("shard_tokens", meta["shard_tokens"], *POSITIVE_INT)
        require("dtype", meta["dtype"], *one_of(("uint16", "uint32")))
        for key, kind in (("name", str), ("sha256", str), ("stand_in", bool), ("provenance", dict)):
            if not isinstance(meta[key], kind):
                raise ValueError(f"{key} must be a {kind.__name__}")
        return Corpus(
            tokenizer=tokenizers.from_dict(meta["tokenizer"]),
            train=_load_split(folder, "train", meta),
            val=_load_split(folder, "val", meta),
            **{key: meta[key] for key in ("name", "sha256", "stand_in", "dtype", "shard_tokens", "provenance")},
        )
    except (UserError, OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise UserError(f"broken token files ({error}); remove {folder} to have them written again") from error


def _load_split(folder: Path, name: str, meta: Mapping[str, Any]) -> Split:
    for key in ("tokens", "bytes", "documents"):
        require(f"{name}.{key}", meta[name][key], *NON_NEGATIVE_INT)
    tokens, size, files = meta[name]["tokens"], meta["shard_tokens"], []
    for i in range(-(-tokens // size)):
        files.append(file := shard_file(folder, name, i))
        expected = min(size, tokens - i * size) * np.dtype(meta["dtype"]).itemsize
        if (found := file.stat().st_size) != expected:
            raise UserError(f"{file} has {found} bytes, {META} needs {expected}")
    return Split(tuple(files), tokens, meta[name]["bytes"], meta[name]["documents"])


def from_bins(train_bin: Path, val_bin: Path, tokenizer: Tokenizer, checksum_cache: Path | None = None) -> Corpus:
    """Read nanoGPT's token files in place: arrays of 16-bit ids.

    Args:
        checksum_cache: JSON file of earlier checksums; None disables caching.

    Raises:
        UserError: a file is missing or not such an array, or the tokenizer was built from a text.
    """
    if not isinstance(tokenizer, BPETokenizer | ByteTokenizer):
        raise UserError("data.train_bin needs the tokenizer of its ids; set tokenizer=gpt2 (nanoGPT's) or byte")
    for name, file in zip(SPLITS, (train_bin, val_bin), strict=True):
        if not file.is_file():
            raise UserError(f"data.{name}_bin={file} is not a file; give the path of a nanoGPT token file")
        if (size := file.stat().st_size) % 2 or not size:
            raise UserError(f"data.{name}_bin={file} has {size} bytes, not an array of 16-bit ids")
    n_train, n_val = (file.stat().st_size // 2 for file in (train_bin, val_bin))
    counts = Tokens([val_bin], "uint16", _ONE_FILE, n_val, tokenizer.vocab_size).count_ids()
    val_bytes, documents = n_val, 0
    if isinstance(tokenizer, BPETokenizer):
        val_bytes, documents = int(counts @ tokenizer.byte_lengths()), int(counts[tokenizer.separator[0]])
        tokenizer = copy(tokenizer)
        tokenizer.separated = tokenizer.separated or documents > 0
    return Corpus(
        name=train_bin.name,
        sha256=hashlib.sha256("".join(checksums([train_bin, val_bin], checksum_cache)).encode()).hexdigest(),
        tokenizer=tokenizer,
        train=Split((train_bin,), n_train, 0, 0),
        val=Split((val_bin,), n_val, val_bytes, documents),
    )
