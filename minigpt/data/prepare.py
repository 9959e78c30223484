"""Prepare a corpus: split its documents, tokenize them in several threads, write token files.

Tokens are written in the order of the text, so the files are the same for any number of threads. A
folder of token files is renamed to its final name once it is complete; the name contains a hash of
the text's checksum, the tokenizer and the split, so changed inputs get new files.
"""

import hashlib
import platform
import shutil
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from minigpt.data.sources import TRAIN, VAL, Source, SplitChunk, find_sources, split_chunks
from minigpt.data.token_files import (
    FORMAT,
    META,
    SPLITS,
    STARTS,
    Corpus,
    load,
)
from minigpt.data.tokenizer import (
    SEPARATOR,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Ids,
    Tokenizer,
    from_dict,
    token_dtype,
    without_chat,
)
from minigpt.utils.checks import Settings
from minigpt.utils.errors import UserError
from minigpt.utils.extras import from_extras
from minigpt.utils.files import PARTIAL, sha256_json, sync, write_json
from minigpt.utils.terminal import warn
from minigpt.utils.threads import map_in_threads

_BATCH_CHARS = 1 << 20  # tokenized together
# By how much of the smaller split a cut at the start of a document may miss val_fraction: documents
# of up to two fifths of the smaller split stay whole.
_CUT_TOLERANCE = 0.2

TokenizeBatch = list[tuple[int, bool, str]]  # split, whether a separator precedes the text, text


def load_corpus(data: Settings, tokenizer: Settings) -> Corpus:
    """Load the token files for the groups data and tokenizer; write them first if there are none.

    Args:
        tokenizer: the config group, or the `to_dict` of a built tokenizer.

    Raises:
        UserError: there is no such text, it is empty or damaged, it has too few documents or pairs
            of bytes, or the data folder cannot be written.
    """
    corpus = _load_corpus(data, tokenizer if data.get("format") else without_chat(tokenizer))
    if "chat" in tokenizer and not corpus.tokenizer.chat:
        from_extras("add_chat")(corpus.tokenizer, tokenizer["chat"])
    return corpus


def _load_corpus(data: Settings, tokenizer: Settings) -> Corpus:
    # What is tokenized, and how: the identity of the token files.
    folder = Path(data["folder"])
    built = from_dict(tokenizer) if tokenizer.keys() - {"name", "vocab_size"} else None
    if built:
        # As `_write_corpus` encodes documents.
        whole = {} if built.splits_at_cuts else {"documents": "whole"}
        tokenizer = {"name": "pretrained", "sha256": sha256_json(tokenizer), **whole}
    if data["train_bin"] is not None or data["val_bin"] is not None:
        return from_extras("load_token_bins")(data, tokenizer, folder, built)
    chat: Settings = {}
    if data.get("format"):
        reader = from_extras("ConversationReader")(built, data["field"])
        chat = reader.chat
        data = {**data, "field": reader}
    sources = find_sources(data)
    provenance = {"source_sha256": sources[0].sha256, "tokenizer": dict(tokenizer)}
    if chat:
        own = {"format": data["format"], "field": reader.field, "chat_sha256": sha256_json(chat)}
        provenance |= own
    if len(sources) > 1:
        provenance["val_sha256"] = sources[1].sha256
    else:
        provenance |= {"split": data["split"], "val_fraction": data["val_fraction"]}

    # Where they are, or will be.
    target = folder / "tokens" / f"{sources[0].name[:40]}-{sha256_json([FORMAT, provenance])[:12]}"
    if not (target / META).is_file():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with _lock(target):
                if not (target / META).is_file():  # no other process wrote it meanwhile
                    _write_corpus(target, sources, provenance, data["threads"], built, chat)
        except OSError as error:
            if error.filename is not None and not Path(error.filename).is_relative_to(folder):
                raise
            raise UserError(
                f"token files cannot be written to {folder} "
                f"({(error.strerror or str(error)).lower()}); free some space, or set data.folder=…"
            ) from error
    return load(target)


def build_tokenizer(
    settings: Settings, folder: Path, alphabet: str, texts: Iterable[str]
) -> Tokenizer:
    """Build the tokenizer of the config group; `char` and `bpe` need the text."""
    match settings["name"]:
        case CharTokenizer.name:
            return CharTokenizer(alphabet)
        case ByteTokenizer.name:
            return ByteTokenizer()
        case BPETokenizer.trained:
            return BPETokenizer.train(texts, settings["vocab_size"])
    return BPETokenizer.from_tiktoken(settings["name"], folder / "tiktoken")


