"""Token files of conversations: windows of whole ones, in which only answers are targets.

A window of `block_size` + 1 tokens holds as many conversations as fit, in the order of the text.
The rest of it repeats its first token, which is no target. A conversation that is longer than a
window is cut, and each of its windows starts at a question. No conversation attends to another one.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

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
from minigpt.utils.terminal import warn_once


@dataclass(frozen=True)
class ConversationCorpus(Corpus):
    """Token files of two splits, `KINDS` × id + kind of each token, and their tokenizer."""

    is_text = False

    def turns(self, split: str) -> Tokens:
        """Return `KINDS` × id + kind of each token of "train" or "val", (N,)."""
        part: Split = getattr(self, split)
        return Tokens(part.files[0], self.dtype, KINDS * self.tokenizer.vocab_size)

    def tokens(self, split: str) -> Any:  # an array of ids (N,)
        return self.turns(split)[:] // KINDS

    def kinds(self, split: str) -> Ids:
        """Return the kind of each token of "train" or "val", (N,), as in `encoding`."""
        return self.turns(split)[:] % KINDS

    def windows(self, split: str, block_size: int) -> "PackedTokens":
        turns = self.turns(split)
        return PackedTokens(turns, pack(turns.file, self.dtype, block_size), block_size)

    def scored_tokens(self, split: str) -> Ids:
        return self.tokens(split)[self.kinds(split) == IN_ANSWER]

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
                warn_once(
                    f"{windows.n_long:,} of {part.documents:,} {name} conversations are longer "
                    f"than {size}: they are cut before questions, and {lost:,} of {part.targets:,} "
                    "tokens of answers are left out"
                )

    def validated_part(self, block_size: int, batch_size: int, n_batches: int | None) -> str:
        packed = self.windows("val", block_size).windows
        total = len(packed.starts)
        windows = total if n_batches is None else min(total, n_batches * batch_size)
        answers = f"{self.val.bytes:,} bytes of answers {self.val_sha256[:8]}"
        if windows == total and packed.n_targets.sum() == self.val.targets:
            return f"all {answers}"  # which losses of another block size are of too
        return f"{windows:,} of {total:,} windows of {block_size} tokens with {answers}"

    def sample_prompt(self, text: str, index: int = 0) -> tuple[str, Ids]:
        """Return a rendered question: the text, or if it is empty, one of the validation split."""
        if text:
            asked = encode_chat(self.tokenizer, [{"role": "user", "content": text}])
            ids = np.array(asked, self.tokenizer.separator.dtype)
        else:
            # What is before an answer in its conversation
            kinds = self.kinds("val")
            answers = np.flatnonzero(np.diff((kinds == IN_ANSWER).astype(np.int8)) > 0) + 1
            end = answers[index % len(answers)]
            begin = np.flatnonzero(kinds[:end] == STARTS_CONVERSATION)[-1]
            ids = self.tokens("val")[begin:end]
        return self.tokenizer.names(ids), ids


class Windows(NamedTuple):
    """Windows of a split, (W,) each; those without a target are left out."""

    starts: NDArray[np.int64]  # first token
    ends: NDArray[np.int64]  # token after the last
    n_targets: NDArray[np.int64]
    n_long: int  # conversations that are longer than a window


@dataclass(eq=False)
class PackedTokens(Tokens):
    """The windows of conversations one after another, `block_size` tokens apart, as an array (N,).

    It is read by `index` (B, T + 1), a window per row, each of which starts at a multiple of
    `block_size`; what is read is `KINDS` × id + kind.
    """

    turns: Tokens  # `KINDS` × id + kind, (N,)
    windows: Windows
    block_size: int

    def __len__(self) -> int:
        return len(self.windows.starts) * self.block_size + 1

    def __getitem__(self, index: Any) -> Ids:
        first = index[:, :1]
        window = np.minimum(first // self.block_size, len(self.windows.starts) - 1)  # (B, 1)
        starts = self.windows.starts[window]  # (B, 1)
        places = starts + index - first  # (B, T + 1)
        return self.turns[np.where(places < self.windows.ends[window], places, starts)]

    def batch(self, window: Any) -> tuple[Any, ...]:
        """Return tokens, targets and conversations, tensors (B, T), of the tensor (B, T + 1)."""
        from minigpt.data.batches import IGNORE_INDEX  # imports torch

        ids = window // KINDS
        kinds = window % KINDS
        targets = ids.masked_fill(kinds != IN_ANSWER, IGNORE_INDEX)
        documents = (kinds == STARTS_CONVERSATION).cumsum(dim=1)
        return ids[:, :-1], targets[:, 1:], documents[:, :-1]


@dataclass
class WeightedBatches:
    """Iterate over the training batches of one rank, as (tokens, targets, documents, weight).

    The weight is the batch's share of the targets of its optimizer step, over all ranks and
    accumulated batches, divided by the mean share. It makes the gradient of the step that of the
    mean loss per target.
    """

    batches: Any  # `Batches` of `PackedTokens`
    accumulate: int  # batches per optimizer step

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        shared = self.batches
        packed = shared.tokens
        rows = np.arange(shared.batch_size)
        for i, batch in enumerate(shared, shared.first()):
            # Targets of each row of the step over all ranks, (accumulate, rows)
            place = i % self.accumulate
            step = np.arange(i - place, i - place + self.accumulate) % (
                shared.repeat or shared.stop
            )
            starts = shared.order.starts(step[:, None] * shared.batch_size + rows)
            n_targets = packed.windows.n_targets[starts // packed.block_size]
            own = n_targets[place, shared.rows].sum()
            yield *batch, float(own * shared.world_size * self.accumulate / n_targets.sum())


def count_answers(folder: Path, meta: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Add the tokens and bytes of the answers in token files to the values of `meta.json`."""
    sizes = np.array([len(tokenizer.token_bytes.get(i, b"")) for i in range(tokenizer.vocab_size)])
    for split in SPLITS:
        turns = np.fromfile(folder / f"{split}.bin", meta["dtype"])
        learned = turns[turns % KINDS == IN_ANSWER] // KINDS
        meta[split] |= {"targets": len(learned), "bytes": int(sizes[learned].sum())}


@lru_cache(maxsize=16)
def pack(file: Path, dtype: str, block_size: int) -> Windows:
    """Cut a token file of conversations into windows of up to `block_size` + 1 tokens."""
    # Where conversations and questions start, with the end of the text
    size = block_size + 1
    kinds = np.fromfile(file, dtype) % KINDS
    conversations = [*np.flatnonzero(kinds == STARTS_CONVERSATION).tolist(), len(kinds)]
    starts = [*np.flatnonzero(kinds >= STARTS_QUESTION).tolist(), len(kinds)]  # of both
    # One window after another. Its end is the last place within `size` tokens after a whole
    # conversation, else before a question, else the place that many tokens on, within an answer;
    # the rest of this answer is in no window
    edges: list[int] = []
    begin = starts[0]
    while begin < len(kinds):
        end = begin + size
        for borders in (starts, conversations):
            border = borders[bisect_right(borders, begin + size) - 1]
            end = border if border > begin else end
        edges += [begin, end]
        begin = starts[bisect_left(starts, end)]
    # Those with a target
    is_answer = np.append(kinds == IN_ANSWER, False)
    n_targets = np.add.reduceat(is_answer, edges, dtype=np.int64)[::2]
    kept = n_targets > 0
    begins, ends = np.array(edges).reshape(-1, 2)[kept].T
    n_long = int((np.diff(conversations) > size).sum())
    return Windows(begins, ends, n_targets[kept], n_long)
