"""Data for the tests of the attention page."""

import base64
import math
from typing import Any

import torch
from torch import Tensor

HOSTILE = [
    "</script>",
    "<!--<script>",
    "<img src=x onerror=\"document.title='broken'\">",
    "]]>",
    '<script type="module" src="server.js"></script>\n',
    "</body>",
    "&lt;b&gt;",
    "'\"`\\",
    "\\u003c",
    "\u2028",
    "\ud800",
    "<svg/onload=\"document.title='broken'\">",
]


def attention(L: int, H: int, T: int, seed: int = 0, sharpness: float = 3.0) -> Tensor:
    """Random causal weights (L, H, T, T)."""
    scores = sharpness * torch.randn(L, H, T, T, generator=torch.Generator().manual_seed(seed))
    return scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)


def token(text: str) -> dict[str, Any]:
    """A token of a page."""
    return {"id": 0, "text": text, "logprob": -1.5, "rank": 1, "top": [{"id": 1, "text": text, "logprob": -0.5}]}


def unpack(data: dict[str, Any]) -> Tensor:
    """Decode the weights of a page: lower triangles, 12 bits per weight, big-endian."""
    L, H, T = data["description"]["n_layer"], data["description"]["n_head"], len(data["tokens"])
    bits = "".join(f"{byte:08b}" for byte in base64.b64decode(data["weights"], validate=True))
    triangle = T * (T + 1) // 2
    assert len(bits) - 12 * L * H * triangle in (0, 12)
    weights = torch.zeros(L, H, T, T)
    place = 0
    for layer in range(L):
        for head in range(H):
            for i in range(T):
                for j in range(i + 1):
                    weights[layer, head, i, j] = (int(bits[place : place + 12], 2) / 4095) ** 2
                    place += 12
    return weights
