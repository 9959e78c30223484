"""A corpus whose splits have several token files each, with headers in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from minigpt.data.token_files import Corpus, Split, Tokens
from minigpt.data.tokenizer import Ids


@dataclass(frozen=True)
class PartsCorpus(Corpus):
    """Token files of two splits, several of each, and their tokenizer."""

    headers: Mapping[str, Sequence[int]] = field(default_factory=dict)  # per split, as `TokenParts`

    def tokens(self, split: str) -> "TokenParts":
        part: Split = getattr(self, split)
        return TokenParts(part.files, self.dtype, self.tokenizer.vocab_size, self.headers[split])


class TokenParts(Tokens):
    """Token files, one after another, as an array (N,); the cost of an index is that of `Tokens`.

    Args:
        headers: bytes before the ids of each file; (): none.
    """

    def __init__(
        self, files: Sequence[Path], dtype: str, vocab_size: int, headers: Sequence[int] = ()
    ) -> None:
        self.files = files
        self.dtype = np.dtype(dtype)
        self.vocab_size = vocab_size
        self.headers = headers or [0] * len(files)
        sizes = np.array([file.stat().st_size for file in files]) - self.headers
        self.starts = np.cumsum([0, *sizes // self.dtype.itemsize])  # (files + 1,)
        self.part = lru_cache(256)(self._part)  # each maps its file, with a file descriptor
        if len(files) == 1 and len(self):
            self.part(0)  # now, so that a run holds its file if it is removed later

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: slice | NDArray[np.int64]) -> Ids:
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            return self._read(begin, max(begin, end))[::step]
        positions = index.ravel()  # (B · T,)
        ids = np.empty(positions.size, self.dtype)
        files = np.searchsorted(self.starts[1:], positions, side="right")  # of each position
        # Neighbors within one file are gathered together.
        for a, b in pairwise([*np.flatnonzero(np.diff(files, prepend=-1)), positions.size]):
            ids[a:b] = self.part(int(files[a]))[positions[a:b] - self.starts[files[a]]]
        return ids.reshape(index.shape)  # (B, T)

    def _read(self, begin: int, end: int) -> Ids:
        ids = np.empty(end - begin, self.dtype)
        first = int(np.searchsorted(self.starts[1:], begin, side="right"))
        for i in range(first, int(np.searchsorted(self.starts[:-1], end))):
            start = int(self.starts[i])
            a = max(begin, start)
            b = min(end, int(self.starts[i + 1]))
            if a < b:  # an empty file cannot be mapped
                ids[a - begin : b - begin] = self.part(i)[a - start : b - start]
        return ids

    def _part(self, i: int) -> Tokens:
        return Tokens(self.files[i], self.dtype.name, self.vocab_size, self.headers[i])
