"""Whole documents for tokenizers that do not split at the cuts between the chunks of a document."""

from collections.abc import Iterable, Iterator

from minigpt.data.readers import TextChunk
from minigpt.data.sources import TRAIN, SplitChunk
from minigpt.utils.terminal import warn

# Of a document that is encoded at once: the package tokenizers takes 80 bytes of memory per byte.
_MAX_JOINED_CHARS = 1 << 22


def join_chunks(chunks: Iterable[SplitChunk]) -> Iterator[SplitChunk]:
    """Join the chunks of each document in each split, up to `_MAX_JOINED_CHARS`."""
    joined = ""
    joined_split = TRAIN
    starts_document = True  # with what is joined
    for split, (text, first) in chunks:
        continues = split == joined_split and not first
        is_long = continues and len(joined) + len(text) > _MAX_JOINED_CHARS
        if is_long and starts_document:  # once per document
            warn(
                f"a document of more than {len(joined):,} characters is encoded in parts, "
                f"with a token more per part"
            )
        if text and (is_long or not continues):
            if joined:
                yield joined_split, TextChunk(joined, starts_document)
            joined = ""
            joined_split = split
            starts_document = first
        joined += text
    if joined:
        yield joined_split, TextChunk(joined, starts_document)
