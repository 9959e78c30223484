"""Documents of a data set of the Hugging Face hub, or of a folder with its layout. Its rows are
streamed.

The checksum of a data set of the hub is that of its commit, which is read even if the hub has a
later one; that of a folder is of the files that are read.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from minigpt.data.readers import TextChunk, row_chunk, without_null
from minigpt.data.sources import Source
from minigpt.extras.packages import import_extra
from minigpt.utils.errors import RunError, UserError
from minigpt.utils.files import checksums, sha256_json
from minigpt.utils.ranks import is_rank_zero
from minigpt.utils.terminal import log


def hub_source(data: Mapping[str, Any], split: str) -> Source:
    """Return a split of `data.dataset`."""
    name, subset, revision, field = (
        data[key] for key in ("dataset", "subset", "revision", "field")
    )
    read_as = data.get("format") or field
    setting, is_local = f"data.dataset={name}", Path(name).is_dir()
    with _explained(setting, is_local):
        if is_local:
            files = [
                Path(file)
                for file in (_build(data, revision).config.data_files or {}).get(split, ())
            ]
            read = [*(file.suffix for file in files), *checksums(files, Path(data["folder"]))]
        else:
            revision = _find_commit(name, revision, setting)
            if revision != data["revision"] and is_rank_zero():
                log(f"{setting} is read at commit {revision}; data.revision={revision} fixes it")
            read = [name]

    def stream() -> Iterator[TextChunk | None]:
        with _explained(setting, is_local):
            builder = _build(data, revision)
            # The cache of datasets may hold another commit
            if not is_local and builder.hash != revision:
                raise ConnectionError(revision)
            for number, row in enumerate(builder.as_streaming_dataset(split=split), 1):
                yield row_chunk(row, field, f"{setting}, row {number:,}", "column")

    return Source(
        name=data["name"],
        sha256=sha256_json([*read, subset, revision, read_as, split]),
        read=lambda: without_null(stream(), setting),
    )


def _find_commit(name: str, revision: str | None, setting: str) -> str:
    """Return the commit of a revision of a data set of the hub; without a network, the one last
    seen.
    """
    if revision and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    hub = import_extra("huggingface_hub", setting, "data")
    # The errors are no attribute of a package that was just imported
    errors = import_extra("huggingface_hub.errors", setting, "data")
    card = {"repo_id": name, "filename": "README.md", "repo_type": "dataset", "revision": revision}
    try:
        if os.environ.get("HF_DATASETS_OFFLINE", "").lower() in ("1", "on", "yes", "true"):
            raise ConnectionError("HF_DATASETS_OFFLINE is set")
        commit = str(
            hub.HfApi().dataset_info(name, revision=revision, expand=["sha"], timeout=10).sha
        )
        with suppress(errors.EntryNotFoundError):
            hub.hf_hub_download(**card)  # keeps the commit of the revision in the cache
        return commit
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise
    except Exception:
        cached = hub.try_to_load_from_cache(**card)
        if not isinstance(cached, str):
            raise
        return Path(cached).parent.name


def _build(data: Mapping[str, Any], revision: str | None) -> Any:
    """Return the builder of a data set."""
    datasets = import_extra("datasets", f"data.dataset={data['dataset']}", "data")
    datasets.disable_progress_bars()
    builder = datasets.load_dataset_builder(data["dataset"], data["subset"], revision=revision)
    if getattr(builder.config, "sample_by", None) == "line":  # a text file is one document
        builder.config.sample_by = "document"
    return builder


@contextmanager
def _explained(setting: str, is_local: bool) -> Iterator[None]:
    """Raise UserError if a data set cannot be read, RunError if the hub cannot be reached."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        known = kinds & {
            "ValueError",
            "FileNotFoundError",
            "RepositoryNotFoundError",
            "RevisionNotFoundError",
        }
        if is_local or (known and "LocalEntryNotFoundError" not in kinds):
            raise UserError(f"{setting} cannot be read: {error}") from error
        kind = type(error).__name__
        raise RunError(
            f"{setting} could not be reached ({kind}); try again, or set data.path=…"
        ) from error
