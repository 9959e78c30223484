"""Token files: the ids of a corpus on disk, as training reads them.

A folder has `train.bin` and `val.bin`, raw arrays of ids as nanoGPT writes them, beside a `meta.json` that describes
them. nanoGPT's own files, those of llm.c and NumPy's, of which a split may have several, are read in place.
"""

import codecs
import hashlib
import mmap
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from glob import glob
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from minigpt.data.tokenizer import Tokenizer, from_dict, token_dtype
from minigpt.utils.checks import NON_NEGATIVE_INT, one_of
from minigpt.utils.errors import UserError, require
from minigpt.utils.files import checksums, read_json, sha256_json
from minigpt.utils.terminal import log

FORMAT = 6
META = "meta.json"
STARTS = ".starts"  # file of a split: where each document starts in its bytes (int64), if no token ends documents
SPLITS = ("train", "val")
_SCAN_TOKENS = 1 << 20  # counted at a time
_MAX_MAPS = 256  # memory maps at a time; each has a file descriptor
_HASHED_FILES, _HASHED_BYTES = (
    64,
    1 << 16,
)  # of many files: how many are read, and the bytes of each
_HEAD_BYTES = 1 << 12  # that show the kind of a file
_SAMPLED_PAIRS = 1 << 13  # that show the width of ids
_LLM_C = {
    (20240520, 1): 2,
    (20240801, 7): 4,
}  # bytes per id, by the magic number and the version of the header
_LLM_C_HEADER = 1024  # bytes
_WRITE = "write its ids with np.array(ids, np.uint16).tofile(…), or np.uint32 for a vocabulary above 65,536"

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Split:
    """The token files of one split and its size in tokens, bytes of UTF-8, and documents."""

    files: Sequence[Path]
    tokens: int
    bytes: int
    documents: int
    headers: Sequence[int] = ()  # bytes before the ids of each file; (): none


