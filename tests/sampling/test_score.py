"""Scores against the log-likelihoods of `GPT.forward`."""

from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, make, tokens
from tolerance import assert_near, rounding, terms_of
from torch import Tensor

from minigpt.sampling.generation import score


@pytest.mark.parametrize("settings", [{}, ARCHITECTURES["modern"]], ids=["gpt2", "modern"])
def test_score_returns_the_logprob_and_rank_of_each_token(settings: dict[str, Any]):
    model = make(**settings)
    start = [5, 1]
    text = tokens(14)
    found = score(model, text, start, n_top=3)
    assert not found.logprobs.requires_grad
    logits = model(torch.tensor([[*start, *text[:-1]]]))
    logprobs = logits[0, 1:].double().log_softmax(-1)
    own = logprobs[range(14), text]
    assert_near(found.logprobs, own.float(), terms=terms_of(model.config))
    assert found.ranks.tolist() == (logprobs > own[:, None]).sum(-1).tolist()
    assert found.nats == pytest.approx(-own.sum().item(), rel=1e-5)
    values, ids = logprobs.topk(3)
    top = Tensor(found.top)  # (14, 3, 2)
    assert torch.equal(top[..., 0].long(), ids)
    assert_near(top[..., 1], values.float(), logits, terms=200)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_every_token_of_a_long_text_is_scored_with_at_least_half_a_block_of_context(
    block_size: int,
):
    model = make(block_size=block_size)
    read = list[int]()
    model.register_forward_hook(lambda module, given, logits: read.append(given[0].numel()))
    for n_start, n_text in ((1, 50), (15, 1), (16, 50), (40, 50)):
        ids = torch.tensor(tokens(n_start + n_text))
        read.clear()
        found = score(model, ids[n_start:], ids[:n_start])
        assert len(found.logprobs) == len(found.ranks) == n_text
        assert sum(read) <= 2 * len(ids) + block_size
        assert len(read) <= 2 * len(ids) / block_size + 2
        # The log-probabilities after each n tokens of the text, by n
        after = {}
        for n in range(1, min(block_size, len(ids)) + 1):
            with torch.no_grad():
                after[n] = model(ids.unfold(0, n, 1))[:, -1].log_softmax(-1)
        scored = zip(range(n_start, len(ids)), found.logprobs, found.ranks, strict=True)
        for i, logprob, rank in scored:
            contexts = range(min(i, (block_size + 1) // 2), min(i, block_size) + 1)
            ranks = []
            for n in contexts:
                row = after[n][i - n]
                own = row[ids[i]]
                if (own - logprob).abs() < rounding(row, terms=terms_of(model.config)):
                    ranks.append((row > own).sum())
            assert rank in ranks, f"token {i} was not scored after {contexts}"
