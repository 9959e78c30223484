"""Decoding of one token per sample and step, with the model's own `forward` and cache. Depends on torch alone.

`Decoder` is right for every model, however its user changed it. `make_decoder` returns the `FastDecoder` of
`minigpt.fast_decoder` for models that it knows: the same samples, faster. That file and the line that chooses it can be
deleted.

Shapes: B samples, T tokens, V vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from minigpt.fast_decoder import FastDecoder
from minigpt.graph_decoder import GraphDecoder
from minigpt.model import Cache
from minigpt.structure import find_change, original, uncompiled, unwrap
from minigpt.utils.errors import UserError


def make_decoder(
    model: Any, prompts: Sequence[Sequence[int]] = (), num_samples: int = 1, max_new_tokens: int | None = None
) -> "Decoder | FastDecoder":
    """Return a decoder of `num_samples` samples per prompt, which has read all of their prompts.

    Args:
        model: in evaluation mode.
        prompts: token ids of each prompt, at least one; the last `block_size` are read.
        max_new_tokens: per sample; bounds the size of the cache. None: any number, and samples can join.

    Raises:
        UserError: the model is not one of minigpt, or returns no logits.
    """
    model = unwrap(model)
    if find_change(model) is None:
        kind = GraphDecoder if next(model.parameters()).is_cuda else FastDecoder
        return kind(original(model), prompts, num_samples, max_new_tokens)
    return Decoder(model, prompts, num_samples, max_new_tokens)


def _without_gradients(method: Any) -> Any:
    """Decorate a method to run without gradients, but not in inference mode: the model can be trained afterwards."""
    return torch.inference_mode(False)(torch.no_grad()(method))


@dataclass
class _Group:
    """Samples of one prompt."""

    rows: list[int]  # of the batch
    begin: int  # index in their texts of the first token of the window
    cache: Cache | None = None  # of the window up to the last token; None: the window is read at every step


class Decoder:
    """Decode a batch of samples token by token; `logits` (B, V) are those of the next token.

    The samples of a prompt are read in one batch. When their window of `block_size` tokens is full, its newer half is
    read again from position 0. A cache is used only if it gives the logits of `model(tokens)` for a text that is read
    as the longest sample will be: `forward` may ignore the cache, and a hook may look at positions. Otherwise, and for
    any number of new tokens, the whole window is read for every token.

    Args:
        model, prompts, num_samples, max_new_tokens: as for `make_decoder`.
    """

    @_without_gradients
    def __init__(
        self, model: Any, prompts: Sequence[Sequence[int]] = (), num_samples: int = 1, max_new_tokens: int | None = None
    ) -> None:
        self.model, self.block_size = model, model.config.block_size
        self.device = next(model.parameters()).device
        self.tokens: list[list[int]] = []  # of each sample, with its prompt
        self._groups: list[_Group] = []
        self._slots = 0  # of a cache; 0: none is used
        if max_new_tokens is not None:
            shortest, longest = min(map(len, prompts)), max(map(len, prompts)) + max_new_tokens
            together = shortest - 1 if longest <= self.block_size else min(shortest - 1, self.block_size // 2)
            slots = min(longest, self.block_size)
            self._slots = slots if self._cache_is_right(slots, together) else 0
        for prompt in prompts:
            self.add(prompt, num_samples)
        if prompts:
            last = [prompt[-1] for prompt in prompts for _ in range(num_samples)]
            self.step(torch.tensor(last, device=self.device))

    @_without_gradients
    def add(self, prompt: Sequence[int], num_samples: int = 1) -> None:
        """Read a prompt for new samples at the end of the batch; the next `step` is to add its last token."""
        context, B = list(prompt[:-1]), len(self.tokens)
        group = _Group(list(range(B, B + num_samples)), max(0, len(prompt) - self.block_size))
        self.tokens += [list(context) for _ in group.rows]
        if self._slots:
            group.cache = self.model.new_cache(1)
            if unread := context[group.begin :]:
                self._read([unread], group.cache)
            self._select_rows(group.cache, [0] * num_samples)
        self._groups.append(group)

    @_without_gradients
    def drop(self, row: int) -> None:
        """Remove a sample; the last one of the batch takes its row."""
        group = next(group for group in self._groups if row in group.rows)
        kept = [i for i, other in enumerate(group.rows) if other != row]
        group.rows = [group.rows[i] for i in kept]
        if not kept:
            self._groups.remove(group)
        elif group.cache is not None:
            self._select_rows(group.cache, kept)
        last = self.tokens.pop()
        if row < len(self.tokens):
            self.tokens[row] = last
            for group in self._groups:
                group.rows = [row if other == len(self.tokens) else other for other in group.rows]

    @_without_gradients
    def step(self, tokens: Tensor) -> Tensor:
        """Append one token (B,) to each sample and return the logits (B, V) after it."""
        for text, token in zip(self.tokens, tokens.tolist(), strict=True):
            text.append(token)
        logits = torch.cat([self._read_next(group) for group in self._groups])
        self.logits = torch.empty_like(logits)
        self.logits[[row for group in self._groups for row in group.rows]] = logits
        return self.logits

    def cache_bytes(self, rows: int, length: int) -> int:
        """Return the memory of the keys and values of samples that join: they have none."""
        return 0

    def _read_next(self, group: _Group) -> Tensor:
        """Read the last token of each text, and what has to be read again; return the logits after it."""
        end = len(self.tokens[group.rows[0]])
        begin = end - 1
        if group.cache is None:
            begin = max(0, end - self.block_size)
        elif end - group.begin > self.block_size:
            begin = group.begin = end - max(1, self.block_size // 2)
            group.cache = self.model.new_cache(len(group.rows))
        return self._read([self.tokens[row][begin:] for row in group.rows], group.cache)[:, -1]

    def _read(self, tokens: Sequence[Sequence[int]], cache: Any = None) -> Tensor:
        """Return the logits (B, T, V) of tokens (B, T) after those of the cache, if there is one."""
        ids = torch.tensor(tokens, device=self.device)
        with uncompiled():
            logits = self.model(ids) if cache is None else self.model(ids, cache=cache)
        if not isinstance(logits, Tensor) or logits.dim() != 3:
            raise UserError(f"model(tokens) must return logits, a tensor (B, T, V), got {type(logits).__name__}")
        return logits

    def _cache_is_right(self, length: int, together: int) -> bool:
        """Return whether a text has the logits of `model(tokens)` if its end is read token by token, with a cache."""
        ids = [i % self.model.config.vocab_size for i in range(length)]
        whole = self._read([ids])
        tolerance = torch.finfo(whole.dtype).eps ** 0.5 * whole.abs().max()
        try:
            cache = self.model.new_cache(1)
            self._select_rows(cache, [0])
            for begin, end in pairwise((*sorted({0, together}), *range(together + 1, length + 1))):
                if (self._read([ids[begin:end]], cache) - whole[:, begin:end]).abs().max() > tolerance:
                    return False
        except Exception:  # of the model's own code
            return False
        return True

    def _select_rows(self, cache: Cache, rows: list[int]) -> None:
        """Keep these rows of a cache, in this order, and the slots that the samples need."""
        for layer in cache.layers:
            layer.k, layer.v = layer.k[rows, :, : self._slots or None], layer.v[rows, :, : self._slots or None]
        cache.last, cache.last_tokens = cache.last[rows], cache.last_tokens[rows]
