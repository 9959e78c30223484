"""The n-gram model, against Witten and Bell's formula."""

from collections import Counter, defaultdict
from math import log

import numpy as np
import pytest

from minigpt.extras.planner.ngram_model import ngram_losses


def witten_bell(train, val, vocab_size, longest):
    losses, distinct = [], []
    probabilities = [1 / vocab_size] * len(val)
    for n in range(1, longest + 1):
        followers = defaultdict(Counter)
        for i in range(n - 1, len(train)):
            followers[tuple(train[i - n + 1 : i])][train[i]] += 1
        for i in range(n - 1, len(val)):
            seen = followers.get(tuple(val[i - n + 1 : i]), Counter())
            if total := seen.total():
                probabilities[i] = (seen[val[i]] + len(seen) * probabilities[i]) / (
                    total + len(seen)
                )
        losses.append(-sum(map(log, probabilities[longest - 1 :])) / (len(val) - longest + 1))
        distinct.append(sum(map(len, followers.values())))
    return losses, distinct


@pytest.mark.parametrize("vocab_size", [5, 300, 200_000])
def test_ngram_losses_are_those_of_the_formula(vocab_size):
    random = np.random.default_rng(0)
    train, val = (random.zipf(1.5, n) % vocab_size for n in (3000, 700))
    expected_losses, expected_counts = witten_bell(train.tolist(), val.tolist(), vocab_size, 5)
    losses, distinct = ngram_losses(train.astype(np.uint32), val.astype(np.uint32), vocab_size, 5)
    assert distinct == expected_counts
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-9)
