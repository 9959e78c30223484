"""Models that a run can start from (`init_from`): of minigpt, or of Hugging Face, local or on its Hub."""

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minigpt.checkpoints.find import BEST, LAST, PREVIOUS, find_checkpoint, model_name
from minigpt.checkpoints.huggingface import CONFIG, HUB_FILES, folder_errors, read_config, read_weights, weight_files
from minigpt.checkpoints.models import build_model, check_vocabulary, load_checkpoint
from minigpt.config import GPTConfig
from minigpt.data.tokenizer import Tokenizer
from minigpt.data.tokenizer_json import load_tokenizer
from minigpt.model import GPT
from minigpt.utils.errors import UserError
from minigpt.utils.files import checksums
from minigpt.utils.scripts import import_extra


@dataclass(frozen=True)
class Pretrained:
    """A model to start from, whose weights may not be read yet, and its tokenizer.

    Args:
        path: a checkpoint of minigpt, or a folder of Hugging Face.
        source: absolute path, or id of the Hub.
        revision: commit of the Hub.
        model: of minigpt's checkpoint.
    """

    path: Path
    source: str
    revision: str | None
    config: GPTConfig
    tokenizer: Tokenizer
    model: GPT | None = None

    @property
    def name(self) -> str:
        """A short name: that of the run, of the file or of the folder, or the id of the Hub."""
        if self.model:
            return model_name(self.path)
        return self.source if self.revision else self.path.name

    def load(self, config: GPTConfig | None = None) -> GPT:
        """Load the model in float32 and evaluation mode, with the block size and dropout of `config`."""
        weights = self.model.state_dict() if self.model else read_weights(self.path, self.config)
        return build_model(config or self.config, weights).eval()

    def provenance(self, cache: Path | None = None) -> dict[str, Any]:
        """Return the source, the revision, and the SHA-256 of each file of weights; `cache` is that of `checksums`."""
        files = [self.path] if self.model else weight_files(self.path)
        sums = dict(zip((file.name for file in files), checksums(files, cache), strict=True))
        return {"source": self.source, "revision": self.revision, "sha256": sums}


def find_pretrained(source: str | None) -> Pretrained:
    """Find a model, download it if it is on the Hub only, and read its configuration and tokenizer.

    Args:
        source: a run folder or checkpoint of minigpt, a folder of Hugging Face, an id of its Hub, which may end in `@`
            and a revision, or None: the newest run.

    Raises:
        UserError: there is no such model, or minigpt cannot read it.
    """
    path, revision = find_checkpoint(None) if source is None else Path(source).expanduser(), None
    if path.exists():
        source = str(path.resolve())
    else:
        path = _download(str(source))
        revision = path.name
    if (path / CONFIG).is_file():
        found = Pretrained(path, str(source), revision, read_config(path), load_tokenizer(path))
        with folder_errors(path):
            check_vocabulary(found.config, found.tokenizer)
        return found
    path = find_checkpoint(path)
    model, tokenizer = load_checkpoint(path)
    config = replace(model.config, dropout=0.0, ngram_dropout=0.0)
    return Pretrained(path, str(path.resolve()), revision, config, tokenizer, model)


def find_start(init_from: str, resume: str | None, folder: Path | None) -> Pretrained:
    """Find the model of `init_from`, or the checkpoint of the run that `resume` continues, whose folder is `folder`."""
    if resume not in (None, "auto"):
        return find_pretrained(str(find_checkpoint(resume, last=True)))
    for name in (LAST, PREVIOUS, BEST) if resume and folder else ():
        with suppress(UserError):  # missing or damaged
            return find_pretrained(str(find_checkpoint(Path(str(folder), name))))
    return find_pretrained(init_from)


def _download(source: str) -> Path:
    """Download the files of a model into the cache of huggingface_hub, and return their folder."""
    name, _, revision = source.partition("@")
    first = name.partition("/")[0]
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or first in ("runs", ".", "..") or Path(first).exists():
        raise UserError(f"{source} does not exist; give a run folder, a checkpoint, or a folder or id of Hugging Face")
    hub = import_extra("huggingface_hub", f"{source} does not exist, and the Hugging Face Hub", "huggingface")
    hub.logging.set_verbosity_error()  # without a line per retry
    try:
        return Path(hub.snapshot_download(name, revision=revision or None, allow_patterns=HUB_FILES))
    except Exception as error:  # its own, of HTTP and of the file system
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(
            f"{source} does not exist, and cannot be downloaded from the Hugging Face Hub: {reason.rstrip('.')}"
        ) from error
