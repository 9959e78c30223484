"""Write token files batch by batch, with a journal from which a killed process resumes."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from minigpt.data.token_files import SPLITS, shard_file
from minigpt.data.tokenizer import Ids
from minigpt.utils.files import read_json, sync, write_json

JOURNAL = "journal.json"
_SAVE_EVERY_TOKENS = 1 << 24


class Journal:
    """Append ids to the token files of both splits, in files of `shard_tokens` ids.

    On resume, ids that a killed process wrote after the last journal entry are removed.

    Attributes:
        batches: number of batches that were appended, also before a resume.
        tokens: number of ids in each split.
    """

    def __init__(self, folder: Path, dtype: str, shard_tokens: int) -> None:
        self.folder, self.dtype, self.shard_tokens = folder, np.dtype(dtype), shard_tokens
        self.batches, self.tokens = 0, [0, 0]
        if (folder / JOURNAL).is_file():
            saved = read_json(folder / JOURNAL)
            self.batches, self.tokens = saved["batches"], saved["tokens"]
        self._synced = list(self.tokens)
        for split, length in zip(SPLITS, self.tokens, strict=True):
            for file in folder.glob(f"{split}-*.bin"):
                kept = length - int(file.stem.rpartition("-")[2]) * shard_tokens
                if kept > 0:
                    os.truncate(file, min(kept, shard_tokens) * self.dtype.itemsize)
                else:
                    file.unlink()

    def append(self, ids: Sequence[Ids]) -> None:
        """Append the ids of one batch, a row per split."""
        for i, row in enumerate(ids):
            self._append_row(i, row.astype(self.dtype, copy=False))
        self.batches += 1
        if sum(self.tokens) - sum(self._synced) >= _SAVE_EVERY_TOKENS:
            self.sync()
            write_json(self.folder / JOURNAL, {"batches": self.batches, "tokens": self.tokens})

    def files(self, split: int) -> list[Path]:
        """Return the token files of a split."""
        return [shard_file(self.folder, SPLITS[split], i) for i in range(-(-self.tokens[split] // self.shard_tokens))]

    def sync(self) -> None:
        """Flush the ids to disk that were appended since the last call."""
        for split, synced in enumerate(self._synced):
            for file in self.files(split)[synced // self.shard_tokens :]:
                sync(file)
        self._synced = list(self.tokens)

    def _append_row(self, split: int, ids: Ids) -> None:
        while len(ids):
            index, inside = divmod(self.tokens[split], self.shard_tokens)
            head, ids = np.split(ids, [self.shard_tokens - inside])
            with open(shard_file(self.folder, SPLITS[split], index), "ab") as file:
                file.write(head.data)
            self.tokens[split] += len(head)
