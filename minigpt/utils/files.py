"""Atomic writes, durable writes, and JSON."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` on success, remove it on failure."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # left by a killed process with the same id; it may be a link
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file or a directory to disk, if it exists and the system supports it."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_json(file: Path) -> Any:
    """Read a JSON file; raise ValueError if it is not JSON, or nested too deeply."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} is not JSON ({error})") from error


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    with atomic_write(file) as partial:
        partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def sha256_json(values: Any) -> str:
    """Return the SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
