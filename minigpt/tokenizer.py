"""Text to token ids and back: one protocol, saved as plain data in token files and checkpoints."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from minigpt.errors import UserError

Ids = np.ndarray[Any, np.dtype[np.integer[Any]]]


class Tokenizer(Protocol):
    """What every tokenizer can do."""

    vocab_size: int

    def encode(self, text: str) -> Ids:
        """Token ids of a text. Raises UserError for text that it cannot encode."""

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text of token ids."""

    def to_dict(self) -> dict[str, Any]:
        """Everything needed to build it again with `from_dict`, as plain data."""


class CharTokenizer:
    """One id for every distinct character of a corpus, in code-point order, as nanoGPT numbers them."""

    name = "char"

    def __init__(self, alphabet: str) -> None:
        points = _code_points(alphabet)
        if len(points) == 0 or (np.diff(points.astype(np.int64)) <= 0).any():
            raise UserError("the alphabet of a char tokenizer must be distinct characters in code-point order")
        self.alphabet, self.vocab_size = alphabet, len(points)
        self._points = points
        self._ids = np.full(int(points[-1]) + 1, -1, dtype=np.int32)  # code point -> id
        self._ids[points] = np.arange(len(points))

    @classmethod
    def of(cls, characters: Iterable[str]) -> "CharTokenizer":
        return cls("".join(sorted(set(characters))))

    def encode(self, text: str) -> Ids:
        """Raises UserError, naming the characters, for any outside the alphabet."""
        points = _code_points(text)
        inside = points < len(self._ids)
        ids = np.where(inside, self._ids[np.where(inside, points, 0)], -1)
        if (ids < 0).any():
            unknown = sorted({chr(point) for point in points[ids < 0]})
            named = ", ".join(map(ascii, unknown[:10])) + (", …" if len(unknown) > 10 else "")
            raise UserError(
                f"the tokenizer does not know {named}; it knows the {self.vocab_size} characters "
                f"of the text that it was made from"
            )
        return ids

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Ids that no character has (a padded vocabulary has such) become the replacement character."""
        chosen = np.asarray(ids, dtype=np.int64)
        inside = (chosen >= 0) & (chosen < self.vocab_size)
        points = np.where(inside, self._points[np.where(inside, chosen, 0)], 0xFFFD)
        return points.astype("<u4").tobytes().decode("utf-32-le")

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "alphabet": self.alphabet}


def from_dict(values: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `to_dict` described.

    Raises:
        UserError: it is not a description of a tokenizer that this version knows.
    """
    if not isinstance(values, Mapping) or values.get("name") != CharTokenizer.name:
        raise UserError(f"unknown tokenizer {values!r:.80}; it takes {CharTokenizer.name}")
    if not isinstance(values.get("alphabet"), str):
        raise UserError("a char tokenizer is described by its alphabet, a text")
    return CharTokenizer(values["alphabet"])


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> Ids:
    """Token ids to begin a text with; an empty prompt begins from a new line, or from the first id.

    Raises:
        UserError: the prompt holds characters that the tokenizer does not know.
    """
    if prompt:
        return tokenizer.encode(prompt)
    try:
        return tokenizer.encode("\n")
    except UserError:
        return np.zeros(1, dtype=np.int32)


def _code_points(text: str) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
