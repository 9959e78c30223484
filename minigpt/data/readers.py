"""Read documents from plain text, Markdown, JSON Lines, CSV and Parquet, in chunks.

A text file is one document, and so is each row of the other formats; both may be compressed. A long
document comes in chunks, cut where no pattern in `tokenizer.PATTERNS` matches across the cut, so
the ids are those of the whole document and a file may be larger than memory. `join_chunks` in
`extras/huggingface/whole_documents.py` joins them for other tokenizers.
"""

import codecs
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from glob import escape, glob, has_magic
from io import IncrementalNewlineDecoder
from itertools import chain, takewhile
from pathlib import Path
from typing import NamedTuple

from minigpt.data.tokenizer import whole_characters
from minigpt.utils.errors import UserError, require
from minigpt.utils.extras import from_extras
from minigpt.utils.scripts import ROOT, shell_quote, usage
from minigpt.utils.terminal import unescape, warn, warn_once

STDIN = ("-", "/dev/stdin")
TEXT_SUFFIXES = (".txt", ".md")
COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
# Of a folder: tables often lie beside texts, and are read if a path or a pattern names them.
_FOLDER_SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".ndjson", ".jsonlines", ".parquet")
# The folder of a run or a sweep holds one of these sets of names (runs/run_dir.py,
# sweeps/report.py), and is left out. If it is itself the folder that is read, these files of it are
# left out, as those of `data.folder` are.
_RUN_MARKS = (
    {".hydra", "metrics.csv"},
    {".hydra", "summary.json"},
    {".hydra", "checkpoints"},
    {".hydra", ".lock"},
    {"sweep.json"},
    {"runs.csv", "sweep.md"},
)
_RUN_NAMES = re.compile(
    r"(log|samples)\.txt|checkpoints|wandb|(sweep|runs|metrics)\.\w+|(summary|plan)\.json"
)
_DATA_NAMES = re.compile(
    r"tokens|tiktoken|checksums\.json|stdin-\w{16}(-\w{12})?\.txt"
    r"|tinyshakespeare(-stand-in)?(-\w{12})?\.txt"
)
_BLOCK_BYTES = 1 << 20  # read at a time
_CUT_WINDOW = 1 << 16  # characters before the end of a text that are searched for a cut
# Of a chunk without a place to cut, in which tiktoken may take 100 bytes per character.
_MAX_CHUNK_CHARS = 1 << 18
# With which a text does not begin: an array of objects, an object per line, or objects of many
# lines, each with a key. Code and markup may have braces in lines of their own.
_JSON_ROWS = rb'\s*(\[\s*\{\s*"[^"\n]*"\s*:|\{\s*"[^"\n]*"\s*:(.*\}\s*\n|(?s:.*?)\n\})\s*\{'
# The same by suffix: a file of JSON may be one object.
_JSON = {
    # Prose begins with no field and no list of texts either.
    **dict.fromkeys(
        ("", *TEXT_SUFFIXES),
        re.compile(_JSON_ROWS + rb'|\{\s*"[^"\n]*"\s*:|\[\s*"[^"\n]*"\s*(,\s*"|\]\s*\Z))'),
    ),
    ".json": re.compile(_JSON_ROWS + rb"|\[)"),
    "other": re.compile(_JSON_ROWS + rb")"),
}
_BINARY = {  # how files begin, in bytes, that hold a text which must be unpacked, or none
    codecs.BOM_UTF32_LE: "UTF-32; convert it: iconv -f UTF-32 -t UTF-8 {} > utf8.txt",
    b"\xff\xfe|\xfe\xff": "UTF-16; convert it: iconv -f UTF-16 -t UTF-8 {} > utf8.txt",
    b"\x1f\x8b": "gzip; end its name with .gz, or unpack it with gunzip",
    b"BZh[1-9]1AY": "bzip2; end its name with .bz2, or unpack it with bunzip2",
    b"\xfd7zXZ": "xz; end its name with .xz, or unpack it with unxz",
    b"\\x28\xb5\x2f\xfd": "zstd; end its name with .zst, or unpack it with unzstd",
    b"PAR1": "Parquet; end its name with .parquet",
    b"PK[\x03\x05]": (
        "a zip archive or an office document; unpack it: unzip {}, or save it as UTF-8 text"
    ),
    b"7z\xbc\xaf": "a 7-Zip archive; unpack it: 7z x {}",
    b"Rar!": "a RAR archive; unpack it: unrar x {}",
    b".{257}ustar": "a tar archive; unpack it: tar -xf {}",
    b"%PDF-": "a PDF document; convert it: pdftotext {}",
    b"\xd0\xcf\x11\xe0": "an office document; save it as UTF-8 text",
}
# A text is cut after a single line break before a letter or digit, or else before a single space
# between letters.
_CUTS = (
    re.compile(r"(?s:.*)(?<=\S)\n(?=[^\W_])"),
    re.compile(r"(?s:.*)(?<=[^\W\d_])(?= [^\W\d_])"),
)


