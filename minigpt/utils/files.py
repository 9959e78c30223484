"""Files that appear whole or not at all, and checksums of files that are not read twice."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to: it becomes `path` at the end, and of a failure nothing is left."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # of a process that had the same number and was killed; it may be a link
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, outlast a loss of power, where it is there and the system can."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_json(file: Path) -> Any:
    """What a file of JSON says.

    Raises:
        ValueError: it is none, or its lists lie too deep in each other.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("its lists lie too deep in each other") from error


def checksums(files: Sequence[Path], known: Path | None) -> list[str]:
    """The SHA-256 of files, remembered in the file `known`, if there is one, for as long as nothing wrote to them.

    A write, however quick, changes a file's time of change, which no program can set back; so a large corpus is
    read for its checksum once, and a start costs what it costs with a small one.
    """
    if known is None:
        return [_sha256(file) for file in files]
    remembered: dict[str, str] = {}
    with suppress(OSError, ValueError, TypeError):
        remembered = {key: str(value) for key, value in dict(read_json(known)).items()}
    keys, found = [], dict(remembered)
    for file in files:
        state = os.stat(file)
        keys.append(f"{file.resolve()} {state.st_size} {state.st_mtime_ns} {state.st_ctime_ns} {state.st_ino}")
        if keys[-1] not in found:
            found[keys[-1]] = _sha256(file)
    if found != remembered:
        with suppress(OSError):  # a folder that cannot be written remembers nothing
            known.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(known) as partial:
                partial.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    return [found[key] for key in keys]


def _sha256(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
