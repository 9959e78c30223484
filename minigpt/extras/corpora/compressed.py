"""Decompress files: gzip, zstd, bzip2 and xz."""

import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from minigpt.extras.packages import import_extra
from minigpt.utils.errors import UserError

_COMPRESSED_BYTES = 1 << 16  # read at a time from a compressed file, whose text can be much larger
_DECOMPRESSORS = {  # and what they raise
    ".bz2": ("bz2:BZ2Decompressor", "builtins:OSError"),
    ".xz": ("lzma:LZMADecompressor", "lzma:LZMAError"),
}


def read_compressed(file: Path) -> Iterator[bytes]:
    """Yield the decompressed blocks of a file; raise UserError if it is not complete."""
    suffix, failure = file.suffix.lower(), zlib.error
    new_frame: Callable[[], Any] = partial(zlib.decompressobj, wbits=31)  # gzip
    if suffix in _DECOMPRESSORS:
        new_frame, failure = map(resolve_name, _DECOMPRESSORS[suffix])
    if suffix == ".zst":
        zstandard = import_extra("zstandard", ".zst", "data")
        new_frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        failure = zstandard.ZstdError
    with open(file, "rb") as raw:
        try:
            yield from _decompress(iter(lambda: raw.read(_COMPRESSED_BYTES), b""), new_frame)
        except (EOFError, failure) as error:
            raise UserError(f"{file} is not a complete {suffix} file ({error})") from error


def _decompress(blocks: Iterable[bytes], new_frame: Callable[[], Any]) -> Iterator[bytes]:
    """Decompress frame by frame: the stream reader of zstandard accepts a truncated file.

    Zeros after a frame are padding, as of tapes.
    """
    frame = new_frame()
    for block in blocks:
        while block := block.lstrip(b"\0") if frame.eof else block:
            if frame.eof:
                frame = new_frame()
            if text := frame.decompress(block):
                yield text
            block = frame.unused_data
    if not frame.eof:
        raise EOFError("it ends too early")
