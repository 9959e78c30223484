"""Every architecture that the decoders must decode, and the logits of a text read alone."""

from typing import Any

import pytest
import torch
from models import make_model
from tolerance import assert_near, terms_of
from torch import Tensor

from minigpt import GPT
from minigpt.model.ops import ACTIVATIONS

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "position": "rope",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
        "n_kv_head": 2,
    },
    "qwen3": {
        "position": "rope",
        "qk_norm": True,
        "qk_norm_weights": True,
        "norm_eps": 1e-6,
        "n_kv_head": 2,
    },
    "multi-query": {"position": "none", "n_kv_head": 1, "qk_norm": True, "head_dim": 10},
    "modern": {"position": "rope", "norm": "rmsnorm_noscale", "ngram": 3, "smear": 2},
    "post-norm": {"norm_position": "post", "activation": "relu2", "tie_embeddings": False},
}
EVERY: dict[str, dict[str, Any]] = {
    **ARCHITECTURES,
    **{f"{activation}, biases": {"activation": activation} for activation in ACTIVATIONS},
    "weights of qk_norm": {**ARCHITECTURES["qwen3"], "norm_eps": 0.1},
    "soft cap": {"logit_softcap": 0.7},
    "scaled rope": {"position": "rope", "rope_factor": 4.0, "rope_original_block_size": 8},
    "wide heads": {"position": "rope", "head_dim": 12, "rope_base": 100.0},
    "long ngram": {"ngram": 5, "ngram_buckets": 50, "smear": 3, "position": "none"},
    "embed_norm": {"embed_norm": True, "ngram": 2, "smear": 1},
    "mup, post-norm": {
        "parametrization": "mup",
        "norm_position": "post",
        "position": "rope",
        "qk_norm": True,
    },
}
architectures = pytest.mark.parametrize("settings", ARCHITECTURES.values(), ids=ARCHITECTURES)
every_architecture = pytest.mark.parametrize("settings", EVERY.values(), ids=EVERY)


def make(**settings: Any) -> GPT:
    """Return a small model whose weights are large enough for its text to vary."""
    return make_model(**{"n_head": 4, "n_embd": 32, "std": 0.3, "seed": 1, **settings})


def tokens(n: int) -> list[int]:
    return torch.randint(23, (n,)).tolist()


def as_alone(model: GPT, text: list[int], n: int) -> Tensor:
    """Return the logits (1 + following, V) after the prompt, n tokens, and after each that follows.

    A full window is cropped to its newer half.
    """
    block_size = model.config.block_size
    context = text[:n][-block_size:]
    logits = [model(torch.tensor([context]))[0, -1]]
    for token in text[n:]:
        context = [*context, token]
        if len(context) > block_size:
            context = context[-max(1, block_size // 2) :]
        logits.append(model(torch.tensor([context]))[0, -1])
    return torch.stack(logits)


def close(model: GPT, logits: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.1
    assert_near(logits, expected, terms=terms_of(model.config))
