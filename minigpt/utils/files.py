"""Files: atomic and durable writes, JSON, checksums, downloads."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

PARTIAL = f"{'[0-9a-f]' * 16}.partial"  # glob pattern of the end of temporary names, after a dot


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success rename it to `path`, else remove it."""
    # A name has at most 255 bytes, four per character; hosts and containers may share process ids.
    partial = path.with_name(f".{path.name[:50]}.{token_hex(8)}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file or a directory to disk, if it exists and the system supports it."""
    with suppress(OSError), ExitStack() as stack:
        descriptor = os.open(path, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        os.fsync(descriptor)


def read_json(file: Path) -> Any:
    """Read a JSON file; raise ValueError if it is not JSON, or nested too deeply."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} is not JSON ({error})") from error


def write_json(file: Path, values: Mapping[str, object]) -> None:
    """Write a JSON file atomically."""
    with atomic_write(file) as partial:
        partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def sha256_json(values: object) -> str:
    """Return the SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def checksums(files: Sequence[Path], data_folder: Path | None) -> list[str]:
    """Return the SHA-256 of each file; a cache in the data folder saves reading it again.

    A cache entry is keyed by path and `file_version`.
    """
    cache = data_folder / "checksums.json" if data_folder else None
    known: dict[str, str] = {}
    try:
        if cache and os.path.lexists(cache):
            known = {**read_json(cache)}
    except (OSError, ValueError, TypeError):  # damaged, or of the user: it stays
        cache = None
    keys = [f"{file.resolve()} {file_version(file)}" for file in files]
    missing = {key: file for key, file in zip(keys, files, strict=True) if key not in known}
    for key, file in missing.items():
        with open(file, "rb") as content:
            known[key] = hashlib.file_digest(content, "sha256").hexdigest()
    is_cache = all(key.count(" ") > 3 and key[-1].isdecimal() for key in known)  # else the user's
    if cache and missing and is_cache:
        with suppress(OSError):
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_json(cache, known)
    return [known[key] for key in keys]


def file_version(file: Path) -> str:
    """Return size, times and inode: another text once a file was written or replaced.

    Every write updates the change time (ctime), which no program can set back.
    """
    state = file.stat()
    return f"{state.st_size} {state.st_mtime_ns} {state.st_ctime_ns} {state.st_ino}"


def download(url: str, sha256: str, target: Path) -> bool:
    """Download a file atomically, unless it is there; return whether it is there afterwards."""
    if target.is_file() and checksums([target], None) == [sha256]:
        return True
    import requests

    target.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(3):
        with suppress(requests.RequestException):
            response = requests.get(url, timeout=(5, 30))  # seconds, to connect and for each read
            response.raise_for_status()
            if hashlib.sha256(response.content).hexdigest() == sha256:
                with atomic_write(target) as partial:
                    partial.write_bytes(response.content)
                return True
    return False
