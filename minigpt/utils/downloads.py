"""Downloads with timeouts, retries and a checksum."""

import os
from pathlib import Path


def download(url: str, sha256: str, target: Path) -> bool:
    """Download a file atomically, with a progress bar.

    Returns:
        Whether the server answered with a file that has this checksum.

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
    except (requests.RequestException, ValueError):  # ValueError: the checksum differs
        return False
    mask = os.umask(0)
    os.umask(mask)
    target.chmod(0o666 & ~mask)  # pooch's temporary file is private to the user
    return True
