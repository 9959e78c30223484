"""Token files: the ids of a corpus on disk, as training reads them.

A folder has `train.bin` and `val.bin`, raw arrays of ids as nanoGPT writes them, beside a `meta.json` that describes
them. nanoGPT's own files are read in place.
"""

import hashlib
import mmap
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minigpt.data import tokenizer as tokenizers
from minigpt.data.tokenizer import Tokenizer
from minigpt.utils.checks import NON_NEGATIVE_INT, one_of
from minigpt.utils.errors import UserError, require
from minigpt.utils.files import checksums, read_json

FORMAT = 4
META = "meta.json"
SPLITS = ("train", "val")
_SCAN_TOKENS = 1 << 20  # counted at a time

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Split:
    """The token file of one split and its size in tokens, bytes of UTF-8, and documents."""

    file: Path
    tokens: int
    bytes: int
    documents: int


@dataclass(frozen=True)
class Corpus:
    """Token files of two splits and their tokenizer."""

    name: str
    sha256: str  # of the text
    tokenizer: Tokenizer
    train: Split
    val: Split
    dtype: str = "uint16"
    provenance: Mapping[str, Any] = field(default_factory=dict)  # of `prepare.py`; empty for nanoGPT's files

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
        return Tokens(getattr(self, split).file, self.dtype, self.tokenizer.vocab_size)


class Tokens:
    """A token file as an array (N,): `tokens[a:b]`, or `tokens[index]` for windows (B, T).

    The cost of an index does not depend on N. Raises UserError for ids outside the vocabulary.
    """

    def __init__(self, file: Path, dtype: str, vocab_size: int) -> None:
        self.file, self.dtype, self.vocab_size = file, np.dtype(dtype), vocab_size
        self.ids = _map(file, self.dtype)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> Array:
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            count, offset = max(0, end - begin), begin * self.dtype.itemsize
            ids = np.fromfile(self.file, self.dtype, count, offset=offset)[::step]
        else:
            ids = self.ids[index]
        if (largest := ids.max(initial=0)) >= self.vocab_size:
            raise UserError(
                f"{self.file} has a token id {largest}, outside the vocabulary of {self.vocab_size}; "
                f"the file is damaged, or of another tokenizer"
            )
        return ids

    def count_ids(self) -> Array:
        """Count how often each id occurs, (vocab_size,)."""
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for begin in range(0, len(self), _SCAN_TOKENS):
            counts += np.bincount(self[begin : begin + _SCAN_TOKENS], minlength=self.vocab_size)
        return counts


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


def from_bins(train_bin: Path, val_bin: Path, tokenizer: Tokenizer, checksum_cache: Path | None = None) -> Corpus:
    """Read nanoGPT's token files, arrays of 16-bit ids, in place; `checksum_cache` is that of `checksums`.

    Raise UserError if a file is missing or not such an array.
    """
    for name, file in zip(SPLITS, (train_bin, val_bin), strict=True):
        if not file.is_file():
            raise UserError(f"data.{name}_bin={file} is not a file; give the path of a nanoGPT token file")
        if (size := file.stat().st_size) % 2 or not size:
            raise UserError(f"data.{name}_bin={file} has {size} bytes, not an array of 16-bit ids")
    train, val = (Tokens(file, "uint16", tokenizer.vocab_size) for file in (train_bin, val_bin))
    counts, documents = val.count_ids(), 0  # (vocab_size,)
    val_bytes = sum(int(n) * len(tokenizer.token_bytes.get(i, b"")) for i, n in enumerate(counts))  # of UTF-8
    if (end := tokenizer.end_token) is not None:
        documents = int(counts[end])
        tokenizer = copy(tokenizer)
        tokenizer.separated = tokenizer.separated or documents > 0
    return Corpus(
        name=train_bin.name,
        sha256=hashlib.sha256("".join(checksums([train_bin, val_bin], checksum_cache)).encode()).hexdigest(),
        tokenizer=tokenizer,
        train=Split(train_bin, len(train), 0, 0),
        val=Split(val_bin, len(val), val_bytes, documents),
    )


def _map(file: Path, dtype: np.dtype[Any]) -> Array:
    """Map a file without read-ahead, since windows are anywhere in it."""
    if file.stat().st_size == 0:
        return np.empty(0, dtype=dtype)  # an empty file cannot be mapped
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
    return Split(file, sizes["tokens"], sizes["bytes"], sizes["documents"])
