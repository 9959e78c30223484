"""How much of a text is copied from the training text: new n-grams, and spans that occur in it verbatim.

Source: n-novelty, Merrill et al., 2024, https://arxiv.org/abs/2406.13069
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from pydivsufsort import divsufsort

from minigpt.data.token_files import META, Corpus
from minigpt.extras.interpret.file_version import file_version
from minigpt.extras.interpret.run_corpus import find_corpus
from minigpt.model import GPT
from minigpt.runs.run_dir import ORIGINALITY_HEADER, SAMPLES
from minigpt.utils.errors import RunError, UserError
from minigpt.utils.files import atomic_write
from minigpt.utils.scripts import usage
from minigpt.utils.terminal import warn

NGRAMS = (5, 10, 20, 40)  # characters
SPAN = 20  # characters of a copied span, at least
LONGEST = 1000  # bytes of a match that are compared
CONTEXT = 80  # bytes of the training text on both sides of a span
INDEX = "train.suffixes"  # the text, and then its suffix array, 4 bytes per byte
MAX_INDEXED = 100_000_000  # bytes of the training split, from its start
VALIDATION_CHARACTERS = 20_000
DRAWN_TOKENS = 400  # of each sample at the end of a training
MAX_INDEXED_AFTER_TRAINING = 20e6  # bytes: an index of more takes longer than the rest
_DECODED = 1 << 20  # tokens at a time


@dataclass(frozen=True)
class Index:
    """A training text with its suffix array: the offsets of its suffixes in their alphabetical order."""

    text: bytes
    suffixes: np.ndarray[Any, Any]
    is_whole: bool  # else only the first `MAX_INDEXED` bytes of the split

    def longest_match(self, part: bytes) -> tuple[int, int]:
        """Return the length and the offset of the longest beginning of `part` that occurs in the text, in bytes."""
        place = bisect_left(self.suffixes, part, key=lambda at: self.text[at : at + len(part)])
        near = self.suffixes[max(0, place - 1) : place + 1].tolist()  # the suffixes before and after `part`
        return max((_shared(part, self.text[at : at + len(part)]), at) for at in near)


def _shared(a: bytes, b: bytes) -> int:
    """Return the length of the longest common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def build_index(corpus: Corpus) -> Index:
    """Index the training split of a corpus; the index is kept beside token files that minigpt has written."""
    folder, n = corpus.train.files[0].parent, min(corpus.train.bytes, MAX_INDEXED)
    file, is_ours = folder / INDEX, (folder / META).is_file()
    if is_ours and file.is_file() and file.stat().st_size == 5 * n:
        with open(file, "rb") as opened:
            return Index(opened.read(n), np.memmap(file, np.int32, "r", offset=n), corpus.train.bytes == n)
    tokens, text, end = corpus.tokens("train"), b"", 0
    while end < len(tokens) and len(text) <= MAX_INDEXED:
        text += corpus.tokenizer.decode_bytes(tokens[end : end + _DECODED].tolist())
        end += _DECODED
    index = Index(text[:MAX_INDEXED], divsufsort(text[:MAX_INDEXED]), len(text) <= MAX_INDEXED)
    if is_ours:
        with suppress(OSError), atomic_write(file) as partial:  # a read-only disk
            partial.write_bytes(index.text + index.suffixes.tobytes())
    return index


def originality(index: Index, text: str) -> dict[str, Any]:
    """Compare a text with the training text.

    Returns:
        `new`, the share of n-grams of characters that the training text lacks, by n as a string; `longest`, the longest
        match in characters; `spans`, the maximal matches of at least `SPAN` characters: [start, end) in the text, and
        the text `before` and `after` it in the training text; `whole`, whether all of the training text was searched.
    """
    data, starts = text.encode(), [0, *accumulate(len(character.encode()) for character in text)]
    matches = [index.longest_match(data[start : start + LONGEST]) for start in starts[:-1]]
    new = {}
    for n in NGRAMS:
        whole = enumerate(matches[: max(0, len(text) - n + 1)])
        found = [length >= starts[i + n] - starts[i] for i, (length, _) in whole]
        new[str(n)] = 1 - sum(found) / len(found) if found else None
    longest, spans, reached = 0, [], 0
    for i, (length, at) in enumerate(matches):
        end = bisect_left(starts, starts[i] + length + 1) - 1  # of the last whole character
        longest = max(longest, end - i)
        if end > reached and end - i >= SPAN:
            before, after = index.text[max(0, at - CONTEXT) : at], index.text[at + length : at + length + CONTEXT]
            context = {"before": before.decode(errors="ignore"), "after": after.decode(errors="ignore")}
            spans.append({"start": i, "end": end, **context})
        reached = max(reached, end)
    return {"new": new, "longest": longest, "spans": spans, "whole": index.is_whole}


