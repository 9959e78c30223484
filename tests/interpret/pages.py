"""Data for the tests of the attention page."""

import math

import torch

HOSTILE = [
    "</script>",
    "<!--<script>",
    "<img src=x onerror=\"document.title='broken'\">",
    "]]>",
    "{{policy}}",
    "{{data}}",
    "&lt;b&gt;",
    "'\"`\\",
    "\\u003c",
    "\u2028",
    "\ud800",
    "<svg/onload=\"document.title='broken'\">",
]


def attention(L, H, T, seed=0, sharpness=3.0):
    """Random causal weights (L, H, T, T), and probabilities (T,) with NaN for the first."""
    generator = torch.Generator().manual_seed(seed)
    scores = sharpness * torch.randn(L, H, T, T, generator=generator)
    weights = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
    probabilities = torch.rand(T, generator=generator)
    probabilities[0] = math.nan
    return weights, probabilities