def _write_corpus(
    target: Path,
    sources: Sequence[Source],
    provenance: Settings,
    threads: int | None,
    built: Tokenizer | None,
    chat: Settings,
) -> None:
    """Write the files to a folder beside `target`, and rename it when it is complete.

    Args:
        built: the tokenizer of `init_from`.
        chat: of conversations, as `add_chat` takes it; else empty.
    """
    if any(target.glob("*")):
        raise UserError(f"{target} has files but no {META}; remove it, or set data.folder=…")

    # On some network file systems, a lock excludes only the processes of one host.
    prefix = f".{target.name[-12:]}.{platform.node()}"  # short, as a host may have a long name
    for left in target.parent.glob(f"{prefix}.{PARTIAL}"):  # by a killed process
        shutil.rmtree(left, ignore_errors=True)
    partial = target.with_name(f"{prefix}.{token_hex(8)}.partial")
    partial.mkdir()
    try:
        # The text is read once or twice to build the tokenizer and to find the cut, then written.
        tokenizer, cut, provenance = _plan(sources, provenance, target.parents[1], built, chat)
        chunks = split_chunks(sources, provenance, cut)
        if not tokenizer.splits_at_cuts and not chat:
            chunks = from_extras("join_chunks")(chunks)
        batches = TextBatches(chunks)
        encoder = from_extras("TurnEncoder")(tokenizer) if chat else tokenizer
        _write_tokens(partial, encoder, batches, threads)
        if batches.has_separators and not chat:
            warn(
                f"{SEPARATOR} in the text is read as ordinary text; "
                f"data.separator='{SEPARATOR}' splits text files there"
            )
        dtype = token_dtype(encoder.vocab_size)
        meta = _build_meta(partial, sources, provenance, tokenizer, batches, dtype)
        if chat:
            from_extras("count_answers")(partial, meta, tokenizer)
        write_json(partial / META, meta)
        if not (target / META).is_file():  # no other host wrote it meanwhile
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _plan(
    sources: Sequence[Source],
    provenance: Settings,
    folder: Path,
    built: Tokenizer | None,
    chat: Settings,
) -> tuple[Tokenizer, int, Settings]:
    """Build the tokenizer if it is not built, and find the cut between the splits.

    Also return the provenance, with where the cut is if it is within one of several documents.
    """
    by_character = provenance["tokenizer"]["name"] == CharTokenizer.name
    by_fraction = provenance.get("split") == "fraction"
    cut = 0
    alphabet = ""
    if by_fraction or by_character:
        lengths, alphabet = scan_corpus(sources, by_character)
        if not sum(lengths):
            raise UserError(f"{sources[0].name} is empty; give a text that is not")
        if by_fraction:
            cut = cut_by_fraction(lengths, provenance["val_fraction"], keeps_whole=bool(chat))
            if len(lengths) > 1 and cut not in np.cumsum(lengths):
                # Runs of earlier versions, which cut elsewhere, have no such entry, and so other
                # files: they are not resumed.
                provenance = {**provenance, "cut": "within a document"}
    texts = (
        chunk.text for split, chunk in split_chunks(sources, provenance, cut) if split == TRAIN
    )
    if chat:
        alphabet, texts = from_extras("unmarked")(alphabet, texts)
    tokenizer = built or build_tokenizer(provenance["tokenizer"], folder, alphabet, texts)
    if chat:
        from_extras("add_chat")(tokenizer, chat)
    return tokenizer, cut, provenance


