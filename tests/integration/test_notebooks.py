"""The last of the five notebooks from which minigpt started: twenty heads as wide as the model in a post-norm block.

It prints no figures, so the test compares with its formulas. docs/attention.md has the figures of the others, to 4
decimals, and test_docs.py runs its code.
"""

import pytest
import torch
from tolerance import assert_near
from torch import Tensor, nn

from minigpt import GPTConfig
from minigpt.attention import MultiHeadAttention
from minigpt.model import Block, Norm
from minigpt.ops import EPS


@pytest.mark.parametrize("causal", [False, True])
def test_the_post_norm_block_of_notebook_004_equals_its_formulas(causal: bool):
    torch.manual_seed(0)
    # The notebook has biases in the MLP and the norms but not in attention: biases of zero there.
    # Its block is bidirectional, which a language model must not be; a block is causal by default.
    block = Block(GPTConfig(n_embd=10, n_head=20, head_dim=10, norm_position="post", activation="relu"))
    assert block.attention.causal
    block.attention.causal = causal
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    nn.init.zeros_(block.attention.qkv.bias)
    nn.init.zeros_(block.attention.out.bias)
    assert block.mlp.up.weight.shape == (40, 10)
    x = torch.rand(8, 5, 10)
    y = normalized(x + wide_heads(block.attention, x, causal=causal), block.norm_1)
    hidden = (y @ block.mlp.up.weight.T + block.mlp.up.bias).clamp(min=0)
    expected = normalized(y + hidden @ block.mlp.down.weight.T + block.mlp.down.bias, block.norm_2)
    assert_near(block(x, rotary=None, cache=None), expected, terms=10 + 10 + 5 + 200 + 10 + 40)


def wide_heads(attention: MultiHeadAttention, x: Tensor, *, causal: bool = False) -> Tensor:
    """Compute notebook 004's attention, one head at a time and without biases."""
    w_q, w_k, w_v = (w.split(10) for w in attention.qkv.weight.split(200))
    outputs = []
    for head in range(20):
        q, k, v = x @ w_q[head].T / 10**0.25, x @ w_k[head].T / 10**0.25, x @ w_v[head].T
        raised = (q @ k.mT).exp()
        raised = raised.tril() if causal else raised
        outputs.append(raised / raised.sum(-1, keepdim=True) @ v)
    return torch.cat(outputs, -1) @ attention.out.weight.T


def normalized(x: Tensor, norm: Norm) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.weight + norm.bias
