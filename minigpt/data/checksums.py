"""Checksums that identify texts and token files: of their content, which are cached, or of a sample."""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from minigpt.utils.files import read_json, sha256_json, write_json

CHECKSUM_CACHE = "checksums.json"  # in the data folder
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16  # files that `_sample_checksum` reads, and bytes of each


def checksums(files: Sequence[Path], cache: Path | None) -> list[str]:
    """Return the SHA-256 of each file, so that an unchanged file is read once.

    A cache entry is keyed by path, size, times and inode. Every write updates the change time (ctime), which no
    program can set back.

    Args:
        cache: JSON file of earlier checksums, updated if it can be written; None disables caching.
    """
    known: dict[str, str] = {}
    with suppress(OSError, ValueError, TypeError):  # missing or damaged
        known |= read_json(cache) if cache else {}
    keys, n_cached = [], len(known)
    for file in files:
        state = file.stat()
        keys.append(f"{file.resolve()} {state.st_size} {state.st_mtime_ns} {state.st_ctime_ns} {state.st_ino}")
        if keys[-1] not in known:
            with open(file, "rb") as content:
                known[keys[-1]] = hashlib.file_digest(content, "sha256").hexdigest()
    if cache and len(known) > n_cached:
        with suppress(OSError):
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_json(cache, known)
    return [known[key] for key in keys]


def split_checksums(train: Sequence[Path], val: Sequence[Path], cache: Path | None) -> list[str]:
    """Identify the token files of both splits by content if each has one, else by a sample; `cache` as `checksums`."""
    if len(train) == len(val) == 1:
        return checksums([*train, *val], cache)
    return [_sample_checksum(train), _sample_checksum(val)]


def _sample_checksum(files: Sequence[Path]) -> str:
    """Identify files by their sizes and the first bytes of some of them, wherever they are."""
    n, heads = min(len(files), _SAMPLES), []
    for i in range(n):
        with open(files[i * len(files) // n], "rb") as content:
            heads.append(hashlib.sha256(content.read(_SAMPLE_BYTES)).hexdigest())
    return sha256_json([[file.stat().st_size for file in files], heads])
