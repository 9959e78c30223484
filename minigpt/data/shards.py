"""Shards: the files of a corpus that was tokenized elsewhere, on disk, or behind a URL that fsspec reads (S3, HTTP).

Windows are read in random order from all shards, so a cache that is smaller than the corpus would fetch a shard for
almost every window. A remote shard is fetched whole and once, when it is first read, and stays. The caches of fsspec
would keep a partial file, miss a changed one on HTTP, and fetch one file in several processes at a time.
"""

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from filelock import FileLock

from minigpt.utils.errors import RunError, UserError
from minigpt.utils.files import atomic_write, sha256_json
from minigpt.utils.scripts import PIP_INSTALL

CONNECTIONS = 32  # requests at a time
_WAITS = (0.5, 1.0, 2.0, 4.0)  # seconds between the attempts of a request
_SILENT_SECONDS = 60  # of an HTTP server, after which a request fails
_REFUSED = (401, 403, 404, 410)  # status of HTTP that another attempt does not change

T = TypeVar("T")


class Shard(NamedTuple):
    """A file of ids; for a remote shard, `file` is the copy that `fetch` writes."""

    file: Path
    bytes: int
    url: str | None = None


def local_shard(file: Path) -> Shard:
    """Return a file as a shard."""
    return Shard(file, file.stat().st_size)


def find_shards(key: str, value: str | Sequence[str], folder: Path) -> list[Shard]:
    """Find the shards of a path or URL, of a pattern (*, sorted), of a range ({0000..4999}), or of a list of these.

    Args:
        key: config key of `value`, for errors.
        folder: where copies of remote shards are written.

    Raises:
        UserError: there is no such file, it is not an array of 16-bit ids, or the package for a URL is missing.
        RunError: a server does not answer.
    """
    patterns = [value] if isinstance(value, str) else value
    paths = [path for pattern in patterns for each in _expand_range(pattern) for path in _expand_pattern(each)]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return list(pool.map(lambda path: _find_shard(key, path, folder), paths))


def fetch(shard: Shard) -> Path:
    """Return the file of a shard; of a remote one, fetch it first. Threads and processes fetch it once together."""
    if not _is_here(shard):
        shard.file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{shard.file}.lock"):
            if not _is_here(shard):
                _request(str(shard.url), lambda files: _download(files, shard))
    return shard.file


def read_head(shard: Shard, size: int) -> bytes:
    """Return the first `size` bytes of a shard without fetching it."""
    if _is_here(shard):
        with open(shard.file, "rb") as content:
            return content.read(size)
    end = min(size, shard.bytes)
    head = _request(str(shard.url), lambda files: files.cat_file(shard.url, start=0, end=end))
    return head[:end]  # a server may send the whole file


def _expand_range(path: str) -> list[str]:
    """Expand a range of numbers as a shell does; its start sets the number of digits."""
    if not (found := re.search(r"\{(\d{1,6})\.\.(\d{1,6})\}", path)):
        return [path]
    begin, end = found.groups()
    return [path.replace(found[0], f"{i:0{len(begin)}}") for i in range(int(begin), int(end) + 1)]


def _expand_pattern(path: str) -> list[str]:
    """Return the files of a pattern, sorted, or the path itself if it matches none."""
    if "://" not in path:
        return sorted(glob(str(Path(path).expanduser()))) or [path]
    if "*" not in path:  # the other characters of patterns are frequent in URLs
        return [path]
    return _request(path, lambda files: [files.unstrip_protocol(name) for name in sorted(files.glob(path))]) or [path]


def _find_shard(key: str, path: str, folder: Path) -> Shard:
    if "://" in path:
        info = _request(path, lambda files: files.info(path))
        if info["size"] is None:
            raise UserError(f"{key}={path} has no Content-Length; use a server that sends the sizes of its files")
        version = [str(info.get(name)) for name in ("ETag", "Last-Modified", "LastModified")]  # of its content
        name = re.sub(r"[^\w.-]", "-", path.rpartition("/")[2])[-60:]
        shard = Shard(folder / f"{sha256_json([path, version])[:16]}-{name}", info["size"], path)
    elif Path(path).expanduser().is_file():
        shard = local_shard(Path(path).expanduser())
    else:
        raise UserError(f"{key}={path} is not a file; give the path of nanoGPT's token files")
    if shard.bytes % 2 or not shard.bytes:
        raise UserError(f"{key}={path} has {shard.bytes} bytes, not an array of 16-bit ids")
    return shard


def _is_here(shard: Shard) -> bool:
    return shard.url is None or (shard.file.is_file() and shard.file.stat().st_size == shard.bytes)


def _download(files: Any, shard: Shard) -> None:
    with atomic_write(shard.file) as partial:
        files.get_file(shard.url, str(partial))
        if (size := partial.stat().st_size) != shard.bytes:
            raise OSError(f"{size} of {shard.bytes} bytes were received")


def _request(url: str, request: Callable[[Any], T]) -> T:
    """Return `request(file system)`, which is repeated with growing waits unless the server refuses it."""
    files, waits = _open_filesystem(url), iter(_WAITS)
    while True:
        try:
            return request(files)
        except Exception as error:  # each file system of fsspec has its own kinds
            cause = error.__cause__ or error  # fsspec makes a FileNotFoundError of every failure of HTTP
            reason = " ".join(f"{type(cause).__name__}: {cause}".split())
            if isinstance(cause, FileNotFoundError | PermissionError) or getattr(cause, "status", None) in _REFUSED:
                raise UserError(f"{url} cannot be read ({reason}); check the URL and the credentials") from error
            if (wait := next(waits, None)) is None:
                raise RunError(f"{url} cannot be read ({reason}); try again") from error
        time.sleep(wait)


def _open_filesystem(url: str) -> Any:
    import fsspec

    try:
        if not url.startswith("http"):
            return fsspec.core.url_to_fs(url)[0]
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENT_SECONDS, sock_read=_SILENT_SECONDS)
        return fsspec.filesystem("http", client_kwargs={"timeout": timeout})
    except (ImportError, ValueError) as error:  # ValueError: an unknown protocol
        raise UserError(f"{url} cannot be read ({error}); {PIP_INSTALL.format('remote')}") from error
