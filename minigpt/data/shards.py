"""Arrays that grow on disk, in files of equally many numbers, and go on where a killed process left them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np


class Shards:
    """Appends to the files NAME-00000.bin, NAME-00001.bin … of a folder.

    Args:
        size: numbers of every file but the last.
        length: numbers that are kept of what is there; what a killed process wrote beyond them is cut off.
    """

    def __init__(self, folder: Path, name: str, *, dtype: str, size: int, length: int = 0) -> None:
        self.folder, self.name, self.dtype, self.size, self.length = folder, name, np.dtype(dtype), size, length
        for file in folder.glob(f"{name}-[0-9]*.bin"):
            keep = min(max(0, length - int(file.stem.rpartition("-")[2]) * size), size) * self.dtype.itemsize
            if keep:
                os.truncate(file, keep)
            else:
                file.unlink()
        self._file: IO[bytes] | None = None

    def append(self, numbers: Sequence[int] | np.ndarray[Any, Any]) -> None:
        rest = np.asarray(numbers, dtype=self.dtype)
        while len(rest):
            index, inside = divmod(self.length, self.size)
            if self._file is None or inside == 0:
                self.close()
                self._file = open(self.folder / f"{self.name}-{index:05}.bin", "ab")  # noqa: SIM115
            now, rest = rest[: self.size - inside], rest[self.size - inside :]
            self._file.write(now.data)
            self.length += len(now)

    def sync(self) -> None:
        """Have what was appended on the disk, not on its way to it."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self.sync()
            self._file.close()
            self._file = None
