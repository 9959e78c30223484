"""What n-grams alone predict: an interpolated n-gram model, counted in a second, says how a text
can be modelled.
"""

from typing import Any

import numpy as np

from minigpt.data.token_files import Tokens

Array = np.ndarray[Any, Any]

_PIECE = 1000  # tokens of a long text that stay together
_TOKEN_BITS = 18  # of a key; the other bits are a hash of the tokens before
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ / golden ratio: Fibonacci hashing


def evenly_spaced(tokens: Tokens, count: int) -> Array:
    """Return up to `count` of the tokens, a multiple of 1,000, in pieces from all parts of the
    text.
    """
    if len(tokens) <= count:
        return tokens[: len(tokens)]
    starts = np.linspace(0, len(tokens) - _PIECE, count // _PIECE, dtype=np.int64)
    return tokens[starts[:, None] + np.arange(_PIECE)].reshape(-1)


def ngram_losses(
    train: Array, val: Array, vocab_size: int, longest: int
) -> tuple[list[float], list[int]]:
    """Count the n-grams of up to `longest` tokens in `train`, and predict `val` from them.

    The probability of a token after n - 1 others mixes its frequency there with the probability by
    n - 2 of them: (count + kinds · p) / (total + kinds), where `kinds` is the number of distinct
    tokens that followed.

    Args:
        train, val: token ids (N,), with at least `longest` in each.

    Returns:
        By n from 1 to `longest`: the loss on `val` in nats per token, and the number of distinct
            n-grams in `train`.

    Source: Witten & Bell, 1991, method C, https://doi.org/10.1109/18.87000
    """
    p = np.full(len(val), 1 / vocab_size)
    before_train, before_val = (
        np.zeros(len(train), np.uint64),
        np.zeros(len(val), np.uint64),
    )  # hashes of n - 1 tokens
    losses, distinct = [], []
    for n in range(1, longest + 1):
        keys, counts = np.unique(_keys(before_train, train)[n - 1 :], return_counts=True)
        contexts = keys >> np.uint64(_TOKEN_BITS)
        # Keys are sorted
        starts = np.flatnonzero(np.diff(contexts, prepend=contexts[0] + np.uint64(1)))
        totals, kinds = np.add.reduceat(counts, starts), np.diff(starts, append=len(keys))
        wanted = _keys(before_val, val)
        count = _find(keys, counts, wanted)
        total, kind = (
            _find(contexts[starts], v, wanted >> np.uint64(_TOKEN_BITS)) for v in (totals, kinds)
        )
        p = np.where(total > 0, (count + kind * p) / np.maximum(total + kind, 1), p)
        losses.append(float(-np.log(p[longest - 1 :]).mean()))
        distinct.append(len(keys))
        before_train, before_val = _longer(before_train, n, train), _longer(before_val, n, val)
    return losses, distinct


def _keys(before: Array, ids: Array) -> Array:
    """Return the keys of n-grams, by the hash of all tokens but the last, and the last."""
    return before >> np.uint64(_TOKEN_BITS) << np.uint64(_TOKEN_BITS) | ids.astype(np.uint64)


def _longer(before: Array, n: int, ids: Array) -> Array:
    """Return the hashes of the n tokens before each position, from those of n - 1."""
    hashed = (np.roll(before, 1) ^ np.roll(ids, 1).astype(np.uint64)) * _MULTIPLIER + np.uint64(n)
    return hashed ^ hashed >> np.uint64(29)


def _find(keys: Array, values: Array, wanted: Array) -> Array:
    """Return the value of each wanted key, 0 if it is not among the sorted keys."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
