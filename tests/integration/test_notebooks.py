"""The five notebooks from which minigpt started, each as a configuration of its one attention.

The number in a test's name is that of the notebook. Outputs equal the figures that it prints, to 4 decimals, or the
formula where it sets no seed. The code of docs/attention.md, which test_readme.py runs, prints more of these figures,
and those of notebooks 001 to 003.
"""

import pytest
import torch
from models import draw_weights
from tolerance import assert_near
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from minigpt import GPTConfig
from minigpt.attention import MultiHeadAttention
from minigpt.model import Block

# Notebook 000: three tokens of width 2, no biases, seed 42.
TOKENS = torch.tensor([[[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]]])  # (1, 3, 2)
THREE_HEADS = [
    [1.0100, 1.0641, -0.7081, -0.8268, 0.6226, 0.1312],
    [0.2040, 0.7057, -0.7417, -0.9193, 0.5522, 0.2499],
    [3.4989, 2.2427, -0.7190, -0.8447, 0.5669, 0.2324],
]


def test_000_self_attention_with_and_without_a_mask():
    assert_printed(full_width_heads(3)(TOKENS)[0], THREE_HEADS)
    plain, causal = full_width_heads(1), full_width_heads(1, causal=True)
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
    drawn = [[nn.Linear(2, 2, bias=False).weight for _ in "qkv"] for _ in range(n_head)]
    attention = MultiHeadAttention(2, n_head, head_dim=2, bias=False, causal=causal)
    attention.out = nn.Identity()
    attention.qkv.weight.data = torch.cat([head[i] for i in range(3) for head in drawn]).detach()
    return attention


@pytest.mark.parametrize("causal", [False, True])
def test_004_the_post_norm_block_with_twenty_heads_as_wide_as_the_model(causal):
    # The notebook's block is bidirectional, which a language model must not be; a block is causal by default.
    block = Block(GPTConfig(n_embd=10, n_head=20, head_dim=10, norm_position="post", activation="relu"))
    attention, up, down = block.attention, block.mlp.up, block.mlp.down
    assert attention.causal
    attention.causal = causal
    draw_weights(block, std=0.5)
    x = torch.rand(8, 5, 10)
    q, k, v = F.linear(x, attention.qkv.weight, attention.qkv.bias).view(8, 5, 3, 20, 10).permute(2, 0, 3, 1, 4)
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)  # (8, 5, 200)
    expected = x + F.linear(heads, attention.out.weight, attention.out.bias)
    expected = F.layer_norm(expected, (10,), block.norm_1.weight, block.norm_1.bias)
    expected = expected + F.linear(F.linear(expected, up.weight, up.bias).relu(), down.weight, down.bias)
    expected = F.layer_norm(expected, (10,), block.norm_2.weight, block.norm_2.bias)
    assert_near(block(x, rotary=None, cache=None), expected, terms=10 + 10 + 5 + 200 + 10 + 40)


def assert_printed(actual: Tensor, figures: object) -> None:
    """Assert that values equal the figures that a notebook prints, to 4 decimals."""
    assert_close(actual, torch.tensor(figures, dtype=actual.dtype), atol=5.5e-5, rtol=0)
