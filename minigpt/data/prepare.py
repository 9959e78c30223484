"""Prepare a corpus: split its documents, tokenize them in several threads, write token files.

Tokens are written in the order of the text, so the files are the same for any number of threads. A folder of token
files is renamed to its final name once it is complete; the name contains a hash of the text's checksum, the tokenizer
and the split, so changed inputs get new files.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from minigpt.data import token_files
from minigpt.data import tokenizer as tokenizers
from minigpt.data.sources import Source, find_sources
from minigpt.data.splits import (
    TRAIN,
    VAL,
    TextBatches,
    TokenizeBatch,
    cut_by_fraction,
    join_chunks,
    scan_corpus,
    split_chunks,
)
from minigpt.data.token_files import FORMAT, META, SPLITS, Corpus
from minigpt.data.tokenizer import SEPARATOR, BPETokenizer, ByteTokenizer, CharTokenizer, Ids, Tokenizer, token_dtype
from minigpt.utils.errors import UserError
from minigpt.utils.files import sha256_json, sync, write_json
from minigpt.utils.terminal import warn
from minigpt.utils.threads import map_in_threads


def load_corpus(data: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> Corpus:
    """Load the token files for the config groups data and tokenizer; write them first if there are none.

    `tokenizer` may also be the `to_dict` of a built tokenizer.

    Raise UserError if there is no such text, if it is empty or damaged, has too few documents or pairs of bytes, or if
    the data folder cannot be written.
    """
    folder = Path(data["folder"])
    built = tokenizers.from_dict(tokenizer) if tokenizer.keys() - {"name", "vocab_size"} else None
    if built:
        whole = {} if built.splits_at_cuts else {"documents": "whole"}  # as `_write_corpus` encodes them
        tokenizer = {"name": "pretrained", "sha256": sha256_json(tokenizer), **whole}
    if data["train_bin"] is not None or data["val_bin"] is not None:
        return _load_bins(data, tokenizer, folder, built)
    sources = find_sources(data)
    provenance = {"source_sha256": sources[0].sha256, "tokenizer": dict(tokenizer)}
    if len(sources) > 1:
        provenance["val_sha256"] = sources[1].sha256
    else:
        provenance |= {"split": data["split"], "val_fraction": data["val_fraction"]}
    target = folder / "tokens" / f"{sources[0].name[:40]}-{sha256_json([FORMAT, provenance])[:12]}"
    if not (target / META).is_file():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with _lock(target):
                if not (target / META).is_file():  # no other process wrote it meanwhile
                    _write_corpus(target, sources, provenance, data["threads"], built)
        except OSError as error:
            if error.filename is not None and not Path(error.filename).is_relative_to(folder):
                raise
            reason = (error.strerror or str(error)).lower()
            raise UserError(
                f"token files cannot be written to {folder} ({reason}); free some space, or set data.folder=…"
            ) from error
    return token_files.load(target)


def _load_bins(data: Mapping[str, Any], tokenizer: Mapping[str, Any], folder: Path, built: Tokenizer | None) -> Corpus:
    if data["train_bin"] is None or data["val_bin"] is None:
        raise UserError("data.train_bin and data.val_bin must be set together; set both, or neither")
    if tokenizer["name"] in (CharTokenizer.name, BPETokenizer.trained):
        raise UserError(
            f"tokenizer={tokenizer['name']} is built from a text, but data.train_bin has only ids; "
            f"set tokenizer=gpt2 (nanoGPT's) or byte"
        )
    built = built or _build_tokenizer(tokenizer, folder, "", ())
    return token_files.load_bins(data, built, folder)


def _build_tokenizer(settings: Mapping[str, Any], folder: Path, alphabet: str, texts: Iterable[str]) -> Tokenizer:
    """Build the tokenizer of the config group: from an alphabet (char), from training texts (bpe), or by its name."""
    name = settings["name"]
    if name == CharTokenizer.name:
        return CharTokenizer(alphabet)
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    if name == BPETokenizer.trained:
        return BPETokenizer.train(texts, settings["vocab_size"])
    return BPETokenizer.from_tiktoken(name, folder / "tiktoken")


def _write_corpus(
    target: Path, sources: Sequence[Source], provenance: Mapping[str, Any], threads: int | None, built: Tokenizer | None
) -> None:
    """Write the files to a folder beside `target`, and rename it when it is complete."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    partial.mkdir()
    try:
        tokenizer, cut = _plan(sources, provenance, target.parents[1], built)
        chunks = split_chunks(sources, provenance, cut)
        batches = TextBatches(join_chunks(chunks) if "documents" in provenance["tokenizer"] else chunks)
        _write_tokens(partial, tokenizer, batches, threads)
        if batches.has_separators:
            advice = f"data.separator='{SEPARATOR}' splits text files there"
            warn(f"{SEPARATOR} in the text is read as ordinary text; {advice}")
        write_json(partial / META, _build_meta(partial, sources, provenance, tokenizer, batches))
        shutil.rmtree(target, ignore_errors=True)  # a folder without its meta.json
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _plan(
    sources: Sequence[Source], provenance: Mapping[str, Any], folder: Path, built: Tokenizer | None
) -> tuple[Tokenizer, int]:
    """Build the tokenizer if it is not built, and find the cut between the splits."""
    settings, cut, alphabet = provenance["tokenizer"], 0, ""
    by_character = settings["name"] == CharTokenizer.name
    if provenance.get("split") == "fraction" or by_character:
        lengths, alphabet = scan_corpus(sources if by_character else sources[:1], by_character)
        if not sum(lengths):
            raise UserError(f"{sources[0].name} is empty; give a text that is not")
        if "val_fraction" in provenance:
            cut = cut_by_fraction(lengths, provenance["val_fraction"])
    texts = (chunk.text for split, chunk in split_chunks(sources, provenance, cut) if split == TRAIN)
    return built or _build_tokenizer(settings, folder, alphabet, texts), cut


