"""Text to token ids and back: characters, bytes, byte-pair encodings, and tokenizers of Hugging Face.

A tokenizer is saved as plain data in token files and checkpoints; `from_dict` rebuilds it without any other
file. Patterns are saved by name, so no file can contain a regular expression, except in a `HuggingFaceTokenizer`.
"""

import base64
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from minigpt.utils.errors import UserError
from minigpt.utils.scripts import import_extra
from minigpt.utils.signals import Interrupted
from minigpt.utils.terminal import visible

if TYPE_CHECKING:
    import tiktoken

EncodeChat = Callable[[list[dict[str, str]]], list[int]]
Ids = np.ndarray[Any, np.dtype[np.integer[Any]]]

SEPARATOR = "<|endoftext|>"

# Regular expressions that split a text before bytes are merged, by tiktoken's encoding: GPT-2, GPT-4 and GPT-4o.
PATTERNS = {
    "gpt2": r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
    "cl100k_base": r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"""
    r"""|\s*[\r\n]|\s+(?!\S)|\s""",
    "o200k_base": r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"""
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
}

# The character that stands for each byte in a byte-level tokenizer.json, as in GPT-2: the same if it is visible.
_VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))
BYTE_CHARACTERS = dict(zip(_VISIBLE, map(chr, _VISIBLE), strict=True))
BYTE_CHARACTERS |= {byte: chr(256 + i) for i, byte in enumerate(sorted(set(range(256)) - set(_VISIBLE)))}


class Tokenizer:
    """The interface of every tokenizer."""

    name: str  # of the config group
    vocab_size: int
    separator: Ids  # between two documents
    token_bytes: Mapping[int, bytes]  # UTF-8 of each id; b"" for special tokens
    special: Mapping[str, int] = {}  # ids of special tokens
    separated = False  # documents end with a separator that is a special token
    encode_chat: EncodeChat | None = None  # with the chat template of a folder

    @property
    def end_token(self) -> int | None:
        """Id of the separator if it is a special token; some tokenizer.json do not mark theirs as one."""
        return next((i for i in self.separator.tolist() if self.separated or self.token_bytes[i] == b""), None)

    @property
    def start(self) -> Ids:
        """Ids that stand for an empty prompt: a separator, or the first id."""
        return self.separator if len(self.separator) else np.zeros(1, dtype=self.separator.dtype)

    def encode(self, text: str) -> Ids:
        """Encode a text to ids (T,) of the smallest dtype; special tokens in it are ordinary text.

        Raises UserError for characters without an id.
        """
        raise NotImplementedError

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Decode ids to text; invalid ids and bytes become the replacement character."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int] | Ids) -> bytes:
        """Decode ids to UTF-8, which may end within a character; special tokens are left out."""
        unknown = "\ufffd".encode()  # the replacement character
        return b"".join([self.token_bytes.get(int(i), unknown) for i in ids])

    def names(self, ids: Sequence[int] | Ids) -> str:
        """Decode ids of whole characters to text, with the names of special tokens."""
        names = {i: name for name, i in self.special.items()}
        return "".join(names.get(int(i)) or self.decode([i]) for i in ids)

    def to_dict(self) -> dict[str, Any]:
        """Return the plain data from which `from_dict` rebuilds the tokenizer."""
        raise NotImplementedError


class CharTokenizer(Tokenizer):
    """One id per distinct character of a corpus, in code-point order, as in nanoGPT."""

    name = "char"

    def __init__(self, alphabet: str) -> None:
        points = _code_points(alphabet)
        if not alphabet or list(alphabet) != sorted(set(alphabet)):
            raise UserError("the alphabet of a char tokenizer must be distinct characters in code-point order")
        self.alphabet, self.vocab_size = alphabet, len(points)
        self.token_bytes = {i: whole_characters(character).encode() for i, character in enumerate(alphabet)}
        # The id of each code point, or vocab_size if it has none; the last entry is for all higher code points.
        self._ids = np.full(int(points[-1]) + 2, self.vocab_size, dtype=token_dtype(self.vocab_size + 1))
        self._ids[points] = np.arange(len(points))
        self.separator = np.flatnonzero(points == ord("\n")).astype(self._ids.dtype)

    def encode(self, text: str) -> Ids:
        ids = self._ids.take(_code_points(text), mode="clip")
        if ids.max(initial=0) == self.vocab_size:
            unknown = sorted(set(text) - set(self.alphabet))
            listed = ", ".join(map(visible, unknown[:10])) + (", …" if len(unknown) > 10 else "")
            raise UserError(
                f"the tokenizer has no id for {listed}; its alphabet is the {self.vocab_size} characters "
                f"of the text it was built from; a model with tokenizer=byte or bpe reads any text"
            )
        return ids

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "alphabet": self.alphabet}


class ByteTokenizer(Tokenizer):
    """One id per byte of UTF-8."""

    name = "byte"
    vocab_size = 256
    token_bytes = {i: bytes([i]) for i in range(256)}
    separator = np.array([ord("\n")], dtype=np.uint8)

    def encode(self, text: str) -> Ids:
        return np.frombuffer(bytearray(whole_characters(text).encode()), dtype=np.uint8)  # writable, for torch

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name}