class TextChunk(NamedTuple):
    """A document or a part of one; the text is empty only for an empty document."""

    text: str
    first: bool  # whether a document starts here


Field = str | Callable[[object, str], TextChunk]  # as `read_documents` takes it


def find_files(path: str | Sequence[str], setting: str, folder: str | Path = "data") -> list[Path]:
    """Find the files of one or more paths.

    A path is a file, a folder, of which the files with known suffixes are read, or a pattern. Files
    of a folder or a pattern are sorted, and each is read once, however many links lead to it. A
    file that is named, or matched by a pattern, may have any suffix. Hidden files are skipped;
    others are skipped with a warning, as is the output of earlier commands, unless its name is
    given.

    Args:
        setting: config key of the path.
        folder: `data.folder`.

    Raises:
        UserError: there is no such file.
    """
    _is_run.cache_clear()
    found: dict[str, Path] = {}
    for one in [path] if isinstance(path, str) else path:
        given = Path(os.path.expanduser(one or "''"))  # Path("") would be the current folder
        for file in _find(given, f"{setting}={one}", Path(folder)):
            found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def _find(given: Path, setting: str, data_folder: Path) -> list[Path]:
    is_folder = given.is_dir()
    if given.exists() and not is_folder:
        return [given]
    if given.is_symlink():
        raise UserError(
            f"{setting} is a broken link to {os.readlink(given)}; give a file that exists"
        )

    # Sort what matches into files to read and files to skip, with the reason. Output of earlier
    # commands is looked for below the folder, or below the part of the pattern without a wildcard.
    pattern = Path(escape(str(given)), "**", "*") if is_folder else given
    fixed = [*takewhile(lambda part: is_folder or not has_magic(part), given.parts)]
    files: list[Path] = []
    skipped: list[str] = []
    found = {file for file in _expand(pattern.as_posix()) if not file.is_dir()}
    for file in sorted(found, key=lambda file: file.parts):  # Windows compares without case
        suffix = content_suffix(file)
        entries = [file, *file.parents[: len(file.parts) - len(fixed) - 1]]
        if not file.is_file():
            skipped.append("broken link, FIFO or device")
        elif has_magic(pattern.name) and any(_is_output(entry, data_folder) for entry in entries):
            skipped.append("of earlier commands")
        elif is_folder and suffix not in _FOLDER_SUFFIXES:
            skipped.append(suffix or "no suffix")
        else:
            files.append(file)

    # Warn of what is skipped, or raise if there is nothing to read.
    kinds = ", ".join(sorted(set(skipped))[:10])
    counted = f"{len(skipped):,} files of {given} are skipped ({kinds})"
    if files and skipped:
        warn(f"{counted}; a pattern such as '**/*.py' reads any suffix, a path any file")
    if not files:
        problem = (
            f"{'matches no file' if has_magic(str(given)) else 'does not exist'}; "
            f"give a file, a folder, a pattern such as 'texts/**/*.txt', or a list [a.txt,b.txt]"
        )
        if is_folder:
            problem = (
                f"has no file with suffix {', '.join(_FOLDER_SUFFIXES)}, or these with "
                f"{', '.join(COMPRESSED_SUFFIXES)}; for others give a pattern such as '**/*.py'"
            )
        raise UserError(f"{setting} {problem}" + (f"; {counted}" if skipped else ""))
    return files


def _expand(pattern: str) -> Iterator[Path]:
    # As glob does, but `**` enters a folder once, however many links lead to it.
    head, *tail = re.split(r"(?<![^/])\*\*(?:/|$)", pattern, maxsplit=1)
    if not tail:
        yield from map(Path, glob(pattern))
        return
    seen: set[str] = set()
    for top in glob(head) if head else ["."]:
        for folder, names, _ in os.walk(top, followlinks=True):
            real = os.path.realpath(folder)
            names[:] = [] if real in seen else sorted(name for name in names if name[0] != ".")
            seen.add(real)
            yield from _expand(f"{escape(Path(folder).as_posix())}/{tail[0] or '*'}")


