"""Assign documents to the training or the validation split, and batch their texts for tokenization."""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from minigpt.data.readers import TextChunk
from minigpt.data.sources import Source
from minigpt.data.tokenizer import SEPARATOR
from minigpt.utils.terminal import warn

TRAIN, VAL = 0, 1
_BATCH_CHARS = 1 << 20  # tokenized together
_MAX_JOINED_CHARS = 1 << 22  # of a document: the package tokenizers takes 80 bytes of memory per byte

TokenizeBatch = list[tuple[int, bool, str]]  # split, whether a separator precedes the text, text
SplitChunk = tuple[int, TextChunk]  # the split, and a chunk whose `first` starts a document of that split


def scan_corpus(sources: Sequence[Source], by_character: bool) -> tuple[Sequence[int], str]:
    """Count the characters of each document; if `by_character`, also find the distinct ones."""
    lengths, seen = array("Q"), np.zeros(0x110000, dtype=bool)
    for _, (text, first) in _read(sources):
        if first:
            lengths.append(0)
        lengths[-1] += len(text)
        if by_character:
            seen[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")] = True
    seen[ord("\n")] |= len(lengths) > 1  # the separator of documents
    return lengths, "".join(map(chr, np.flatnonzero(seen)))


def cut_by_fraction(lengths: Sequence[int], val_fraction: float) -> int:
    """Return where the validation split starts, as a number of characters from the start of the first document.

    Several documents are cut at the nearest start of a document, a single one anywhere.
    """
    starts = np.cumsum([0, *lengths])
    wanted = int(starts[-1] * (1 - val_fraction))
    return wanted if len(lengths) == 1 else int(starts[1:-1][np.abs(starts[1:-1] - wanted).argmin()])


def split_chunks(sources: Sequence[Source], rule: Mapping[str, Any], cut: int) -> Iterator[SplitChunk]:
    """Read the chunks of all documents with the split of each.

    Two sources are the two splits. A single one is split by `rule`, which has `split` and `val_fraction` of the data
    group; `cut` is the result of `cut_by_fraction` for split=fraction.
    """
    if len(sources) > 1:
        return _read(sources)
    chunks = sources[0].read()
    return _by_fraction(chunks, cut) if rule["split"] == "fraction" else _by_hash(chunks, rule["val_fraction"])


def join_chunks(chunks: Iterable[SplitChunk]) -> Iterator[SplitChunk]:
    """Join the chunks of each document in each split, up to `_MAX_JOINED_CHARS`."""
    joined, start = "", (TRAIN, True)  # its split, and whether a document starts there
    for split, (text, first) in chunks:
        is_long = len(joined) + len(text) > _MAX_JOINED_CHARS and not first and split == start[0]
        if is_long and start[1]:  # once per document
            warn(f"a document of more than {len(joined):,} characters is encoded in parts, with a token more per part")
        if text and (first or split != start[0] or is_long):
            if joined:
                yield start[0], TextChunk(joined, start[1])
            joined, start = "", (split, first)
        joined += text
    if joined:
        yield start[0], TextChunk(joined, start[1])


def _read(sources: Sequence[Source]) -> Iterator[SplitChunk]:
    """Yield the chunks of all sources with the index of their source."""
    return ((i, chunk) for i, source in enumerate(sources) for chunk in source.read())


def _by_fraction(chunks: Iterable[TextChunk], cut: int) -> Iterator[SplitChunk]:
    begin = 0
    for text, first in chunks:
        inside = max(0, cut - begin)
        yield TRAIN, TextChunk(text[:inside], first)
        yield VAL, TextChunk(text[inside:], first or begin <= cut)
        begin += len(text)


def _by_hash(chunks: Iterable[TextChunk], val_fraction: float) -> Iterator[SplitChunk]:
    """Choose documents by the hash of their first chunk, so that equal documents are in one split."""
    split = TRAIN
    for chunk in chunks:
        if chunk.first:
            digest = hashlib.blake2b(chunk.text.encode(), digest_size=8).digest()
            split = VAL if int.from_bytes(digest, "little") < val_fraction * 2**64 else TRAIN
        yield split, chunk


class TextBatches:
    """Iterate once over the texts of both splits in batches, and count them."""

    def __init__(self, chunks: Iterable[SplitChunk]) -> None:
        self.chunks = chunks
        self.bytes = [0, 0]  # of UTF-8 in each split
        self.hashes = (array("Q"), array("Q"))  # one per document of each split
        self.has_separators = False  # as ordinary text

    def __iter__(self) -> Iterator[TokenizeBatch]:
        batch: TokenizeBatch = []
        size, hasher = 0, hashlib.blake2b()
        for split, (text, first) in self.chunks:
            if not text:
                continue
            self.has_separators = self.has_separators or SEPARATOR in text
            content, hashes = text.encode(), self.hashes[split]
            batch.append((split, first and len(hashes) > 0, text))
            if first:
                hasher = hashlib.blake2b(digest_size=8)
                hashes.append(0)
            hasher.update(content)
            hashes[-1] = int.from_bytes(hasher.digest(), "little")
            self.bytes[split] += len(content)
            size += len(text)
            if size >= _BATCH_CHARS:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch
