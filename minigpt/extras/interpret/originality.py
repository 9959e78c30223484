"""How much of a text is copied from the training text: new n-grams, and spans that occur in it
verbatim.

Source: n-novelty, Merrill et al., 2024, https://arxiv.org/abs/2406.13069
"""

import os
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from filelock import FileLock
from pydivsufsort import divsufsort

from minigpt.data.token_files import STARTS, Corpus, Split
from minigpt.extras.corpora.run_corpus import find_corpus
from minigpt.utils.errors import UserError
from minigpt.utils.files import atomic_write, file_version, sha256_json
from minigpt.utils.terminal import warn

NGRAMS = (5, 10, 20, 40)  # characters
SPAN = 20  # characters of a copied span, at least
LONGEST = 1000  # bytes of a match that are compared
CONTEXT = 80  # bytes of the training text on both sides of a span
BORDER = b"\xff"  # between documents: no text in UTF-8 has it, so no match spans two of them
INDEX = "train.suffixes"  # the text and its suffix array, 5 bytes per byte, between fingerprints
MAX_INDEXED = 100_000_000  # bytes of the training split, from its start
VALIDATION_CHARACTERS = 20_000
_DECODED = 1 << 20  # tokens at a time
_UNDERLINE = "\x1b[4m"
_NO_UNDERLINE = "\x1b[24m"


@dataclass(frozen=True)
class Index:
    """A training text with its suffix array: the offsets of its suffixes in their alphabetical
    order.

    Its documents are separated by `BORDER`.
    """

    text: bytes
    suffixes: np.ndarray[Any, Any]
    is_whole: bool  # else only the first `MAX_INDEXED` bytes of the split

    def longest_match(self, part: bytes) -> tuple[int, int]:
        """Return the length and the offset of the longest beginning of `part` that occurs in the
        text, in bytes.
        """
        place = bisect_left(self.suffixes, part, key=lambda at: self.text[at : at + len(part)])
        near = self.suffixes[
            max(0, place - 1) : place + 1
        ].tolist()  # the suffixes before and after `part`
        return max((_shared(part, self.text[at : at + len(part)]), at) for at in near)


