"""Token files of other tools: nanoGPT's, those of llm.c and NumPy's, read in place.

A split may have several. The files of a folder of `prepare.py` may be given without their text.
"""

import codecs
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from glob import glob
from pathlib import Path

import numpy as np

from minigpt.data.prepare import build_tokenizer
from minigpt.data.token_files import META, SPLITS, Corpus, Split, load
from minigpt.data.tokenizer import (
    BPETokenizer,
    CharTokenizer,
    Tokenizer,
    from_dict,
    token_dtype,
    without_chat,
)
from minigpt.extras.corpora.token_parts import PartsCorpus, TokenParts
from minigpt.utils.checks import Settings
from minigpt.utils.errors import UserError, require
from minigpt.utils.files import checksums, read_json, sha256_json
from minigpt.utils.terminal import log

PREPARED = "prepared"  # the tokenizer of the token files that data.train_bin names
_SCAN_TOKENS = 1 << 20  # counted at a time
_HASHED_FILES = 64  # of a split of several
_HASHED_BYTES = 1 << 16  # of each of them
_HEAD_BYTES = 1 << 12  # that show the kind of a file
_SAMPLED_PAIRS = 1 << 13  # that show the width of ids
# Bytes per id, by the magic number and the version in the header of llm.c. Source:
# https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py
_LLM_C = {(20240520, 1): 2, (20240801, 7): 4}
_LLM_C_HEADER = 1024  # bytes
_WRITE = (
    "write its ids with np.array(ids, np.uint16).tofile(…), "
    "or np.uint32 for a vocabulary above 65,536"
)


def load_token_bins(
    data: Settings, tokenizer: Settings, folder: Path, built: Tokenizer | None
) -> Corpus:
    """Load the token files that data.train_bin and data.val_bin name.

    Args:
        tokenizer: the config group, or the identity of `built`.
        folder: `data.folder`.
        built: the tokenizer of `init_from`.

    Raises:
        UserError: there are no such files, or they are of another kind or tokenizer.
    """
    if data["train_bin"] is None or data["val_bin"] is None:
        raise UserError(
            "data.train_bin and data.val_bin must be set together; set both, or neither"
        )

    # Files of `prepare.py` have a tokenizer, which must be the chosen one.
    prepared = load_prepared(data)
    if prepared:
        made = prepared.provenance.get("tokenizer", {})
        if built:
            # `separated` depends on the documents.
            own = without_chat(prepared.tokenizer.to_dict()) | {"separated": False}
            is_same = (
                tokenizer == made or without_chat(built.to_dict()) | {"separated": False} == own
            )
            advice = "init_from needs token files of its own"
        else:
            is_same = tokenizer == made or tokenizer["name"] == PREPARED
            advice = f"tokenizer={PREPARED} selects it"
        require(
            "tokenizer",
            ", ".join(map(str, tokenizer.values())),
            lambda _: is_same,
            f"{', '.join(map(str, made.values()))}, as in {prepared.train.files[0].parent / META}",
            advice,
        )
        return prepared

    # Other files need one that is built without a text.
    if tokenizer["name"] in (CharTokenizer.name, BPETokenizer.trained, PREPARED):
        raise UserError(
            f"tokenizer={tokenizer['name']} needs a text, or both files of a folder of prepare.py "
            f"with its {META}; set tokenizer=gpt2 (nanoGPT's) or byte"
        )
    return load_bins(data, built or build_tokenizer(tokenizer, folder, "", ()), folder)


def load_prepared(data: Settings) -> Corpus | None:
    """Load the token files of the data group if they are those of a folder of `prepare.py`."""
    files = [*_find_bins(data, "train_bin"), *_find_bins(data, "val_bin")]
    folder = files[0].parent
    is_prepared = files == [folder / f"{split}.bin" for split in SPLITS]
    return load(folder) if is_prepared and _is_own_meta(folder / META) else None


def _is_own_meta(meta: Path) -> bool:
    return meta.is_file() and b'"provenance"' in meta.read_bytes()  # else of another tool


def load_bins(data: Settings, tokenizer: Tokenizer, data_folder: Path | None = None) -> Corpus:
    """Read the token files of the data group, arrays of ids, in place.

    The validation split is read whole, to count its bytes and documents. `data_folder` is that of
    `checksums`.
    """
    # What the files are: the width of their ids, and the bytes before them.
    vocab_size = tokenizer.vocab_size
    train = _find_bins(data, "train_bin")
    val = _find_bins(data, "val_bin")
    layouts = [_layout(f"data.train_bin={file}", file, vocab_size) for file in train]
    layouts += [_layout(f"data.val_bin={file}", file, vocab_size) for file in val]
    headers = [header for _, header in layouts]
    widths = {width for width, _ in layouts}

    # All of one tokenizer, as far as can be seen, and of one width.
    for meta in {file.with_name(META) for file in (*train, *val)}:
        if (
            _is_own_meta(meta)
            and from_dict(read_json(meta).get("tokenizer")).token_bytes != tokenizer.token_bytes
        ):
            raise UserError(
                f"{meta.parent} has token files of another tokenizer; "
                f"give files of one, and tokenizer=…"
            )
    if len(widths) > 1:
        raise UserError(
            f"data.train_bin and data.val_bin must have ids of one width, got several; {_WRITE}"
        )
    dtype = f"uint{8 * widths.pop()}"
    if dtype != token_dtype(vocab_size):
        log(f"the ids of data.train_bin and data.val_bin are read as {dtype}")

    # How often each id is in the validation split, and so its bytes of UTF-8 and its documents.
    split_headers = {"train": headers[: len(train)], "val": headers[len(train) :]}
    train_tokens = TokenParts(train, dtype, vocab_size, split_headers["train"])
    tokens = TokenParts(val, dtype, vocab_size, split_headers["val"])
    counts = np.zeros(vocab_size, dtype=np.int64)
    for begin in range(0, len(tokens), _SCAN_TOKENS):
        ids = tokens[begin : begin + _SCAN_TOKENS]
        counts += np.bincount(ids.astype(np.int64), minlength=vocab_size)
    sizes = [len(tokenizer.token_bytes.get(i, b"")) for i in range(vocab_size)]
    end = tokenizer.end_token
    documents = 0 if end is None else int(counts[end])
    if documents:
        tokenizer = copy(tokenizer)
        tokenizer.separated = True

    sums = split_checksums(train, val, data_folder)
    return PartsCorpus(
        name=train[0].name,
        sha256=hashlib.sha256("".join(sums).encode()).hexdigest(),
        tokenizer=tokenizer,
        train=Split(train, len(train_tokens), 0, 0, len(train_tokens)),
        val=Split(val, len(tokens), int(counts @ sizes), documents, len(tokens)),
        dtype=dtype,
        val_sha256=sums[1],
        headers=split_headers,
    )


