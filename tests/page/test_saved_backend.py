"""The page of one text: it gives the attention weights and the tokens that were saved, whatever they are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minigpt.interpret.page import write_page

L, H, T = 2, 3, 11
ATTENTION = "return backend.attention(backend.models[0], [], ...arguments).then(weights => [...weights])"
DESCRIPTION = {"name": "model", "facts": "A GPT.", "n_layer": L, "n_head": H, "block_size": T}
HISTORY = {"train_loss": [[1, 2.5]], "val_loss": [], "samples": []}
TOKENS = [
    {"id": i, "text": f"</script>{i}\ud800\u2028", "logprob": -i / 4 if i else None, "rank": i, "top": []}
    for i in range(T)
]


@pytest.fixture
def saved(tmp_path: Path, open_page: Any) -> tuple[Any, torch.Tensor]:
    """The script of a page, and its weights: random, causal, some of them tiny."""
    scores = 4 * torch.randn(L, H, T, T, generator=torch.Generator().manual_seed(0))
    weights = scores.masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf")).softmax(-1)
    file = tmp_path / "page.html"
    write_page(file, description=DESCRIPTION, tokens=TOKENS, weights=weights, history=HISTORY)
    return open_page(file), weights


def test_every_head_and_their_mean_have_the_saved_weights(saved: tuple[Any, torch.Tensor]) -> None:
    run, weights = saved
    for layer in range(L):
        for head in (*range(H), None):
            found = torch.tensor(run(ATTENTION, layer, head)).view(T, T)
            expected = weights[layer].mean(0) if head is None else weights[layer, head]
            assert ((found - expected).abs() <= weights[layer].amax(0).sqrt() / 4000 + 1e-6).all()
            assert (found.triu(1) == 0).all()


def test_tokens_and_history_are_those_that_were_saved_and_nothing_is_generated(saved: tuple[Any, torch.Tensor]) -> None:
    run, _ = saved
    assert json.loads(run("return backend.score('model', 'another text').then(JSON.stringify)")) == TOKENS
    assert run("return backend.history('model')") == HISTORY
    assert run("return backend.generate === undefined")
    assert run("return backend.models") == ["model"]
    described = run("return backend.describe('model')")
    assert described.pop("facts").startswith("A GPT. ")
    assert described == {name: value for name, value in DESCRIPTION.items() if name != "facts"}
