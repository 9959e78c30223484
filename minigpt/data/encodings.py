"""tiktoken's encodings, with their files downloaded into its cache before tiktoken reads them.

tiktoken's own download has no timeout and does not name the missing file.
"""

import hashlib
import os
from pathlib import Path

from minigpt.data.tokenizer import ENCODINGS, BPETokenizer
from minigpt.utils.downloads import download
from minigpt.utils.errors import UserError, require
from minigpt.utils.files import checksums

_HOST = "https://openaipublic.blob.core.windows.net"
_SHA256 = {  # URL -> checksum, as in tiktoken
    f"{_HOST}/gpt-2/encodings/main/vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    f"{_HOST}/gpt-2/encodings/main/encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    f"{_HOST}/encodings/r50k_base.tiktoken": "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
    f"{_HOST}/encodings/p50k_base.tiktoken": "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069",
    f"{_HOST}/encodings/cl100k_base.tiktoken": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    f"{_HOST}/encodings/o200k_base.tiktoken": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
}
_SHARED_FILES = {"p50k_edit": "p50k_base", "o200k_harmony": "o200k_base"}  # encoding -> encoding with the same file


def load_encoding(name: str, folder: Path) -> BPETokenizer:
    """Load a tiktoken encoding from the cache in TIKTOKEN_CACHE_DIR, or else in `folder`.

    Raise UserError if there is no such encoding, or a file is missing and cannot be downloaded.
    """
    require("tokenizer.name", name, ENCODINGS.__contains__, f"one of char, byte, bpe, {', '.join(ENCODINGS)}")
    before = os.environ.get("TIKTOKEN_CACHE_DIR")
    cache = Path(before or os.environ.get("DATA_GYM_CACHE_DIR") or folder)
    _download_missing(name, cache)
    os.environ["TIKTOKEN_CACHE_DIR"] = str(cache)
    try:
        return BPETokenizer.from_tiktoken(name)
    finally:
        del os.environ["TIKTOKEN_CACHE_DIR"]
        if before is not None:
            os.environ["TIKTOKEN_CACHE_DIR"] = before


def _download_missing(name: str, cache: Path) -> None:
    files = {url: cache / hashlib.sha1(url.encode(), usedforsecurity=False).hexdigest() for url in _urls(name)}
    missing = {
        url: file for url, file in files.items() if not file.is_file() or checksums([file], None) != [_SHA256[url]]
    }
    try:
        complete = all(download(url, _SHA256[url], file) for url, file in missing.items())
    except OSError as error:
        raise UserError(
            f"the files of tokenizer={name} cannot be written to {cache} ({error.strerror}); "
            f"set TIKTOKEN_CACHE_DIR to a writable folder"
        ) from error
    if not complete:
        wanted = ", and ".join(f"{url} as {file}" for url, file in missing.items())
        raise UserError(
            f"the files of tokenizer={name} could not be downloaded; "
            f"save {wanted}, or set TIKTOKEN_CACHE_DIR to a folder that has them"
        )


def _urls(name: str) -> list[str]:
    part = "/gpt-2/" if name == "gpt2" else f"/{_SHARED_FILES.get(name, name)}.tiktoken"
    return [url for url in _SHA256 if part in url]
