"""What is added to the embedding of a token: its n-grams, and the embeddings before it.

Shapes: B batch, T time, C n_embd.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minigpt.model.config import GPTConfig
from minigpt.model.ops import apply_dropout


class NGramEmbedding(nn.Module):
    """Embed the last 2 … `ngram` tokens: each n-gram is hashed into a table.

    A short training spends most of its steps on n-gram statistics; this makes them an input of the
    first block.

    Source: Byte Latent Transformer, section 3.2.1, https://arxiv.org/abs/2412.09871
    """

    MULTIPLIER = 2_654_435_761  # of Knuth's multiplicative hash
    PRIME = 2_147_483_647  # 2³¹ - 1

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.orders = config.ngram - 1
        self.buckets = config.ngram_buckets
        self.dropout = config.ngram_dropout
        self.table = nn.Embedding(self.orders * self.buckets, config.ngram_dim)
        self.out = nn.Linear(self.orders * config.ngram_dim, config.n_embd, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ids (B, orders + T), the first `orders` of which are context alone, to (B, T, C)."""
        hashed = tokens[:, self.orders :]  # (B, T)
        rows = []
        for n in range(1, self.orders + 1):
            # No overflow: the product is below 2⁶³, for ids below 2³¹.
            hashed = (hashed * self.MULTIPLIER + tokens[:, self.orders - n : -n] + 1) % self.PRIME
            rows.append(hashed % self.buckets + (n - 1) * self.buckets)
        embedded = self.table(torch.stack(rows, dim=-1))  # (B, T, orders, ngram_dim)
        if self.training and self.dropout:
            whole = embedded.new_ones(*embedded.shape[:3], 1)  # an n-gram is dropped whole
            embedded = embedded * apply_dropout(whole, self.dropout)
        return self.out(embedded.flatten(2))  # (B, T, C)


def smear(x: Tensor, padded: Tensor, factors: Sequence[Tensor] | nn.ParameterList) -> Tensor:
    """Add to each position of x (B, T, C) the k before it, times k factors (C,) each.

    Args:
        padded: (B, k + T, C): the k positions before x, and x.
    """
    T = x.size(1)
    for i, factor in enumerate(factors):  # the last is for the previous position
        x = x + factor * padded[:, i : i + T]
    return x
