"""Read documents from plain text, Markdown, JSON Lines and Parquet, also compressed, in chunks.

A text file is one document, and so is each line of JSON Lines and each row of Parquet. A long document comes in
chunks, cut where no pattern in `tokenizer.PATTERNS` matches across the cut, so the ids are those of the whole document
and a file may be larger than memory. `prepare.join_chunks` joins them for other tokenizers.
"""

import codecs
import json
import os
import re
import shlex
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from glob import glob, has_magic
from io import IncrementalNewlineDecoder
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from minigpt.data.tokenizer import whole_characters
from minigpt.utils.errors import UserError
from minigpt.utils.scripts import import_extra, usage
from minigpt.utils.terminal import unescape, warn

TEXT_SUFFIXES, COMPRESSED_SUFFIXES = (".txt", ".md"), (".gz", ".zst")
_ARROW_TEXT_TYPES = ("string", "large_string", "string_view", "dictionary<values=string, indices=int32, ordered=0>")
_BLOCK_BYTES = 1 << 20  # read at a time
_COMPRESSED_BYTES = 1 << 16  # read at a time from a compressed file, whose text can be much larger
_CUT_WINDOW = 1 << 16  # characters before the end of a text that are searched for a cut
_MAX_CHUNK_CHARS = 1 << 18  # of a chunk without a place to cut, in which tiktoken may take 100 bytes per character
_JSON_ROWS = re.compile(rb"\s*(\[|\{.*\}\s*\n\s*\{)")  # an array, or an object per line
# A text is cut after a single line break before a letter or digit, or else before a single space between letters.
_CUTS = (re.compile(r"(?s:.*)(?<=\S)\n(?=[^\W_])"), re.compile(r"(?s:.*)(?<=[^\W\d_])(?= [^\W\d_])"))


class TextChunk(NamedTuple):
    """A document or a part of one; the text is empty only for an empty document."""

    text: str
    first: bool  # whether a document starts here


def find_files(path: str, setting: str) -> list[Path]:
    """Find the files of a path, sorted: one file, the files of a folder with known suffixes, or those of a pattern.

    A file that is named, or matched by a pattern, may have any suffix. Hidden files of a folder are skipped. Raise
    UserError with `setting`, the config key of the path, if there is no such file.
    """
    given = Path(os.path.expanduser(path or "''"))  # Path("") would be the current folder
    if given.is_dir():
        shown = [file for file in given.rglob("*") if "/." not in f"/{file.relative_to(given).as_posix()}"]
        found = [file for file in shown if content_suffix(file) in (*TEXT_SUFFIXES, *ROW_READERS)]
        others = [file for file in {*shown} - {*found} if not file.is_dir()]
        if found and others:
            kinds = ", ".join(sorted({content_suffix(file) or "no suffix" for file in others})[:10])
            warn(f"{len(others):,} files of {path} are skipped ({kinds}); a pattern such as '**/*.py' reads any file")
        suffixes = f"{', '.join((*TEXT_SUFFIXES, *ROW_READERS))}, or these with {' or '.join(COMPRESSED_SUFFIXES)}"
        problem = f"has no file with suffix {suffixes}; for others give a pattern such as '**/*.py'"
    else:
        found = [given] if given.exists() else list(map(Path, glob(str(given), recursive=True)))
        problem = "matches no file" if has_magic(str(given)) else "does not exist"
        problem += "; give a file, a folder, or a pattern such as 'texts/**/*.txt'"
    files = sorted({file for file in found if not file.is_dir()})
    if not files:
        raise UserError(f"{setting}={path} {problem}")
    return files


def content_suffix(file: Path) -> str:
    """Return the suffix of a file in lower case, without that of its compression."""
    name = Path(file.name.lower())
    return Path(name.stem).suffix if name.suffix in COMPRESSED_SUFFIXES else name.suffix


def read_texts(path: str, setting: str, field: str = "text", separator: str = "") -> Iterator[TextChunk]:
    """Read the documents of all files of a path, as `find_files` takes it, or the text on standard input (`-`)."""
    if path == "-":
        blocks = iter(lambda: sys.stdin.buffer.read(_BLOCK_BYTES), b"")
        return text_chunks(_decode(blocks, f"{setting}=-"), separator)
    return chain.from_iterable(read_documents(file, field, separator) for file in find_files(path, setting))


def read_documents(file: Path, field: str, separator: str = "") -> Iterator[TextChunk]:
    """Read the documents of a file.

    Args:
        field: of JSON Lines, or column of Parquet, that holds the text.
        separator: of documents in a text file, which may hold `\\n` and `\\t`; empty: the file is one document.

    Raise UserError if the file is damaged, binary, not UTF-8, or has no such field.
    """
    suffix = content_suffix(file)
    if suffix in ROW_READERS:
        return ROW_READERS[suffix](file, field)
    return text_chunks(_decode(_read_blocks(file), file, is_json=suffix == ".json"), separator)


def text_chunks(blocks: Iterable[str], separator: str = "") -> Iterator[TextChunk]:
    """Cut a text, given as blocks, into documents at the separator, and these where no tokenizer merges across.

    The line breaks around a document, and empty documents, are dropped if there is a separator.
    """
    first, rest, edges, separator = True, "", "\r\n" if separator else "", unescape(separator)
    for block in blocks:
        *ended, rest = (rest + block).split(separator) if separator else [rest + block]
        for text in ended:
            if text := (text.strip(edges) if first else text.rstrip(edges)):
                yield TextChunk(text, first)
            first = True
        if len(rest) < _BLOCK_BYTES // 2:
            continue
        whole = rest[: len(rest) - len(separator)]  # which holds no part of a separator at its end
        if cut := cut_point(whole) or (len(whole) if len(whole) > _MAX_CHUNK_CHARS else 0):
            yield TextChunk(rest[:cut].lstrip(edges) if first else rest[:cut], first)
            first, rest = False, rest[cut:]
    rest = rest.strip(edges) if first else rest.rstrip(edges)
    if rest or (first and not separator):
        yield TextChunk(rest, first)