def _find_bins(data: Settings, key: str) -> list[Path]:
    # The files of a path, of a pattern (sorted by name), or of a list of these.
    value: str | Sequence[str] = data[key]
    files: list[Path] = []
    for path in [value] if isinstance(value, str) else value:
        given = Path(path).expanduser()
        matches = sorted(map(Path, glob(str(given))), key=Path.as_posix)
        # A name may look like a pattern.
        files += matches if matches and not given.exists() else [given]
    for file in files:
        if not file.is_file():
            raise UserError(
                f"data.{key}={file} is not a file; give the path of nanoGPT's token files"
            )
    return files


def split_checksums(
    train: Sequence[Path], val: Sequence[Path], data_folder: Path | None
) -> list[str]:
    """Return a checksum per split: of its file, or of the sizes and a sample of its files."""
    if len(train) == len(val) == 1:
        return checksums([*train, *val], data_folder)
    sums = []
    for files in (train, val):
        n = min(len(files), _HASHED_FILES)
        heads = []
        for i in range(n):
            with open(files[i * len(files) // n], "rb") as content:
                heads.append(hashlib.sha256(content.read(_HASHED_BYTES)).hexdigest())
        sums.append(sha256_json([[file.stat().st_size for file in files], heads]))
    return sums


def _layout(name: str, file: Path, vocab_size: int) -> tuple[int, int]:
    """Return the bytes per id and the bytes before the first id.

    Raises:
        UserError: the file, `name` in the message, is of another kind.
    """
    size = file.stat().st_size
    with open(file, "rb") as content:
        head = content.read(_HEAD_BYTES)

    # An array of NumPy.
    if head.startswith(np.lib.format.MAGIC_PREFIX):
        try:
            array = np.load(file, mmap_mode="r")
        except (ValueError, OSError) as error:
            raise UserError(f"{name} cannot be read by NumPy ({error})") from error
        dtype = array.dtype
        if array.ndim != 1 or dtype.kind not in "iu" or dtype.newbyteorder("<") != dtype:
            raise UserError(
                f"{name} must be an array of integers (N,), got {dtype} {array.shape}; {_WRITE}"
            )
        return dtype.itemsize, array.offset

    # A file of llm.c.
    magic, version, n_tokens = np.frombuffer(head[:12].ljust(12), "<i4").tolist()
    if 20240520 <= magic <= 20240801:
        width = _LLM_C.get((magic, version), 0)
        if not width or size != _LLM_C_HEADER + width * n_tokens:
            raise UserError(
                f"{name} is not a complete token file of llm.c: "
                f"{magic=}, {version=}, {n_tokens:,} tokens"
            )
        return width, _LLM_C_HEADER

    # A text, which a path of token files names by mistake.
    if size >= 64 and b"\0" not in head:
        with suppress(UnicodeDecodeError):
            codecs.getincrementaldecoder("utf-8")().decode(head)
            raise UserError(f"{name} is a text, not an array of ids; set data.path to it")

    # Ids alone, which may be wider than those of the vocabulary must be.
    narrowest = np.dtype(token_dtype(vocab_size)).itemsize
    width = narrowest
    while width < 8 and _alternates(file, width):
        width *= 2
    if size % width or not size:
        raise UserError(f"{name} has {size} bytes, not an array of {8 * width}-bit ids")
    if width > narrowest and np.frombuffer(head, f"<u{width}").max() >= vocab_size:
        raise UserError(
            f"{name} has no ids of this tokenizer: every second number of {4 * width} bits is 0, "
            f"and as ids of {8 * width} bits they are outside the vocabulary of {vocab_size:,}; "
            f"{_WRITE}"
        )
    return width, 0


def _alternates(file: Path, width: int) -> bool:
    # Whether every second number of `width` bytes is 0, as the halves of wider ids are.
    n = file.stat().st_size // (2 * width)  # pairs
    if n < 16:
        return False
    numbers = np.memmap(file, f"<u{width}", "r", shape=(n, 2))
    even, odd = (numbers[:: n // _SAMPLED_PAIRS + 1] == 0).mean(axis=0)
    return bool(odd == 1 > even or abs(even - odd) > 0.25)
