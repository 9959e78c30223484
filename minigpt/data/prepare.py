"""Prepare a corpus: split its documents, tokenize them in several processes, write token files.

Tokens are written in the order of the text, so the files are the same for any number of processes. A folder of token
files is renamed to its final name once it is complete; the name contains a hash of the text's checksum, the tokenizer
and the split, so changed inputs get new files. A killed preparation resumes from its journal.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from minigpt.data import token_files
from minigpt.data import tokenizer as tokenizers
from minigpt.data.encodings import load_encoding
from minigpt.data.journal import JOURNAL, Journal
from minigpt.data.sources import CHECKSUM_CACHE, Source, corpus_sha256, find_sources
from minigpt.data.splits import TRAIN, VAL, TextBatches, cut_by_fraction, scan_corpus, split_chunks
from minigpt.data.token_files import FORMAT, META, SPLITS, Corpus, Tokens
from minigpt.data.tokenize_workers import tokenize
from minigpt.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer, token_dtype
from minigpt.utils.errors import UserError
from minigpt.utils.files import read_json, write_json
from minigpt.utils.terminal import warn

_PLAN = "plan.json"  # the tokenizer and the cut, so that a resumed preparation does not compute them again
_SINGLE_PROCESS_BYTES = 1 << 24  # of text, which take less time than starting other processes


def load_corpus(data: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> Corpus:
    """Load the token files for the config groups data and tokenizer; write them first if there are none.

    Raises:
        UserError: there is no such text, it is empty or damaged, has too few documents or pairs of bytes, or the
            data folder cannot be written.
    """
    folder = Path(data["folder"])
    if data["train_bin"] is not None or data["val_bin"] is not None:
        return _load_bins(data, tokenizer, folder)
    sources = find_sources(data)
    if len(sources) > 1:
        rule = {"val_sha256": sources[1].sha256}
    else:
        rule = {key: data[key] for key in ("split", "val_fraction")}
    provenance = {"source_sha256": sources[0].sha256, "tokenizer": dict(tokenizer)} | rule
    identity = [FORMAT, provenance, data["shard_tokens"]]
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    target = folder / "tokens" / f"{sources[0].name[:40]}-{key[:12]}"
    if not (target / META).is_file():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with _lock(target):
                if not (target / META).is_file():  # no other process wrote it meanwhile
                    _CorpusWriter(target, sources, provenance, data["shard_tokens"], data["processes"]).write()
        except OSError as error:
            if error.filename is not None and not Path(error.filename).is_relative_to(folder):
                raise
            reason = (error.strerror or str(error)).lower()
            raise UserError(
                f"token files cannot be written to {folder} ({reason}); free some space, or set data.folder=…"
            ) from error
    return token_files.load(target)


def describe_corpus(corpus: Corpus) -> dict[str, str]:
    """Return the figures of token files as names and formatted values."""
    made, rows = corpus.provenance, {"corpus": corpus.name}
    for name, split in (("training", corpus.train), ("validation", corpus.val)):
        rows[name] = f"{split.documents:,} documents, {split.bytes:,} bytes, {split.tokens:,} tokens"
    if made:
        tokens, used, size = corpus.train.tokens + corpus.val.tokens, made["used_ids"], corpus.tokenizer.vocab_size
        files = f"{len(corpus.train.files)} + {len(corpus.val.files)}"
        rows["bytes per token"] = f"{(corpus.train.bytes + corpus.val.bytes) / max(1, tokens):.3f}"
        rows["vocabulary"] = f"{size:,} ids, {used:,} of them used ({used / size:.1%})"
        rows["in both splits"] = f"{made['duplicates']:,} documents"
        rows["checksum"] = f"{made['tokens_sha256']} (of the ids)"
        rows["files"] = f"{files} of {corpus.dtype}, {made['seconds']:.1f} s"
    rows["folder"] = str((corpus.val.files or corpus.train.files)[0].parent)
    return rows


def _build_tokenizer(settings: Mapping[str, Any], folder: Path, alphabet: str, texts: Iterable[str]) -> Tokenizer:
    """Build the tokenizer of the config group: from an alphabet (char), from training texts (bpe), or by its name."""
    name = settings["name"]
    if name == CharTokenizer.name:
        return CharTokenizer.of(alphabet)
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    if name == BPETokenizer.trained:
        return BPETokenizer.train(texts, settings["vocab_size"])
    return load_encoding(name, folder / "tiktoken")


def _load_bins(data: Mapping[str, Any], tokenizer: Mapping[str, Any], folder: Path) -> Corpus:
    if data["train_bin"] is None or data["val_bin"] is None:
        raise UserError("data.train_bin and data.val_bin must be set together; set both, or neither")
    if tokenizer["name"] in (CharTokenizer.name, BPETokenizer.trained):
        raise UserError(
            f"tokenizer={tokenizer['name']} is built from a text, but data.train_bin has only ids; "
            f"set tokenizer=gpt2 (nanoGPT's) or byte"
        )
    train, val = (Path(data[key]).expanduser() for key in ("train_bin", "val_bin"))
    return token_files.from_bins(train, val, _build_tokenizer(tokenizer, folder, "", ()), folder / CHECKSUM_CACHE)


@dataclass(frozen=True)
class _CorpusWriter:
    target: Path
    sources: Sequence[Source]  # for training and, if it is separate, for validation
    provenance: Mapping[str, Any]  # checksums of the sources, and the config of the tokenizer and the split
    shard_tokens: int
    processes: int | None

    def write(self) -> None:
        """Write the files in a folder beside `target`, and rename it when it is complete."""
        started, partial = time.monotonic(), self.target.with_name(f"{self.target.name}.partial")
        try:
            if not (partial / _PLAN).is_file():
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                self._write_plan(partial / _PLAN)
            plan = read_json(partial / _PLAN)
            tokenizer = tokenizers.from_dict(plan["tokenizer"])
            journal = Journal(partial, token_dtype(tokenizer.vocab_size), self.shard_tokens)
            batches = TextBatches(split_chunks(self.sources, self.provenance, plan["cut"]))
            self._tokenize(batches, tokenizer, journal)
            meta = self._build_meta(batches, tokenizer, journal)
            meta["provenance"]["seconds"] = time.monotonic() - started
            write_json(partial / META, meta)
            for file in (partial / _PLAN, partial / JOURNAL):
                file.unlink(missing_ok=True)
            shutil.rmtree(self.target, ignore_errors=True)  # a folder without its meta.json
            partial.rename(self.target)
        except BaseException as error:
            if isinstance(error, UserError) or not (partial / JOURNAL).is_file():  # nothing to resume from
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _write_plan(self, file: Path) -> None:
        """Find the cut between the splits, build the tokenizer, and write both."""
        settings, sources = self.provenance["tokenizer"], self.sources
        by_character = settings["name"] == CharTokenizer.name
        cut, alphabet = (0, 0), ""
        if self.provenance.get("split") == "fraction" or by_character:
            lengths, alphabet = scan_corpus(sources if by_character else sources[:1], by_character)
            if not sum(lengths):
                raise UserError(f"{sources[0].name} is empty; give a text that is not")
            if "val_fraction" in self.provenance:
                cut = cut_by_fraction(lengths, self.provenance["val_fraction"])
        texts = (chunk.text for split, chunk in split_chunks(sources, self.provenance, cut) if split == TRAIN)
        tokenizer = _build_tokenizer(settings, self.target.parents[1], alphabet, texts)
        write_json(file, {"tokenizer": tokenizer.to_dict(), "cut": cut})

    def _tokenize(self, batches: TextBatches, tokenizer: Tokenizer, journal: Journal) -> None:
        """Append the ids of the batches that are not in the journal yet."""
        sizes = [size for source in self.sources for size in source.sizes]
        total = None if 0 in sizes else sum(sizes)
        from loky import cpu_count

        small = total is not None and total <= _SINGLE_PROCESS_BYTES
        processes = 1 if small else self.processes or cpu_count()
        remaining = islice(batches, journal.batches, None)
        with tqdm(total=total, unit="B", unit_scale=True, delay=1, disable=None) as bar:
            for ids in tokenize(tokenizer, remaining, processes):
                journal.append(ids)
                bar.update(batches.position - bar.n)
        journal.sync()

    def _build_meta(self, batches: TextBatches, tokenizer: Tokenizer, journal: Journal) -> dict[str, Any]:
        """Check the token files and return the values of `meta.json`."""
        source, documents = self.sources[0], [len(hashes) for hashes in batches.hashes]
        if self.provenance.get("split") == "document" and 0 in documents:
            empty = "training" if documents[TRAIN] == 0 else "validation"
            raise UserError(
                f"none of the {sum(documents)} documents is for {empty}; with so few set data.split=fraction, "
                f"another data.val_fraction, or data.val_path=…"
            )
        duplicates = int(np.isin(np.array(batches.hashes[TRAIN]), np.array(batches.hashes[VAL])).sum())
        if duplicates:
            warn(f"{duplicates:,} training documents of {source.name} are also in the validation split")
        checksum, counts = hashlib.sha256(), np.zeros(tokenizer.vocab_size, dtype=np.int64)
        for split, tokens in enumerate(journal.tokens):
            files = journal.files(split)
            counts += Tokens(files, journal.dtype.name, self.shard_tokens, tokens, tokenizer.vocab_size).count_ids()
            for file in files:
                checksum.update(np.memmap(file, mode="r").data)
        description = tokenizer.to_dict()
        if "separated" in description:
            description["separated"] = documents[TRAIN] > 1
        figures = zip(SPLITS, documents, batches.bytes, journal.tokens, strict=True)
        return {
            "format": FORMAT,
            "name": source.name,
            "sha256": corpus_sha256(self.sources),
            "stand_in": source.stand_in,
            "dtype": journal.dtype.name,
            "shard_tokens": self.shard_tokens,
            **{split: {"documents": n, "bytes": size, "tokens": tokens} for split, n, size, tokens in figures},
            "provenance": {
                **self.provenance,
                "used_ids": int((counts > 0).sum()),
                "duplicates": duplicates,
                "tokens_sha256": checksum.hexdigest(),
            },
            "tokenizer": description,
        }


def _lock(target: Path) -> AbstractContextManager[Any]:
    """Lock a folder against other processes that prepare it."""
    lock = FileLock(f"{target}.lock")
    try:
        return lock.acquire(timeout=2)
    except Timeout:
        warn(f"another process prepares {target.name}; waiting for it")
        return lock.acquire()
