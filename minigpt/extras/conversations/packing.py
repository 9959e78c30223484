"""Windows of whole conversations, and batches of them in which only answers are targets.

A window holds as many conversations, in the order of the text, as fit into `block_size` + 1 tokens;
what is left of it repeats its first token, which is no target. Of a longer conversation, each window
starts at a question. Attention reaches from a conversation to those before it in its window.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minigpt.data.batches import (
    IGNORE_INDEX,
    Array,
    Batches,
    ValidationBatches,
    WindowOrder,
    WindowReader,
)
from minigpt.data.token_files import Tokens
from minigpt.extras.conversations.encoding import (
    IN_ANSWER,
    STARTS_CONVERSATION,
    STARTS_QUESTION,
)

if TYPE_CHECKING:
    from minigpt.extras.conversations.corpus import ConversationCorpus


class Windows(NamedTuple):
    """Windows of a split, (W,) each, those without a target left out."""

    starts: Array  # first token
    ends: Array  # token after the last
    n_targets: Array
    n_long: int  # conversations that are longer than a window


def pack(kinds: NDArray[np.uint8], block_size: int) -> Windows:
    """Cut tokens, of which `kinds` (N,) are known, into windows of up to `block_size` + 1."""
    # Where a window may start, and where conversations start, with the end of the text
    n = len(kinds)
    size = block_size + 1
    starts = np.append(np.flatnonzero(kinds >= STARTS_QUESTION), n)
    borders = np.append(np.flatnonzero(kinds == STARTS_CONVERSATION), n)
    # Where a window that starts there ends: after a conversation, before a question, or within an
    # answer, of which the rest is left out
    begins = starts[:-1]
    full = np.minimum(begins + size, n)
    after_whole = borders[np.searchsorted(borders, full, "right") - 1]
    before_question = starts[np.searchsorted(starts, full, "right") - 1]
    ends = np.where(before_question > begins, before_question, full)
    ends = np.where(after_whole > begins, after_whole, ends)
    following = np.maximum(np.searchsorted(starts, ends), np.arange(len(begins)) + 1)
    # One window after another
    chosen = []
    i = 0
    while i < len(begins):
        chosen.append(i)
        i = int(following[i])
    begins = begins[chosen]
    ends = ends[chosen]
    # Those with a target
    is_answer = np.append(kinds == IN_ANSWER, False)
    edges = np.stack((begins, ends), 1).ravel()
    n_targets = np.add.reduceat(is_answer, edges, dtype=np.int64)[::2]
    kept = n_targets > 0
    n_long = int((np.diff(borders) > size).sum())
    return Windows(begins[kept], ends[kept], n_targets[kept], n_long)


class PackedOrder(WindowOrder):
    """The order in which training reads windows: each once per epoch, in a new order."""

    def __init__(self, windows: Windows, block_size: int, seed: int) -> None:
        self.windows = windows
        self.block_size = block_size
        self.seed = seed
        self.n_windows = len(windows.starts)

    def _epoch_starts(self, epoch: int, position: Array) -> Array:
        return self.windows.starts[self._shuffle(epoch, position)[0]]


class MarkedTokens:
    """Token ids as an array (N,), in which `~id` stands for an id that is no target."""

    def __init__(self, corpus: "ConversationCorpus", split: str) -> None:
        self.tokens = corpus.tokens(split)
        self.kinds = corpus.kinds(split)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: slice | Array) -> Array:
        ids = self.tokens[index].astype(np.int64)
        return np.where(self.kinds[index] == IN_ANSWER, ids, ~ids)


class PackedReader(WindowReader):
    """Read batches of windows; only answers are targets."""

    def __init__(
        self, tokens: MarkedTokens, windows: Windows, block_size: int, device: torch.device
    ) -> None:
        super().__init__(cast(Tokens, tokens), block_size, device)
        self.windows = windows

    def __call__(self, batches: Iterable[Array]) -> Iterator[tuple[Tensor, Tensor]]:
        for tokens, targets in super().__call__(batches):  # (B, T) each
            yield tokens.where(tokens >= 0, ~tokens), targets.where(targets >= 0, IGNORE_INDEX)

    def _index(self, starts: Array) -> Array:
        ends = self.windows.ends[np.searchsorted(self.windows.starts, starts)]  # (B,)
        index = starts[:, None] + self.window  # (B, T + 1)
        return np.where(index < ends[:, None], index, starts[:, None])


@dataclass(eq=False)
class PackedBatches(Batches):
    """Iterate over the training batches of one rank, as (tokens, targets, weight).

    The weight makes the gradient of an optimizer step that of its mean loss per target, however
    unevenly ranks and accumulated batches share the targets.
    """

    order: PackedOrder
    accumulate: int = 1  # batches per optimizer step

    @classmethod
    def of(
        cls, corpus: "ConversationCorpus", block_size: int, seed: int, **options: Any
    ) -> "PackedBatches":
        """Return the batches of a corpus, with `options` of this class."""
        order = PackedOrder(corpus.windows("train", block_size), block_size, seed)
        return cls(cast(Tokens, MarkedTokens(corpus, "train")), order, **options)

    def __post_init__(self) -> None:
        self.rows = np.arange(self.rank, self.batch_size, self.world_size)  # (B,)
        tokens: Any = self.tokens
        windows = self.order.windows
        self.read_windows = PackedReader(tokens, windows, self.order.block_size, self.device)

    def __iter__(self) -> Iterator[Any]:
        for i, (tokens, targets) in enumerate(super().__iter__(), self.first()):
            yield tokens, targets, self._weight(i)

    def _weight(self, batch: int) -> float:
        # The mean over ranks and batches of loss × weight is the mean loss per target of the step
        first = batch - batch % self.accumulate
        batches = np.arange(first, first + self.accumulate) % (self.repeat or self.stop)
        positions = batches[:, None] * self.batch_size + np.arange(self.batch_size)
        starts = self.order.starts(positions)  # (accumulate, rows of all ranks)
        windows = np.searchsorted(self.order.windows.starts, starts)
        n_targets = self.order.windows.n_targets[windows]
        own = n_targets[batch - first, self.rows].sum()
        return float(own * self.world_size * self.accumulate / n_targets.sum())


@dataclass(eq=False)
class PackedValidation(ValidationBatches):
    """Iterate over the windows of the validation split, as (tokens, targets), (B, T) each."""

    packed: Windows | None = None

    @classmethod
    def of(cls, corpus: "ConversationCorpus", block_size: int, **options: Any) -> "PackedValidation":
        """Return the batches of a corpus, with `options` of `ValidationBatches`."""
        tokens: Any = MarkedTokens(corpus, "val")
        return cls(tokens, block_size, **options, packed=corpus.windows("val", block_size))

    def __post_init__(self) -> None:
        assert self.packed is not None
        total = len(self.packed.starts)
        kept = total if self.n_batches is None else min(total, self.n_batches * self.batch_size)
        self.windows = np.arange(kept) * total // kept  # (kept,)
        tokens: Any = self.tokens
        self.read_windows = PackedReader(tokens, self.packed, self.block_size, self.device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        assert self.packed is not None
        starts = self.packed.starts[self.windows]
        batches = [
            starts[begin : begin + self.batch_size][self.rank :: self.world_size]
            for begin in range(0, len(starts), self.batch_size)
        ]
        # A rank without a window reads one, of which nothing is a target
        read = self.read_windows([own if len(own) else starts[:1] for own in batches])
        for own, (tokens, targets) in zip(batches, read, strict=True):
            yield tokens, targets if len(own) else torch.full_like(targets, IGNORE_INDEX)
