"""The first of the five notebooks from which minigpt started, as a configuration of its one
attention.

Outputs equal the figures that it prints, to 4 decimals. The code of docs/attention.md, which
test_readme.py runs, prints more of them, and those of the other notebooks.
"""

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from minigpt.model.attention import MultiHeadAttention

# Notebook 000: three tokens of width 2, no biases, seed 42.
TOKENS = torch.tensor([[[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]]])  # (1, 3, 2)
THREE_HEADS = [
    [1.0100, 1.0641, -0.7081, -0.8268, 0.6226, 0.1312],
    [0.2040, 0.7057, -0.7417, -0.9193, 0.5522, 0.2499],
    [3.4989, 2.2427, -0.7190, -0.8447, 0.5669, 0.2324],
]


def test_000_self_attention_with_and_without_a_mask():
    assert_printed(full_width_heads(3)(TOKENS)[0], THREE_HEADS)
    plain = full_width_heads(1)
    causal = full_width_heads(1, causal=True)
    weights = [[0.3573, 0.4011, 0.2416], [0.3410, 0.6047, 0.0542], [0.0722, 0.0320, 0.8959]]
    assert_printed(plain.attention_weights(TOKENS)[0, 0], weights)
    masked = [[1, 0, 0], [0.3606, 0.6394, 0], weights[2]]
    assert_printed(causal.attention_weights(TOKENS)[0, 0], masked)
    visible = torch.ones(3, 3, dtype=torch.bool).tril()  # true where the notebook's mask is false
    for output in (causal(TOKENS)[0], plain(TOKENS, mask=visible)[0]):
        assert_printed(output, [[0.6038, 0.7434], [-0.0062, 0.6072], [3.4989, 2.2427]])


def full_width_heads(n_head: int, *, causal: bool = False) -> MultiHeadAttention:
    """Return concatenated heads as wide as the tokens, with notebook 000's weights."""
    torch.manual_seed(42)
    drawn = [nn.Linear(2, 2, bias=False).weight for _ in range(3 * n_head)]
    attention = MultiHeadAttention(2, n_head, head_dim=2, bias=False, causal=causal)
    attention.out = nn.Identity()
    attention.qkv.weight.data = torch.cat(drawn[::3] + drawn[1::3] + drawn[2::3]).detach()
    return attention


def assert_printed(actual: Tensor, figures: object) -> None:
    """Assert that values equal the figures that a notebook prints, to 4 decimals."""
    assert_close(actual, torch.tensor(figures, dtype=actual.dtype), atol=5.5e-5, rtol=0)
