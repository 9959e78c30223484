"""Token files: the ids of a corpus on disk, as training reads them.

A folder has `train.bin` and `val.bin`, raw arrays of ids as nanoGPT writes them, beside a `meta.json` that describes
them. nanoGPT's own files, of which a split may have several, are read in place.
"""

import mmap
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from glob import glob
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from minigpt.data import tokenizer as tokenizers
from minigpt.data.checksums import token_files_checksum
from minigpt.data.tokenizer import Tokenizer
from minigpt.utils.checks import NON_NEGATIVE_INT, one_of
from minigpt.utils.errors import UserError, require
from minigpt.utils.files import read_json

FORMAT = 4
META = "meta.json"
SPLITS = ("train", "val")
_SCAN_TOKENS = 1 << 20  # counted at a time
_MAX_MAPS = 256  # memory maps at a time; each has a file descriptor

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Split:
    """The token files of one split and its size in tokens, bytes of UTF-8, and documents."""

    files: Sequence[Path]
    tokens: int
    bytes: int
    documents: int


@dataclass(frozen=True)
class Corpus:
    """Token files of two splits and their tokenizer."""

    name: str
    sha256: str  # of the text, or of token files
    tokenizer: Tokenizer
    train: Split
    val: Split
    dtype: str = "uint16"
    provenance: Mapping[str, Any] = field(default_factory=dict)  # of `prepare.py`; empty for nanoGPT's files

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
        return Tokens(getattr(self, split).files, self.dtype, self.tokenizer.vocab_size)


class Tokens:
    """Token files, one after another, as an array (N,): `tokens[a:b]`, or `tokens[index]` for windows (B, T).

    The cost of an index does not depend on N. Raises UserError for ids outside the vocabulary.
    """

    def __init__(self, files: Sequence[Path], dtype: str, vocab_size: int) -> None:
        self.files, self.dtype, self.vocab_size = files, np.dtype(dtype), vocab_size
        self.starts = np.cumsum([0, *(file.stat().st_size // self.dtype.itemsize for file in files)])  # (files + 1,)
        self.map = lru_cache(_MAX_MAPS)(lambda i: _map(files[i], self.dtype))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: Any) -> Array:
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            ids = self._read(begin, max(begin, end))
            self._check(ids, range(begin, end))
            return ids[::step]
        positions = index.ravel()
        ids, files = np.empty(positions.size, self.dtype), np.searchsorted(self.starts[1:], positions, side="right")
        for a, b in pairwise([*np.flatnonzero(np.diff(files, prepend=-1)), positions.size]):  # runs within a file
            ids[a:b] = self.map(files[a])[positions[a:b] - self.starts[files[a]]]
        self._check(ids, positions)
        return ids.reshape(index.shape)

    def _read(self, begin: int, end: int) -> Array:
        """Read consecutive ids without mapping their files."""
        ids = np.empty(end - begin, self.dtype)
        for i in range(np.searchsorted(self.starts[1:], begin, side="right"), np.searchsorted(self.starts[:-1], end)):
            a, b = max(begin, self.starts[i]), min(end, self.starts[i + 1])
            offset = (a - self.starts[i]) * self.dtype.itemsize
            ids[a - begin : b - begin] = np.fromfile(self.files[i], self.dtype, b - a, offset=offset)
        return ids

    def _check(self, ids: Array, positions: Any) -> None:
        if (largest := ids.max(initial=0)) >= self.vocab_size:
            i = int(np.searchsorted(self.starts[1:], positions[int(ids.argmax())], side="right"))
            raise UserError(
                f"{self.files[i]} has a token id {largest}, outside the vocabulary of {self.vocab_size}; "
                f"the file is damaged, or of another tokenizer"
            )


def load(folder: Path) -> Corpus:
    """Load the files of `prepare.py`; raise UserError if one is missing or has another size than in `meta.json`."""
    try:
        meta = read_json(folder / META)
        require("dtype", meta["dtype"], *one_of(("uint16", "uint32")))
        for key, kind in (("name", str), ("sha256", str), ("provenance", dict)):
            if not isinstance(meta[key], kind):
                raise ValueError(f"{key} must be a {kind.__name__}")
        return Corpus(
            tokenizer=tokenizers.from_dict(meta["tokenizer"]),
            train=_load_split(folder / "train.bin", meta["train"], meta["dtype"]),
            val=_load_split(folder / "val.bin", meta["val"], meta["dtype"]),
            **{key: meta[key] for key in ("name", "sha256", "dtype", "provenance")},
        )
    except (UserError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"broken token files ({error}); remove {folder} to have them written again") from error


def load_bins(data: Mapping[str, Any], tokenizer: Tokenizer, checksum_cache: Path | None = None) -> Corpus:
    """Read nanoGPT's token files of the data group, arrays of 16-bit ids, in place.

    The validation split is read whole, to count its bytes and documents. `checksum_cache` is that of `checksums`.
    """
    train, val = (_find_bins(f"data.{key}", data[key]) for key in ("train_bin", "val_bin"))
    tokens, documents = Tokens(val, "uint16", tokenizer.vocab_size), 0
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)  # of each id
    for begin in range(0, len(tokens), _SCAN_TOKENS):
        counts += np.bincount(tokens[begin : begin + _SCAN_TOKENS], minlength=len(counts))
    val_bytes = sum(int(n) * len(tokenizer.token_bytes.get(i, b"")) for i, n in enumerate(counts))  # of UTF-8
    if (end := tokenizer.end_token) is not None:
        documents = int(counts[end])
        tokenizer = copy(tokenizer)
        tokenizer.separated = tokenizer.separated or documents > 0
    return Corpus(
        name=train[0].name,
        sha256=token_files_checksum(train, val, checksum_cache),
        tokenizer=tokenizer,
        train=Split(train, sum(file.stat().st_size for file in train) // 2, 0, 0),
        val=Split(val, len(tokens), val_bytes, documents),
    )


def _find_bins(key: str, value: str | Sequence[str]) -> list[Path]:
    """Find the files of a path, of a pattern (sorted by name), or of a list of these; `key` is for errors."""
    files: list[Path] = []
    for path in [value] if isinstance(value, str) else value:
        given = Path(path).expanduser()
        found = [given] if given.exists() else [*map(Path, sorted(glob(str(given))))]  # a name may look like a pattern
        files += found or [given]
    for file in files:
        if not file.is_file():
            raise UserError(f"{key}={file} is not a file; give the path of nanoGPT's token files")
        if (size := file.stat().st_size) % 2 or not size:
            raise UserError(f"{key}={file} has {size} bytes, not an array of 16-bit ids")
    return files


def _map(file: Path, dtype: np.dtype[Any]) -> Array:
    """Map a file without read-ahead, since windows are anywhere in it."""
    with open(file, "rb") as content:
        pages = mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):
        pages.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(pages, dtype=dtype)


def _load_split(file: Path, sizes: Mapping[str, int], dtype: str) -> Split:
    for key in ("tokens", "bytes", "documents"):
        require(key, sizes[key], *NON_NEGATIVE_INT)
    expected = sizes["tokens"] * np.dtype(dtype).itemsize
    if (found := file.stat().st_size) != expected:
        raise UserError(f"{file} has {found} bytes, {META} needs {expected}")
    return Split([file], sizes["tokens"], sizes["bytes"], sizes["documents"])
