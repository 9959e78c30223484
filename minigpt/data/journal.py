"""Token files that grow while a corpus is tokenized, and a journal from which a killed process resumes."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from minigpt.data.token_files import SPLITS, shard_file
from minigpt.data.tokenizer import Ids
from minigpt.utils.files import atomic_write, read_json

JOURNAL = "journal.json"
_SAVE_EVERY_TOKENS = 1 << 24


class Journal:
    """Append the ids of batches to the token files of both splits.

    Attributes:
        batches: number of batches that were appended, also before the process resumed.
    """

    def __init__(self, folder: Path, dtype: str, shard_tokens: int) -> None:
        self.file = folder / JOURNAL
        self.batches, lengths = 0, [0, 0]
        if self.file.is_file():
            saved = read_json(self.file)
            self.batches, lengths = saved["batches"], saved["tokens"]
        self._saved_tokens = sum(lengths)
        self.shards = [
            Shards(folder, split, dtype=dtype, shard_tokens=shard_tokens, length=length)
            for split, length in zip(SPLITS, lengths, strict=True)
        ]

    @property
    def tokens(self) -> list[int]:
        """Number of tokens in each split."""
        return [shards.length for shards in self.shards]

    def append(self, ids: Sequence[Ids]) -> None:
        """Append the ids of one batch, a row per split."""
        for shards, row in zip(self.shards, ids, strict=True):
            shards.append(row)
        self.batches += 1
        if sum(self.tokens) - self._saved_tokens >= _SAVE_EVERY_TOKENS:
            for shards in self.shards:
                shards.sync()
            write_json(self.file, {"batches": self.batches, "tokens": self.tokens})
            self._saved_tokens = sum(self.tokens)

    def close(self) -> None:
        for shards in self.shards:
            shards.close()


class Shards:
    """An array on disk that grows in files of `shard_tokens` ids.

    Args:
        length: ids to keep; those that a killed process wrote after its last journal entry are removed.
    """

    def __init__(self, folder: Path, split: str, *, dtype: str, shard_tokens: int, length: int) -> None:
        self.folder, self.split, self.dtype = folder, split, np.dtype(dtype)
        self.shard_tokens, self.length = shard_tokens, length
        for file in folder.glob(f"{split}-*.bin"):
            index = int(file.stem.rpartition("-")[2])
            keep = min(max(0, length - index * shard_tokens), shard_tokens) * self.dtype.itemsize
            if keep:
                os.truncate(file, keep)
            else:
                file.unlink()
        self._file: IO[bytes] | None = None

    def append(self, ids: Ids) -> None:
        while len(ids):
            index, inside = divmod(self.length, self.shard_tokens)
            if self._file is None or inside == 0:
                self.close()
                self._file = open(shard_file(self.folder, self.split, index), "ab")  # noqa: SIM115
            head, ids = np.split(ids, [self.shard_tokens - inside])
            self._file.write(head.astype(self.dtype, copy=False).data)
            self.length += len(head)

    def sync(self) -> None:
        """Flush the appended ids to disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self.sync()
            self._file.close()
            self._file = None


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    with atomic_write(file) as partial:
        partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
