"""Text to token ids and back: characters, bytes and byte-pair encodings.

A tokenizer is saved as plain data in token files and checkpoints; `from_dict` rebuilds it without
any other file. Patterns are saved by name, so no file can contain a regular expression, except in a
tokenizer of Hugging Face.
"""

import base64
import hashlib
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from minigpt.utils.checks import Settings, one_of
from minigpt.utils.errors import UserError, require
from minigpt.utils.extras import from_extras
from minigpt.utils.files import download
from minigpt.utils.terminal import visible

if TYPE_CHECKING:
    import tiktoken

Ids = NDArray[np.integer]

SEPARATOR = "<|endoftext|>"

# Regular expressions that split a text before bytes are merged, by tiktoken's encoding: of GPT-2,
# GPT-4 and GPT-4o.
PATTERNS = {
    "gpt2": r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
    "cl100k_base": r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"""
    r"""| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s""",
    "o200k_base": r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*"""
    r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"""
    r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
}
_HOST = "https://openaipublic.blob.core.windows.net"
_SHA256 = {  # of the files of tiktoken's encodings, as in tiktoken
    f"{_HOST}/gpt-2/encodings/main/vocab.bpe": (
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
    ),
    f"{_HOST}/gpt-2/encodings/main/encoder.json": (
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
    ),
    f"{_HOST}/encodings/cl100k_base.tiktoken": (
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
    ),
    f"{_HOST}/encodings/o200k_base.tiktoken": (
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
    ),
}


class Tokenizer:
    """The interface of every tokenizer."""

    name: str  # of the config group
    vocab_size: int
    separator: Ids  # between two documents
    token_bytes: Mapping[int, bytes]  # UTF-8 of each id; b"" for special tokens
    special: Mapping[str, int] = {}  # ids of special tokens
    separated = False  # documents end with a separator that is a special token
    # Ids that a tokenizer of Hugging Face puts before a text, except in training, and after one,
    # except in training and in a prompt, which is continued.
    prefix: Sequence[int] = ()
    suffix: Sequence[int] = ()
    reads_special = False  # names of special tokens in a prompt are these tokens
    splits_at_cuts = True  # `readers.cut_point` separates parts that are encoded independently
    # How conversations are written, as `add_chat` of extras/conversations takes it.
    chat: Settings | None = None

    @property
    def end_token(self) -> int | None:
        """Id of the separator if it is a special token."""
        # Some tokenizer.json do not mark theirs as special.
        ids = (i for i in self.separator.tolist() if self.separated or not self.token_bytes[i])
        return next(ids, None)

    @property
    def end_ids(self) -> list[int]:
        """Ids that end a text: where sampling stops."""
        return self.separator.tolist() if self.separated else []

    @property
    def start(self) -> Ids:
        """Ids that stand for an empty prompt: a separator, or the first id."""
        return self.separator if len(self.separator) else np.zeros(1, dtype=self.separator.dtype)

    def encode(self, text: str) -> Ids:
        """Encode a text to ids (T,) of the smallest dtype; special tokens in it are ordinary text.

        Raises UserError for characters without an id.
        """
        raise NotImplementedError

    def parse(self, text: str) -> Ids:
        """Encode a text to continue or to score, with special tokens if `reads_special`."""
        if not self.reads_special:
            return self.encode(text)
        names = "|".join(map(re.escape, sorted(self.special, key=len, reverse=True)))
        parts = re.split(f"({names})", text)
        ids = [[self.special[p]] if p in self.special else self.encode(p) for p in parts]
        return np.concatenate(ids).astype(self.separator.dtype)

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

    def to_dict(self) -> dict[str, object]:
        """Return the plain data from which `from_dict` rebuilds the tokenizer."""
        return {"name": self.name, **self._values(), **({"chat": self.chat} if self.chat else {})}

    def _values(self) -> Settings:
        return {}


class CharTokenizer(Tokenizer):
    """One id per distinct character of a corpus, in code-point order, as in nanoGPT."""

    name = "char"

    def __init__(self, alphabet: str) -> None:
        points = _code_points(alphabet)
        if not alphabet or list(alphabet) != sorted(set(alphabet)):
            raise UserError(
                "the alphabet of a char tokenizer must be distinct characters in code-point order"
            )
        self.alphabet = alphabet
        self.vocab_size = len(alphabet)
        self.token_bytes = {i: whole_characters(c).encode() for i, c in enumerate(alphabet)}
        # The id of each code point, or vocab_size if it has none; the last entry is for all higher.
        self._ids = np.full(int(points[-1]) + 2, self.vocab_size, token_dtype(self.vocab_size + 1))
        self._ids[points] = np.arange(self.vocab_size)
        self.separator = np.flatnonzero(points == ord("\n")).astype(self._ids.dtype)

    def encode(self, text: str) -> Ids:
        ids = self._ids.take(_code_points(text), mode="clip")
        if ids.max(initial=0) == len(self.alphabet):
            unknown = sorted(set(text) - set(self.alphabet))
            listed = ", ".join(map(visible, unknown[:10])) + (", …" if len(unknown) > 10 else "")
            raise UserError(
                f"the tokenizer has no id for {listed}; its alphabet is the {len(self.alphabet)} "
                f"characters of the text it was built from; "
                f"a model with tokenizer=byte or bpe reads any text"
            )
        return ids

    def _values(self) -> Settings:
        return {"alphabet": self.alphabet}


class ByteTokenizer(Tokenizer):
    """One id per byte of UTF-8."""

    name = "byte"
    vocab_size = 256
    token_bytes = {i: bytes([i]) for i in range(256)}
    separator = np.array([ord("\n")], dtype=np.uint8)

    def encode(self, text: str) -> Ids:
        # Writable, for torch.
        return np.frombuffer(bytearray(whole_characters(text).encode()), dtype=np.uint8)


class BPETokenizer(Tokenizer):
    """Byte-level byte-pair encoding, run by tiktoken.

    Source: Sennrich et al., 2016, https://arxiv.org/abs/1508.07909

    Args:
        name: a tiktoken encoding, or "bpe" for one trained on a corpus.
        tokens: the bytes of each id; None for special and unused ids.
        special: ids of the special tokens, SEPARATOR among them.
        separated: the corpus has SEPARATOR between its documents, so it stands for an empty prompt.
    """

    trained = "bpe"  # name of an encoding trained on a corpus

    def __init__(
        self,
        name: str,
        tokens: Sequence[bytes | None],
        special: Mapping[str, int],
        *,
        separated: bool = False,
    ) -> None:
        # Every text must have ids, each of one token.
        ranks = {token: rank for rank, token in enumerate(tokens) if token is not None}
        if SEPARATOR not in special or not ranks.keys() >= set(ByteTokenizer.token_bytes.values()):
            raise UserError(f"a byte-pair encoding must have all 256 bytes and {SEPARATOR}")
        ids = [*ranks.values(), *special.values()]
        is_distinct = len(ranks) == len(tokens) - tokens.count(None) and len(set(ids)) == len(ids)
        if b"" in ranks or not is_distinct:
            raise UserError(
                "a byte-pair encoding must have distinct ids and distinct tokens, "
                "none of them empty"
            )
        # Else lists of all ids would not fit in memory.
        if min(ids) < 0 or max(ids) >= len(tokens) + (1 << 16):
            raise UserError(
                f"the ids of a byte-pair encoding must be consecutive, got {min(ids)} to {max(ids)}"
            )

        self.name = name
        self.tokens = tokens
        self.special = dict(special)
        self.separated = separated
        self.vocab_size = max(len(tokens), max(ids) + 1)
        self.token_bytes = dict.fromkeys(special.values(), b"") | {i: t for t, i in ranks.items()}
        self.separator = np.array([special[SEPARATOR]], dtype=token_dtype(self.vocab_size))
        self._ranks = ranks
        self._local = threading.local()

    @classmethod
    def from_tiktoken(cls, name: str, folder: Path) -> "BPETokenizer":
        """Load a tiktoken encoding from the cache in TIKTOKEN_CACHE_DIR, or else in `folder`.

        Its files are downloaded first: tiktoken's own download has no timeout and does not name the
        missing file.

        Raises:
            UserError: no encoding has this name, or a file of it cannot be downloaded.
        """
        # Download what is missing.
        names = (CharTokenizer.name, ByteTokenizer.name, cls.trained, *PATTERNS)
        require("tokenizer.name", name, *one_of(names))
        cache = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or folder)
        part = "/gpt-2/" if name == "gpt2" else f"/{name}.tiktoken"
        files = {
            url: cache / hashlib.sha1(url.encode(), usedforsecurity=False).hexdigest()
            for url in _SHA256
            if part in url
        }
        try:
            missing = [
                f"{url} as {file}"
                for url, file in files.items()
                if not download(url, _SHA256[url], file)
            ]
        except OSError as error:
            raise UserError(
                f"the files of tokenizer={name} cannot be written to {cache} ({error.strerror}); "
                f"set TIKTOKEN_CACHE_DIR to a writable folder"
            ) from error
        if missing:
            raise UserError(
                f"the files of tokenizer={name} could not be downloaded; save "
                f"{', and '.join(missing)}, or set TIKTOKEN_CACHE_DIR to a folder that has them"
            )

        # Read the files as tiktoken does.
        os.environ["TIKTOKEN_CACHE_DIR"] = str(cache.absolute())
        import tiktoken  # slow to import

        encoding = tiktoken.get_encoding(name)
        special = {t: encoding.encode_single_token(t) for t in encoding.special_tokens_set}
        tokens = {encoding.encode_single_token(t): t for t in encoding.token_byte_values()}
        return cls(name, [tokens.get(i) for i in range(max(tokens) + 1)], special)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BPETokenizer":
        """Merge the most frequent pairs until there are `vocab_size` ids, including SEPARATOR.

        Raise UserError if the texts have too few pairs.
        """
        import rustbpe

        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator(
            iter(texts), vocab_size=vocab_size - 1, pattern=PATTERNS["gpt2"]
        )
        ranks = sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])
        tokens = [bytes(token) for token, _ in ranks]
        require(
            "tokenizer.vocab_size",
            vocab_size,
            lambda size: size <= len(tokens) + 1,  # with SEPARATOR
            f"at most {len(tokens) + 1} for this training text",
        )
        return cls(cls.trained, tokens, {SEPARATOR: vocab_size - 1})

    def encode(self, text: str) -> Ids:
        ids = self._encoding.encode_to_numpy(whole_characters(text), disallowed_special=())
        return ids.astype(self.separator.dtype)

    @property
    def start(self) -> Ids:
        return self.separator if self.separated else self.encode("\n")

    def _values(self) -> Settings:
        # One string of base64 loads in a twentieth of the time of a list of 50,000.
        tokens = ["-" if t is None else base64.b64encode(t).decode() for t in self.tokens]
        return {
            "tokens": " ".join(tokens),
            "special": self.special,
            "separated": self.separated,
        }

    @classmethod
    def from_dict(cls, values: Settings) -> "BPETokenizer":
        tokens = [
            None if t == "-" else base64.b64decode(t, validate=True)
            for t in values["tokens"].split(" ")
        ]
        kinds = {(type(name), type(i)) for name, i in values["special"].items()}
        if not isinstance(values["separated"], bool) or kinds != {(str, int)}:
            raise UserError(
                "a byte-pair encoding must have the keys tokens, special and separated, "
                "of their types"
            )
        return cls(values["name"], tokens, values["special"], separated=values["separated"])

    @property
    def _encoding(self) -> "tiktoken.Encoding":
        # One per thread: threads that share one wait for each other.
        if not hasattr(self._local, "encoding"):
            import tiktoken  # slow to import, and not needed to decode

            self._local.encoding = tiktoken.Encoding(
                self.name,
                pat_str=PATTERNS.get(self.name, PATTERNS["gpt2"]),
                mergeable_ranks=self._ranks,
                special_tokens=dict(self.special),
            )
        return self._local.encoding


def from_dict(values: Settings) -> Tokenizer:
    """Rebuild a tokenizer from the result of `to_dict`; raise UserError if it describes none."""
    try:
        match values["name"]:
            case CharTokenizer.name:
                tokenizer: Tokenizer = CharTokenizer(values["alphabet"])
            case ByteTokenizer.name:
                tokenizer = ByteTokenizer()
            case "huggingface":
                tokenizer = from_extras("HuggingFaceTokenizer")(
                    values["json"],
                    values["separator"],
                    **values.get("options", {}),
                )
            case name if name in (BPETokenizer.trained, *PATTERNS):
                tokenizer = BPETokenizer.from_dict(values)
            case _:
                raise UserError(
                    f"unknown tokenizer {values!r:.80}; "
                    f"use char, byte, bpe, huggingface, {', '.join(PATTERNS)}"
                )
        if "chat" in values:
            from_extras("add_chat")(tokenizer, values["chat"])
        return tokenizer
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"damaged description of a tokenizer {values!r:.80} ({error!r:.80})"
        ) from error


def without_chat(values: Settings) -> dict[str, Any]:
    """Return a `to_dict` without a chat template that adds no tokens: texts have equal ids."""
    is_huggingface = values["name"] == "huggingface"
    return {key: value for key, value in values.items() if not (is_huggingface and key == "chat")}


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> Ids:
    """Encode a prompt, (T,); an empty one becomes `tokenizer.start`.

    The name of a special token that separates the documents of the corpus is that token. A
    tokenizer of Hugging Face reads all special tokens, and adds its prefix.
    """
    if not prompt:
        return tokenizer.start
    separator = tokenizer.separator
    if tokenizer.reads_special or not tokenizer.separated:
        return np.array([*tokenizer.prefix, *tokenizer.parse(prompt)], dtype=separator.dtype)
    # A separator before each part, without the first one.
    parts = prompt.split(tokenizer.names(separator))
    ids = [np.concatenate([separator, tokenizer.encode(part)]) for part in parts]
    return np.concatenate(ids)[len(separator) :]


def whole_characters(text: str) -> str:
    """Replace lone surrogates, which JSON can contain, by the replacement character."""
    return text.encode("utf-16-le", errors="surrogatepass").decode("utf-16-le", errors="replace")


def token_dtype(vocab_size: int) -> str:
    """Return the smaller dtype of token files that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