def _shared(a: bytes, b: bytes) -> int:
    """Return the length of the longest common beginning."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def build_index(corpus: Corpus) -> Index:
    """Index the training split of a corpus; the index is kept beside token files that minigpt has
    written.
    """
    file, fingerprint = corpus.train.files[0].with_name(INDEX), _fingerprint(corpus)
    kept = _read(file, fingerprint)
    if kept or not corpus.provenance:  # the folder is of another tool
        return kept or _build(corpus)
    with (
        suppress(OSError),
        FileLock(f"{file}.lock"),
    ):  # a read-only disk; another process may be building it
        index = _read(file, fingerprint) or _build(corpus)
        with suppress(OSError), atomic_write(file) as partial, open(partial, "wb") as opened:
            opened.write(fingerprint + index.text)
            opened.write(index.suffixes.data)
            opened.write(fingerprint)  # shows that the file is complete
        return index
    return _build(corpus)


def _fingerprint(corpus: Corpus) -> bytes:
    """Identify the documents of an index, and that they are separated."""
    values = [
        BORDER.hex(),
        MAX_INDEXED,
        corpus.sha256,
        dict(corpus.provenance),
        corpus.tokenizer.to_dict(),
    ]
    return sha256_json(values).encode()


def _read(file: Path, fingerprint: bytes) -> Index | None:
    """Read a kept index; None if there is none, or it is incomplete, of another text or of an
    earlier version.
    """
    with suppress(OSError), open(file, "rb") as opened:
        n = (file.stat().st_size - 2 * len(fingerprint)) // 5
        if n > 0 and opened.read(len(fingerprint)) == fingerprint:
            text = opened.read(n)
            opened.seek(4 * n, os.SEEK_CUR)
            if opened.read() == fingerprint:
                suffixes = np.memmap(file, np.int32, "r", offset=len(fingerprint) + n, shape=n)
                return Index(text, suffixes, n < MAX_INDEXED)
    return None


def _build(corpus: Corpus) -> Index:
    text = read_documents(corpus, "train", MAX_INDEXED)
    return Index(text, divsufsort(text), len(text) < MAX_INDEXED)


def read_documents(corpus: Corpus, split: str, limit: int) -> bytes:
    """Return the documents of a split with `BORDER` between them, up to so many bytes.

    Raises:
        UserError: the token files do not show where documents start.
    """
    part: Split = getattr(corpus, split)
    tokens, end = corpus.scored_tokens(split), corpus.tokenizer.end_token
    # A special token ends a document, or an answer
    named = corpus.tokenizer.token_bytes.items()
    token_bytes = {i: token for i, token in named if token and i != end}
    text = bytearray()
    for begin in range(0, len(tokens), _DECODED):
        if len(text) < limit:
            ids = tokens[begin : begin + _DECODED].tolist()
            text += b"".join([token_bytes.get(i, BORDER) for i in ids])
    # Documents are joined by line breaks, which are also within them
    if end is None and part.documents > 1:
        if not len(corpus.tokenizer.separator):
            raise UserError("the tokenizer separates no documents, so none is compared by itself")
        file = part.files[0].with_suffix(STARTS)
        starts = np.fromfile(file, np.int64) if file.is_file() else np.zeros(0, np.int64)
        breaks = starts[(starts > 0) & (starts <= len(text))] - 1
        marked = np.frombuffer(text, np.uint8)
        if len(starts) != part.documents or (marked[breaks] != ord("\n")).any():
            raise UserError(
                f"{file} is missing or damaged; remove {file.parent} to have it written again"
            )
        marked[breaks] = ord(BORDER)
    return bytes(text[:limit])


def originality(index: Index, *texts: str) -> dict[str, Any]:
    """Compare texts with the training text, each by itself: no n-gram and no match spans two of
    them.

    Returns:
        `new`, the share of n-grams of characters that the training text lacks, by n as a string;
        `longest`, the longest match in characters; `spans`, the maximal matches of at least `SPAN`
        characters: the place of the `sample` among the texts, [start, end) in it, and the text
        `before` and `after` it in its training document; `whole`, whether all of the training text
        was searched.
    """
    found: dict[int, list[bool]] = {n: [] for n in NGRAMS}
    longest, spans = 0, list[dict[str, Any]]()
    for sample, given in enumerate(texts):
        text = given.removesuffix("\ufffd")  # a sample may end within a character
        data, starts = (
            text.encode(),
            [0, *accumulate(len(character.encode()) for character in text)],
        )
        matches = [index.longest_match(data[start : start + LONGEST]) for start in starts[:-1]]
        for n in NGRAMS:
            whole = enumerate(matches[: max(0, len(text) - n + 1)])
            found[n] += [length >= starts[i + n] - starts[i] for i, (length, _) in whole]
        reached = 0
        for i, (length, at) in enumerate(matches):
            end = bisect_left(starts, starts[i] + length + 1) - 1  # of the last whole character
            longest = max(longest, end - i)
            if end > reached and end - i >= SPAN:
                last = at + starts[end] - starts[i]  # the match may go on within a character
                before = (
                    index.text[max(0, at - CONTEXT) : at]
                    .rpartition(BORDER)[2]
                    .decode(errors="ignore")
                )
                after = index.text[last : last + CONTEXT].partition(BORDER)[0]
                context = {"before": before, "after": after.decode(errors="ignore")}
                spans.append({"sample": sample, "start": i, "end": end, **context})
            reached = max(reached, end)
    new = {str(n): 1 - sum(known) / len(known) if known else None for n, known in found.items()}
    return {"new": new, "longest": longest, "spans": spans, "whole": index.is_whole}


_indexes = WeakValueDictionary[bytes, Index]()  # those that `_load` keeps, by fingerprint


def compare(checkpoint: Path, *texts: str) -> dict[str, Any]:
    """Return the `originality` of texts and of the validation text, for the corpus of a checkpoint.

    Raises:
        UserError: the corpus is not there, or it has changed since.
    """
    index, validation = _load(checkpoint, file_version(checkpoint))
    return {"text": originality(index, *texts), "validation": validation}


def comparison(
    checkpoint: Path,
) -> Callable[[Sequence[str], Sequence[str], Callable[[str], str]], None] | None:
    """Return a function that prints samples, and to stderr what is new in them.

    Its arguments are what is before each sample, the texts, and a function that escapes a text.
    Without the corpus, the result is None, with a warning.
    """

    def print_compared(
        begins: Sequence[str], texts: Sequence[str], escape: Callable[[str], str]
    ) -> None:
        found = compare(checkpoint, *texts)
        for i, text in enumerate(texts):
            spans = [span for span in found["text"]["spans"] if span["sample"] == i]
            print(begins[i] + _underline(text, spans, escape), flush=True)
        print(
            format_table({"samples": found["text"], "validation_text": found["validation"]}),
            file=sys.stderr,
        )
        if not found["text"]["whole"]:
            print("only the first 100 MB of the training text were searched", file=sys.stderr)

    try:
        compare(checkpoint)  # builds the index
    except UserError as error:
        warn(f"--originality is ignored: {error}")
        return None
    return print_compared


def _underline(text: str, spans: Sequence[Mapping[str, Any]], escape: Callable[[str], str]) -> str:
    """Return an escaped text with its spans underlined, which may overlap."""
    shown = ""
    at = 0
    for span in spans:
        copied = escape(text[max(at, span["start"]) : span["end"]])
        shown += escape(text[at : span["start"]]) + _UNDERLINE + copied + _NO_UNDERLINE
        at = span["end"]
    return shown + escape(text[at:])


@lru_cache(maxsize=4)
def _load(checkpoint: Path, version: str) -> tuple[Index, dict[str, Any]]:
    corpus = find_corpus(checkpoint)
    fingerprint = _fingerprint(corpus)
    index = _indexes[fingerprint] = _indexes.get(fingerprint) or build_index(corpus)
    return index, figures(originality(index, *validation_texts(corpus, VALIDATION_CHARACTERS)))


def figures(compared: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept of a result of `originality`: not its spans."""
    return {name: compared[name] for name in ("new", "longest")}


def validation_texts(corpus: Corpus, characters: int) -> list[str]:
    """Return the first documents of the validation split, for comparison: people repeat themselves
    too.
    """
    text = read_documents(corpus, "val", 4 * characters)  # bytes: a character has at most 4
    return (
        text.replace(BORDER, "\ufffd".encode())
        .decode(errors="replace")[:characters]
        .split("\ufffd")
    )


def format_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the results of `originality` for texts by their names, one line per text."""
    lines = [
        "new n-grams of characters, n =" + "".join(f"{n:8}" for n in NGRAMS) + "   longest match"
    ]
    for name, row in rows.items():
        shares = "".join(
            f"{'–':>8}" if share is None else f"{share:8.1%}" for share in row["new"].values()
        )
        lines.append(f"{name.replace('_', ' '):30}{shares}{row['longest']:16,}")
    return "\n".join(lines)
