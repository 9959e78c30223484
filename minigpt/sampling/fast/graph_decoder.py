"""Decoding on a CUDA GPU, where most of a step is the time to start its kernels. Depends on torch alone.

`GraphDecoder` records the kernels of a step in a CUDA graph, which starts them all at once. Addresses and shapes in a
graph are fixed, so a step reads its slot from a tensor and attends to all slots of the cache up to a multiple of 256;
a mask hides those that a sample does not see. Tokens/s are in docs/gpu.md. This file can be deleted.

Shapes: B samples, V vocab, K key-value heads, D head width, S slots.
"""

import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor

from minigpt.model.gpt import Cache
from minigpt.sampling.fast.fast_decoder import FastDecoder

_SLOTS = 256
_WARMUP_STEPS = 3  # before a step is recorded: torch loads and chooses kernels
_RECORDING = threading.Lock()  # CUDA records one graph at a time


class GraphDecoder(FastDecoder):
    """A `FastDecoder` whose steps are CUDA graphs; on a CPU, for tests, they are the same but not recorded."""

    _step: "_FixedStep | None" = None

    def _next_logits(self, tokens: Tensor, slot: int) -> Tensor:
        slots = min(self._cache.size(3), -(-self._end // _SLOTS) * _SLOTS)
        step = self._step
        if (
            step is None
            or step.cache is not self._cache
            or len(step.tokens) != len(tokens)
            or step.slots != slots
        ):
            step = self._step = _FixedStep(self, slots)
        return step(self, tokens, slot)


class _FixedStep:
    """A step of the samples of a decoder over its first `slots` slots, whose tensors have fixed addresses."""

    def __init__(self, decoder: Any, slots: int) -> None:
        self.model, self.rotary = decoder._fast_model, decoder._rotary
        self.slots, self.cache, B = slots, decoder._cache, len(decoder.windows)
        self.layers = self.cache[:, :B, :, :slots].unbind()  # (B, K, S, D) each
        self.tokens = torch.zeros(B, dtype=torch.long, device=decoder.device)
        self.slot, self.begins = self.tokens.new_zeros(1), self.tokens.new_zeros(B, 1)
        self.given_begins: list[int] = []
        self.all_slots = torch.arange(slots, device=decoder.device)
        self.inputs = (
            decoder._inputs.last_embeddings.clone(),
            decoder._inputs.last_tokens.clone(),
        )  # as of `Cache`
        self.graph: torch.cuda.CUDAGraph | None = None
        self.runs, self.logits = 0, torch.empty(0)  # of the graph

    def __call__(self, decoder: Any, tokens: Tensor, slot: int) -> Tensor:
        """Return the logits (B, V) after tokens (B,)."""
        self.tokens.copy_(tokens)
        self.slot.fill_(slot)
        if self.given_begins != decoder._begins:
            self.given_begins = list(decoder._begins)
            self.begins.copy_(torch.tensor(self.given_begins)[:, None])
        given = decoder._inputs
        for mine, theirs in zip(
            self.inputs, (given.last_embeddings, given.last_tokens), strict=True
        ):
            mine.copy_(
                theirs
            )  # of another tensor if samples joined or left; else torch copies nothing
        decoder._inputs = Cache([], *self.inputs)
        self.runs += 1
        if self.graph is None and self.runs > _WARMUP_STEPS and tokens.is_cuda:
            self._record(tokens.device)
        if self.graph is None:
            return self._compute()
        self.graph.replay()
        return self.logits.clone()  # the next step overwrites them

    def _record(self, device: torch.device) -> None:
        graph, now = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        mode: Any = {"stream": _recording_stream(device), "capture_error_mode": "thread_local"}
        # `stream` selects the device, and restores what `graph` does not if it cannot end the recording.
        with _RECORDING, torch.cuda.stream(now), torch.cuda.graph(graph, **mode):
            self.logits = self._compute()
        self.graph = graph

    def _compute(self) -> Tensor:
        positions = self.slot - self.begins  # (B, 1)
        visible = (self.all_slots >= self.begins) & (self.all_slots <= self.slot)  # (B, S)
        # Added to the scores, because a boolean mask would be converted in every layer.
        mask = self.cache.new_zeros(visible.shape).masked_fill_(~visible, float("-inf"))[
            :, None, None
        ]  # (B, 1, 1, S)
        rotary = (
            None if self.rotary is None else self.rotary[:, positions].unbind()
        )  # (B, 1, 1, D) each
        after = Cache([], *self.inputs)
        x = self.model.embed(self.tokens[:, None], positions, after)[:, 0]  # (B, C)
        for mine, theirs in zip(
            self.inputs, (after.last_embeddings, after.last_tokens), strict=True
        ):
            mine.copy_(theirs)
        for i, block in enumerate(self.model.blocks):
            x = block(x, rotary, _Slot(self.layers[2 * i], self.layers[2 * i + 1], self.slot), mask)
        return self.model.logits(x)


_recording_stream = cache(
    torch.cuda.Stream
)  # one per device, because torch keeps a workspace for each


class _Slot:
    """The cache of one layer in one step, as `KVCache`: keys and values (B, K, S, D), and the slot (1,) to write."""

    def __init__(self, k: Tensor, v: Tensor, slot: Tensor) -> None:
        self.k, self.v, self.slot = k, v, slot

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, 1, K, D) and return all."""
        for stored, new in ((self.k, k), (self.v, v)):  # under autocast of different types
            stored.index_copy_(2, self.slot, new.transpose(1, 2).to(stored.dtype))
        return self.k, self.v
