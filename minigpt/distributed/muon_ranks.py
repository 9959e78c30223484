"""Muon's matrices between ranks: each orthogonalizes its share of them, and they exchange the results."""

from collections.abc import Sequence
from itertools import accumulate

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
        """Orthogonalize 1/n of the matrices (R, C), and get the others."""
        matrices, group = torch.stack(updates), self.group  # (N, R, C)
        shares = matrices.tensor_split(group.size())
        mine = orthogonalize(shares[group.rank()], steps)
        whole = exchange(
            mine.flatten().repeat(group.size()),  # to each rank the same
            [mine.numel()] * group.size(),
            [share.numel() for share in shares],
            group,
        )
        return list(whole.view_as(matrices))


class Shards(OneRank):
    """Ranks that hold some rows of every matrix, as under FSDP2."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self.group, self.rank = group, group.rank()

    def rows_of_ranks(self, matrices: list[int]) -> list[list[int]]:
        """Return how many rows of concatenated matrices each rank holds: FSDP2 splits as torch.chunk."""
        n, ends = self.group.size(), list(accumulate(matrices))
        share = -(-sum(matrices) // n)
        return [
            [max(0, min(end, (rank + 1) * share) - max(start, rank * share)) for rank in range(n)]
            for start, end in zip([0, *ends], ends, strict=False)
        ]

    def orthogonalize(
        self, updates: list[Tensor], rows: list[list[int]], steps: int
    ) -> list[Tensor]:
        """Get 1/n of the matrices whole, orthogonalize them, and give the rows back; (r, C) of each matrix here."""
        group, columns = self.group, updates[0].size(1)
        n, me = group.size(), group.rank()
        numel = [[count * columns for count in counts] for counts in rows]  # [matrix][rank]
        owned = [
            numel[len(numel) * i // n : len(numel) * (i + 1) // n] for i in range(n)
        ]  # by each rank
        mine = owned[me]
        to_owners = [sum(counts[me] for counts in matrices) for matrices in owned]
        from_ranks = [sum(counts[rank] for counts in mine) for rank in range(n)]
        gathered = exchange(
            torch.cat([update.flatten() for update in updates]), to_owners, from_ranks, group
        )
        parts = [
            part.split([counts[rank] for counts in mine])
            for rank, part in enumerate(gathered.split(from_ranks))
        ]
        whole = torch.cat([torch.cat(matrix) for matrix in zip(*parts, strict=True)] or [gathered])
        whole = orthogonalize(
            whole.view(len(mine), -1 if mine else 1, columns), steps
        )  # (N/n, R, C)
        back = [matrix.flatten().split(counts) for matrix, counts in zip(whole, mine, strict=True)]
        sent = torch.cat(
            [part for parts in zip(*back, strict=True) for part in parts] or [gathered]
        )
        received = exchange(sent, from_ranks, to_owners, group).split(
            [counts[me] for counts in numel]
        )
        return [result.view_as(update) for result, update in zip(received, updates, strict=True)]


def exchange(
    sent: Tensor, sizes: Sequence[int], received: Sequence[int], group: distributed.ProcessGroup
) -> Tensor:
    """Send `sizes` elements to the ranks, and return the `received` elements from them, in the order of the ranks."""
    result = sent.new_empty(sum(received))
    distributed.all_to_all_single(result, sent, list(received), list(sizes), group=group)
    return result