class BPETokenizer(Tokenizer):
    """Byte-level byte-pair encoding, run by tiktoken. Source: Sennrich et al., 2016, https://arxiv.org/abs/1508.07909

    Args:
        name: a tiktoken encoding, or "bpe" for one trained on a corpus.
        tokens: the bytes of each id; None for special and unused ids.
        special: ids of the special tokens, SEPARATOR among them.
        separated: the corpus has SEPARATOR between its documents, so that it can stand for an empty prompt.
    """

    trained = "bpe"  # name of an encoding trained on a corpus

    def __init__(
        self, name: str, tokens: Sequence[bytes | None], special: Mapping[str, int], *, separated: bool = False
    ) -> None:
        ranks = {token: rank for rank, token in enumerate(tokens) if token is not None}
        ids = [*ranks.values(), *special.values()]
        if SEPARATOR not in special or not ranks.keys() >= {bytes([byte]) for byte in range(256)}:
            raise UserError(f"a byte-pair encoding must have all 256 bytes and {SEPARATOR}")
        if b"" in ranks or len(ranks) < sum(token is not None for token in tokens) or len(set(ids)) < len(ids):
            raise UserError("a byte-pair encoding must have distinct ids and distinct tokens, none of them empty")
        if min(ids) < 0 or max(ids) >= len(tokens) + (1 << 16):  # lists of all ids would not fit in memory
            raise UserError(f"the ids of a byte-pair encoding must be consecutive, got {min(ids)} to {max(ids)}")
        self.name, self.tokens, self.special, self.separated = name, tokens, dict(special), separated
        self.vocab_size = max(len(tokens), max(ids) + 1)
        self._ranks, self._dtype, self._local = ranks, token_dtype(self.vocab_size), threading.local()
        self.token_bytes = dict.fromkeys(special.values(), b"") | {rank: token for token, rank in ranks.items()}
        self.separator = np.array([special[SEPARATOR]], dtype=self._dtype)

    @classmethod
    def from_tiktoken(cls, name: str) -> "BPETokenizer":
        """Load a tiktoken encoding whose files are in tiktoken's cache."""
        import tiktoken

        encoding = tiktoken.get_encoding(name)
        special = {token: encoding.encode_single_token(token) for token in encoding.special_tokens_set}
        ids = {encoding.encode_single_token(token): token for token in encoding.token_byte_values()}
        return cls(name, [ids.get(i) for i in range(max(ids) + 1)], special)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BPETokenizer":
        """Merge the most frequent pairs until there are `vocab_size` ids, including SEPARATOR.

        Raise UserError if the texts have too few pairs.
        """
        import rustbpe

        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator(iter(texts), vocab_size=vocab_size - 1, pattern=PATTERNS["gpt2"])
        tokens = [bytes(token) for token, _ in sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])]
        if len(tokens) < vocab_size - 1:
            raise UserError(
                f"tokenizer.vocab_size must be at most {len(tokens) + 1} for this training text, got {vocab_size}"
            )
        return cls(cls.trained, tokens, {SEPARATOR: vocab_size - 1})

    def encode(self, text: str) -> Ids:
        return self._encoding.encode_to_numpy(whole_characters(text), disallowed_special=()).astype(self._dtype)

    @property
    def start(self) -> Ids:
        return self.separator if self.separated else self.encode("\n")

    def to_dict(self) -> dict[str, Any]:
        # One string of base64 loads in a twentieth of the time of a list of 50,000.
        tokens = " ".join("-" if token is None else base64.b64encode(token).decode() for token in self.tokens)
        return {"name": self.name, "tokens": tokens, "special": self.special, "separated": self.separated}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "BPETokenizer":
        texts, special, separated = values["tokens"].split(" "), values["special"], values["separated"]
        tokens = [None if text == "-" else base64.b64decode(text, validate=True) for text in texts]
        if not isinstance(separated, bool) or {(str, int)} != {(type(k), type(v)) for k, v in special.items()}:
            raise UserError("a byte-pair encoding must have the keys tokens, special and separated, of their types")
        return cls(values["name"], tokens, special, separated=separated)

    @property
    def _encoding(self) -> "tiktoken.Encoding":
        """tiktoken's encoding of this thread: threads that share one wait for each other."""
        if not hasattr(self._local, "encoding"):
            import tiktoken  # slow to import, and not needed to decode

            pattern, special = PATTERNS.get(self.name, PATTERNS["gpt2"]), dict(self.special)
            options: Any = {"pat_str": pattern, "mergeable_ranks": self._ranks, "special_tokens": special}
            self._local.encoding = tiktoken.Encoding(self.name, **options)
        return self._local.encoding


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json of Hugging Face, run by their package tokenizers: the ids of transformers for the text alone.

    Ids are decoded one by one. So where the file puts a space before a text and its decoder takes it away (Llama 2),
    the decoded text begins with that space. Decoders other than ByteLevel, ByteFallback and Fuse raise UserError.

    Args:
        content: the text of tokenizer.json.
        separator: id of the end of a text; None if there is none.
    """

    name = "huggingface"

    def __init__(self, content: str, separator: int | None = None) -> None:
        tokenizers = import_extra("tokenizers", "tokenizer.json", "huggingface")
        with _one_line_errors("damaged tokenizer.json"):
            values = json.loads(content)
            self.json = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
            if values["model"].get("continuing_subword_prefix"):  # merges with one can abort the process
                raise UserError("tokenizer.json must have no continuing_subword_prefix")
            self.backend = tokenizers.Tokenizer.from_str(self.json)
            self.backend.encode_special_tokens = True  # as ordinary text
            self.backend.no_truncation()
            self.backend.no_padding()
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # we have threads of our own
            to_bytes = _token_decoder(values["decoder"])
            self.token_bytes = {i: to_bytes(token) for token, i in self.backend.get_vocab().items()}
            added = self.backend.get_added_tokens_decoder()
            self.special = {token.content: i for i, token in added.items() if token.special}
            for i, token in added.items():
                self.token_bytes[i] = b"" if token.special else token.content.encode()
            self.vocab_size = max(self.token_bytes) + 1
        if self.vocab_size > len(self.token_bytes) + (1 << 16):  # lists of all ids would not fit in memory
            raise UserError(f"the ids of tokenizer.json must be consecutive, got {self.vocab_size - 1} as the largest")
        if separator is not None and separator not in self.token_bytes:
            raise UserError(f"the separator must be an id of tokenizer.json, got {separator!r:.80}")
        self.separator = np.array([] if separator is None else [separator], dtype=token_dtype(self.vocab_size))
        self.separated = separator is not None

    def encode(self, text: str) -> Ids:
        with _one_line_errors("tokenizer.json does not encode this text"):
            # `encode` would not release the GIL.
            (encoding,) = self.backend.encode_batch_fast([whole_characters(text)], add_special_tokens=False)
        return np.array(encoding.ids, dtype=self.separator.dtype)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "json": self.json, "separator": next(iter(self.separator.tolist()), None)}


def from_dict(values: Mapping[str, Any]) -> Tokenizer:
    """Rebuild a tokenizer from the result of `to_dict`; raise UserError if it does not describe one."""
    try:
        if values["name"] == CharTokenizer.name:
            return CharTokenizer(values["alphabet"])
        if values["name"] == ByteTokenizer.name:
            return ByteTokenizer()
        if values["name"] in (BPETokenizer.trained, *PATTERNS):
            return BPETokenizer.from_dict(values)
        if values["name"] == HuggingFaceTokenizer.name:
            return HuggingFaceTokenizer(values["json"], values["separator"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"damaged description of a tokenizer {values!r:.80} ({error!r:.80})") from error
    raise UserError(f"unknown tokenizer {values!r:.80}; use char, byte, bpe, huggingface, {', '.join(PATTERNS)}")


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> Ids:
    """Encode a prompt, (T,); an empty one becomes a separator, a new line, or the first id.

    The name of a special token that separates the documents of the corpus is that token.
    """
    if not prompt:
        return tokenizer.start
    if not tokenizer.separated:
        return tokenizer.encode(prompt)
    first, *others = map(tokenizer.encode, prompt.split(tokenizer.names(tokenizer.separator)))
    return np.concatenate([first, *(ids for other in others for ids in (tokenizer.separator, other))])


def whole_characters(text: str) -> str:
    """Replace lone surrogates, which JSON can contain, by the replacement character."""
    return text.encode("utf-16-le", errors="surrogatepass").decode("utf-16-le", errors="replace")


def token_dtype(vocab_size: int) -> str:
    """Return the smaller dtype of token files that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def _code_points(text: str) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")


def _token_decoder(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """Return the function from a token to its bytes that the decoder of a tokenizer.json describes."""
    parts: list[Any] = decoder.get("decoders", [decoder]) if decoder else [{"type": None}]  # joins with spaces
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        byte_of = {character: byte for byte, character in BYTE_CHARACTERS.items()}
        return lambda token: bytes(map(byte_of.__getitem__, token)) if byte_of.keys() >= set(token) else token.encode()
    if not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        raise UserError(f"the decoder of tokenizer.json must be ByteLevel, ByteFallback or Fuse, got {kinds!s:.80}")
    replaced = [(part["pattern"]["String"], part["content"]) for part in parts if part["type"] == "Replace"]

    def to_bytes(token: str) -> bytes:
        if "ByteFallback" in kinds and (byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)):
            return bytes.fromhex(byte[1])
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode()

    return to_bytes


@contextmanager
def _one_line_errors(problem: str) -> Iterator[None]:
    """Raise UserError for errors and panics of the package tokenizers."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, Interrupted):
        raise
    except BaseException as error:  # a panic of pyo3 is no Exception
        raise UserError(f"{problem} ({error!r:.200})") from error
