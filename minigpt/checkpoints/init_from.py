"""Models that a run can start from (`init_from`): runs of minigpt.

Those of Hugging Face are found by an extra.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minigpt.checkpoints.find import checkpoints_of, find_checkpoint, follow_latest
from minigpt.checkpoints.load import build_model, load_checkpoint
from minigpt.data.tokenizer import Tokenizer
from minigpt.model.config import GPTConfig
from minigpt.model.gpt import GPT
from minigpt.utils.errors import UserError
from minigpt.utils.extras import from_extras
from minigpt.utils.files import checksums


@dataclass(frozen=True)
class Pretrained:
    """A model to start from, and its tokenizer."""

    path: Path  # a checkpoint of minigpt; of a `HuggingFaceModel`, a folder
    source: str  # absolute path, or id of the Hub
    revision: str | None  # commit of the Hub
    config: GPTConfig
    tokenizer: Tokenizer
    model: GPT | None = None

    @property
    def files(self) -> list[Path]:
        """The files of its weights."""
        return [self.path]

    def load(self, config: GPTConfig | None = None) -> GPT:
        """Load the model in float32 and evaluation mode.

        Args:
            config: has another block size or dropout.
        """
        assert self.model is not None
        return build_model(config or self.config, self.model.state_dict()).eval()

    def provenance(self, data_folder: str) -> dict[str, Any]:
        """Return the source, the revision, and the cached SHA-256 of each file."""
        sums = checksums(self.files, Path(data_folder))
        return {
            "source": self.source,
            "revision": self.revision,
            "sha256": {file.name: each for file, each in zip(self.files, sums, strict=True)},
        }


def find_pretrained(source: str | None, *, step: int | None = None) -> Pretrained:
    """Find a model, and read its configuration and tokenizer.

    Args:
        source: a run folder or checkpoint of minigpt, a folder of Hugging Face, or an id of its
            Hub, which may end in `@` and a revision; None is the newest run.
        step: of a snapshot of the run.

    Raises:
        UserError: there is no such model, or minigpt cannot read it.
    """
    path = find_checkpoint(None) if source is None else Path(follow_latest(source)).expanduser()
    if step is None and (not path.exists() or (path / "config.json").is_file()):
        return from_extras("find_huggingface")(source)
    path = find_checkpoint(path, step=step)
    model, tokenizer = load_checkpoint(path)
    return Pretrained(
        path=path,
        source=str(path.resolve()),
        revision=None,
        config=replace(model.config, dropout=0.0, ngram_dropout=0.0),
        tokenizer=tokenizer,
        model=model,
    )


def find_start(init_from: str, resume: str | None, folder: Path | None) -> Pretrained:
    """Find the model of `init_from`; a run that resumes has that of its own checkpoint.

    Args:
        folder: of the run, with the checkpoint to resume from automatically.
    """
    if resume not in (None, "auto"):
        return find_pretrained(str(find_checkpoint(resume, last=True)))
    if resume and folder:
        for file in checkpoints_of(folder):
            with suppress(UserError):  # damaged
                return find_pretrained(str(file))
    return find_pretrained(init_from)
