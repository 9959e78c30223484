"""Token files of conversations: windows of whole ones, in which only answers are targets.

A window holds as many conversations, in the order of the text, as fit into `block_size` + 1
tokens; what is left of it repeats its first token, which is no target. Of a longer conversation,
each window starts at a question. No conversation attends to another one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minigpt.data.token_files import SPLITS, Corpus, Split, Tokens
from minigpt.data.tokenizer import Ids, Tokenizer
from minigpt.extras.conversations.encoding import (
    IN_ANSWER,
    KINDS,
    STARTS_CONVERSATION,
    STARTS_QUESTION,
    encode_chat,
)
from minigpt.utils.errors import UserError
from minigpt.utils.terminal import warn

if TYPE_CHECKING:
    from torch import Tensor

    from minigpt.data.batches import Batches

_warn_once = cache(warn)


@dataclass(frozen=True)
class ConversationCorpus(Corpus):
    """Token files of two splits, `KINDS` × id + kind of each token, and their tokenizer."""

    is_text: ClassVar[bool] = False

    def tokens(self, split: str) -> "TurnTokens":
        return TurnTokens(self._file(split), self.dtype, KINDS * self.tokenizer.vocab_size)

    def kinds(self, split: str) -> NDArray[np.uint8]:
        """Return what each token of "train" or "val" is, (N,), as in `encoding`."""
        return _kinds(self._file(split), self.dtype)

    def windows(self, split: str, block_size: int) -> "PackedTokens":
        file = self._file(split)
        turns = Tokens(file, self.dtype, KINDS * self.tokenizer.vocab_size)
        return PackedTokens(turns, _pack(file, self.dtype, block_size), block_size)

    def scored_tokens(self, split: str) -> Ids:
        return self.tokens(split)[:][self.kinds(split) == IN_ANSWER]

    def check_length(self, block_size: int) -> None:
        """Raise UserError if no answer is a target; warn of conversations that are cut."""
        for name, split in (("training", "train"), ("validation", "val")):
            part: Split = getattr(self, split)
            windows = self.windows(split, block_size).windows
            size = f"model.block_size + 1 = {block_size + 1} tokens"
            if not len(windows.starts):
                raise UserError(f"no answer of the {name} split begins within {size}; raise it")
            if windows.n_long:
                lost = part.targets - int(windows.n_targets.sum())
                _warn_once(
                    f"{windows.n_long:,} of {part.documents:,} {name} conversations are longer "
                    f"than {size}: they are cut before questions, and {lost:,} of {part.targets:,} "
                    "tokens of answers are left out"
                )

    def validated_part(self, block_size: int, batch_size: int, n_batches: int | None) -> str:
        total = len(self.windows("val", block_size).windows.starts)
        windows = total if n_batches is None else min(total, n_batches * batch_size)
        part = f"{windows:,} of {total:,}" if windows < total else f"all {total:,}"
        answers = f"{self.val.bytes:,} bytes of answers {self.val_sha256[:8]}"
        return f"{part} windows of {block_size} tokens with {answers}"

    def sample_prompt(self, text: str, index: int = 0) -> tuple[str, Ids]:
        """Return a question, rendered: the text, or else one of the validation split."""
        if text:
            asked = encode_chat(self.tokenizer, [{"role": "user", "content": text}])
            ids = np.array(asked, self.tokenizer.separator.dtype)
        else:
            kinds = self.kinds("val")
            answers = np.flatnonzero(np.diff((kinds == IN_ANSWER).astype(np.int8)) > 0) + 1
            end = answers[index % len(answers)]
            begin = np.flatnonzero(kinds[:end] == STARTS_CONVERSATION)[-1]
            ids = self.tokens("val")[begin:end]
        return self.tokenizer.names(ids), ids

    def _file(self, split: str) -> Path:
        part: Split = getattr(self, split)
        return part.files[0]


class TurnTokens(Tokens):
    """The ids of token files of conversations, as an array (N,)."""

    def __getitem__(self, index: slice | NDArray[np.int64]) -> Ids:
        return super().__getitem__(index) // KINDS


class Windows(NamedTuple):
    """Windows of a split, (W,) each, those without a target left out."""

    starts: NDArray[np.int64]  # first token
    ends: NDArray[np.int64]  # token after the last
    n_targets: NDArray[np.int64]
    n_long: int  # conversations that are longer than a window


class PackedTokens(Tokens):
    """The windows of conversations one after another, `block_size` tokens apart, as an array (N,).

    A window is read from `index` (B, T + 1), of which each row starts at a multiple of
    `block_size`, as `KINDS` × id + kind.
    """

    is_text = False

    def __init__(self, turns: Tokens, windows: Windows, block_size: int) -> None:
        self.turns = turns  # `KINDS` × id + kind
        self.windows = windows
        self.block_size = block_size

    def __len__(self) -> int:
        return len(self.windows.starts) * self.block_size + 1

    def __getitem__(self, index: Any) -> Ids:
        first = index[:, :1]
        window = np.minimum(first // self.block_size, len(self.windows.starts) - 1)  # (B, 1)
        starts = self.windows.starts[window]  # (B, 1)
        places = starts + index - first  # (B, T + 1)
        return self.turns[np.where(places < self.windows.ends[window], places, starts)]

    def batch(self, window: "Tensor") -> "tuple[Tensor, Tensor, Tensor]":
        """Return the tokens of (B, T + 1), their targets and their conversations, (B, T) each."""
        from minigpt.data.batches import IGNORE_INDEX  # imports torch

        ids = window // KINDS
        kinds = window % KINDS
        targets = ids.masked_fill(kinds != IN_ANSWER, IGNORE_INDEX)
        documents = (kinds == STARTS_CONVERSATION).cumsum(dim=1)
        return ids[:, :-1], targets[:, 1:], documents[:, :-1]


@dataclass
class WeightedBatches:
    """Iterate over the training batches of one rank, as (tokens, targets, documents, weight).

    The weight makes the gradient of an optimizer step that of its mean loss per target, however
    unevenly ranks and accumulated batches share the targets.
    """

    batches: "Batches"
    accumulate: int  # batches per optimizer step

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for i, batch in enumerate(self.batches, self.batches.first()):
            yield *batch, self.weight_of(i)

    def weight_of(self, batch: int) -> float:
        """Return the weight of a batch of this rank: the mean of all in the step is 1."""
        shared = self.batches
        packed: Any = shared.tokens
        first = batch - batch % self.accumulate
        step = np.arange(first, first + self.accumulate) % (shared.repeat or shared.stop)
        rows = np.arange(shared.batch_size)
        starts = shared.order.starts(step[:, None] * shared.batch_size + rows)  # (accumulate, rows)
        n_targets = packed.windows.n_targets[starts // packed.block_size]
        own = n_targets[batch - first, shared.rows].sum()
        return float(own * shared.world_size * self.accumulate / n_targets.sum())


def count_answers(folder: Path, meta: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Add the tokens and bytes of the answers in token files to the values of `meta.json`."""
    sizes = np.array([len(tokenizer.token_bytes.get(i, b"")) for i in range(tokenizer.vocab_size)])
    for split in SPLITS:
        turns = np.fromfile(folder / f"{split}.bin", meta["dtype"])
        learned = turns[turns % KINDS == IN_ANSWER] // KINDS
        meta[split] |= {"targets": len(learned), "bytes": int(sizes[learned].sum())}


