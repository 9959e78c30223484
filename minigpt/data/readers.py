"""Documents out of files: plain text, Markdown, JSON Lines and Parquet, also compressed, a piece at a time.

A text file is one document, and so is a line of JSON Lines and a row of Parquet. A long document comes in
pieces, cut where no tokenizer looks across, so a file may be larger than the memory and is tokenized as if
it were read at once.
"""

import codecs
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from glob import glob, has_magic
from pathlib import Path
from typing import IO, Any

from minigpt.data.tokenizer import whole_characters
from minigpt.utils.errors import UserError
from minigpt.utils.ranks import is_rank_zero
from minigpt.utils.terminal import sanitize_line

TEXTS, ROWS, PACKED = (".txt", ".md"), (".jsonl", ".parquet"), (".gz", ".zst")
_ARROW_TEXTS = ("string", "large_string", "string_view", "dictionary<values=string, indices=int32, ordered=0>")
_BLOCK = 1 << 20  # bytes read at a time
_LOOK = 1 << 16  # characters before the end of a text in which a place to cut is looked for
_LONGEST = 1 << 24  # characters of a piece where there is no good place to cut


@dataclass(frozen=True)
class TextChunk:
    """A document, or a part of one.

    Args:
        text: of the piece, never empty but for an empty document.
        first: a document begins here.
        read: bytes of the file that were read by now.
    """

    text: str
    first: bool
    read: int


def find_files(path: str, setting: str = "data.path") -> list[Path]:
    """Find the files of a path, sorted: one file, the files of known kinds in a folder, or those matching a pattern.

    A file that is named, or matched by a pattern, may have any suffix. One line on stderr counts the files of a
    folder that are skipped; hidden files are not counted.

    Args:
        setting: that gives the path, for messages.

    Raises:
        UserError: there is none.
    """
    given = Path(path or "''").expanduser()  # an empty path is not the current folder
    if given.is_dir():
        visible = [file for file in given.rglob("*") if not _hidden(file.relative_to(given)) and file.is_file()]
        files = [file for file in visible if _kind(file) in (*TEXTS, *ROWS)]
        if not files:
            takes = f"{', '.join((*TEXTS, *ROWS))}, or these with {' or '.join(PACKED)}"
            raise UserError(f"{setting}={path} has no file of {takes}; for others give a pattern, '{path}/**/*.py' say")
        if skipped := set(visible) - set(files):
            kinds = sorted({file.suffix.lower() or "no suffix" for file in skipped})
            listed = ", ".join(kinds[:8]) + (", …" if len(kinds) > 8 else "")
            _print_once(
                f"{setting}={path}: read {len(files):,} files, skipped {len(skipped):,} of other kinds ({listed})"
            )
    elif given.exists():  # also what is no regular file, a pipe say
        files = [given]
    elif has_magic(str(given)):
        files = [Path(file) for file in glob(str(given), recursive=True) if Path(file).is_file()]
        if not files:
            raise UserError(
                f"{setting}={path} matches no file; give a file, a folder or a pattern such as 'texts/**/*.txt'"
            )
    else:
        raise UserError(
            f"{setting}={path} does not exist; give a file of text, a folder, or a pattern such as 'texts/*.txt'"
        )
    return sorted(set(files))


@cache  # however often a folder is read
def _print_once(line: str) -> None:
    if is_rank_zero():
        print(sanitize_line(line), file=sys.stderr)


def read_documents(file: Path, field: str) -> Iterator[TextChunk]:
    """The documents of a file.

    Args:
        field: what is read of a line of JSON Lines and a row of Parquet.

    Raises:
        UserError: the file is damaged, is no text, is not UTF-8, or has no such field.
    """
    kind = _kind(file)
    if kind == ".parquet":
        return _parquet(file, field)
    return _jsonl(file, field) if kind == ".jsonl" else text_chunks(_decoded(file))


def text_chunks(blocks: Iterable[tuple[str, int]]) -> Iterator[TextChunk]:
    """One document from blocks of text and how far was read with each, cut where tokenizers do not look across."""
    first, rest, read = True, "", 0
    for block, read in blocks:
        rest += block
        if len(rest) >= _BLOCK // 2 and (cut := cut_point(rest) or (len(rest) if len(rest) > _LONGEST else 0)):
            yield TextChunk(rest[:cut], first, read)
            first, rest = False, rest[cut:]
    if rest or first:
        yield TextChunk(rest, first, read)


def cut_point(text: str) -> int:
    """The last place where every pattern of `tokenizer.PATTERNS` cuts, whatever follows; 0 if none is near the end.

    That is after a single line break before a letter or digit, or else before a single space between letters.
    """
    least = max(1, len(text) - _LOOK)
    for place in _backwards(text, "\n", least):
        if not text[place - 1].isspace() and (text[place + 1].isalpha() or text[place + 1].isdecimal()):
            return place + 1
    for place in _backwards(text, " ", least):
        if text[place - 1].isalpha() and text[place + 1].isalpha():
            return place
    return 0


def _backwards(text: str, space: str, least: int) -> Iterator[int]:
    place = len(text) - 1
    while (place := text.rfind(space, least, place)) >= 0:
        yield place


