"""Attention as an interactive HTML page: the tokens of one text with their probabilities, and all attention weights.

Each weight takes 16 bits, so that 36 heads × 256 tokens take 3.2 MB. `minigpt/page/saved.js` reads them.
"""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigpt.data.detokenizer import token_pieces
from minigpt.data.tokenizer import Tokenizer
from minigpt.generation import score
from minigpt.model import GPT
from minigpt.page.render import N_TOP, describe_token, render
from minigpt.utils.files import atomic_write


def write_page(
    path: Path,
    *,
    description: Mapping[str, Any],
    tokens: Sequence[Mapping[str, Any]],
    weights: Tensor,
    history: Mapping[str, Any] | None = None,
) -> None:
    """Write the page atomically.

    Args:
        description: of the model, from `minigpt.page.render.describe`.
        tokens: T tokens, from `score_tokens`.
        weights: (L, H, T, T), causal, each row with sum 1.
        history: the losses and samples of its training, from `minigpt.runs.history.read_history`.

    Raises:
        ValueError: a weight is not finite.
    """
    if not weights.isfinite().all():
        raise ValueError("weights must be finite; the model may have diverged")
    facts = f"{description['facts']} This page holds one text and its attention weights, without the model."
    data = {"description": {**description, "facts": facts}, "history": history}
    page = render("saved.js", data | {"tokens": tokens, "weights": _pack(weights)})
    with atomic_write(path) as partial:
        partial.write_text(page, encoding="utf-8", newline="\n")


def score_tokens(model: GPT, tokenizer: Tokenizer, tokens: Tensor) -> list[dict[str, Any]]:
    """Describe each token of a text (T,), T ≥ 2, given those before it; the first has no probability."""
    scored = score(model, tokens[1:], tokens[:1], n_top=N_TOP)
    ids = tokens.tolist()
    columns = ([None, *scored.logprobs.tolist()], [0, *scored.ranks.tolist()], [[], *scored.top])
    rows = zip(ids, token_pieces(tokenizer, ids), *columns, strict=True)
    return [describe_token(tokenizer, *row) for row in rows]


def _pack(weights: Tensor) -> str:
    """Encode the lower triangles, row by row, as little-endian 16-bit integers in base64; 65535 is a weight of 1."""
    row, column = torch.tril_indices(*weights.shape[-2:])
    levels = (weights.detach().cpu().float()[:, :, row, column] * 65535).round()  # (L, H, T(T+1)/2)
    return base64.b64encode(levels.numpy().astype("<u2").tobytes()).decode("ascii")
