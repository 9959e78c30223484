"""Batches as a pure function of (seed, step, rank, world size).

An epoch cuts the training tokens into windows at a random offset and reads each window once, in random order. The
order of many windows is a keyed permutation evaluated at a position, not a shuffled list, so the cost of a batch does
not depend on the size of the corpus, and a resumed run needs only its step.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minigpt.data.token_files import Tokens
from minigpt.utils.threads import map_in_threads

Array = np.ndarray[Any, np.dtype[np.int64]]

IGNORE_INDEX = -100  # torch's cross_entropy leaves out this target
_FEISTEL_ROUNDS = 4
_MAX_SHUFFLED_WINDOWS = 1024  # a Feistel network of few rounds is biased on very few windows
_EDGE_WINDOWS = 8  # at each end of the text, between which windows overlap
_ROWS_PER_LOOKUP = 4096  # rows whose windows are computed at a time
_READERS = 16  # batches that are read ahead, each in a thread
_MAX_DEVICE_TOKENS = 1 << 28  # a larger corpus stays on disk, and its batches are copied to the GPU


class WindowOrder:
    """The order in which training reads the windows of `block_size` + 1 tokens; the training split has more.

    The windows of an epoch are adjacent and go from the first token to the last, so that every token but the first is a
    target. They overlap in two places, one near each end. How much of the overlap is in the first place is the offset
    of the windows between the two. The places differ per epoch, so that no target is much more frequent than others.
    """

    def __init__(self, n_tokens: int, block_size: int, seed: int) -> None:
        self.block_size, self.seed = block_size, seed
        self.last_start = n_tokens - 1 - block_size
        # As many in all epochs, with an overlap of half a window or more, which gives that many offsets.
        self.n_windows = 1 - (-2 * self.last_start - block_size) // (2 * block_size)
        self.overlap = (self.n_windows - 1) * block_size - self.last_start
        self.n_edge = min(_EDGE_WINDOWS, self.n_windows - 1)

    def starts(self, index: Array) -> Array:
        """Return the first token of the windows at positions `index` (any shape), counted over all epochs."""
        epochs, position = np.divmod(index, self.n_windows)
        starts = np.empty_like(position)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            few = self.n_windows <= _MAX_SHUFFLED_WINDOWS
            n_keys = self.n_windows if few else _FEISTEL_ROUNDS
            *keys, offset, first, last = np.random.SeedSequence(
                (self.seed, int(epoch))
            ).generate_state(n_keys + 3, np.uint64)
            at = position[chosen]
            window = np.argsort(keys)[at] if few else permute(at, self.n_windows, np.array(keys))
            before = int(offset) % (self.overlap + 1)  # the part of the overlap in the first place
            is_after_first = window > int(first) % self.n_edge
            is_after_last = window >= self.n_windows - 1 - int(last) % self.n_edge
            moved = before * is_after_first + (self.overlap - before) * is_after_last
            starts[chosen] = np.clip(window * self.block_size - moved, 0, self.last_start)
        return starts


def permute(index: Array, n: int, keys: np.ndarray[Any, np.dtype[np.uint64]]) -> Array:
    """Apply a keyed pseudo-random permutation of range(n) to `index`.

    A Feistel network on the least even number of bits that holds n, repeated until the result is below n (cycle
    walking). Source: Black & Rogaway, 2002, https://doi.org/10.1007/3-540-45760-7_9
    """
    half = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))
    mask = (np.uint64(1) << half) - np.uint64(1)

    def shuffle(x: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        left, right = x >> half, x & mask
        for key in keys:
            mixed = (right + key) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ (mixed >> np.uint64(32)) & mask
        return left << half | right

    x = shuffle(index.astype(np.uint64))
    while (outside := x >= n).any():
        x[outside] = shuffle(x[outside])
    return x.astype(np.int64)


@dataclass(eq=False, kw_only=True)
class _RankBatches:
    """The batches of one rank, which reads their rows rank, rank + world_size, …"""

    tokens: Tokens = field(kw_only=False)  # of the split, (N,)
    batch_size: int  # windows per batch over all ranks
    rank: int
    world_size: int
    device: torch.device


@dataclass(eq=False, kw_only=True)
class Batches(_RankBatches):
    """Iterate over the training batches of one rank, as (tokens, targets), (B, T) each.

    The ranks share the windows of a batch as evenly as possible: 12 on 5 ranks are 3, 3, 2, 2 and 2.
    """

    order: WindowOrder = field(kw_only=False)
    first: Callable[[], int]  # returns the index of the first batch when iteration starts
    stop: int  # number of batches of the whole run
    repeat: int  # number of batches that are repeated; 0 reads all

    def __post_init__(self) -> None:
        self.rows = np.arange(self.rank, self.batch_size, self.world_size)
        self.weight = (
            len(self.rows) * self.world_size / self.batch_size
        )  # of this rank in a mean over ranks
        self.read_windows = WindowReader(self.tokens, self.order.block_size, self.device)

    def __len__(self) -> int:
        return self.stop

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.read_windows(self._starts())

    def _starts(self) -> Iterator[Array]:
        n = max(1, _ROWS_PER_LOOKUP // self.batch_size)
        for begin in range(self.first(), self.stop, n):
            batches = np.arange(begin, min(begin + n, self.stop)) % (self.repeat or self.stop)
            yield from self.order.starts(batches[:, None] * self.batch_size + self.rows)


@dataclass(eq=False, kw_only=True)
class ValidationBatches(_RankBatches):
    """Iterate over the validation split in non-overlapping windows, as (tokens, targets), (B, T) each.

    A shorter last window is padded to (T,), with targets `IGNORE_INDEX`. The rows of a batch are spread over the
    ranks, so that all ranks have equally many batches, and the windows are the same on any number of ranks. A rank
    without a row has one of padding alone, because not every kernel accepts an empty batch.
    The split has at least two tokens.
    """

    block_size: int
    n_batches: int | None = (
        None  # maximum, whose windows are spread evenly over the split; None: no maximum
    )

    def __post_init__(self) -> None:
        self.n_targets = len(self.tokens) - 1
        total = -(-self.n_targets // self.block_size)
        kept = total if self.n_batches is None else min(total, self.n_batches * self.batch_size)
        self.windows = np.arange(kept) * total // kept
        self.read_windows = WindowReader(self.tokens, self.block_size, self.device)

    def __len__(self) -> int:
        return -(-len(self.windows) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        shares = [
            self.windows[begin : begin + self.batch_size][self.rank :: self.world_size]
            * self.block_size
            for begin in range(0, len(self.windows), self.batch_size)
        ]
        batches = [starts if len(starts) else np.array([self.n_targets]) for starts in shares]
        for starts, (tokens, targets) in zip(batches, self.read_windows(batches), strict=True):
            if (padding := int(starts[-1]) + self.block_size - self.n_targets) > 0:
                targets = targets.clone()  # it shares memory with tokens
                targets[-1, -padding:] = IGNORE_INDEX
            yield tokens, targets


class WindowReader:
    """Read batches of windows with one indexed read each; beyond the end the last token is repeated.

    On a CPU, and for a corpus too large for the device, the tokens stay a memory map that threads read ahead;
    otherwise they are copied to the device once.
    """

    def __init__(self, tokens: Tokens, block_size: int, device: torch.device) -> None:
        self.tokens, self.device, self.window = tokens, device, np.arange(block_size + 1)
        self.on_device: Tensor | None = None
        if device.type != "cpu" and len(tokens) <= _MAX_DEVICE_TOKENS:
            self.on_device = torch.from_numpy(tokens[:].astype(np.int32)).to(device)

    def __call__(self, batches: Iterable[Array]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (tokens, targets), (B, T) each, of the windows that start at the tokens of each batch, (B,)."""
        indices = (
            np.minimum(starts[:, None] + self.window, len(self.tokens) - 1) for starts in batches
        )  # (B, T + 1)
        if (tokens := self.on_device) is not None:
            read: Iterator[Tensor] = (tokens[self._copy(index)].long() for index in indices)
        else:
            read = map(
                self._copy,
                map_in_threads(
                    lambda index: self.tokens[index].astype(np.int64), indices, _READERS
                ),
            )
        for window in read:
            yield window[:, :-1], window[:, 1:]

    def _copy(self, values: Array) -> Tensor:
        tensor = torch.from_numpy(values)
        if self.device.type == "cuda":  # a copy from pageable memory may wait for the GPU
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)