@dataclass(frozen=True)
class Corpus:
    """Token files of two splits and their tokenizer."""

    name: str
    sha256: str  # of the text (`Source` of data/sources.py), or of token files
    tokenizer: Tokenizer
    train: Split
    val: Split
    dtype: str = "uint16"
    provenance: Mapping[str, Any] = field(
        default_factory=dict
    )  # of `prepare.py`; empty for nanoGPT's files
    val_sha256: str = (
        ""  # of the validation files, of their text, or of the text and how it is split
    )

    def check_length(self, block_size: int) -> None:
        """Raise UserError if a split is shorter than one window of `block_size` tokens and the next token."""
        # With a quarter more than a window: a split at the start of a document may be a fifth smaller.
        share = ceil(125 * (block_size + 1) / max(1, self.train.tokens + self.val.tokens)) / 100
        by_fraction = self.provenance.get("split") == "fraction" and share <= 0.5
        for name, split, fraction in (
            ("training", self.train, 1 - share),
            ("validation", self.val, share),
        ):
            if split.tokens <= block_size:
                raise UserError(
                    f"the {name} split has {split.tokens} tokens, but a window needs model.block_size + 1 = "
                    f"{block_size + 1}; {f'set data.val_fraction={fraction:g}, ' if by_fraction else ''}"
                    f"use a longer text or a smaller model.block_size"
                )

    def validated_part(self, block_size: int, batch_size: int, n_batches: int | None) -> str:
        """Describe what `ValidationBatches` reads of the validation split: losses of different parts do not compare."""
        total, split = -(-(self.val.tokens - 1) // block_size), f"{self.val.bytes:,} bytes"
        windows = total if n_batches is None else min(total, n_batches * batch_size)
        part = f"{windows:,} of {total:,} windows of {block_size} tokens in"
        return f"{'all' if windows == total else part} {split} of text {self.val_sha256[:8]}"

    def tokens(self, split: str) -> "Tokens":
        """Return the ids of "train" or "val", (N,), which are read from disk on access."""
        part: Split = getattr(self, split)
        return Tokens(part.files, self.dtype, self.tokenizer.vocab_size, part.headers)


class Tokens:
    """Token files, one after another, as an array (N,): `tokens[a:b]`, or `tokens[index]` for windows (B, T).

    The cost of an index does not depend on N. Raises UserError for ids outside the vocabulary.
    """

    def __init__(
        self, files: Sequence[Path], dtype: str, vocab_size: int, headers: Sequence[int] = ()
    ) -> None:
        self.files, self.dtype, self.vocab_size = files, np.dtype(dtype), vocab_size
        self.headers = headers or [0] * len(files)
        sizes = [
            file.stat().st_size - header for file, header in zip(files, self.headers, strict=True)
        ]
        self.starts = np.cumsum(
            [0, *(size // self.dtype.itemsize for size in sizes)]
        )  # (files + 1,)
        self.map = lru_cache(_MAX_MAPS)(lambda i: _map(files[i], self.dtype, self.headers[i]))
        if len(files) == 1 and len(self):
            self.map(0)  # now, so that a run holds its file if it is removed later

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: Any) -> Array:
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            ids = self._read(begin, max(begin, end))
            self._check(ids, range(begin, end))
            return ids[::step]
        positions = index.ravel()
        ids, files = (
            np.empty(positions.size, self.dtype),
            np.searchsorted(self.starts[1:], positions, side="right"),
        )
        for a, b in pairwise(
            [*np.flatnonzero(np.diff(files, prepend=-1)), positions.size]
        ):  # runs within a file
            ids[a:b] = self.map(int(files[a]))[positions[a:b] - self.starts[files[a]]]
        self._check(ids, positions)
        return ids.reshape(index.shape)

    def _read(self, begin: int, end: int) -> Array:
        """Read consecutive ids without mapping their files."""
        ids = np.empty(end - begin, self.dtype)
        for i in range(
            np.searchsorted(self.starts[1:], begin, side="right"),
            np.searchsorted(self.starts[:-1], end),
        ):
            a, b = max(begin, self.starts[i]), min(end, self.starts[i + 1])
            offset = self.headers[i] + (a - self.starts[i]) * self.dtype.itemsize
            ids[a - begin : b - begin] = np.fromfile(
                self.files[i], self.dtype, b - a, offset=offset
            )
        return ids

    def _check(self, ids: Array, positions: Any) -> None:
        if (largest := ids.max(initial=0)) >= self.vocab_size:
            i = int(np.searchsorted(self.starts[1:], positions[int(ids.argmax())], side="right"))
            raise UserError(
                f"{self.files[i]} has a token id {largest}, outside the vocabulary of {self.vocab_size}; "
                f"the file is damaged, of another tokenizer, or its ids have another width"
            )


def load(folder: Path) -> Corpus:
    """Load the files of `prepare.py`; raise UserError if one is missing or has another size than in `meta.json`."""
    try:
        meta = read_json(folder / META)
        require("dtype", meta["dtype"], *one_of(("uint16", "uint32")))
        for key, kind in (("name", str), ("sha256", str), ("provenance", dict)):
            if not isinstance(meta[key], kind):
                raise ValueError(f"{key} must be a {kind.__name__}")
        split = [meta["provenance"].get(key) for key in ("source_sha256", "split", "val_fraction")]
        return Corpus(
            tokenizer=from_dict(meta["tokenizer"]),
            train=_load_split(folder / "train.bin", meta["train"], meta["dtype"]),
            val=_load_split(folder / "val.bin", meta["val"], meta["dtype"]),
            val_sha256=meta["provenance"].get("val_sha256") or sha256_json(split),
            **{key: meta[key] for key in ("name", "sha256", "dtype", "provenance")},
        )
    except (UserError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"broken token files ({error}); remove {folder} to have them written again"
        ) from error


def load_prepared(data: Mapping[str, Any]) -> Corpus | None:
    """Load the token files of the data group if they are those of a folder of `prepare.py`; None if not."""
    files = [file for key in ("train_bin", "val_bin") for file in _find_bins(key, data[key])]
    meta = files[0].with_name(META)
    is_prepared = (
        files == [meta.with_name(f"{split}.bin") for split in SPLITS]
        and meta.is_file()
        and b'"provenance"' in meta.read_bytes()  # not of another tool
    )
    return load(meta.parent) if is_prepared else None


def load_bins(
    data: Mapping[str, Any], tokenizer: Tokenizer, data_folder: Path | None = None
) -> Corpus:
    """Read the token files of the data group, arrays of ids, in place.

    The validation split is read whole, to count its bytes and documents. `data_folder` is that of `checksums`.
    """
    vocab_size, documents = tokenizer.vocab_size, 0
    found = {key: _find_bins(key, data[key]) for key in ("train_bin", "val_bin")}
    layouts = [
        _layout(f"data.{key}={file}", file, vocab_size)
        for key, files in found.items()
        for file in files
    ]
    train, val = found.values()
    for meta in filter(Path.is_file, {file.with_name(META) for file in (*train, *val)}):
        if (
            b'"provenance"' in meta.read_bytes()  # not of another tool
            and from_dict(read_json(meta).get("tokenizer")).token_bytes != tokenizer.token_bytes
        ):
            raise UserError(
                f"{meta.parent} has token files of another tokenizer; give files of one, and tokenizer=…"
            )
    if len(widths := {width for width, _ in layouts}) > 1:
        raise UserError(
            f"data.train_bin and data.val_bin must have ids of one width, got several; {_WRITE}"
        )
    dtype, headers = f"uint{8 * widths.pop()}", [header for _, header in layouts]
    if dtype != token_dtype(vocab_size):
        log(f"the ids of data.train_bin and data.val_bin are read as {dtype}")
    train_headers, val_headers = headers[: len(train)], headers[len(train) :]
    tokens = Tokens(val, dtype, vocab_size, val_headers)
    counts = np.zeros(vocab_size, dtype=np.int64)  # of each id
    for begin in range(0, len(tokens), _SCAN_TOKENS):
        counts += np.bincount(
            tokens[begin : begin + _SCAN_TOKENS].astype(np.int64), minlength=len(counts)
        )
    val_bytes = sum(
        int(n) * len(tokenizer.token_bytes.get(i, b"")) for i, n in enumerate(counts)
    )  # of UTF-8
    if (end := tokenizer.end_token) is not None:
        documents = int(counts[end])
        tokenizer = copy(tokenizer)
        tokenizer.separated = tokenizer.separated or documents > 0
    sums = split_checksums(train, val, data_folder)
    return Corpus(
        name=train[0].name,
        sha256=hashlib.sha256("".join(sums).encode()).hexdigest(),
        tokenizer=tokenizer,
        train=Split(
            train, len(Tokens(train, dtype, vocab_size, train_headers)), 0, 0, train_headers
        ),
        val=Split(val, len(tokens), val_bytes, documents, val_headers),
        dtype=dtype,
        val_sha256=sums[1],
    )


def _find_bins(key: str, value: str | Sequence[str]) -> list[Path]:
    """Find the files of a path, of a pattern (sorted by name), or of a list of these; `key` is of the data group."""
    files: list[Path] = []
    for path in [value] if isinstance(value, str) else value:
        given = Path(path).expanduser()
        matches = sorted(map(Path, glob(str(given))), key=Path.as_posix)
        files += (
            matches if matches and not given.exists() else [given]
        )  # a name may look like a pattern
    for file in files:
        if not file.is_file():
            raise UserError(
                f"data.{key}={file} is not a file; give the path of nanoGPT's token files"
            )
    return files


def split_checksums(
    train: Sequence[Path], val: Sequence[Path], data_folder: Path | None
) -> list[str]:
    """Identify the token files of both splits: by content if each has one, else by sizes and a sample."""
    if len(train) == len(val) == 1:
        return checksums([*train, *val], data_folder)
    sums = []
    for files in (train, val):
        n, heads = min(len(files), _HASHED_FILES), []
        for i in range(n):
            with open(files[i * len(files) // n], "rb") as content:
                heads.append(hashlib.sha256(content.read(_HASHED_BYTES)).hexdigest())
        sums.append(sha256_json([[file.stat().st_size for file in files], heads]))
    return sums


def _layout(name: str, file: Path, vocab_size: int) -> tuple[int, int]:
    """Return the bytes per id and the bytes before the first; raise UserError, with `name`, for other kinds of files.

    Source of llm.c's header: https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py
    """
    size = file.stat().st_size
    with open(file, "rb") as content:
        head = content.read(_HEAD_BYTES)
    if head.startswith(np.lib.format.MAGIC_PREFIX):
        try:
            array: Any = np.load(file, mmap_mode="r")
        except (ValueError, OSError) as error:
            raise UserError(f"{name} cannot be read by NumPy ({error})") from error
        if (
            array.ndim != 1
            or array.dtype.newbyteorder("<") != array.dtype
            or array.dtype.kind not in "iu"
        ):
            raise UserError(
                f"{name} must be an array of integers (N,), got {array.dtype} {array.shape}; {_WRITE}"
            )
        return array.dtype.itemsize, array.offset
    magic, version, n_tokens = np.frombuffer(head[:12].ljust(12), "<i4").tolist()
    if 20240520 <= magic <= 20240801:
        width = _LLM_C.get((magic, version), 0)
        if not width or size != _LLM_C_HEADER + width * n_tokens:
            raise UserError(
                f"{name} is not a complete token file of llm.c: {magic=}, {version=}, {n_tokens:,} tokens"
            )
        return width, _LLM_C_HEADER
    if size >= 64 and b"\0" not in head:
        with suppress(UnicodeDecodeError):
            codecs.getincrementaldecoder("utf-8")().decode(head)
            raise UserError(f"{name} is a text, not an array of ids; set data.path to it")
    base = width = np.dtype(token_dtype(vocab_size)).itemsize
    while width < 8 and _alternate(file, width):
        width *= 2
    if size % width or not size:
        raise UserError(f"{name} has {size} bytes, not an array of {8 * width}-bit ids")
    if width > base and np.frombuffer(head, f"<u{width}").max() >= vocab_size:
        raise UserError(
            f"{name} has no ids of this tokenizer: every second number of {4 * width} bits is 0, "
            f"and as ids of {8 * width} bits they are outside the vocabulary of {vocab_size:,}; "
            f"{_WRITE}"
        )
    return width, 0


def _alternate(file: Path, width: int) -> bool:
    """Return whether numbers of `width` bytes are 0 in every second place, as the halves of wider ids are."""
    if (n := file.stat().st_size // (2 * width)) < 16:
        return False
    numbers: Any = np.memmap(file, f"<u{width}", "r", shape=(n, 2))
    even, odd = (numbers[:: n // _SAMPLED_PAIRS + 1] == 0).mean(axis=0)
    return bool(odd == 1 > even or abs(even - odd) > 0.25)


def _map(file: Path, dtype: np.dtype[Any], header: int) -> Array:
    """Map a file without read-ahead, since windows are anywhere in it."""
    with open(file, "rb") as content:
        pages = mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ)
    if sys.platform != "win32":
        pages.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(pages, dtype=dtype, offset=header)


def _load_split(file: Path, sizes: Mapping[str, int], dtype: str) -> Split:
    for key in ("tokens", "bytes", "documents"):
        require(key, sizes[key], *NON_NEGATIVE_INT)
    expected = sizes["tokens"] * np.dtype(dtype).itemsize
    if (found := file.stat().st_size) != expected:
        raise UserError(f"{file} has {found} bytes, {META} needs {expected}")
    return Split([file], sizes["tokens"], sizes["bytes"], sizes["documents"])
