"""The order in which documents are read, and the split that each part of them is for.

Texts come in units of about a million characters, each with the place in the text that follows it, so that
a preparation can be told to carry on from there.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minigpt.data.readers import TextChunk
from minigpt.data.sources import DocumentReader
from minigpt.data.tokenize_workers import Texts

TRAIN, VAL = 0, 1
_UNIT = 1 << 20  # characters that are tokenized at a time


@dataclass
class Progress:
    """How much was read of all documents, and of each split."""

    index: int = 0  # documents begun
    documents: list[int] = field(default_factory=lambda: [0, 0])
    bytes: list[int] = field(default_factory=lambda: [0, 0])


@dataclass(frozen=True)
class Cursor:
    """A place in the text: so many pieces into a part, and what was read before that part."""

    part: int = 0
    pieces: int = 0
    read: Progress = field(default_factory=Progress)


@dataclass(frozen=True)
class TokenizeBatch:
    """Texts that are tokenized together."""

    items: Texts
    documents: tuple[list[int], list[int]]  # checksums of the documents of each split that end here
    after: Cursor
    position: int  # bytes read, for the progress bar


# Which texts of a document, whose index in the corpus is given, are for which split. `begin`: characters before.
Assign = Callable[[int, int, int, TextChunk], list[tuple[int, str]]]


def scan_corpus(parts: Sequence[DocumentReader], by_character: bool) -> tuple[Sequence[int], str]:
    """How many characters every document has, and if asked, which ones there are."""
    lengths, seen = array("Q"), np.zeros(0x110000, dtype=bool)
    for part in parts:
        for piece in part():
            if piece.first:
                lengths.append(0)
            lengths[-1] += len(piece.text)
            if by_character:
                seen[np.frombuffer(piece.text.encode("utf-32-le"), dtype="<u4")] = True
    seen[ord("\n")] |= len(lengths) > 1  # what separates documents
    return lengths, "".join(map(chr, np.flatnonzero(seen)))


def cut_by_fraction(lengths: Sequence[int], val_fraction: float) -> tuple[int, int]:
    """The document and the character in it that the validation split begins with."""
    starts = np.cumsum([0, *lengths])
    wanted = int(starts[-1] * (1 - val_fraction))
    if len(lengths) == 1:
        return 0, wanted
    return int(np.abs(starts[1:-1] - wanted).argmin()) + 1, 0  # a document is never cut in two where there are more


def assign_by(made: Mapping[str, Any], cut: Sequence[int], first_val_part: int) -> Assign:
    """The rule that splits the documents."""
    document, character = cut

    def own(part: int, index: int, begin: int, piece: TextChunk) -> list[tuple[int, str]]:
        return [(VAL if part >= first_val_part else TRAIN, piece.text)]

    def fraction(part: int, index: int, begin: int, piece: TextChunk) -> list[tuple[int, str]]:
        if index != document:
            return [(VAL if index > document else TRAIN, piece.text)]
        here = max(0, character - begin)
        return [(TRAIN, piece.text[:here]), (VAL, piece.text[here:])]

    now = TRAIN

    def by_checksum(part: int, index: int, begin: int, piece: TextChunk) -> list[tuple[int, str]]:
        nonlocal now
        if piece.first:
            begins = hashlib.blake2b(piece.text.encode(), digest_size=8).digest()
            now = VAL if int.from_bytes(begins, "little") < made["val_fraction"] * 2**64 else TRAIN
        return [(now, piece.text)]

    return {"fraction": fraction, "document": by_checksum}.get(made.get("split", ""), own)


def tokenize_batches(
    parts: Sequence[DocumentReader], sizes: Sequence[int], assign: Assign, mark: Cursor
) -> Iterator[TokenizeBatch]:
    """The texts from a mark on, with their splits; a unit does not reach across parts."""
    read, position = deepcopy(mark.read), sum(sizes[: mark.part])
    for part in range(mark.part, len(parts)):
        before, done, begin = deepcopy(read), mark.pieces if part == mark.part else 0, 0
        items: Texts = []
        ended: tuple[list[int], list[int]] = ([], [])
        open_: dict[int, Any] = {}  # the checksums of the document that is being read, a split each

        def end() -> None:
            for split, checksum in open_.items():  # noqa: B023
                ended[split].append(int.from_bytes(checksum.digest(), "little"))  # noqa: B023
            open_.clear()  # noqa: B023

        size = count = 0
        for count, piece in enumerate(parts[part](), 1):
            if piece.first:
                end()
                read.index, begin = read.index + 1, 0
            for split, text in assign(part, read.index - 1, begin, piece):
                if not text:
                    continue
                separated = split not in open_ and read.documents[split] > 0
                if split not in open_:
                    open_[split] = hashlib.blake2b(digest_size=8)
                    read.documents[split] += 1
                content = text.encode()
                open_[split].update(content)
                read.bytes[split] += len(content)
                items.append((split, separated, text))
            begin, size = begin + len(piece.text), size + len(piece.text)
            if count <= done or size >= _UNIT:
                if count > done:  # else a killed run tokenized it
                    yield TokenizeBatch(items, ended, Cursor(part, count, before), position + piece.read)
                items, ended, size = [], ([], []), 0
        end()
        position += sizes[part]
        yield TokenizeBatch(items, ended, Cursor(part + 1, 0, deepcopy(read)), position)
