"""How a model learned: at every snapshot of a run, the losses of kinds of tokens and the scores of
its heads.

Shapes: L layers, H heads, B batch, T time.
"""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from minigpt.checkpoints.find import find_snapshots
from minigpt.checkpoints.load import load_checkpoint
from minigpt.extras.corpora.run_corpus import validation_batches
from minigpt.extras.interpret.heads import attention_maps, head_table, induction_scores
from minigpt.extras.interpret.token_pieces import token_pieces
from minigpt.utils.errors import UserError
from minigpt.utils.files import file_version

KINDS = (
    "first letters of words",
    "inside words",
    "spaces and line breaks",
    "names in capitals",
    "other",
)
_FIRST, _INSIDE, _SPACE, _CAPITALS, _OTHER = range(len(KINDS))
MAP_TOKENS = 256  # of the text whose attention is measured


def learning_curves(folder: Path) -> list[dict[str, Any]]:
    """Return the step and the measurements of every snapshot of a run that can be loaded, in the
    order of steps.

    Raises:
        UserError: the validation split is not there.
    """
    found = {}
    for step, file in find_snapshots(folder).items():
        with suppress(OSError):  # a run that resumes has removed it
            found[step] = measure(file, file_version(file))
    return [{"step": step, **measured} for step, measured in found.items() if measured]


@lru_cache(maxsize=128)
@torch.inference_mode()
def measure(snapshot: Path, version: str) -> dict[str, Any] | None:
    """Measure a model on the first batch of its validation split; None if the file is damaged.

    Args:
        version: of the file, so that a snapshot that is written again or replaced is measured
            again.

    Returns:
        `kinds`, the loss in nats per token by the kinds of tokens that occur; `previous` and
        `induction`, the scores of heads, L lists of H numbers, or None where the context is too
        short for them.
    """
    try:
        model, tokenizer = load_checkpoint(snapshot)
    except UserError:
        return None
    batch = next(iter(validation_batches(snapshot, model)))
    tokens, targets = batch[:2]  # (B, T)
    losses = model(*batch, reduction="none")  # (B·T,)
    known = targets.flatten() >= 0
    losses, ids = losses[known], targets.flatten()[known].tolist()
    kinds = torch.tensor(token_kinds(token_pieces(tokenizer, ids)))
    table = head_table(
        attention_maps(model, tokens[0, :MAP_TOKENS]),  # (L, H, T, T)
        induction_scores(model, tokenizer.vocab_size),
    )
    return {
        "kinds": {
            name: losses[kinds == i].mean().item()
            for i, name in enumerate(KINDS)
            if (kinds == i).any()
        },
        **{
            name: None if math.isnan(table[name].sum()) else table[name].tolist()
            for name in ("previous", "induction")
        },
    }


def token_kinds(texts: Sequence[str]) -> list[int]:
    """Return the index in `KINDS` of each of the successive tokens of a text: that of its first
    visible character.
    """
    text = "".join(texts)
    kinds = [_SPACE if character.isspace() else _OTHER for character in text]
    for word in re.finditer(r"[^\W\d_]+", text):
        in_capitals = len(word[0]) > 1 and word[0].isupper()
        of_letters = (
            [_CAPITALS] * len(word[0]) if in_capitals else [_FIRST, *[_INSIDE] * (len(word[0]) - 1)]
        )
        kinds[slice(*word.span())] = of_letters
    found, start = [], 0
    for part in texts:
        visible = len(part) - len(part.lstrip())
        found.append(kinds[start + visible if visible < len(part) else start] if part else _OTHER)
        start += len(part)
    return found
