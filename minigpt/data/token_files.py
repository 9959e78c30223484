"""Token files: the ids of a corpus on disk, as training reads them.

A folder has `train.bin` and `val.bin`, raw arrays of ids as nanoGPT writes them, beside a
`meta.json` that describes them. A corpus of files of other tools may have several files per split,
and headers in them (`extras/corpora/token_parts.py`).
"""

import mmap
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from minigpt.data.tokenizer import Ids, Tokenizer, encode_prompt, from_dict
from minigpt.utils.checks import NON_NEGATIVE_INT, Settings, one_of
from minigpt.utils.errors import UserError, require
from minigpt.utils.extras import from_extras
from minigpt.utils.files import read_json, sha256_json

FORMAT = 6
META = "meta.json"
# File of a split: where each document starts in its bytes (int64), if no token ends documents.
STARTS = ".starts"
SPLITS = ("train", "val")


@dataclass(frozen=True)
class Split:
    """The token files of one split and its size in tokens, bytes of UTF-8, and documents."""

    files: Sequence[Path]
    tokens: int
    bytes: int  # of the text that losses are of
    documents: int
    targets: int  # tokens that losses are of: all, or those of answers in conversations


@dataclass(frozen=True)
class Corpus:
    """Token files of two splits and their tokenizer."""

    is_text = True  # losses are of every token; else of the answers alone

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
        return (
            f"{part if windows < total else 'all'} "
            f"{self.val.bytes:,} bytes of text {self.val_sha256[:8]}"
        )

    def tokens(self, split: str) -> "Tokens":
        """Return the ids of "train" or "val", (N,), which are read from disk on access."""
        return Tokens(getattr(self, split).files[0], self.dtype, self.tokenizer.vocab_size)

    def windows(self, split: str, block_size: int) -> "Tokens":
        """Return the ids of "train" or "val" as they are read in windows of `block_size` + 1."""
        return self.tokens(split)

    def scored_tokens(self, split: str) -> "Tokens | Ids":
        """Return the ids of "train" or "val" that losses are of, in their order, (N,)."""
        return self.tokens(split)

    def sample_prompt(self, text: str, index: int = 0) -> tuple[str, Ids]:
        """Return a prompt for samples as text and as ids, (T,).

        Args:
            text: may be empty. Of conversations, it is a question; if it is empty, the question
                before answer `index` of the validation split.
        """
        return text, encode_prompt(self.tokenizer, text)


class Tokens:
    """A token file as an array (N,).

    `tokens[a:b]` reads a slice, and `tokens[index]` gathers windows, (B, T). The cost of an index
    does not depend on N. Raises UserError for ids outside the vocabulary.
    """

    def __init__(self, file: Path, dtype: str, vocab_size: int, header: int = 0) -> None:
        self.file = file
        self.dtype = np.dtype(dtype)
        self.vocab_size = vocab_size
        self.header = header  # bytes before the ids
        # Mapped now, so that a run holds its file if it is removed later; without read-ahead,
        # since windows are anywhere in the file.
        with open(file, "rb") as content:
            pages = mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ)
        if sys.platform != "win32":
            pages.madvise(mmap.MADV_RANDOM)
        self.ids = np.frombuffer(pages, self.dtype, offset=header)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: slice | NDArray[np.int64]) -> Ids:
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            # Without the map, which is slower
            offset = self.header + begin * self.dtype.itemsize
            ids = np.fromfile(self.file, self.dtype, max(0, end - begin), offset=offset)
            self._check(ids)
            return ids[::step]
        ids = self.ids[index]  # (B, T)
        self._check(ids)
        return ids

    def _check(self, ids: Ids) -> None:
        largest = ids.max(initial=0)
        if largest >= self.vocab_size:
            raise UserError(
                f"{self.file} has a token id {largest}, outside the vocabulary of "
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
        corpus = from_extras("ConversationCorpus") if "format" in provenance else Corpus
        return corpus(
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
    targets = sizes.get("targets", sizes["tokens"])
    return Split([file], sizes["tokens"], sizes["bytes"], sizes["documents"], targets)