def _hidden(file: Path) -> bool:
    return any(part.startswith(".") for part in file.parts)


def _kind(file: Path) -> str:
    """The suffix that tells what a file holds, without that of its compression."""
    name = file.name.lower()
    for packed in PACKED:
        name = name.removesuffix(packed)
    return Path(name).suffix


def _decoded(file: Path) -> Iterator[tuple[str, int]]:
    """The characters of a file as they are (line ends too), and the bytes read, a block at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done, begun = 0, False
    with _opened(file) as (read_block, read_so_far):
        while True:
            block = read_block()
            if (zero := block.find(b"\0")) >= 0:
                raise UserError(f"{file} is not text: byte 0 at offset {done + zero:,}; save it as UTF-8 text")
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                where = done - pending + error.start
                raise UserError(f"{file} is not UTF-8 text: bad byte at offset {where:,}; save it as UTF-8") from error
            if text and not begun:
                text, begun = text.removeprefix("\ufeff"), True  # the byte order mark is not part of the text
            done += len(block)
            if text:
                yield text, read_so_far()
            if not block:
                return


def _jsonl(file: Path, field: str) -> Iterator[TextChunk]:
    number, rest = 0, list[str]()
    for block, read in _ended(_decoded(file)):
        head, *lines = block.split("\n")
        rest.append(head)
        if not lines:
            continue
        lines, rest = ["".join(rest), *lines[:-1]], [lines[-1]]
        for line in lines:
            number += 1
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{file}, line {number:,}: not JSON ({error})") from error
            if not isinstance(row, dict) or not isinstance(row.get(field), str):
                texts = [key for key, value in row.items() if isinstance(value, str)] if isinstance(row, dict) else []
                there = f"the fields with text are {', '.join(texts[:10])}" if texts else "there is no field with text"
                raise UserError(f"{file}, line {number:,}: no text in field {field}; {there}; set data.field=…")
            yield TextChunk(whole_characters(row[field]), True, read)


def _parquet(file: Path, field: str) -> Iterator[TextChunk]:
    parquet = import_extra("pyarrow.parquet")
    arrow = import_extra("pyarrow")
    size, rows = file.stat().st_size, 0
    with _opened(file, whole=True) as (source, _):
        try:
            table = parquet.ParquetFile(source)
            kinds = {column.name: str(column.type) for column in table.schema_arrow}
            texts = [name for name, kind in kinds.items() if kind in _ARROW_TEXTS]
            if field not in texts:
                there = f"the columns with text are {', '.join(texts)}" if texts else "there is no column with text"
                raise UserError(f"{file}: no text in column {field}; {there}; set data.field=…")
            for batch in table.iter_batches(batch_size=256, columns=[field]):
                rows += len(batch)
                for text in batch.column(0).to_pylist():
                    yield TextChunk(text or "", True, size * rows // table.metadata.num_rows)
        except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file} is not a whole Parquet file ({error})") from error


def import_extra(module: str) -> Any:
    """Import what only some kinds of data need.

    Raises:
        UserError: it is not installed.
    """
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UserError(f'this data needs the package {package}; install it with pip install -e ".[data]"') from error


def _ended(blocks: Iterator[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """The blocks, and a line end after the last."""
    read = 0
    for block, read in blocks:
        yield block, read
    yield "\n", read


@contextmanager
def _opened(file: Path, whole: bool = False) -> Iterator[tuple[Any, Callable[[], int]]]:
    """A function that reads the next block of what a file holds, and one that tells the bytes of the file read.

    With `whole`, a file to read from anywhere instead of the first function.
    """
    with open(file, "rb") as raw:
        packed = next((suffix for suffix in PACKED if file.name.lower().endswith(suffix)), "")
        if whole:
            if packed:
                raise UserError(f"{file}: Parquet is compressed inside; unpack the {packed} around it")
            yield raw, raw.tell
            return
        unpack = {"": _plain, ".gz": _gzip, ".zst": _zstandard}[packed]
        blocks = unpack(raw, file)
        yield lambda: next(blocks, b""), raw.tell


def _plain(raw: IO[bytes], file: Path) -> Iterator[bytes]:
    while block := raw.read(_BLOCK):
        yield block


def _gzip(raw: IO[bytes], file: Path) -> Iterator[bytes]:
    import gzip

    if not raw.read(1):
        raise UserError(f"{file} is not a whole gzip file (it is empty)")
    raw.seek(0)
    try:
        with gzip.GzipFile(fileobj=raw) as unpacked:
            while block := unpacked.read(_BLOCK):
                yield block
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{file} is not a whole gzip file ({error})") from error


def _zstandard(raw: IO[bytes], file: Path) -> Iterator[bytes]:
    zstandard = import_extra("zstandard")
    frames = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    try:
        unpack = frames.decompressobj()
        while block := raw.read(1 << 16):
            while block:
                if unpack.eof:  # the next of several frames
                    unpack = frames.decompressobj()
                if text := unpack.decompress(block):
                    yield text
                block = unpack.unused_data if unpack.eof else b""
    except zstandard.ZstdError as error:
        raise UserError(f"{file} is not a whole zstandard file ({error})") from error
    if not unpack.eof:
        raise UserError(f"{file} is not a whole zstandard file (it ends too early)")
