"""Token files: the ids of a corpus on disk, as training reads them.

A folder has `train.bin` and `val.bin`, raw arrays of ids as nanoGPT writes them, beside a
`meta.json` that describes them. nanoGPT's own files, those of llm.c and NumPy's, of which a split
may have several, are read in place.
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

import numpy as np
from numpy.typing import NDArray

from minigpt.data.tokenizer import Ids, Tokenizer, from_dict, token_dtype
from minigpt.utils.checks import NON_NEGATIVE_INT, Settings, one_of
from minigpt.utils.errors import UserError, require
from minigpt.utils.files import checksums, read_json, sha256_json
from minigpt.utils.terminal import log

FORMAT = 6
META = "meta.json"
# File of a split: where each document starts in its bytes (int64), if no token ends documents.
STARTS = ".starts"
SPLITS = ("train", "val")
_SCAN_TOKENS = 1 << 20  # counted at a time
_MAX_MAPS = 256  # memory maps at a time; each has a file descriptor
_HASHED_FILES = 64  # of a split of several
_HASHED_BYTES = 1 << 16  # of each of them
_HEAD_BYTES = 1 << 12  # that show the kind of a file
_SAMPLED_PAIRS = 1 << 13  # that show the width of ids
# Bytes per id, by the magic number and the version in the header of llm.c. Source:
# https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py
_LLM_C = {(20240520, 1): 2, (20240801, 7): 4}
_LLM_C_HEADER = 1024  # bytes
_WRITE = (
    "write its ids with np.array(ids, np.uint16).tofile(…), "
    "or np.uint32 for a vocabulary above 65,536"
)


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
    # Of the validation files or their text, or of the text and how it is split.
    val_sha256: str = ""
    provenance: Settings = field(default_factory=dict)  # of `prepare.py`; else empty

    def check_length(self, block_size: int) -> None:
        """Raise UserError if a split is shorter than a window of `block_size` + 1 tokens."""
        # With a quarter more: a split at the start of a document may be a fifth smaller.
        share = ceil(125 * (block_size + 1) / max(1, self.train.tokens + self.val.tokens)) / 100
        by_fraction = self.provenance.get("split") == "fraction" and share <= 0.5
        splits = (("training", self.train, 1 - share), ("validation", self.val, share))
        for name, split, fraction in splits:
            if split.tokens <= block_size:
                raise UserError(
                    f"the {name} split has {split.tokens} tokens, but a window needs "
                    f"model.block_size + 1 = {block_size + 1}; "
                    f"{f'set data.val_fraction={fraction:g}, ' if by_fraction else ''}"
                    f"use a longer text or a smaller model.block_size"
                )

    def validated_part(self, block_size: int, batch_size: int, n_batches: int | None) -> str:
        """Describe what `ValidationBatches` reads: losses of different parts do not compare."""
        total = -(-(self.val.tokens - 1) // block_size)
        windows = total if n_batches is None else min(total, n_batches * batch_size)
        part = f"{windows:,} of {total:,} windows of {block_size} tokens in"
        text = f"{self.val.bytes:,} bytes of text {self.val_sha256[:8]}"
        return f"{part if windows < total else 'all'} {text}"

    def tokens(self, split: str) -> "Tokens":
        """Return the ids of "train" or "val", (N,), which are read from disk on access."""
        part: Split = getattr(self, split)
        return Tokens(part.files, self.dtype, self.tokenizer.vocab_size, part.headers)


class Tokens:
    """Token files, one after another, as an array (N,).

    `tokens[a:b]` reads a slice, and `tokens[index]` gathers windows, (B, T). The cost of an index
    does not depend on N. Raises UserError for ids outside the vocabulary.
    """

    def __init__(
        self, files: Sequence[Path], dtype: str, vocab_size: int, headers: Sequence[int] = ()
    ) -> None:
        self.files = files
        self.dtype = np.dtype(dtype)
        self.vocab_size = vocab_size
        self.headers = headers or [0] * len(files)  # bytes
        sizes = np.array([file.stat().st_size for file in files]) - self.headers
        self.starts = np.cumsum([0, *sizes // self.dtype.itemsize])  # (files + 1,)
        self.map = lru_cache(_MAX_MAPS)(self._map)
        if len(files) == 1 and len(self):
            self.map(0)  # now, so that a run holds its file if it is removed later

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: slice | NDArray[np.int64]) -> Ids:
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            ids = self._read(begin, max(begin, end))
            self._check(ids, range(begin, end))
            return ids[::step]
        positions = index.ravel()  # (B · T,)
        ids = np.empty(positions.size, self.dtype)
        files = np.searchsorted(self.starts[1:], positions, side="right")  # of each position
        # Neighbors within one file are gathered together.
        for a, b in pairwise([*np.flatnonzero(np.diff(files, prepend=-1)), positions.size]):
            ids[a:b] = self.map(int(files[a]))[positions[a:b] - self.starts[files[a]]]
        self._check(ids, positions)
        return ids.reshape(index.shape)  # (B, T)

    def _read(self, begin: int, end: int) -> Ids:
        ids = np.empty(end - begin, self.dtype)  # without mapping the files, which is slower
        first = np.searchsorted(self.starts[1:], begin, side="right")
        for i in range(first, np.searchsorted(self.starts[:-1], end)):
            a = max(begin, self.starts[i])
            b = min(end, self.starts[i + 1])
            offset = self.headers[i] + (a - self.starts[i]) * self.dtype.itemsize
            ids[a - begin : b - begin] = np.fromfile(
                self.files[i], self.dtype, b - a, offset=offset
            )
        return ids

    def _map(self, i: int) -> Ids:
        # Without read-ahead, since windows are anywhere in the file.
        with open(self.files[i], "rb") as content:
            pages = mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ)
        if sys.platform != "win32":
            pages.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(pages, self.dtype, offset=self.headers[i])

    def _check(self, ids: Ids, positions: Sequence[int] | NDArray[np.int64]) -> None:
        largest = ids.max(initial=0)
        if largest >= self.vocab_size:
            i = int(np.searchsorted(self.starts[1:], positions[int(ids.argmax())], side="right"))
            raise UserError(
                f"{self.files[i]} has a token id {largest}, outside the vocabulary of "
                f"{self.vocab_size}; the file is damaged, of another tokenizer, "
                f"or its ids have another width"
            )


def load(folder: Path) -> Corpus:
    """Load the files of `prepare.py`.

    Raises:
        UserError: one is missing, or has another size than in `meta.json`.
    """
    try:
        meta = read_json(folder / META)
        require("dtype", meta["dtype"], *one_of(("uint16", "uint32")))
        for key, kind in (("name", str), ("sha256", str), ("provenance", dict)):
            if not isinstance(meta[key], kind):
                raise ValueError(f"{key} must be a {kind.__name__}")
        provenance = meta["provenance"]
        split = [provenance.get(key) for key in ("source_sha256", "split", "val_fraction")]
        return Corpus(
            name=meta["name"],
            sha256=meta["sha256"],
            tokenizer=from_dict(meta["tokenizer"]),
            train=_load_split(folder / "train.bin", meta["train"], meta["dtype"]),
            val=_load_split(folder / "val.bin", meta["val"], meta["dtype"]),
            dtype=meta["dtype"],
            val_sha256=provenance.get("val_sha256") or sha256_json(split),
            provenance=provenance,
        )
    except (UserError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"broken token files ({error}); remove {folder} to have them written again"
        ) from error


def _load_split(file: Path, sizes: Mapping[str, int], dtype: str) -> Split:
    for key in ("tokens", "bytes", "documents"):
        require(key, sizes[key], *NON_NEGATIVE_INT)
    expected = sizes["tokens"] * np.dtype(dtype).itemsize
    if (found := file.stat().st_size) != expected:
        raise UserError(f"{file} has {found} bytes, {META} needs {expected}")
    return Split([file], sizes["tokens"], sizes["bytes"], sizes["documents"])


def load_prepared(data: Settings) -> Corpus | None:
    """Load the token files of the data group if they are those of a folder of `prepare.py`."""
    files = [*_find_bins(data, "train_bin"), *_find_bins(data, "val_bin")]
    folder = files[0].parent
    is_prepared = files == [folder / f"{split}.bin" for split in SPLITS]
    return load(folder) if is_prepared and _is_own_meta(folder / META) else None


def _is_own_meta(meta: Path) -> bool:
    return meta.is_file() and b'"provenance"' in meta.read_bytes()  # else of another tool


def load_bins(data: Settings, tokenizer: Tokenizer, data_folder: Path | None = None) -> Corpus:
    """Read the token files of the data group, arrays of ids, in place.

    The validation split is read whole, to count its bytes and documents. `data_folder` is that of
    `checksums`.
    """
    # What the files are: the width of their ids, and the bytes before them.
    vocab_size = tokenizer.vocab_size
    train = _find_bins(data, "train_bin")
    val = _find_bins(data, "val_bin")
    layouts = [_layout(f"data.train_bin={file}", file, vocab_size) for file in train]
    layouts += [_layout(f"data.val_bin={file}", file, vocab_size) for file in val]
    headers = [header for _, header in layouts]
    widths = {width for width, _ in layouts}

    # All of one tokenizer, as far as can be seen, and of one width.
    for meta in {file.with_name(META) for file in (*train, *val)}:
        if (
            _is_own_meta(meta)
            and from_dict(read_json(meta).get("tokenizer")).token_bytes != tokenizer.token_bytes
        ):
            raise UserError(
                f"{meta.parent} has token files of another tokenizer; "
                f"give files of one, and tokenizer=…"
            )
    if len(widths) > 1:
        raise UserError(
            f"data.train_bin and data.val_bin must have ids of one width, got several; {_WRITE}"
        )
    dtype = f"uint{8 * widths.pop()}"
    if dtype != token_dtype(vocab_size):
        log(f"the ids of data.train_bin and data.val_bin are read as {dtype}")

    # How often each id is in the validation split, and so its bytes of UTF-8 and its documents.
    train_headers = headers[: len(train)]
    val_headers = headers[len(train) :]
    tokens = Tokens(val, dtype, vocab_size, val_headers)
    counts = np.zeros(vocab_size, dtype=np.int64)
    for begin in range(0, len(tokens), _SCAN_TOKENS):
        ids = tokens[begin : begin + _SCAN_TOKENS]
        counts += np.bincount(ids.astype(np.int64), minlength=vocab_size)
    sizes = [len(tokenizer.token_bytes.get(i, b"")) for i in range(vocab_size)]
    end = tokenizer.end_token
    documents = 0 if end is None else int(counts[end])
    if documents:
        tokenizer = copy(tokenizer)
        tokenizer.separated = True

    sums = split_checksums(train, val, data_folder)
    return Corpus(
        name=train[0].name,
        sha256=hashlib.sha256("".join(sums).encode()).hexdigest(),
        tokenizer=tokenizer,
        train=Split(
            train, len(Tokens(train, dtype, vocab_size, train_headers)), 0, 0, train_headers
        ),
        val=Split(val, len(tokens), int(counts @ sizes), documents, val_headers),
        dtype=dtype,
        val_sha256=sums[1],
    )


def _find_bins(data: Settings, key: str) -> list[Path]:
    # The files of a path, of a pattern (sorted by name), or of a list of these.
    value: str | Sequence[str] = data[key]
    files: list[Path] = []
    for path in [value] if isinstance(value, str) else value:
        given = Path(path).expanduser()
        matches = sorted(map(Path, glob(str(given))), key=Path.as_posix)
        # A name may look like a pattern.
        files += matches if matches and not given.exists() else [given]
    for file in files:
        if not file.is_file():
            raise UserError(
                f"data.{key}={file} is not a file; give the path of nanoGPT's token files"
            )
    return files


def split_checksums(
    train: Sequence[Path], val: Sequence[Path], data_folder: Path | None
) -> list[str]:
    """Return a checksum per split: of its file, or of the sizes and a sample of its files."""
    if len(train) == len(val) == 1:
        return checksums([*train, *val], data_folder)
    sums = []
    for files in (train, val):
        n = min(len(files), _HASHED_FILES)
        heads = []
        for i in range(n):
            with open(files[i * len(files) // n], "rb") as content:
                heads.append(hashlib.sha256(content.read(_HASHED_BYTES)).hexdigest())
        sums.append(sha256_json([[file.stat().st_size for file in files], heads]))
    return sums


def _layout(name: str, file: Path, vocab_size: int) -> tuple[int, int]:
    """Return the bytes per id and the bytes before the first id.

    Raises:
        UserError: the file, `name` in the message, is of another kind.
    """
    size = file.stat().st_size
    with open(file, "rb") as content:
        head = content.read(_HEAD_BYTES)

    # An array of NumPy.
    if head.startswith(np.lib.format.MAGIC_PREFIX):
        try:
            array = np.load(file, mmap_mode="r")
        except (ValueError, OSError) as error:
            raise UserError(f"{name} cannot be read by NumPy ({error})") from error
        dtype = array.dtype
        if array.ndim != 1 or dtype.kind not in "iu" or dtype.newbyteorder("<") != dtype:
            raise UserError(
                f"{name} must be an array of integers (N,), got {dtype} {array.shape}; {_WRITE}"
            )
        return dtype.itemsize, array.offset

    # A file of llm.c.
    magic, version, n_tokens = np.frombuffer(head[:12].ljust(12), "<i4").tolist()
    if 20240520 <= magic <= 20240801:
        width = _LLM_C.get((magic, version), 0)
        if not width or size != _LLM_C_HEADER + width * n_tokens:
            raise UserError(
                f"{name} is not a complete token file of llm.c: "
                f"{magic=}, {version=}, {n_tokens:,} tokens"
            )
        return width, _LLM_C_HEADER

    # A text, which a path of token files names by mistake.
    if size >= 64 and b"\0" not in head:
        with suppress(UnicodeDecodeError):
            codecs.getincrementaldecoder("utf-8")().decode(head)
            raise UserError(f"{name} is a text, not an array of ids; set data.path to it")

    # Ids alone, which may be wider than those of the vocabulary must be.
    narrowest = np.dtype(token_dtype(vocab_size)).itemsize
    width = narrowest
    while width < 8 and _alternates(file, width):
        width *= 2
    if size % width or not size:
        raise UserError(f"{name} has {size} bytes, not an array of {8 * width}-bit ids")
    if width > narrowest and np.frombuffer(head, f"<u{width}").max() >= vocab_size:
        raise UserError(
            f"{name} has no ids of this tokenizer: every second number of {4 * width} bits is 0, "
            f"and as ids of {8 * width} bits they are outside the vocabulary of {vocab_size:,}; "
            f"{_WRITE}"
        )
    return width, 0


def _alternates(file: Path, width: int) -> bool:
    # Whether every second number of `width` bytes is 0, as the halves of wider ids are.
    n = file.stat().st_size // (2 * width)  # pairs
    if n < 16:
        return False
    numbers = np.memmap(file, f"<u{width}", "r", shape=(n, 2))
    even, odd = (numbers[:: n // _SAMPLED_PAIRS + 1] == 0).mean(axis=0)
    return bool(odd == 1 > even or abs(even - odd) > 0.25)
