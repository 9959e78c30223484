"""The five notebooks from which minigpt started, each as a configuration of its one attention.

The number in a test's name is that of the notebook. Inputs and seeds are the notebook's, and outputs equal the
figures that it prints, to 4 decimals. Where a notebook sets no seed, its figures are not reproducible: such a test
compares with the formula instead. The code of docs/attention.md, which test_docs.py runs, shows the rest.
"""

import math

import pytest
import torch
from tolerance import assert_near
from torch import Tensor, nn
from torch.testing import assert_close

from minigpt import GPTConfig
from minigpt.attention import MultiHeadAttention, attend, attend_explicit
from minigpt.model import Block, Norm
from minigpt.ops import EPS

# Notebook 000: three tokens of width 2, no biases, seed 42.

TOKENS = torch.tensor([[[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]]])  # (1, 3, 2)
PLAIN = [[1.0100, 1.0641], [0.2040, 0.7057], [3.4989, 2.2427]]
MASKED = [[0.6038, 0.7434], [-0.0062, 0.6072], [3.4989, 2.2427]]
THREE_HEADS = [
    [1.0100, 1.0641, -0.7081, -0.8268, 0.6226, 0.1312],
    [0.2040, 0.7057, -0.7417, -0.9193, 0.5522, 0.2499],
    [3.4989, 2.2427, -0.7190, -0.8447, 0.5669, 0.2324],
]


def test_000_self_attention():
    attention = full_width_heads(1)
    w_q, w_k, w_v = attention.qkv.weight.split(2)
    assert_printed(w_q.T, [[0.5406, -0.1657], [0.5869, 0.6496]])
    assert_printed(w_k.T, [[-0.1549, -0.3443], [0.1427, 0.4153]])
    assert_printed(w_v.T, [[0.6233, 0.6146], [-0.5188, 0.1323]])
    q, k, v = attention.qkv(TOKENS)[0].split(2, dim=-1)
    assert_printed(q, [[0.7621, -0.0428], [1.1063, 0.7890], [1.1164, -2.1336]])
    assert_printed(k, [[-0.1469, -0.3038], [0.1057, 0.3685], [-0.9914, -2.4152]])
    assert_printed(v, [[0.6038, 0.7434], [-0.3502, 0.5303], [3.8695, 2.4246]])
    weights = attention.attention_weights(TOKENS)[0, 0]
    assert_scores(weights, [[-0.0700, 0.0458, -0.4612], [-0.2844, 0.2883, -2.1230], [0.3424, -0.4725, 2.8610]])
    assert_printed(weights, [[0.3573, 0.4011, 0.2416], [0.3410, 0.6047, 0.0542], [0.0722, 0.0320, 0.8959]])
    assert_printed(attention(TOKENS)[0], PLAIN)


def test_000_masked_self_attention():
    causal = full_width_heads(1, causal=True)
    assert_printed(causal(TOKENS)[0], MASKED)
    assert_printed(causal.attention_weights(TOKENS)[0, 0], [[1, 0, 0], [0.3606, 0.6394, 0], [0.0722, 0.0320, 0.8959]])
    visible = torch.ones(3, 3, dtype=torch.bool).tril()  # true where the notebook's mask is false
    assert_printed(full_width_heads(1)(TOKENS, mask=visible)[0], MASKED)


def test_000_concatenated_heads_of_full_width():
    assert_printed(full_width_heads(3)(TOKENS)[0], THREE_HEADS)


# Notebook 001: six words of width 16, queries and keys of width 24, values of 28, seed 123.

CONTEXT = [
    *[-1.5993, 0.0156, 1.2670, 0.0032, -0.6460, -1.1407, -0.4908],
    *[-1.4632, 0.4747, 1.1926, 0.4506, -0.7110, 0.0602, 0.7125],
    *[-0.1628, -2.0184, 0.3838, -2.1188, -0.8136, -1.5694, 0.7934],
    *[-0.2911, -1.3640, -0.2366, -0.9564, -0.5265, 0.0624, 1.7084],
]


def test_001_scores_weights_and_context_of_the_second_word():
    torch.manual_seed(123)
    words = nn.Embedding(6, 16).weight.detach()[[0, 4, 5, 2, 1, 3]]  # (6, 16)
    torch.manual_seed(123)
    w_q, w_k, w_v = (torch.rand(width, 16) for width in (24, 24, 28))
    q, k, v = words[1:2] @ w_q.T, words @ w_k.T, words @ w_v.T
    q, k, v = (x[None, None] for x in (q, k, v))  # (1, 1, 1, 24), (1, 1, 6, 24), (1, 1, 6, 28)
    scores = [8.5808, -7.6597, 3.2558, 1.0395, 11.1466, -0.4800]
    assert_printed((q @ k.mT).flatten(), scores)
    assert_scores(attend_explicit(q.double(), k.double(), v.double(), scale=1.0)[1].view(1, 6), [scores])
    y, weights = attend_explicit(q, k, v)
    assert_printed(weights.flatten(), [0.2912, 0.0106, 0.0982, 0.0625, 0.4917, 0.0458])
    assert_printed(y.flatten(), CONTEXT)
    assert_printed(attend(q, k, v).flatten(), CONTEXT)


