"""The corpus of a checkpoint's run, found by its checksum.

The run config in a checkpoint may come from anyone and name any path, so token files are only read:
nothing is downloaded, tokenized or written.
"""

from pathlib import Path

from minigpt.checkpoints.corpus import find_prepared
from minigpt.checkpoints.format import MINIGPT, explain_errors
from minigpt.checkpoints.resume import read_run
from minigpt.data import token_files
from minigpt.data.batches import ValidationBatches
from minigpt.data.tokenizer import from_dict
from minigpt.extras.corpora import token_bins
from minigpt.model.gpt import GPT
from minigpt.utils.errors import UserError
from minigpt.utils.scripts import usage

TOKENS_PER_BATCH = 4096


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
        corpus.tokens("val"),
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
        if found := find_prepared(folder, run):
            return found
        raise UserError(
            f"the token files of the run are not in {folder}; "
            "start from the folder that training was started in, or prepare them with "
            f"{usage('prepare')} and the run's data= and tokenizer="
        )