def _write_tokens(folder: Path, tokenizer: Tokenizer, batches: TextBatches, threads: int | None) -> None:
    """Tokenize the batches, and write the ids of each split to its file."""
    paths = [folder / f"{split}.bin" for split in SPLITS]
    with ExitStack() as stack:
        files = [stack.enter_context(open(path, "wb")) for path in paths]
        bar = stack.enter_context(tqdm(unit="B", unit_scale=True, delay=1, disable=None))
        for ids in tokenize(tokenizer, batches, threads):
            for file, row in zip(files, ids, strict=True):
                file.write(row.data)
            bar.update(sum(batches.bytes) - bar.n)
    for path in paths:
        sync(path)


def tokenize(tokenizer: Tokenizer, batches: Iterable[TokenizeBatch], threads: int | None) -> Iterator[list[Ids]]:
    """Tokenize batches in `threads` (None: one per core); yield the ids of each split, per batch."""
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
    folder: Path, sources: Sequence[Source], provenance: Mapping[str, Any], tokenizer: Tokenizer, batches: TextBatches
) -> dict[str, Any]:
    """Check the token files and return the values of `meta.json`."""
    documents, sums = [len(hashes) for hashes in batches.hashes], [source.sha256 for source in sources]
    if provenance.get("split") == "document" and 0 in documents:
        empty = "training" if documents[TRAIN] == 0 else "validation"
        raise UserError(
            f"none of the {sum(documents)} documents is for {empty}; with so few set data.split=fraction, "
            f"another data.val_fraction, or data.val_path=…"
        )
    duplicates = int(np.isin(np.array(batches.hashes[TRAIN]), np.array(batches.hashes[VAL])).sum())
    if duplicates:
        warn(f"{duplicates:,} training documents of {sources[0].name} are also in the validation split")
    if isinstance(tokenizer, BPETokenizer):
        tokenizer.separated = documents[TRAIN] > 1
    dtype = token_dtype(tokenizer.vocab_size)
    tokens = [(folder / f"{split}.bin").stat().st_size // np.dtype(dtype).itemsize for split in SPLITS]
    figures = zip(SPLITS, documents, batches.bytes, tokens, strict=True)
    return {
        "format": FORMAT,
        "name": sources[0].name,
        "sha256": sums[0] if len(sums) == 1 else sha256_json(sums),
        "dtype": dtype,
        **{split: {"documents": n, "bytes": size, "tokens": length} for split, n, size, length in figures},
        "provenance": {**provenance, "duplicates": duplicates},
        "tokenizer": tokenizer.to_dict(),
    }


def _lock(target: Path) -> AbstractContextManager[Any]:
    """Lock a folder against other processes that prepare it."""
    lock = FileLock(f"{target}.lock")
    try:
        return lock.acquire(timeout=2)
    except Timeout:
        warn(f"another process prepares {target.name}; waiting for it")
        return lock.acquire()
