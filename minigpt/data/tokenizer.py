"""Text to token ids and back: one protocol, saved as plain data in token files and checkpoints.

Characters, bytes, and byte-pair encodings: GPT-2's and its successors', or one trained on the corpus. What
`to_dict` gives rebuilds a tokenizer without any other file; patterns are known by name and never read from
one, so no file can bring a regular expression of its own.
"""

import base64
import binascii
import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from minigpt.utils.errors import UserError

if TYPE_CHECKING:
    import tiktoken

Ids = np.ndarray[Any, np.dtype[np.integer[Any]]]

SEPARATOR = "<|endoftext|>"
REPLACEMENT = "\ufffd"
_CACHED = 1 << 15  # characters whose code points stay in a core's cache: twice as fast as all at once

# Where a text is cut before bytes are merged: GPT-2 (Radford et al., 2019), GPT-4 and GPT-4o, as in tiktoken.
PATTERNS = {
    "gpt2": r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
    "cl100k": r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"""
    r"""|\s*[\r\n]|\s+(?!\S)|\s""",
    "o200k": r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"""
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
}
ENCODINGS = {  # tiktoken's, and the pattern of each
    "gpt2": "gpt2",
    "r50k_base": "gpt2",
    "p50k_base": "gpt2",
    "p50k_edit": "gpt2",
    "cl100k_base": "cl100k",
    "o200k_base": "o200k",
    "o200k_harmony": "o200k",
}


class Tokenizer(Protocol):
    """What every tokenizer can do."""

    vocab_size: int

    @property
    def separator(self) -> Ids:
        """What stands between two documents."""

    @property
    def start(self) -> Ids:
        """What a text without a prompt begins from."""

    def encode(self, text: str) -> Ids:
        """Token ids (T,) of a text, the smallest integers that hold them; nothing in it is a command.

        Raises UserError for text that it cannot encode.
        """

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text of token ids; what is no text becomes the replacement character."""

    def decode_bytes(self, ids: Sequence[int] | Ids) -> bytes:
        """The same in UTF-8, where ids may end within a character; separators that are no text are left out."""

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
        self._unknown = self.vocab_size  # an id that no character has
        self._ids = np.full(int(points[-1]) + 2, self._unknown, dtype=token_dtype(self.vocab_size + 1))
        self._ids[points] = np.arange(len(points))  # code point -> id; the last one stands for all beyond
        # A text of Latin-1 is a byte a character, and bytes are translated four times as fast as code points.
        latin = np.full(256, 255, dtype=np.uint8)
        inside = points[points < 256]
        latin[inside] = np.arange(len(inside))
        self._latin = latin.tobytes()
        newline = self._ids[10] if len(self._ids) > 10 and self._ids[10] != self._unknown else None
        self.separator: Ids = np.array([] if newline is None else [newline], dtype=self._ids.dtype)
        self.start: Ids = np.array([0 if newline is None else newline], dtype=self._ids.dtype)

    @classmethod
    def of(cls, characters: Iterable[str]) -> "CharTokenizer":
        return cls("".join(sorted(set(characters))))

    def encode(self, text: str) -> Ids:
        """Raises UserError, naming the characters, for any outside the alphabet."""
        try:
            row = text.encode("latin-1").translate(self._latin)
        except UnicodeEncodeError:
            row = b"\xff"
        if b"\xff" not in row:
            return np.frombuffer(row, dtype=np.uint8).astype(self._ids.dtype)
        ids = np.empty(len(text), dtype=self._ids.dtype)
        for begin in range(0, len(text), _CACHED):
            points = _code_points(text[begin : begin + _CACHED])
            self._ids.take(points, mode="clip", out=ids[begin : begin + _CACHED])
        if ids.max(initial=0) == self._unknown:
            unknown = sorted({chr(point) for point in _code_points(text)[ids == self._unknown]})
            named = ", ".join(map(repr, unknown[:10])) + (", …" if len(unknown) > 10 else "")
            raise UserError(
                f"the tokenizer does not know {named}; it knows the {self.vocab_size} characters "
                f"of the text that it was made from"
            )
        return ids

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Ids that no character has (a padded vocabulary has such) become the replacement character."""
        chosen = np.asarray(ids, dtype=np.int64)
        inside = (chosen >= 0) & (chosen < self.vocab_size)
        points = np.where(inside, self._points[np.where(inside, chosen, 0)], ord(REPLACEMENT))
        return points.astype("<u4").tobytes().decode("utf-32-le", errors="surrogatepass")

    def decode_bytes(self, ids: Sequence[int] | Ids) -> bytes:
        return whole_characters(self.decode(ids)).encode()

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "alphabet": self.alphabet}

    def __repr__(self) -> str:
        alphabet = self.alphabet if self.vocab_size <= 40 else f"{self.alphabet[:20]}…{self.alphabet[-19:]}"
        return f"CharTokenizer(vocab_size={self.vocab_size}, alphabet={alphabet!r})"