def compare(checkpoint: Path, text: str) -> dict[str, Any]:
    """Return the `originality` of a text and of the validation text, for the corpus of a checkpoint.

    Raises:
        UserError: the corpus is not there, or it has changed since.
    """
    index, validation = _load(checkpoint, file_version(checkpoint))
    return {"text": originality(index, text), "validation": validation}


def comparison(checkpoint: Path) -> Callable[[str], tuple[list[dict[str, Any]], str]] | None:
    """Return a function of a text that returns its `spans` and a table; None, with a warning, without the corpus."""

    def show(text: str) -> tuple[list[dict[str, Any]], str]:
        found = compare(checkpoint, text)
        part = "" if found["text"]["whole"] else "\nonly the first 100 MB of the training text were searched"
        table = format_table({"samples": found["text"], "validation_text": found["validation"]})
        return found["text"]["spans"], table + part

    try:
        show("")  # builds the index
    except UserError as error:
        warn(f"--originality is ignored: {error}")
        return None
    return show


@lru_cache(maxsize=4)
def _load(checkpoint: Path, version: tuple[int, ...]) -> tuple[Index, dict[str, Any]]:
    corpus = find_corpus(checkpoint)
    index = build_index(corpus)
    return index, _figures(originality(index, validation_text(corpus, VALIDATION_CHARACTERS)))


def final_originality(
    model: GPT, corpus: Corpus, sample: str, folder: Path, *, characters: int, seed: int, seconds: float
) -> dict[str, Any] | None:
    """Draw some text; compare it, the final sample and the validation text with the training text, in `samples.txt`.

    Args:
        characters: at most; fewer if drawing them takes longer than `seconds`.

    Returns:
        By the name of the text, the shares of new n-grams and the longest match; None, with a warning, if that fails.
    """
    from minigpt.runs.callbacks.samples import draw, only_a_warning  # imports Lightning

    with only_a_warning("the originality of the text is not known"):
        end = time.perf_counter() + seconds
        if corpus.train.bytes > MAX_INDEXED_AFTER_TRAINING:
            raise RunError(f"the training text has more than 20 MB; compare with {usage('sample')} --originality")
        index, per_token = build_index(corpus), corpus.train.bytes / corpus.train.tokens
        count = -(-characters // max(1, int(DRAWN_TOKENS * per_token)))
        settings: Any = {"max_new_tokens": DRAWN_TOKENS, "temperature": 0.8, "seed": seed, "num_samples": count}
        left = end - time.perf_counter()
        draws = draw(model, corpus.tokenizer, corpus.tokenizer.start, seconds=left, **settings)
        text = "".join(map(corpus.tokenizer.decode, draws))[:characters]
        validation = validation_text(corpus, len(text))
        texts = {"final_sample": sample, "generated_text": text, "validation_text": validation}
        compared = {name: originality(index, text) for name, text in texts.items()}
        with open(folder / SAMPLES, "a", encoding="utf-8") as file:
            file.write(f"{ORIGINALITY_HEADER}\n{format_table(compared)}\n\n")
        return {name: _figures(row) for name, row in compared.items()}
    return None


def _figures(compared: Mapping[str, Any]) -> dict[str, Any]:
    return {name: compared[name] for name in ("new", "longest")}


def validation_text(corpus: Corpus, characters: int) -> str:
    """Return the beginning of the validation split, for comparison: people repeat themselves too."""
    return corpus.tokenizer.decode(corpus.tokens("val")[:characters].tolist())[:characters]


def format_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the results of `originality` for texts by their names, one line per text."""
    lines = ["new n-grams of characters, n =" + "".join(f"{n:8}" for n in NGRAMS) + "   longest match"]
    for name, row in rows.items():
        shares = "".join(f"{'–':>8}" if share is None else f"{share:8.1%}" for share in row["new"].values())
        lines.append(f"{name.replace('_', ' '):30}{shares}{row['longest']:16,}")
    return "\n".join(lines)
