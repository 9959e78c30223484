"""The corpus of a checkpoint's run, found by its checksum; a run resumes without its text so.

The run config in a checkpoint may come from anyone and name any path, so token files are only read:
nothing is downloaded, tokenized or written.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from minigpt.checkpoints.find import find_checkpoint
from minigpt.checkpoints.format import MINIGPT, explain_errors
from minigpt.checkpoints.resume import find_newest, read_run
from minigpt.data import token_files
from minigpt.data.batches import ValidationBatches
from minigpt.data.sources import find_sources
from minigpt.data.tokenizer import from_dict, without_chat
from minigpt.extras.corpora import token_bins
from minigpt.model.gpt import GPT
from minigpt.utils.errors import UserError
from minigpt.utils.scripts import usage
from minigpt.utils.terminal import warn

TOKENS_PER_BATCH = 4096


# The settings of the data group that select the text
TEXT_SETTINGS = (
    "path",
    "val_path",
    "field",
    "separator",
    "format",
    "split",
    "val_fraction",
    "source",
    "train_bin",
    "val_bin",
    "dataset",
    "subset",
    "revision",
    "train_split",
    "val_split",
)


def validation_batches(checkpoint: Path, model: GPT) -> ValidationBatches:
    """Return the whole validation split of a checkpoint's run, in the windows that the run
    validated on.

    Raises:
        UserError: the checkpoint has no run config, or the token files of the run are missing or
            have changed.
    """
    corpus, block_size = find_corpus(checkpoint), model.config.block_size
    corpus.check_length(block_size)
    return ValidationBatches(
        corpus.windows("val", block_size),
        block_size=block_size,
        batch_size=max(1, TOKENS_PER_BATCH // block_size),
        rank=0,
        world_size=1,
        device=model.wte.weight.device,
    )


def find_corpus(checkpoint: Path) -> token_files.Corpus:
    """Return the corpus of a checkpoint's run; raises UserError as `validation_batches`."""
    if checkpoint.is_dir():  # of Hugging Face
        raise UserError(f"{checkpoint} is no run of minigpt, whose text is known")
    run = read_run(checkpoint)[MINIGPT]
    with explain_errors(f"the corpus of {checkpoint} cannot be read"):
        data = run["config"]["data"]
        if data["train_bin"]:
            prepared = token_bins.load_prepared(data)
            corpus = prepared or token_bins.load_bins(data, from_dict(run["tokenizer"]))
            if corpus.sha256 == run["corpus_sha256"]:
                return corpus
            raise UserError(
                f"{data['train_bin']} or {data['val_bin']} has changed since training; "
                "restore the token files of the run"
            )
        folder = Path(data["folder"]) / "tokens"
        if found := _find_prepared(folder, run):
            return found
        raise UserError(
            f"the token files of the run are not in {folder}; "
            "start from the folder that training was started in, or prepare them with "
            f"{usage('prepare')} and the run's data= and tokenizer="
        )


def find_resumed_corpus(
    settings: Mapping[str, Any], folder: Path | None, missing: UserError
) -> token_files.Corpus:
    """Return the corpus of the run that is resumed, if its text cannot be found.

    Args:
        settings: of the run, which resumes.
        folder: of the run.
        missing: the error of loading the text; it is raised if the text is there, or there is no
            checkpoint.

    Raises:
        UserError: there are no token files that are those of the run, or other settings select the
            text.
    """
    data = settings["data"]
    if data["train_bin"] is not None or _is_found(data):
        raise missing
    if settings["resume"] == "auto":
        content = find_newest(folder, warn)[1] if folder else {}
    else:
        content = read_run(find_checkpoint(settings["resume"], last=True))
    if not content:
        raise missing
    # Other settings would select another text
    saved = content[MINIGPT]
    with explain_errors("the corpus of the checkpoint cannot be read"):
        before = saved["config"]
        changed = [key for key in TEXT_SETTINGS if before["data"].get(key) != data.get(key)]
        same = not changed and before["tokenizer"] == settings["tokenizer"]
        found = _find_prepared(Path(data["folder"]) / "tokens", saved) if same else None
    if found is None:
        problem = "is not searched, because other settings select the text"
        if same:
            problem = "has none of the run"
        raise UserError(f"{missing}; or restore its token files: {data['folder']}/tokens {problem}")
    warn(
        f"{str(missing).partition(';')[0]}: resuming on the token files in "
        f"{found.train.files[0].parent}"
    )
    return found


def _is_found(data: Mapping[str, Any]) -> bool:
    try:
        find_sources(data)
    except UserError:
        return False
    return True


def _find_prepared(folder: Path, run: Mapping[str, Any]) -> token_files.Corpus | None:
    """Find the token files of a run, as its checkpoint describes it, among those of prepare.py."""
    data = run["config"]["data"]
    wanted = run["corpus_sha256"], without_chat(run["tokenizer"])
    for meta in sorted(folder.glob(f"*/{token_files.META}")):
        with suppress(UserError):  # incomplete or damaged token files
            corpus = token_files.load(meta.parent)
            split = corpus.provenance
            same_split = all(data[key] == value for key, value in split.items() if key in data)
            same_files = run.get("corpus_provenance", split) == split
            found = corpus.sha256, without_chat(corpus.tokenizer.to_dict())
            if found == wanted and same_split and same_files:
                return replace(corpus, tokenizer=from_dict(run["tokenizer"]))
    return None
