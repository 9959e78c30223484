"""Muon's matrices between ranks: each orthogonalizes its share, and they exchange the results.

Shapes: n ranks, N matrices of one shape (R, C), M of them orthogonalized by this rank.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from minigpt.training.optim import OneRank, orthogonalize


class Replicas(OneRank):
    """Ranks that hold the same gradients, as under DDP."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self.group = group

    def orthogonalize(
        self, updates: list[Tensor], rows: list[list[int]], steps: int
    ) -> list[Tensor]:
        """Orthogonalize 1/n of the matrices, and get the others."""
        n = self.group.size()
        matrices = torch.stack(updates)  # (N, R, C)
        shares = matrices.tensor_split(n)
        mine = orthogonalize(shares[self.group.rank()], steps)  # (M, R, C)
        copies = mine.repeat(n, 1, 1)  # (n·M, R, C): the same for each rank
        return list(exchange(copies, [len(mine)] * n, list(map(len, shares)), self.group))


class Shards(OneRank):
    """Ranks that hold some rows of every matrix, as under FSDP2."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()

    def rows_of_ranks(self, matrices: list[int]) -> list[list[int]]:
        """Return how many rows of concatenated matrices each rank holds, as torch.chunk splits."""
        n = self.group.size()
        share = -(-sum(matrices) // n)
        held = []
        start = 0
        for rows in matrices:
            overlaps = [
                min(start + rows, (i + 1) * share) - max(start, i * share) for i in range(n)
            ]
            held.append([max(0, overlap) for overlap in overlaps])
            start += rows
        return held

    def orthogonalize(
        self, updates: list[Tensor], rows: list[list[int]], steps: int
    ) -> list[Tensor]:
        """Get 1/n of the matrices whole, orthogonalize them, and give the rows back.

        Args:
            updates: the rows (r, C) of each matrix that this rank holds.
            rows: how many rows of each matrix each rank holds.
        """
        n = self.group.size()
        # Rank i orthogonalizes the matrices of owned[i] (M, n): how many rows the n ranks hold.
        owned = torch.tensor(rows).tensor_split([len(rows) * i // n for i in range(1, n)])
        mine = owned[self.rank]
        # Each rank sends its rows of every matrix to the rank that orthogonalizes the matrix.
        to_owners = [int(held[:, self.rank].sum()) for held in owned]
        from_ranks = mine.sum(dim=0).tolist()
        shards = exchange(torch.cat(updates), to_owners, from_ranks, self.group)  # (M·R, C)
        # They arrive by rank, and of each rank by matrix; the sort is by matrix, then by rank.
        matrix_of_row = torch.arange(len(mine)).repeat(n).repeat_interleave(mine.T.flatten())
        order = matrix_of_row.argsort(stable=True)  # (M·R,)
        whole = shards[order].unflatten(0, (len(mine), sum(rows[0])))  # (M, R, C)
        # The rows of the results go back the same way.
        shards[order] = orthogonalize(whole, steps).flatten(0, 1)  # (M·R, C)
        results = exchange(shards, from_ranks, to_owners, self.group)
        return list(results.split([len(update) for update in updates]))


def exchange(
    sent: Tensor, sizes: Sequence[int], received: Sequence[int], group: distributed.ProcessGroup
) -> Tensor:
    """Send `sizes` rows to the ranks; return the `received` rows from them, by rank."""
    result = sent.new_empty(sum(received), *sent.shape[1:])
    distributed.all_to_all_single(result, sent, list(received), list(sizes), group=group)
    return result
