"""Checksums that identify texts and token files: of files, which are cached, and of shards by a sample."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from minigpt.data.shards import CONNECTIONS, Shard, read_head
from minigpt.utils.files import read_json, sha256_json, write_json

CHECKSUM_CACHE = "checksums.json"  # in the data folder
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16  # shards that `_sample_checksum` reads, and bytes of each


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


def shards_checksum(train: Sequence[Shard], val: Sequence[Shard], cache: Path | None) -> str:
    """Identify two local files by their content, others by a sample; `cache` is that of `checksums`."""
    if len(train) == len(val) == 1 and not (train[0].url or val[0].url):
        sums = checksums([train[0].file, val[0].file], cache)
    else:
        sums = [_sample_checksum(train), _sample_checksum(val)]
    return hashlib.sha256("".join(sums).encode()).hexdigest()


def _sample_checksum(shards: Sequence[Shard]) -> str:
    """Identify shards by their sizes and the first bytes of some of them; local copies have the same checksum."""
    n = min(len(shards), _SAMPLES)
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        heads = pool.map(lambda i: read_head(shards[i * len(shards) // n], _SAMPLE_BYTES), range(n))
    return sha256_json([[shard.bytes for shard in shards], [hashlib.sha256(head).hexdigest() for head in heads]])