def cut_point(text: str) -> int:
    """Find the last place where every pattern in `tokenizer.PATTERNS` splits, whatever follows; 0 if there is none."""
    start = max(0, len(text) - _CUT_WINDOW)
    return next((found.end() for pattern in _CUTS if (found := pattern.match(text, start))), 0)


def _decode(blocks: Iterable[bytes], name: object, *, is_json: bool = False) -> Iterator[str]:
    """Yield blocks of text, with \\n as every line end; `name` is for errors. JSON may be one object alone."""
    # Without a byte order mark.
    decoder = IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
    offset, line = 0, 1
    for block in chain(blocks, [b""]):
        if offset == 0 and block[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            command = f"iconv -f UTF-16 -t UTF-8 {shlex.quote(str(name))} > utf8.txt"
            raise UserError(f"{name} is UTF-16; convert it: {command}")
        if (zero := block.find(b"\0")) >= 0:
            raise UserError(f"{name} is not text: byte 0 at offset {offset + zero:,}; save it as UTF-8 text")
        if offset == 0 and is_json and _JSON_ROWS.match(block):
            advice = "make it JSON Lines, .jsonl, with an object in each line, as jq -c '.[]' does with an array"
            raise UserError(f"{name} holds several JSON values, whose syntax would be trained on; {advice}")
        offset += len(block)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            where, line = offset - len(error.object) + error.start, line + error.object[: error.start].count(b"\n")
            bad = f"bad byte at offset {where:,}, in line {line:,}"
            raise UserError(f"{name} is not UTF-8 text: {bad}; save it as UTF-8") from error
        line += block.count(b"\n")
        yield text


def _read_blocks(file: Path) -> Iterator[bytes]:
    """Yield decompressed blocks."""
    suffix, errors = file.suffix.lower(), [EOFError, zlib.error]
    new_frame: Callable[[], Any] = partial(zlib.decompressobj, wbits=31)  # gzip
    if suffix == ".zst":
        zstandard = import_extra("zstandard", ".zst", "data")
        new_frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        errors.append(zstandard.ZstdError)
    with open(file, "rb") as raw:
        try:
            if suffix in COMPRESSED_SUFFIXES:
                yield from _decompress(iter(lambda: raw.read(_COMPRESSED_BYTES), b""), new_frame)
            else:
                yield from iter(lambda: raw.read(_BLOCK_BYTES), b"")
        except tuple(errors) as error:
            raise UserError(f"{file} is not a complete {suffix} file ({error})") from error


def _decompress(blocks: Iterable[bytes], new_frame: Callable[[], Any]) -> Iterator[bytes]:
    """Decompress frame by frame: the stream reader of zstandard accepts a truncated file."""
    frame = new_frame()
    for block in blocks:
        while block:
            if frame.eof:
                frame = new_frame()
            if text := frame.decompress(block):
                yield text
            block = frame.unused_data
    if not frame.eof:
        raise EOFError("it ends too early")


def _read_lines(file: Path) -> Iterator[str]:
    parts: list[str] = []  # of the last line: to join it block by block would take quadratic time
    for block in _decode(_read_blocks(file), file):
        *ended, rest = block.split("\n")
        for end in ended:
            yield "".join([*parts, end])
            parts.clear()
        parts.append(rest)
    yield "".join(parts)


def _read_jsonl(file: Path, field: str) -> Iterator[TextChunk]:
    for number, line in enumerate(_read_lines(file), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}, line {number:,}: not JSON ({error})") from error
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            raise UserError(f"{file}, line {number:,}: {no_text('field', field, row)}")
        yield TextChunk(whole_characters(row[field]), True)


def _read_parquet(file: Path, field: str) -> Iterator[TextChunk]:
    parquet = import_extra("pyarrow.parquet", ".parquet", "data")
    arrow = import_extra("pyarrow", ".parquet", "data")
    with open(file, "rb") as raw:
        try:
            table = parquet.ParquetFile(raw)
            columns = [column.name for column in table.schema_arrow if str(column.type) in _ARROW_TEXT_TYPES]
            if field not in columns:
                raise UserError(f"{file}: {no_text('column', field, dict.fromkeys(columns, ''))}")
            for batch in table.iter_batches(batch_size=256, columns=[field]):
                yield from (TextChunk(text or "", True) for text in batch.column(0).to_pylist())
        except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file} is not a complete Parquet file ({error})") from error


def no_text(kind: str, name: str, row: Any) -> str:
    """Return the message for a row whose field or column has no text."""
    others = [key for key, value in row.items() if isinstance(value, str)] if isinstance(row, dict) else []
    listed = f"the {kind}s with text are {', '.join(others[:10])}" if others else f"there is no {kind} with text"
    return f"no text in {kind} {name}; {listed}; set data.field=… (--field of {usage('sample')})"


# Formats with a document per row, by their suffix: functions of the file and `data.field`.
ROW_READERS: dict[str, Callable[[Path, str], Iterator[TextChunk]]] = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
