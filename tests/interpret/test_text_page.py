"""The file of the attention page: the tokens and weights of the model, and every token escaped."""

import base64
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_model
from torch import Tensor

from minigpt.data.tokenizer import ByteTokenizer
from minigpt.generation import score
from minigpt.interpret.text_page import score_tokens, write_page

HISTORY = {"train_loss": [[1, 2.5]], "val_loss": [], "samples": [{"step": 1, "text": "é"}]}


def attention(L: int, H: int, T: int, seed: int = 0, sharpness: float = 3.0) -> Tensor:
    """Random causal weights (L, H, T, T)."""
    scores = sharpness * torch.randn(L, H, T, T, generator=torch.Generator().manual_seed(seed))
    return scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)


def unpack(data: dict[str, Any]) -> Tensor:
    """Decode the weights of a page: lower triangles, 16 bits per weight."""
    L, H, T = data["description"]["n_layer"], data["description"]["n_head"], len(data["tokens"])
    levels = struct.unpack(f"<{L * H * T * (T + 1) // 2}H", base64.b64decode(data["weights"], validate=True))
    values = torch.tensor(levels) / 65535
    weights = torch.zeros(L, H, T, T)
    weights[:, :, *torch.tril_indices(T, T)] = values.view(L, H, -1)
    return weights


def written(path: Path, texts: list[str], weights: Tensor, **options: Any) -> dict[str, Any]:
    """Write a page, and return the data in it."""
    shape = {"n_layer": weights.size(0), "n_head": weights.size(1), "block_size": len(texts)}
    tokens = [{"id": 0, "text": text, "logprob": -1.5, "rank": 1, "top": []} for text in texts]
    write_page(
        path, description={"name": "model", "facts": "A GPT.", **shape}, tokens=tokens, weights=weights, **options
    )
    (data,) = re.findall('<script type="application/json" id="data">(.*?)</script>', path.read_text(encoding="utf-8"))
    return json.loads(data)


@settings(max_examples=25, deadline=None)
@given(L=st.integers(1, 3), H=st.integers(1, 3), T=st.integers(1, 9), seed=st.integers(0, 99), sharp=st.floats(0, 30))
def test_the_page_holds_the_weights_it_was_given(
    tmp_path_factory: pytest.TempPathFactory, L: int, H: int, T: int, seed: int, sharp: float
) -> None:
    weights = attention(L, H, T, seed, sharp)
    data = written(tmp_path_factory.mktemp("page") / "page.html", ["x"] * T, weights)
    error = (unpack(data) - weights).abs()
    assert (error <= 0.5 / 65535 + 1e-7).all()


def test_tokens_are_rated_and_have_the_characters_that_they_complete() -> None:
    model, tokens = make_model(vocab_size=256), torch.tensor([*"a😀é".encode(), 0xC3])
    first, *rest = score_tokens(model, ByteTokenizer(), tokens)
    assert first == {"id": 97, "text": "a", "logprob": None, "rank": 0, "top": []}
    assert [token["text"] for token in rest] == ["", "", "", "😀", "", "é", "\ufffd"]
    rated = score(model, tokens[1:], tokens[:1], n_top=10)
    columns = (tokens[1:].tolist(), rated.logprobs.tolist(), rated.ranks.tolist())
    assert [(token["id"], token["logprob"], token["rank"]) for token in rest] == [*zip(*columns, strict=True)]
    for token, top in zip(rest, rated.top, strict=True):
        named = [(i, bytes([i]).decode(errors="replace"), logprob) for i, logprob in top]
        assert [(other["id"], other["text"], other["logprob"]) for other in token["top"]] == named


def test_the_page_holds_the_description_and_the_history(tmp_path: Path) -> None:
    hostile = "</script><!--<script>&lt;\u2028\ud800é"
    data = written(tmp_path / "page.html", ["a", hostile], attention(3, 2, 2), history=HISTORY)
    assert [token["text"] for token in data["tokens"]] == ["a", hostile]
    assert data["description"].pop("facts").startswith("A GPT. ")
    assert data["description"] == {"name": "model", "n_layer": 3, "n_head": 2, "block_size": 2}
    assert data["history"] == HISTORY
    assert written(tmp_path / "page.html", ["a", "b"], attention(1, 1, 2))["history"] is None


def test_nan_weights_are_an_error(tmp_path: Path) -> None:
    weights = attention(1, 1, 3)
    weights[0, 0, 2, 1] = math.nan
    with pytest.raises(ValueError, match="must be finite"):
        written(tmp_path / "p.html", list("abc"), weights)
    assert not list(tmp_path.iterdir())