def _is_output(entry: Path, data_folder: Path) -> bool:
    name = entry.name
    return (
        _is_run(entry)
        or (_RUN_NAMES.fullmatch(name) is not None and _is_run(entry.parent))
        or (
            _DATA_NAMES.fullmatch(name) is not None
            and entry.parent.resolve() == data_folder.resolve()
        )
        or (name == "README.md" and entry.resolve() == ROOT / "data" / "README.md")
    )


@cache
def _is_run(folder: Path) -> bool:
    names = set(os.listdir(folder)) if folder.is_dir() else set()
    return any(marks <= names for marks in _RUN_MARKS)


def content_suffix(file: Path) -> str:
    """Return the suffix of a file in lower case, without that of its compression."""
    name = Path(file.name.lower())
    return Path(name.stem).suffix if name.suffix in COMPRESSED_SUFFIXES else name.suffix


def read_texts(
    path: str, setting: str, field: str = "text", separator: str = "", folder: str = "data"
) -> Iterator[TextChunk]:
    """Read the documents of a path, as `find_files` takes it; `-` is standard input."""
    if path in STDIN:
        require(setting, path, lambda _: sys.stdin is not None, "a file, as stdin is closed")
        blocks = iter(lambda: sys.stdin.buffer.read(_BLOCK_BYTES), b"")
        return text_chunks(
            _decode(blocks, f"{setting}=-", None if separator else _JSON[""]), separator
        )
    return read_files(find_files(path, setting, folder), field, separator)


def read_files(files: Sequence[Path], field: Field, separator: str = "") -> Iterator[TextChunk]:
    """Read the documents of files, without the rows whose text is null."""
    documents = (read_documents(file, field, separator) for file in files)
    return without_null(chain.from_iterable(documents), f"{files[0]}{' …' if files[1:] else ''}")


def without_null(chunks: Iterable[TextChunk | None], name: str) -> Iterator[TextChunk]:
    """Leave out None, a row whose text is null, and count these rows in a warning."""
    n_null = 0
    for chunk in chunks:
        if chunk is None:
            n_null += 1
        else:
            yield chunk
    if n_null:
        warn_once(f"{n_null:,} rows of {name} have null instead of a text and are left out")


def read_documents(file: Path, field: Field, separator: str = "") -> Iterator[TextChunk | None]:
    """Read the documents of a file; None for a row whose text is null.

    Args:
        field: of JSON Lines, or column of Parquet and CSV, that holds the text; or a function of a
            row and of its place in words, which returns the document.
        separator: of documents in a text file, which may hold `\\n` and `\\t`; empty: the file is
            one document.

    Raise UserError if the file is damaged, binary, not UTF-8, or has no such field.
    """
    suffix = content_suffix(file)
    if suffix in ROW_READERS:
        return ROW_READERS[suffix](file, field)
    if callable(field):
        return from_extras("read_json_rows")(file, field)
    json_rows = None if separator else _JSON.get(suffix, _JSON["other"])
    return text_chunks(_decode(_read_blocks(file), file, json_rows), separator)


def text_chunks(blocks: Iterable[str], separator: str = "") -> Iterator[TextChunk]:
    """Cut a text, given as blocks, into documents, and these where no tokenizer merges across.

    The line breaks around a document, and empty documents, are dropped if there is a separator.
    """
    edges = "\r\n" if separator else ""
    separator = unescape(separator)
    first = True  # whether a document starts with what is read next
    rest = ""
    for block in blocks:
        # Documents that end in the block.
        *ended, rest = (rest + block).split(separator) if separator else [rest + block]
        for text in ended:
            text = text.strip(edges) if first else text.rstrip(edges)
            if text:
                yield TextChunk(text, first)
            first = True

        # A part of a document that goes on, without what may be a part of a separator, or line
        # breaks at its end.
        if len(rest) >= _BLOCK_BYTES // 2:
            whole = rest[: len(rest) - len(separator)].rstrip(edges)
            cut = cut_point(whole)
            if not cut and len(whole) > _MAX_CHUNK_CHARS:
                cut = len(whole)
            if cut:
                yield TextChunk(rest[:cut].lstrip(edges) if first else rest[:cut], first)
                rest = rest[cut:]
                first = False
    rest = rest.strip(edges) if first else rest.rstrip(edges)
    if rest or (first and not separator):
        yield TextChunk(rest, first)