# Notebook 002: a causal mask, worked by hand.


def test_002_the_mask_computed_by_hand():
    scores = torch.tensor([[[[7.0, -8, 6], [-3, 2, 4], [1, 6, -2]]]], dtype=torch.float64)
    unit = torch.eye(3, dtype=torch.float64)[None, None]  # keys that leave the scores as they are
    before = attend_explicit(scores, unit, unit, scale=1.0)[1][0, 0]
    # As printed in the notebook, with two to seven decimals.
    printed = [[(0.73, 2), (2e-7, 7), (0.27, 2)], [(8e-4, 4), (0.12, 2), (0.88, 2)], [(0.007, 3), (0.99, 2), None]]
    for row, figures in zip(before.tolist(), printed, strict=True):
        for weight, figure in zip(row, figures, strict=True):
            assert figure is None or round(weight, figure[1]) == figure[0]
    # The last weight is e⁻² / (e + e⁶ + e⁻²) = 0.0003; the notebook prints 0.003.
    after = [[1, 0, 0], [0.0067, 0.9933, 0], [0.0067, 0.9930, 0.0003]]
    assert_printed(before[2], after[2])
    y, weights = attend_explicit(scores, unit, unit, scale=1.0, causal=True)
    assert_printed(weights[0, 0], after)
    assert_close(y, weights)
    assert_printed(attend(scores, unit, unit, scale=1.0, causal=True)[0, 0], after)


# Notebook 003: the mean of the past, seed 42; then a causal head.

RUNNING_MEAN = [
    *[[1.9269, 1.4873], [1.4138, -0.3091], [1.1687, -0.6176], [0.8657, -0.8644]],
    *[[0.5422, -0.3617], [0.3864, -0.5354], [0.2272, -0.5388], [0.1027, -0.3762]],
]
EVEN = [[round(1 / (t + 1), 4) if s <= t else 0 for s in range(8)] for t in range(8)]


def test_003_the_running_mean_three_ways_is_attention_with_zero_queries():
    torch.manual_seed(42)
    x = torch.randn(4, 8, 2)
    loop = torch.stack([torch.stack([row[: t + 1].mean(0) for t in range(8)]) for row in x])
    triangle = torch.ones(8, 8).tril() / torch.arange(1, 9)[:, None]
    softmax = torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1) == 1, -math.inf).softmax(-1)
    heads = x[:, None]  # (4, 1, 8, 2)
    y, weights = attend_explicit(torch.zeros_like(heads), heads, heads, causal=True)
    assert_printed(weights[0, 0], EVEN)
    for figures in (y, attend(torch.zeros_like(heads), heads, heads, causal=True)):
        assert_printed(figures[0, 0], RUNNING_MEAN)
        for mean in (loop, triangle @ x, softmax @ x):
            assert_close(figures[:, 0], mean)


# Notebook 004: twenty heads, each as wide as the model, in a block that normalizes last; no seeds.


def test_004_twenty_heads_as_wide_as_the_model():
    attention = MultiHeadAttention(10, 20, head_dim=10, bias=False, causal=False)
    assert attention.qkv.weight.shape == (3 * 200, 10)
    assert attention.out.weight.shape == (10, 200)
    x = torch.rand(8, 5, 10)
    assert_near(attention(x), wide_heads(attention, x), terms=10 + 10 + 5 + 200)


@pytest.mark.parametrize("causal", [False, True])
def test_004_the_post_norm_block(causal: bool):
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


def assert_printed(actual: Tensor, figures: object) -> None:
    """Assert that values equal the figures that a notebook prints, to 4 decimals."""
    assert_close(actual, torch.tensor(figures, dtype=actual.dtype), atol=5.5e-5, rtol=0)


def assert_scores(weights: Tensor, figures: list[list[float]]) -> None:
    """Assert that rows of weights are the softmax of scores: their logarithms differ by a constant per row."""
    found, expected = weights.log(), torch.tensor(figures, dtype=weights.dtype)
    assert_close(found - found[:, :1], expected - expected[:, :1], atol=1.1e-4, rtol=0)


def full_width_heads(n_head: int, *, causal: bool = False) -> MultiHeadAttention:
    """Return concatenated heads as wide as the tokens, with notebook 000's weights."""
    torch.manual_seed(42)
    drawn = [[nn.Linear(2, 2, bias=False).weight for _ in "qkv"] for _ in range(n_head)]
    attention = MultiHeadAttention(2, n_head, head_dim=2, bias=False, causal=causal)
    attention.out = nn.Identity()
    attention.qkv.weight.data = torch.cat([head[i] for i in range(3) for head in drawn]).detach()
    return attention


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
