"""Small models and attention weights that the tests of this folder share."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigpt.config import GPTConfig
from minigpt.model import GPT

ALPHABET = "\n :EMORWaght"
ARCHITECTURES = {
    "gpt2": {},
    "llama": {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False, "n_kv_head": 1},
    "post-norm": {"norm_position": "post", "qk_norm": True, "head_dim": 6, "dropout": 0.4},
}


def make_model(**settings: Any) -> GPT:
    torch.manual_seed(0)
    values = {"vocab_size": len(ALPHABET), "block_size": 16, "n_layer": 3, "n_head": 2, "n_embd": 16}
    model = GPT(GPTConfig(**{**values, **settings}))
    for parameter in model.parameters():  # far from the small initial weights, which make attention uniform
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def uniform(T: int) -> Tensor:
    """Uniform causal attention, (1, 1, T, T)."""
    return (torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None])[None, None]


def svg_texts(path: Path) -> list[str]:
    """The texts of an SVG picture: matplotlib writes them as paths, and as comments beside them."""
    return re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8"))