def scan_corpus(sources: Sequence[Source], by_character: bool) -> tuple[Sequence[int], str]:
    """Count the characters of each document; if `by_character`, also find the distinct ones."""
    lengths = array("Q")
    seen = np.zeros(0x110000, dtype=bool)  # by code point
    for source in sources:
        for text, first in source.read():
            if first:
                lengths.append(0)
            lengths[-1] += len(text)
            if by_character:
                seen[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")] = True
    seen[ord("\n")] |= len(lengths) > 1  # the separator of documents
    return lengths, "".join(map(chr, np.flatnonzero(seen)))


def cut_by_fraction(lengths: Sequence[int], val_fraction: float, *, keeps_whole: bool) -> int:
    """Return where the validation split starts, in characters from the start of the text.

    It is the nearest start of a document, or lies within a document if none is near.

    Args:
        keeps_whole: take the nearest start, however far it is.
    """
    starts = np.cumsum([0, *lengths])
    wanted = int(starts[-1] * (1 - val_fraction))
    inner = starts[1:-1] if len(lengths) > 1 else starts  # so that no split is empty
    nearest = int(inner[np.abs(inner - wanted).argmin()])
    is_near = abs(nearest - wanted) <= _CUT_TOLERANCE * min(wanted, starts[-1] - wanted)
    return nearest if keeps_whole or is_near else wanted


class TextBatches:
    """Iterate once over the texts of both splits in batches, and count them."""

    def __init__(self, chunks: Iterable[SplitChunk]) -> None:
        self.chunks = chunks
        self.bytes = [0, 0]  # of UTF-8 in each split
        self.hashes = (array("Q"), array("Q"))  # one per document of each split
        # Bytes before each document of each split, with a separator of one byte.
        self.starts = (array("q"), array("q"))
        self.has_separators = False  # as ordinary text

    def __iter__(self) -> Iterator[TokenizeBatch]:
        batch: TokenizeBatch = []
        size = 0  # of the batch, in characters
        hasher = hashlib.blake2b()  # of the document
        for split, (text, first) in self.chunks:
            if not text:
                continue

            # The text, after a separator unless it begins its split.
            hashes = self.hashes[split]
            batch.append((split, first and len(hashes) > 0, text))
            size += len(text)

            # What is counted of it.
            if first:
                hasher = hashlib.blake2b(digest_size=8)
                self.starts[split].append(self.bytes[split] + len(hashes))
                hashes.append(0)
            content = text.encode()
            hasher.update(content)
            hashes[-1] = int.from_bytes(hasher.digest(), "little")
            self.bytes[split] += len(content)
            self.has_separators = self.has_separators or SEPARATOR in text

            if size >= _BATCH_CHARS:
                yield batch
                batch = []
                size = 0
        if batch:
            yield batch


def _write_tokens(
    folder: Path, tokenizer: Tokenizer, batches: TextBatches, threads: int | None
) -> None:
    paths = [folder / f"{split}.bin" for split in SPLITS]
    with ExitStack() as stack:
        files = [stack.enter_context(open(path, "wb")) for path in paths]
        bar = stack.enter_context(tqdm(unit="B", unit_scale=True, delay=1, disable=None))
        for ids in tokenize(tokenizer, batches, threads):
            for file, row in zip(files, ids, strict=True):
                file.write(row.data)
            bar.update(sum(batches.bytes) - bar.n)
    for path, starts in zip(paths, batches.starts, strict=True):
        if tokenizer.end_token is None and len(starts) > 1:
            path.with_suffix(STARTS).write_bytes(starts.tobytes())
        sync(path)


def tokenize(
    tokenizer: Tokenizer, batches: Iterable[TokenizeBatch], threads: int | None
) -> Iterator[list[Ids]]:
    """Yield the ids of each split, (N,), per batch; tokenize in `threads` (None: one per core)."""
    from loky import cpu_count

    dtype = token_dtype(tokenizer.vocab_size)

    def encode(batch: TokenizeBatch) -> list[Ids]:
        ids: list[list[Ids]] = [[np.empty(0, dtype)], [np.empty(0, dtype)]]
        for split, separated, text in batch:
            if separated:
                ids[split].append(tokenizer.separator)
            ids[split].append(tokenizer.encode(text))
        return [np.concatenate(row, dtype=dtype) for row in ids]

    return map_in_threads(encode, batches, threads or cpu_count())


def _build_meta(
    folder: Path,
    sources: Sequence[Source],
    provenance: Settings,
    tokenizer: Tokenizer,
    batches: TextBatches,
    dtype: str,
) -> dict[str, Any]:
    """Check the token files and return the values of `meta.json`."""
    # Both splits must have documents, and should share none.
    name = sources[0].name
    documents = [len(hashes) for hashes in batches.hashes]
    if 0 in documents:
        empty = documents.index(0)
        if len(sources) > 1 or not any(documents):
            raise UserError(f"{sources[empty].name} is empty; give a text that is not")
        is_fraction = provenance["split"] == "fraction"  # of conversations, which stay whole
        raise UserError(
            f"none of the {sum(documents)} documents is for "
            f"{'validation' if empty else 'training'}; with so few set "
            f"{'' if is_fraction else 'data.split=fraction, '}"
            f"another data.val_fraction, or data.val_path=…, or give more text"
        )
    duplicates = int(np.isin(batches.hashes[TRAIN], batches.hashes[VAL]).sum())
    if duplicates:
        warn(f"{duplicates:,} training documents of {name} are also in the validation split")

    # What the files hold.
    if isinstance(tokenizer, BPETokenizer) and not tokenizer.chat:
        tokenizer.separated = documents[TRAIN] > 1
    sums = [source.sha256 for source in sources]
    splits = {
        split: {
            "documents": documents[i],
            "bytes": batches.bytes[i],
            "tokens": (folder / f"{split}.bin").stat().st_size // np.dtype(dtype).itemsize,
        }
        for i, split in enumerate(SPLITS)
    }
    return {
        "format": FORMAT,
        "name": name,
        "sha256": sums[0] if len(sums) == 1 else sha256_json(sums),
        "dtype": dtype,
        **splits,
        "provenance": {**provenance, "duplicates": duplicates},
        "tokenizer": tokenizer.to_dict(),
    }


def _lock(target: Path) -> AbstractContextManager[object]:
    lock = FileLock(f"{target}.lock")
    try:
        return lock.acquire(timeout=2)
    except Timeout:
        warn(f"another process prepares {target.name}; waiting for it")
        return lock.acquire()