def cut_point(text: str) -> int:
    """Find the last place where all `tokenizer.PATTERNS` split, whatever follows; else 0."""
    found = (pattern.match(text, max(0, len(text) - _CUT_WINDOW)) for pattern in _CUTS)
    return next((cut.end() for cut in found if cut), 0)


def _decode(
    blocks: Iterable[bytes], name: object, rows: re.Pattern[bytes] | None = None
) -> Iterator[str]:
    """Yield blocks of text, with \\n as every line end.

    Args:
        name: for errors.
        rows: of JSON, with which a text does not begin.
    """
    # Without a byte order mark.
    decoder = IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
    offset = 0
    line = 1
    for block in chain(blocks, [b""]):
        # Bytes that are no text.
        for start, kind in _BINARY.items():
            if offset == 0 and re.match(start, block, re.DOTALL):
                raise UserError(f"{name} is {kind.format(shell_quote(str(name)))}")
        zero = block.find(b"\0")
        if zero >= 0:
            raise UserError(
                f"{name} is not text: byte 0 at offset {offset + zero:,}; save it as UTF-8 text"
            )
        if offset == 0 and rows and rows.match(block.removeprefix(codecs.BOM_UTF8)):
            raise UserError(
                f"{name} holds JSON, whose syntax would be trained on; make it .jsonl, with an "
                f"object in each line, as jq -c . does, or jq -c '.[]' with an array"
            )

        # The text; a character may begin in an earlier block.
        offset += len(block)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            offset += error.start - len(error.object)
            line += error.object[: error.start].count(b"\n")
            raise UserError(
                f"{name} is not UTF-8 text: bad byte at offset {offset:,}, in line {line:,}; "
                f"save it as UTF-8"
            ) from error
        line += block.count(b"\n")
        yield text


def _read_blocks(file: Path) -> Iterator[bytes]:
    if file.suffix.lower() in COMPRESSED_SUFFIXES:
        yield from from_extras("read_compressed")(file)
    else:
        with open(file, "rb") as raw:
            yield from iter(lambda: raw.read(_BLOCK_BYTES), b"")


def read_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a text file."""
    parts: list[str] = []  # of the last line: to join it block by block would take quadratic time
    for block in _decode(_read_blocks(file), file):
        *ended, rest = block.split("\n")
        for end in ended:
            yield "".join([*parts, end])
            parts.clear()
        parts.append(rest)
    yield "".join(parts)


def read_jsonl(file: Path, field: Field) -> Iterator[TextChunk | None]:
    """Read the rows of a file of JSON Lines."""
    for number, line in enumerate(read_lines(file), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{file}, line {number:,}: not JSON ({error})") from error
            yield row_chunk(row, field, f"{file}, line {number:,}")


def row_chunk(row: object, field: Field, where: str, kind: str = "field") -> TextChunk | None:
    """Return the document of a row, with \\n as every line end, or None if its text is null.

    Args:
        where: the row, for errors.
        kind: what the field is called.

    Raises:
        UserError: the row has no text in the field.
    """
    if callable(field):
        return field(row, where)
    cells = row if isinstance(row, dict) else {}
    match cells.get(field, ...):
        case None:
            return None
        case str(text):
            whole = text if text.isascii() else whole_characters(text)
            return TextChunk(whole.replace("\r\n", "\n").replace("\r", "\n"), True)
    others = [key for key, value in cells.items() if isinstance(value, str)][:10]
    names = f"the {kind}s with text are {', '.join(others)}"
    listed = names if others else f"there is no {kind} with text"
    held = f"{kind} {field} holds {type(cells.get(field)).__name__}, not text"
    problem = held if field in cells else f"no text in {kind} {field}"
    raise UserError(
        f"{where}: {problem}; {listed}; set data.field=… (--field of {usage('sample')})"
    )


# Formats with a document per row, by their suffix: functions of the file and `data.field`.
ROW_READERS: dict[str, Callable[[Path, Field], Iterator[TextChunk | None]]] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), read_jsonl),
    **dict.fromkeys((".csv", ".tsv"), lambda *args: from_extras("read_csv")(*args)),
    ".parquet": lambda *args: from_extras("read_parquet")(*args),
}
