"""The files of tiktoken's encodings: found in its cache, or fetched into it before tiktoken looks.

tiktoken would fetch them itself, without a time-out and without a word of what is missing.
"""

import hashlib
import os
from pathlib import Path
from urllib.parse import urlsplit

from minigpt.data.tokenizer import ENCODINGS, BPETokenizer
from minigpt.utils.downloads import download
from minigpt.utils.errors import UserError

_HOST = "https://openaipublic.blob.core.windows.net"
_FILES = {  # a file -> its checksum, as in tiktoken
    f"{_HOST}/gpt-2/encodings/main/vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    f"{_HOST}/gpt-2/encodings/main/encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    f"{_HOST}/encodings/r50k_base.tiktoken": "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
    f"{_HOST}/encodings/p50k_base.tiktoken": "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069",
    f"{_HOST}/encodings/cl100k_base.tiktoken": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    f"{_HOST}/encodings/o200k_base.tiktoken": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
}
_SAME = {"p50k_edit": "p50k_base", "o200k_harmony": "o200k_base"}  # two encodings, one file


def encoding(name: str, folder: Path) -> BPETokenizer:
    """A tiktoken encoding, whose files are kept where TIKTOKEN_CACHE_DIR says, or else in `folder`.

    Raises:
        UserError: a file is not there and cannot be fetched; says where it belongs.
    """
    if name not in ENCODINGS:
        raise UserError(f"tokenizer.name={name} is not possible; it takes char, byte, bpe, {', '.join(ENCODINGS)}")
    given = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    cache = Path(given) if given else folder
    missing = [url for url in _urls(name) if not _have(cache / _key(url), _FILES[url])]
    for url in missing:
        try:
            fetched = download(url, _FILES[url], cache / _key(url))
        except OSError as error:
            raise UserError(
                f"tokenizer={name} cannot keep its files in {cache} ({error.strerror}); "
                f"name a folder that can be written in TIKTOKEN_CACHE_DIR"
            ) from error
        if not fetched:
            wanted = ", and ".join(f"{url} as {cache / _key(url)}" for url in missing)
            raise UserError(
                f"tokenizer={name} needs files that could not be downloaded ({urlsplit(url).netloc} does not answer); "
                f"put {wanted}, or name the folder that holds them in TIKTOKEN_CACHE_DIR"
            )
    before = os.environ.get("TIKTOKEN_CACHE_DIR")
    os.environ["TIKTOKEN_CACHE_DIR"] = str(cache)
    try:
        return BPETokenizer.from_tiktoken(name)
    finally:
        del os.environ["TIKTOKEN_CACHE_DIR"]
        if before is not None:
            os.environ["TIKTOKEN_CACHE_DIR"] = before


def _urls(name: str) -> list[str]:
    part = "/gpt-2/" if name == "gpt2" else f"/{_SAME.get(name, name)}.tiktoken"
    return [url for url in _FILES if part in url]


def _key(url: str) -> str:
    """The name that tiktoken's cache has for a file."""
    return hashlib.sha1(url.encode(), usedforsecurity=False).hexdigest()


def _have(file: Path, sha256: str) -> bool:
    return file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == sha256