@lru_cache(maxsize=4)
def _kinds(file: Path, dtype: str) -> NDArray[np.uint8]:
    return (np.fromfile(file, dtype) % KINDS).astype(np.uint8)


@lru_cache(maxsize=16)
def _pack(file: Path, dtype: str, block_size: int) -> Windows:
    return pack(_kinds(file, dtype), block_size)


def pack(kinds: NDArray[np.uint8], block_size: int) -> Windows:
    """Cut tokens, of which `kinds` (N,) are known, into windows of up to `block_size` + 1."""
    # Where a window may start, and where conversations start, with the end of the text
    n = len(kinds)
    size = block_size + 1
    borders = np.append(np.flatnonzero(kinds == STARTS_CONVERSATION), n)
    starts = np.append(np.flatnonzero(kinds >= STARTS_QUESTION), n)
    begins = starts[:-1]
    # Where a window ends that starts there: after a conversation; of one that is longer, before a
    # question, or else within an answer, the rest of which no window has
    full = np.minimum(begins + size, n)
    before_question = starts[np.searchsorted(starts, full, "right") - 1]
    after_whole = borders[np.searchsorted(borders, full, "right") - 1]
    ends = np.where(before_question > begins, before_question, full)
    ends = np.where(after_whole > begins, after_whole, ends)
    following = np.searchsorted(starts, ends).tolist()
    # One window after another
    chosen = []
    i = 0
    while i < len(begins):
        chosen.append(i)
        i = following[i]
    begins = begins[chosen]
    ends = ends[chosen]
    # Those with a target
    edges = np.stack((begins, ends), 1).ravel()
    is_answer = np.append(kinds == IN_ANSWER, False)
    n_targets = np.add.reduceat(is_answer, edges, dtype=np.int64)[::2]
    kept = n_targets > 0
    n_long = int((np.diff(borders) > size).sum())
    return Windows(begins[kept], ends[kept], n_targets[kept], n_long)