class ByteTokenizer:
    """One id for every byte of UTF-8: no training, nothing unknown."""

    name = "byte"
    vocab_size = 256
    separator: Ids = np.array([ord("\n")], dtype=np.uint8)
    start: Ids = separator

    def encode(self, text: str) -> Ids:
        return np.frombuffer(bytearray(whole_characters(text).encode()), dtype=np.uint8)  # writable, as torch wants it

    def decode(self, ids: Sequence[int] | Ids) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int] | Ids) -> bytes:
        chosen = np.asarray(ids, dtype=np.int64)
        if ((chosen >= 0) & (chosen < 256)).all():
            return chosen.astype(np.uint8).tobytes()
        return b"".join(bytes([i]) if 0 <= i < 256 else REPLACEMENT.encode() for i in chosen.tolist())

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name}

    def __repr__(self) -> str:
        return "ByteTokenizer(vocab_size=256)"


class BPETokenizer:
    """Byte-pair encoding, run by tiktoken: merges of bytes, so any text has ids.

    Args:
        name: of a tiktoken encoding, or "bpe" for one trained on a corpus.
        tokens: the bytes of every id in order; None for ids that are special or not in use.
        special: names and ids of what is no text; SEPARATOR is among them.
        separated: the corpus has SEPARATOR between its documents, so that a text can begin from it.
    """

    trained = "bpe"  # the name of one that was trained on a corpus

    def __init__(
        self,
        name: str,
        tokens: Sequence[bytes | None],
        special: Mapping[str, int],
        *,
        separated: bool = False,
    ) -> None:
        if name not in (self.trained, *ENCODINGS):
            raise UserError(f"unknown byte-pair encoding {name!r:.80}; it takes {self.trained}, {', '.join(ENCODINGS)}")
        ranks = {token: rank for rank, token in enumerate(tokens) if token is not None}
        if b"" in ranks or len(ranks) < sum(token is not None for token in tokens):
            raise UserError("the tokens of a byte-pair encoding are distinct, and none is empty")
        if SEPARATOR not in special or not ranks.keys() >= {bytes([byte]) for byte in range(256)}:
            raise UserError(f"a byte-pair encoding has all 256 bytes and {SEPARATOR}")
        if min(special.values()) < 0 or len({*special.values(), *ranks.values()}) != len(special) + len(ranks):
            raise UserError("two tokens of a byte-pair encoding have the same id")
        self.name, self.special, self.separated = name, dict(special), separated
        self.tokens = tokens
        self.vocab_size = max(len(tokens), max(special.values()) + 1)
        self._ranks = ranks
        self._dtype = token_dtype(self.vocab_size)
        self.separator: Ids = np.array([special[SEPARATOR]], dtype=self._dtype)

    @classmethod
    def from_tiktoken(cls, name: str) -> "BPETokenizer":
        """One of tiktoken's encodings, whose files are in its cache."""
        import tiktoken

        encoding = tiktoken.get_encoding(name)
        special = {token: encoding.encode_single_token(token) for token in encoding.special_tokens_set}
        tokens: list[bytes | None] = [None] * encoding.n_vocab
        for token in encoding.token_byte_values():
            tokens[encoding.encode_single_token(token)] = token
        while tokens[-1] is None:
            tokens.pop()
        return cls(name, tokens, special)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BPETokenizer":
        """Merge the most frequent pairs (Sennrich et al., 2016) until there are `vocab_size` ids, SEPARATOR's too.

        Raises:
            UserError: the texts have not so many pairs to merge.
        """
        import rustbpe

        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator(iter(texts), vocab_size=vocab_size - 1, pattern=PATTERNS["gpt2"])
        tokens = [bytes(token) for token, _ in sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])]
        if len(tokens) < vocab_size - 1:
            raise UserError(
                f"tokenizer.vocab_size={vocab_size} is more than the training text supports; "
                f"use at most {len(tokens) + 1}, or a longer text"
            )
        return cls(cls.trained, tokens, {SEPARATOR: vocab_size - 1})

    def encode(self, text: str) -> Ids:
        return self._encoding.encode_to_numpy(whole_characters(text), disallowed_special=()).astype(self._dtype)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int] | Ids) -> bytes:
        special, known, unknown = set(self.special.values()), len(self.tokens), REPLACEMENT.encode()
        return b"".join(
            (self.tokens[i] if 0 <= i < known else None) or (b"" if i in special else unknown)
            for i in np.asarray(ids).tolist()
        )

    def byte_lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Bytes of text of every id, (vocab_size,)."""
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        lengths[: len(self.tokens)] = [len(token or b"") for token in self.tokens]
        return lengths

    @property
    def start(self) -> Ids:
        return self.separator if self.separated else self.encode("\n")

    def to_dict(self) -> dict[str, Any]:
        # One text of base64: a twentieth of the time of a list of fifty thousand.
        tokens = " ".join("-" if token is None else base64.b64encode(token).decode() for token in self.tokens)
        return {"name": self.name, "tokens": tokens, "special": self.special, "separated": self.separated}

    def __repr__(self) -> str:
        return f"BPETokenizer({self.name!r}, vocab_size={self.vocab_size})"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "BPETokenizer":
        """Raises UserError where the values do not describe one."""
        tokens, special, separated = values.get("tokens"), values.get("special"), values.get("separated")
        if not (
            isinstance(tokens, str)
            and isinstance(special, Mapping)
            and all(isinstance(key, str) and type(value) is int for key, value in special.items())
            and max(special.values(), default=0) < tokens.count(" ") + (1 << 16)  # not far beyond the tokens
            and isinstance(separated, bool)
        ):
            raise UserError("a byte-pair encoding is described by its tokens, special tokens, and separated")
        try:
            decoded = [None if t == "-" else base64.b64decode(t, validate=True) for t in tokens.split(" ")]
        except (binascii.Error, ValueError) as error:
            raise UserError(f"the tokens of a byte-pair encoding are not base64 ({error})") from error
        return cls(values["name"], decoded, special, separated=separated)

    @cached_property
    def _encoding(self) -> "tiktoken.Encoding":
        import tiktoken  # only where text is encoded

        pattern = PATTERNS[ENCODINGS.get(self.name, "gpt2")]
        return tiktoken.Encoding(
            self.name, pat_str=pattern, mergeable_ranks=self._ranks, special_tokens=dict(self.special)
        )


def from_dict(values: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `to_dict` described.

    Raises:
        UserError: it is not a description of a tokenizer that this version knows.
    """
    name = values.get("name") if isinstance(values, Mapping) else None
    if name == CharTokenizer.name:
        if not isinstance(values.get("alphabet"), str):
            raise UserError("a char tokenizer is described by its alphabet, a text")
        return CharTokenizer(values["alphabet"])
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    if isinstance(name, str) and name in (BPETokenizer.trained, *ENCODINGS):
        return BPETokenizer.from_dict(values)
    raise UserError(f"unknown tokenizer {values!r:.80}; it takes char, byte, bpe, {', '.join(ENCODINGS)}")


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> Ids:
    """Token ids to begin a text with; an empty prompt begins from a separator, a new line, or the first id.

    Raises:
        UserError: the prompt holds characters that the tokenizer does not know.
    """
    return tokenizer.encode(prompt) if prompt else tokenizer.start


def stream(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """The text of ids as they come: a character that takes several ids is held back until it is whole."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for i in ids:
        if text := decoder.decode(tokenizer.decode_bytes([i])):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text


def whole_characters(text: str) -> str:
    """The text with halves of characters (lone surrogates, which JSON can spell) as replacement characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", errors="surrogatepass").decode("utf-16-le", errors="replace")
    return text


def token_dtype(vocab_size: int) -> str:
    """The smaller of the two types of token files that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def _code_points(text: str) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
