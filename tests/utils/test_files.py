"""Files that are written at once, and checksums of files."""

import json
import os
from fnmatch import fnmatch

from corpora import sha256

from minigpt.utils.files import PARTIAL, atomic_write, checksums


def test_processes_with_one_id_write_a_file_at_once_and_it_is_that_of_one_of_them(tmp_path):
    """As those of two containers do that share a data folder."""
    file = tmp_path / "file"
    with atomic_write(file) as one:
        one.write_text("one")
        with atomic_write(file) as other:
            assert fnmatch(other.name, f".file.{PARTIAL}")
            other.write_text("oth")  # half of it
            one.write_text("one whole")
    assert file.read_text(encoding="utf-8") == "one whole"
    assert list(tmp_path.iterdir()) == [file]


def test_checksums_are_cached_until_the_file_is_written(tmp_path):
    file = tmp_path / "a.txt"
    folder = tmp_path / "data"
    cache = folder / "checksums.json"
    file.write_bytes(b"first")
    assert checksums([file], folder) == [sha256(b"first")]
    kept = json.loads(cache.read_text(encoding="utf-8"))
    assert list(kept.values()) == [sha256(b"first")]
    cache.write_text(json.dumps(dict.fromkeys(kept, "remembered")), encoding="utf-8")
    assert checksums([file], folder) == ["remembered"]  # from the cache
    times = file.stat()
    file.write_bytes(b"later")  # same size and time
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert checksums([file], folder) == [sha256(b"later")]
    cache.write_text("damaged")
    assert checksums([file], folder) == [sha256(b"later")]
    assert checksums([file], file) == [sha256(b"later")]  # which cannot be written
