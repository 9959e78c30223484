"""Batches as a pure function of (seed, index of the batch, rank, world size).

An optimizer step takes `accumulate_grad_batches` of them. An epoch cuts the training tokens into
windows at a random offset and reads each window once, in random order. The order of many windows is
a keyed permutation evaluated at a position, not a shuffled list, so the cost of a batch does not
depend on the size of the corpus, and a resumed run needs only its step.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minigpt.data.token_files import Tokens
from minigpt.utils.threads import map_in_threads

Array = NDArray[np.int64]

IGNORE_INDEX = -100  # torch's cross_entropy leaves out this target
_MAX_SHUFFLED_WINDOWS = 1024  # a Feistel network of few rounds is biased on very few windows
_ROWS_PER_LOOKUP = 4096  # rows whose windows are computed at a time
_MAX_DEVICE_TOKENS = 1 << 28  # a larger corpus stays on disk; its batches are copied to the GPU


class WindowOrder:
    """The order in which training reads the windows of `block_size` + 1 tokens, new in every epoch.

    The windows of an epoch reach from the first token to the last, so that every token but the
    first is a target. Side by side they would be longer than the split, by `overlap` tokens. So
    they overlap at two of their boundaries, one near each end: each epoch draws which two, and how
    much of `overlap` is at the first of them, by which the windows between the two are moved. The
    training split has more tokens than one window.

    Args:
        moves: cut the text at new places in every epoch; False: windows are side by side.
    """

    def __init__(self, n_tokens: int, block_size: int, seed: int, *, moves: bool = True) -> None:
        self.block_size = block_size
        self.seed = seed
        self.last_start = n_tokens - 1 - block_size
        # So many windows that `overlap`, the range of the random offset, is at least half a window;
        # all epochs have the same number.
        least = block_size if moves else 0  # twice the least overlap
        self.n_windows = 1 - (-2 * self.last_start - least) // (2 * block_size)
        self.overlap = (self.n_windows - 1) * block_size - self.last_start
        # Boundaries at each end, one of which overlaps
        self.n_edge = max(1, min(8, self.n_windows - 1))

    def starts(self, index: Array) -> Array:
        """Return the first token of the windows at positions `index` over all epochs, any shape."""
        epochs, positions = np.divmod(index, self.n_windows)
        starts = np.empty_like(positions)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            starts[in_epoch] = self._epoch_starts(int(epoch), positions[in_epoch])
        return starts

    def _epoch_starts(self, epoch: int, position: Array) -> Array:  # (N,) to (N,)
        # The random numbers of the epoch: keys of its order, its offset, its places of overlap.
        is_shuffled = self.n_windows <= _MAX_SHUFFLED_WINDOWS
        n_keys = self.n_windows if is_shuffled else 4  # rounds of the Feistel network
        numbers = np.random.SeedSequence((self.seed, epoch)).generate_state(n_keys + 3, np.uint64)
        keys = numbers[:n_keys].astype(np.uint64)
        offset, first_place, last_place = numbers[n_keys:].tolist()

        # Which window of the text is read at each position.
        if is_shuffled:
            window = np.argsort(keys)[position]  # (N,)
        else:
            window = permute(position, self.n_windows, keys)  # (N,)

        # Adjacent windows would end beyond the text: after each place of overlap they move back.
        first_overlap = offset % (self.overlap + 1)
        last_overlap = self.overlap - first_overlap
        is_after_first = window > first_place % self.n_edge  # (N,)
        is_after_last = window >= self.n_windows - 1 - last_place % self.n_edge  # (N,)
        moved = first_overlap * is_after_first + last_overlap * is_after_last  # (N,)
        # Of a split with few windows, the two boundaries may be one, or in reverse order.
        return np.clip(window * self.block_size - moved, 0, self.last_start)  # (N,)


def permute(index: Array, n: int, keys: NDArray[np.uint64]) -> Array:
    """Apply a keyed pseudo-random permutation of range(n) to `index`, (N,).

    A Feistel network on the least even number of bits that holds n, repeated until the result is
    below n (cycle walking). Source: Black & Rogaway, 2002,
    https://doi.org/10.1007/3-540-45760-7_9
    """
    half = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))  # bits
    mask = (np.uint64(1) << half) - np.uint64(1)

    def shuffle(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x >> half, x & mask
        for key in keys:
            mixed = (right + key) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
            left ^= (mixed >> np.uint64(32)) & mask
            left, right = right, left
        return left << half | right

    x = shuffle(index.astype(np.uint64))
    while (outside := x >= n).any():
        x[outside] = shuffle(x[outside])
    return x.astype(np.int64)


@dataclass(eq=False)
class Batches:
    """Iterate over the training batches of one rank, as (tokens, targets), (B, T) each.

    The ranks share the rows of a batch as evenly as possible: 12 on 5 ranks are 3, 3, 2, 2 and 2.
    """

    tokens: Tokens  # of the training split, (N,)
    order: WindowOrder
    batch_size: int  # rows per batch over all ranks, a window each
    rank: int  # which reads rows rank, rank + world_size, …
    world_size: int
    device: torch.device
    first: Callable[[], int]  # returns the index of the first batch when iteration starts
    stop: int  # number of batches of the whole run
    repeat: int  # read only so many batches, again and again; 0: read all

    def __post_init__(self) -> None:
        self.rows = np.arange(self.rank, self.batch_size, self.world_size)  # (B,)
        # Of this rank in a mean over ranks.
        self.weight = len(self.rows) * self.world_size / self.batch_size
        self.read_windows = WindowReader(self.tokens, self.order.block_size, self.device)

    def __len__(self) -> int:
        return self.stop

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return self.read_windows(self._starts())

    def starts(self, batches: Array) -> Array:
        """Return the first tokens (n, B) of the windows of n batches, given by their index."""
        # Row r of batch i reads the window at position i * batch_size + r, over all epochs.
        repeated = batches % (self.repeat or self.stop)
        return self.order.starts(repeated[:, None] * self.batch_size + self.rows)

    def _starts(self) -> Iterator[Array]:
        n = max(1, _ROWS_PER_LOOKUP // self.batch_size)  # batches per lookup
        for begin in range(self.first(), self.stop, n):
            yield from self.starts(np.arange(begin, min(begin + n, self.stop)))  # (B,) each


@dataclass(eq=False)
class ValidationBatches:
    """Iterate over the validation split in non-overlapping windows, as (tokens, targets), (B, T).

    A shorter last window is padded to (T,), with targets `IGNORE_INDEX`. The rows of a batch are
    spread over the ranks, so that all ranks have equally many batches, and the windows are the same
    on any number of ranks. A rank without a row has one of padding alone, because not every kernel
    accepts an empty batch. The split has at least two tokens.
    """

    tokens: Tokens  # of the validation split, (N,)
    block_size: int
    batch_size: int  # windows per batch over all ranks
    rank: int  # which reads windows rank, rank + world_size, … of each batch
    world_size: int
    device: torch.device
    n_batches: int | None = None  # maximum, spread evenly over the split; None: no maximum

    def __post_init__(self) -> None:
        self.n_targets = len(self.tokens) - 1
        total = -(-self.n_targets // self.block_size)
        kept = total if self.n_batches is None else min(total, self.n_batches * self.batch_size)
        self.windows = np.arange(kept) * total // kept  # (kept,)
        self.read_windows = WindowReader(self.tokens, self.block_size, self.device)

    def __len__(self) -> int:
        return -(-len(self.windows) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        batches = []
        for begin in range(0, len(self.windows), self.batch_size):
            batch = self.windows[begin : begin + self.batch_size]  # of all ranks
            starts = batch[self.rank :: self.world_size] * self.block_size  # (B,)
            batches.append(starts if len(starts) else np.array([self.n_targets]))
        read = self.read_windows(batches)
        for starts, (tokens, targets, *documents) in zip(batches, read, strict=True):
            padding = int(starts[-1]) + self.block_size - self.n_targets
            if padding > 0:
                targets = targets.clone()  # it shares memory with tokens
                targets[-1, -padding:] = IGNORE_INDEX
            yield tokens, targets, *documents


class WindowReader:
    """Read batches of windows with one gather each; beyond the end the last token is repeated.

    On a CPU, and for a corpus too large for the device, the tokens stay a memory map that threads
    read ahead; otherwise they are copied to the device once.
    """

    def __init__(self, tokens: Tokens, block_size: int, device: torch.device) -> None:
        self.device = device
        self.window = np.arange(block_size + 1)  # (T + 1,)
        self.tokens = tokens
        self.batch = getattr(tokens, "batch", None)  # of windows of conversations
        self.on_device: Tensor | None = None
        # Windows of conversations are packed on the CPU
        if device.type != "cpu" and len(tokens) <= _MAX_DEVICE_TOKENS and not self.batch:
            self.on_device = torch.from_numpy(tokens[:].astype(np.int32)).to(device)  # (N,)

    def __call__(self, batches: Iterable[Array]) -> Iterator[tuple[Tensor, ...]]:
        """Yield (tokens, targets), (B, T) each, of the windows that start at each batch, (B,).

        Windows of conversations yield (tokens, targets, documents).
        """
        on_device = self.on_device
        if on_device is None:
            read_ahead = map_in_threads(self._gather, batches, threads=16)
            windows: Iterator[Tensor] = map(self._copy, read_ahead)
        else:
            windows = (on_device[self._copy(self._index(starts))].long() for starts in batches)
        for window in windows:  # (B, T + 1)
            if self.batch:
                yield self.batch(window)
            else:
                yield window[:, :-1], window[:, 1:]

    def _index(self, starts: Array) -> Array:
        return np.minimum(starts[:, None] + self.window, len(self.tokens) - 1)  # (B, T + 1)

    def _gather(self, starts: Array) -> Array:
        return self.tokens[self._index(starts)].astype(np.int64)  # (B, T + 1)

    def _copy(self, values: Array) -> Tensor:
        tensor = torch.from_numpy(values)
        if self.device.type == "cuda":  # a copy from pageable memory may wait for the GPU
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)
