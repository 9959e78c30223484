"""tiktoken's encodings, with their files downloaded into its cache before tiktoken reads them.

tiktoken's own download has no timeout and does not name the missing file.
"""

import hashlib
import os
from pathlib import Path

from minigpt.data.tokenizer import PATTERNS, BPETokenizer
from minigpt.utils.checks import one_of
from minigpt.utils.errors import UserError, require
from minigpt.utils.files import download

_HOST = "https://openaipublic.blob.core.windows.net"
_SHA256 = {  # URL -> checksum, as in tiktoken
    f"{_HOST}/gpt-2/encodings/main/vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    f"{_HOST}/gpt-2/encodings/main/encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    f"{_HOST}/encodings/cl100k_base.tiktoken": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    f"{_HOST}/encodings/o200k_base.tiktoken": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
}


def load_encoding(name: str, folder: Path) -> BPETokenizer:
    """Load a tiktoken encoding from the cache in TIKTOKEN_CACHE_DIR, or else in `folder`.

    Raise UserError if there is no such encoding, or a file is missing and cannot be downloaded.
    """
    require("tokenizer.name", name, *one_of(("char", "byte", "bpe", *PATTERNS)))
    cache = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or folder)
    urls = [url for url in _SHA256 if ("/gpt-2/" if name == "gpt2" else f"/{name}.tiktoken") in url]
    files = {url: cache / hashlib.sha1(url.encode(), usedforsecurity=False).hexdigest() for url in urls}
    try:
        missing = [f"{url} as {file}" for url, file in files.items() if not download(url, _SHA256[url], file)]
    except OSError as error:
        raise UserError(
            f"the files of tokenizer={name} cannot be written to {cache} ({error.strerror}); "
            f"set TIKTOKEN_CACHE_DIR to a writable folder"
        ) from error
    if missing:
        raise UserError(
            f"the files of tokenizer={name} could not be downloaded; "
            f"save {', and '.join(missing)}, or set TIKTOKEN_CACHE_DIR to a folder that has them"
        )
    os.environ["TIKTOKEN_CACHE_DIR"] = str(cache.absolute())  # where tiktoken reads the files
    return BPETokenizer.from_tiktoken(name)
