"""Whether a file is still the one that was read."""

from pathlib import Path


def file_version(file: Path) -> tuple[int, ...]:
    """Return numbers of which one differs once a file was written or replaced, be it by an older file."""
    state = file.stat()
    return state.st_mtime_ns, state.st_ctime_ns, state.st_size, state.st_ino
