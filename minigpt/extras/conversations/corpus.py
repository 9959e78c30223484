"""Token files of conversations: losses are of the answers alone."""

from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np

from minigpt.data.token_files import Corpus, Split, Tokens
from minigpt.data.tokenizer import Ids
from minigpt.extras.conversations.encoding import (
    IN_ANSWER,
    STARTS_CONVERSATION,
    TURNS,
    encode_chat,
)
from minigpt.extras.conversations.packing import Windows, pack
from minigpt.utils.errors import UserError
from minigpt.utils.terminal import warn

_warn_once = cache(warn)


@dataclass(frozen=True)
class ConversationCorpus(Corpus):
    """Token files of two splits, what their tokens are, and their tokenizer."""

    is_packed: ClassVar[bool] = True

    def kinds(self, split: str) -> Tokens:
        """Return what each token of "train" or "val" is, (N,), as in `encoding`."""
        file = getattr(self, split).files[0].with_suffix(TURNS)
        kinds = Tokens(file, "uint8", STARTS_CONVERSATION + 1)
        if len(kinds) != len(self.tokens(split)):
            raise UserError(f"{file} is damaged; remove {file.parent} to have it written again")
        return kinds

    def scored_tokens(self, split: str) -> Ids:
        return self.tokens(split)[:][self.kinds(split)[:] == IN_ANSWER]

    def windows(self, split: str, block_size: int) -> Windows:
        """Return the windows of "train" or "val", which hold whole conversations."""
        return _pack(getattr(self, split).files[0].with_suffix(TURNS), block_size)

    def check_length(self, block_size: int) -> None:
        """Raise UserError if no answer is a target; warn of conversations that are cut."""
        for name, split in (("training", "train"), ("validation", "val")):
            part: Split = getattr(self, split)
            windows = self.windows(split, block_size)
            if not len(windows.starts):
                raise UserError(
                    f"no question of the {name} split fits into model.block_size + 1 = "
                    f"{block_size + 1} tokens with a part of its answer; use a larger one"
                )
            if windows.n_long:
                lost = part.targets - int(windows.n_targets.sum())
                _warn_once(
                    f"{windows.n_long:,} of {part.documents:,} {name} conversations are longer "
                    f"than model.block_size + 1 = {block_size + 1} tokens: they are cut before "
                    f"questions, and {lost:,} of {part.targets:,} tokens of answers are left out"
                )

    def validated_part(self, block_size: int, batch_size: int, n_batches: int | None) -> str:
        total = len(self.windows("val", block_size).starts)
        windows = total if n_batches is None else min(total, n_batches * batch_size)
        part = f"{windows:,} of {total:,}" if windows < total else f"all {total:,}"
        return (
            f"{part} windows of {block_size} tokens with "
            f"{self.val.bytes:,} bytes of answers {self.val_sha256[:8]}"
        )

    def sample_prompt(self, text: str) -> tuple[str, Ids]:
        """Return a question: the text, or else the first of the validation split."""
        if text:
            asked = encode_chat(self.tokenizer, [{"role": "user", "content": text}])
            ids = np.array(asked, self.tokenizer.separator.dtype)
        else:
            kinds = self.kinds("val")[:]
            end = int((kinds == IN_ANSWER).argmax())
            begin = int(np.flatnonzero(kinds[:end] == STARTS_CONVERSATION)[-1])
            ids = self.tokens("val")[begin:end]
        return self.tokenizer.names(ids), ids


@lru_cache(maxsize=8)
def _pack(file: Path, block_size: int) -> Windows:
    return pack(Tokens(file, "uint8", STARTS_CONVERSATION + 1)[:], block_size)
