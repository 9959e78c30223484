"""Which windows of the corpus make batch i. Batches are a pure function of (seed, step, rank, world size).

An epoch cuts the training tokens into non-overlapping windows at a fresh offset and reads every window
once, in a fresh order. The order of many windows is a keyed permutation evaluated at a position, not a
shuffled list, so a batch costs the same from a corpus of any size, and a resumed run needs only its step.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minigpt.data.token_files import Tokens

Array = np.ndarray[Any, np.dtype[np.int64]]

_ROUNDS = 4
_SHUFFLED = 1024  # windows up to which the order is a shuffle: so few rounds are biased on very few windows
IGNORED = -100  # a target that torch's cross_entropy leaves out
_PLANNED = 4096  # rows whose windows are worked out at a time
_ON_DEVICE = 1 << 28  # tokens; a larger corpus stays on disk and its batches are copied to the GPU


class WindowOrder:
    """The windows of `block_size` + 1 tokens in the order that training reads them.

    Args:
        n_tokens: length of the training split, more than block_size.
        block_size: window length T, tokens; a window holds one more, the last target.
        seed: another seed is another order.
    """

    def __init__(self, n_tokens: int, block_size: int, seed: int) -> None:
        self.block_size, self.seed = block_size, seed
        # Every offset below block_size leaves room for this many windows, so all epochs are equally long.
        self.n_windows = max(1, (n_tokens - block_size) // block_size)
        self.n_offsets = min(block_size, n_tokens - self.n_windows * block_size)

    def starts(self, index: Array) -> Array:
        """The first token of the windows at positions `index` (any shape) of the run, epochs on end."""
        epochs, position = np.divmod(index, self.n_windows)
        starts = np.empty_like(position)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            shuffled = self.n_windows <= _SHUFFLED
            n_keys = self.n_windows if shuffled else _ROUNDS
            *keys, offset = np.random.SeedSequence((self.seed, int(epoch))).generate_state(n_keys + 1, np.uint64)
            if shuffled:
                window = np.argsort(keys)[position[chosen]]
            else:
                window = permute(position[chosen], self.n_windows, np.array(keys))
            starts[chosen] = window * self.block_size + int(offset) % self.n_offsets
        return starts


def permute(index: Array, n: int, keys: np.ndarray[Any, np.dtype[np.uint64]]) -> Array:
    """Where a keyed pseudo-random permutation of range(n) sends `index`.

    A Feistel network on the least even number of bits that holds n, walked until it lands below n
    (Black & Rogaway, 2002: cycle walking).
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


class Batches:
    """The training batches of one rank from `first()` to `stop`, as (tokens, targets), (B, T) each.

    Args:
        tokens: the training split, (N,).
        order: which window comes when.
        batch_size: windows of a batch over all ranks; this rank reads rows rank, rank + world_size, ….
        first: position of the batch to begin with, asked when iteration begins.
        stop: number of batches of the whole run.
        repeat: read only the first so many batches, over and over; 0 reads all.
        left_out: numbers of batches in the order that are not read; the others move up.
        device: where the batches are needed.
    """

    def __init__(
        self,
        tokens: Tokens,
        order: WindowOrder,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        first: Callable[[], int],
        stop: int,
        repeat: int,
        left_out: Collection[int] = (),
        device: torch.device,
    ) -> None:
        self.repeat, self.left_out = repeat, left_out
        self.order, self.batch_size, self.first, self.stop = order, batch_size, first, stop
        self.rows = np.arange(rank, batch_size, world_size)
        self.gather = WindowReader(tokens, order.block_size, device)

    def __len__(self) -> int:
        return self.stop

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        planned = max(1, _PLANNED // self.batch_size)
        for begin in range(self.first(), self.stop, planned):
            batches = past(np.arange(begin, min(begin + planned, self.stop)), self.left_out)
            if self.repeat:
                batches %= self.repeat
            for starts in self.order.starts(batches[:, None] * self.batch_size + self.rows):
                yield self.gather(starts)


def past(batches: Sequence[int] | Array, left_out: Collection[int]) -> Array:
    """The numbers in the order of the batches that are read, where some are left out."""
    batches = np.asarray(batches)
    for number in sorted(left_out):
        batches = batches + (batches >= number)
    return batches


class ValidationBatches:
    """The validation split in non-overlapping windows, as (tokens, targets), (B, T) each; every target once.

    Where block_size does not divide the split, the last window is shorter: it is padded to (T,), with targets
    `IGNORED`, so that all batches have one width. Every batch is spread over the ranks row by row: all ranks see
    equally many batches, and the windows are the same on any number of ranks.

    Args:
        tokens: the validation split, (N,), at least two tokens.
        n_batches: evaluate at most this many batches, their windows spread evenly over the split; None: all.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        block_size: int,
        batch_size: int,
        rank: int,
        world_size: int,
        device: torch.device,
        n_batches: int | None = None,
    ) -> None:
        self.n_targets = len(tokens) - 1
        total = -(-self.n_targets // block_size)
        kept = total if n_batches is None else min(total, n_batches * batch_size)
        self.windows = np.arange(kept) * total // kept
        self.block_size, self.batch_size = block_size, batch_size
        self.rank, self.world_size = rank, world_size
        self.gather = WindowReader(tokens, block_size, device)

    def __len__(self) -> int:
        return -(-len(self.windows) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for begin in range(0, len(self.windows), self.batch_size):
            starts = self.windows[begin : begin + self.batch_size][self.rank :: self.world_size] * self.block_size
            tokens, targets = self.gather(starts)
            if len(starts) and (padding := int(starts[-1]) + self.block_size - self.n_targets) > 0:
                targets = targets.clone()  # it shares its memory with tokens
                targets[-1, -padding:] = IGNORED
            yield tokens, targets


class WindowReader:
    """Cut windows out of a row of tokens with one indexed read; past its end the last token is repeated.

    On a CPU, and for a corpus too large for the device, the tokens stay a memory map; otherwise they live
    on the device and a batch never crosses the bus.
    """

    def __init__(self, tokens: Tokens, block_size: int, device: torch.device) -> None:
        self.device, self.window = device, np.arange(block_size + 1)
        self.on_device: Tensor | None = None
        if device.type != "cpu" and len(tokens) <= _ON_DEVICE:
            self.on_device = torch.from_numpy(tokens[:].astype(np.int32)).to(device)
        self.tokens = tokens

    def __call__(self, starts: Array) -> tuple[Tensor, Tensor]:
        index = np.minimum(starts[:, None] + self.window, len(self.tokens) - 1)  # (B, T + 1)
        if self.on_device is not None:
            window = self.on_device[torch.from_numpy(index).to(self.device, non_blocking=True)].long()
        else:
            window = torch.from_numpy(self.tokens[index].astype(np.int64))
            if self.device.type == "cuda":
                window = window.pin_memory().to(self.device, non_blocking=True)
        return window[:, :-1], window[:, 1:]
