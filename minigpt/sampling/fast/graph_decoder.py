"""Decoding on a CUDA GPU, where most of a step is the time to start its kernels.

`GraphDecoder` records the kernels of a step in a CUDA graph, which starts them all at once.
Addresses and shapes in a graph are fixed, so a step reads its slot from a tensor and attends to all
slots of the cache up to a multiple of 256; a mask hides those that a sample does not see. Tokens/s
are in docs/gpu.md. Depends on torch alone. This file can be deleted.

Shapes: B samples, C n_embd, V vocab, K key-value heads, D head width, S slots.
"""

import threading
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from minigpt.model.gpt import Cache
from minigpt.sampling.fast.fast_decoder import FastDecoder

_SLOTS = 256
_WARMUP_STEPS = 3  # before a step is recorded: torch loads and chooses kernels
_RECORDING = threading.Lock()  # CUDA records one graph at a time


class GraphDecoder(FastDecoder):
    """A `FastDecoder` whose steps are CUDA graphs; on a CPU, for tests, they are not recorded."""

    _step: "_FixedStep | None" = None

    def _next_logits(self, tokens: Tensor, slot: int) -> Tensor:
        shape = (len(tokens), min(self._cache.size(3), -(-self._end // _SLOTS) * _SLOTS))
        step = self._step
        if step is None or step.cache is not self._cache or step.shape != shape:
            step = self._step = _FixedStep(self, shape)
        return step(self, tokens, slot)


class _FixedStep:
    """A step of B samples over the first S slots of a decoder; its tensors have fixed addresses."""

    def __init__(self, decoder: GraphDecoder, shape: tuple[int, int]) -> None:
        self.shape = shape  # (B, S)
        B, S = shape
        self.cache = decoder._cache
        self.layers = self.cache[:, :B, :, :S].unbind()  # (B, K, S, D) each
        self.tokens = torch.zeros(B, dtype=torch.long, device=decoder.device)
        self.slot = self.tokens.new_zeros(1)
        self.begins = self.tokens.new_zeros(B, 1)
        self.given_begins: list[int] = []
        self.all_slots = torch.arange(S, device=decoder.device)
        self.inputs = decoder._inputs
        self.graph: torch.cuda.CUDAGraph | None = None
        self.runs = 0

    def __call__(self, decoder: GraphDecoder, tokens: Tensor, slot: int) -> Tensor:
        self.tokens.copy_(tokens)
        self.slot.fill_(slot)
        if self.given_begins != decoder._begins:
            self.given_begins = list(decoder._begins)
            self.begins.copy_(torch.tensor(self.given_begins)[:, None])
        self.runs += 1
        if self.graph is None and self.runs > _WARMUP_STEPS and tokens.is_cuda:
            graph = torch.cuda.CUDAGraph()
            # `cuda.stream` selects the device, and restores what `cuda.graph` does not if it cannot
            # end the recording.
            with (
                _RECORDING,
                torch.cuda.stream(torch.cuda.current_stream(decoder.device)),
                torch.cuda.graph(
                    graph,
                    stream=_recording_stream(decoder.device),
                    capture_error_mode="thread_local",
                ),
            ):
                self.logits = self._logits(decoder)
            self.graph = graph
        if self.graph is None:
            return self._logits(decoder)
        self.graph.replay()
        return self.logits.clone()  # (B, V); the next step overwrites them

    def _logits(self, decoder: GraphDecoder) -> Tensor:
        positions = self.slot - self.begins  # (B, 1)
        visible = (self.all_slots >= self.begins) & (self.all_slots <= self.slot)  # (B, S)
        visible = visible[:, None, None]  # (B, 1, 1, S)
        # Added to the scores, because a boolean mask would be converted in every layer.
        mask = self.cache.new_zeros(visible.shape).masked_fill_(~visible, float("-inf"))
        # Cosines and sines, (B, 1, 1, D) each
        rotary = None if decoder._rotary is None else decoder._rotary[:, positions].unbind()
        after = Cache([], self.inputs.last_embeddings, self.inputs.last_tokens)
        x = decoder._fast_model.embed(self.tokens[:, None], positions, after)[:, 0]  # (B, C)
        self.inputs.last_embeddings.copy_(after.last_embeddings)
        self.inputs.last_tokens.copy_(after.last_tokens)
        for i, block in enumerate(decoder._fast_model.blocks):
            slots = _GraphSlots(self.layers[2 * i], self.layers[2 * i + 1], self.slot)
            x = block(x, rotary, slots, mask)  # (B, C)
        return decoder._fast_model.logits(x)  # (B, V)


# One per device, because torch keeps a workspace for each stream.
_recording_stream = cache(torch.cuda.Stream)


@dataclass(slots=True)
class _GraphSlots:
    """The cache of one layer in one step, as `KVCache`."""

    k: Tensor  # (B, K, S, D)
    v: Tensor  # (B, K, S, D)
    slot: Tensor  # (1,) to write

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        # Under autocast, of different types
        self.k.index_copy_(2, self.slot, k.transpose(1, 2).to(self.k.dtype))
        self.v.index_copy_(2, self.slot, v.transpose(1, 2).to(self.v.dtype))
        return self.k, self.v
