"""Files from the network: with time-outs and retries, checked, in place whole or not at all."""

import os
from pathlib import Path


def download(url: str, sha256: str, target: Path) -> bool:
    """Fetch a file, with a progress bar; whether it came and is the one that was promised.

    Raises:
        OSError: `target` cannot be written.
    """
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
