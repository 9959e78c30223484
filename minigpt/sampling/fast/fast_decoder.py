"""Fast decoding of one token per sample and step, for models that their user did not change.

The model is copied to plain objects, without hooks and always in evaluation mode. `GPT.forward`
reads the prompts. `FastDecoder.step` runs the same `GPT.embed`, `Block.forward` and `GPT.logits`,
with weights laid out for few rows: one token of a small model costs the overhead of its operations,
not their arithmetic. Tokens/s against `GPT.forward(cache=…)` are in docs/sampling.md.

A text may be longer than `block_size`: see `drop_older_half`. All calls must be in the same mode,
`torch.inference_mode` or `torch.no_grad`. Depends on torch alone.

Shapes: B samples, C n_embd, V vocab, L layers, K key-value heads, D head width, S visible slots,
I and O the input and output widths of a linear layer.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.model.changes import original, plain_kind
from minigpt.model.evaluation import evaluation
from minigpt.model.gpt import GPT
from minigpt.model.ops import CPU
from minigpt.sampling.decoder import Decoder, drop_older_half

_MAX_COPIED_NUMEL = 1 << 20  # of a weight matrix that is copied to a faster layout
_MIN_LARGE_NUMEL = 1 << 17  # smaller matrices take less time by `mm`
_HAS_ONEDNN = torch.backends.mkldnn.is_available()
# By name, so that a machine always computes the same. On a Xeon, slices take 2.2 to 2.7 times as
# long as `F.linear`.
_IS_AMD = str(CPU.get("cpu_name")).startswith("AMD")


class FastDecoder(Decoder):
    """A `Decoder` with a cache of keys and values.

    All samples write to the same slot of the cache, so prompts are aligned at their ends.

    Args:
        model: one without changes, for which `find_change` of `minigpt.model.changes` returns None.
        prompts, num_samples, max_new_tokens: as for `Decoder`.
    """

    def __init__(
        self,
        model: GPT,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        max_new_tokens: int,
    ) -> None:
        super().__init__(model, prompts, num_samples, max_new_tokens)
        # One copy of the model reads prompts, and one decodes. Of what is read, only keys and
        # values are used; its logits would take more memory than the rest.
        self._reader = _plain(model)
        self._fast_model = _fast_model(self._reader)
        self._reader.logits = nn.Identity()
        self._reader.blocks[-1].mlp = nn.Identity()
        weight = self._fast_model.wte.weight  # (V, C)
        rotary = self._fast_model.rotary
        self._rotary = None if rotary is None else rotary.to(weight)  # (2, block_size, 1, D)

        # The cache holds what is known to come. Above 2 block_size, the window moves to the front
        # once per block_size tokens.
        longest = max(map(len, prompts), default=1)
        slots = min(longest - 1 + max_new_tokens, 2 * self.block_size)
        B = len(self.windows)
        self._end = min(longest, self.block_size) - 1  # first free slot
        self._begins = [self._end] * B  # slot of position 0 of each sample
        config = model.config
        self._cache = weight.new_zeros(
            2 * config.n_layer,  # keys and values in turn
            B,
            config.n_kv_head or config.n_head,
            slots,
            config.head_width,
        )
        self._inputs = model.new_cache(B, 0)  # for the previous inputs of smear and n-grams alone
        for row in range(0, B, num_samples):
            self._read([self.windows[row]], list(range(row, row + num_samples)))

    def step(self, tokens: Tensor) -> Tensor:
        # Make room for one more token: of a full window, the newer half is read again.
        full: list[int] = []
        for row, window in enumerate(self.windows):
            if drop_older_half(window, self.block_size):
                full.append(row)
        if full:
            self._read([self.windows[row] for row in full], full)
        if self._end == self._cache.size(3):
            self._make_room()
        # Append the tokens.
        for window, token in zip(self.windows, tokens.tolist(), strict=True):
            window.append(token)
        self._end += 1
        return self._next_logits(tokens, self._end - 1)  # (B, V)

    def _next_logits(self, tokens: Tensor, slot: int) -> Tensor:
        """Return the logits (B, V) after tokens (B,), whose keys and values go to `slot`."""
        # Samples of equal length see the same slots.
        first = min(self._begins)
        positions: int | Tensor = slot - first
        mask = None
        if first != max(self._begins):
            begins = torch.tensor(self._begins, device=self.device)[:, None]  # (B, 1)
            positions = slot - begins  # (B, 1)
            slots = torch.arange(first, self._end, device=self.device)  # (S,)
            mask = (slots >= begins)[:, None, None]  # (B, 1, 1, S)
        # Cosines and sines, (1, D) or (B, 1, 1, D) each
        rotary = None if self._rotary is None else self._rotary[:, positions].unbind()
        # The parts of the cache that each layer writes and reads
        cache = self._cache.narrow(1, 0, len(self.windows))  # (2L, B, K, slots, D)
        written = cache.narrow(3, slot, 1).transpose(2, 3).unbind()  # (B, 1, K, D) each
        visible = cache.narrow(3, first, self._end - first).unbind()  # (B, K, S, D) each
        # The model, for one position per sample
        x = self._fast_model.embed(tokens[:, None], positions, self._inputs)[:, 0]  # (B, C)
        for i, block in enumerate(self._fast_model.blocks):
            x = block(x, rotary, _LayerSlots(written, visible, 2 * i), mask)  # (B, C)
        return self._fast_model.logits(x)  # (B, V)

    def _make_room(self) -> None:
        """Move the window to the front of the cache, whose older half no sample sees."""
        first = min(self._begins)
        self._cache[:, :, :, : self._end - first] = self._cache[:, :, :, first:]
        self._begins = [begin - first for begin in self._begins]
        self._end -= first
        # No NaN of an earlier token, for GraphDecoder
        self._cache[:, :, :, self._end :] = 0

    def _read(self, contexts: list[list[int]], rows: list[int]) -> None:
        """Fill the cache of samples: one context for all of them, or one each, of equal length."""
        length = len(contexts[0])
        begin = self._end - length
        for row in rows:
            self._begins[row] = begin
        # Not in inference mode, so that the model can be trained afterwards.
        with torch.inference_mode(False), torch.no_grad(), evaluation():
            read = self._reader.new_cache(len(contexts), length)
            if length:
                self._reader(torch.tensor(contexts, device=self.device), cache=read)
        for i, layer in enumerate(read.layers):
            self._cache[2 * i, rows, :, begin : self._end] = layer.k  # (B, K, T, D)
            self._cache[2 * i + 1, rows, :, begin : self._end] = layer.v
        self._inputs.last_embeddings[rows] = read.last_embeddings
        self._inputs.last_tokens[rows] = read.last_tokens


@dataclass(slots=True)
class _LayerSlots:
    """The cache of one layer in one step, as `KVCache`."""

    written: Sequence[Tensor]  # keys and values of all layers in turn, (B, 1, K, D) each
    visible: Sequence[Tensor]  # likewise, (B, K, S, D) each
    keys: int  # index of those of the layer

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.written[self.keys].copy_(k)
        self.written[self.keys + 1].copy_(v)
        return self.visible[self.keys], self.visible[self.keys + 1]


def _fast_model(plain: Any) -> Any:
    """Copy a plain model, with faster linear layers and GELU in its blocks and head."""
    fast = copy.copy(plain)
    to_fast_head = _padded if plain.lm_head.weight.is_cuda else _linear
    fast.lm_head = to_fast_head(plain.lm_head)
    is_small = plain.config.n_embd * plain.config.inner_width < _MAX_COPIED_NUMEL
    is_scaled = (
        is_small and plain.lm_head.weight.is_cpu and plain.blocks[0].mlp.activation is F.gelu
    )
    half = math.sqrt(0.5) if is_scaled else 1.0
    fast.blocks = [copy.copy(block) for block in plain.blocks]
    for block in fast.blocks:
        block.attention = copy.copy(block.attention)
        block.attention.qkv = _linear(block.attention.qkv)
        block.attention.out = _linear(block.attention.out)
        block.mlp = copy.copy(block.mlp)
        block.mlp.up = _linear(block.mlp.up, half, half)
        block.mlp.down = _linear(block.mlp.down, half)
        if is_scaled:
            block.mlp.activation = _scaled_gelu
    return fast


def _plain(part: nn.Module | Tensor | None) -> Any:
    """Copy a module to an object of its code and attributes that is no `nn.Module`.

    Its weights are without gradient, and gathered if FSDP shards them.
    """
    if part is None:
        return None
    if isinstance(part, Tensor):
        return part.full_tensor() if hasattr(part, "full_tensor") else part.detach()
    module: nn.Module = original(part)
    if isinstance(module, nn.ModuleList | nn.ParameterList):
        return [_plain(item) for item in module]
    plain = _plain_class(type(module))()  # type: ignore[arg-type]
    vars(plain).update(vars(module), training=False)
    for name, inner in (module._parameters | module._buffers | module._modules).items():
        setattr(plain, name, _plain(inner))
    return plain


@cache
def _plain_class(kind: type[nn.Module]) -> type[Any]:
    """Return a class with the methods of a module class, whose instances are called without hooks.

    It does not inherit: `__getattr__` of `nn.Module` makes Python look up attributes more slowly.
    """
    methods = dict(vars(plain_kind(kind)))
    methods["__call__"] = methods["forward"]
    methods.pop("__init__", None)
    return type(kind.__name__, (), methods)


def _linear(
    layer: nn.Linear, weight_factor: float = 1.0, bias_factor: float = 1.0
) -> Callable[[Tensor], Tensor]:
    """Return the fastest function of a plain linear layer, for x (B, I).

    The factors multiply its weights and its bias.
    """
    bias = None if layer.bias is None else layer.bias * bias_factor  # (O,)
    weight = layer.weight if weight_factor == 1 else layer.weight * weight_factor  # (O, I)
    is_float32_on_cpu = weight.is_cpu and weight.dtype == torch.float32
    if weight.numel() >= _MIN_LARGE_NUMEL and is_float32_on_cpu and _HAS_ONEDNN:
        return _LargeLinear(weight, bias)
    transposed = weight.T.contiguous() if weight.numel() < _MAX_COPIED_NUMEL else weight.T  # (I, O)
    if bias is None:
        return lambda x: torch.mm(x, transposed)
    return lambda x: torch.addmm(bias, x, transposed)


def _padded(head: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Return a function of the output head, with zero rows up to a multiple of 64, for GPUs."""
    V = len(head.weight)
    weight = F.pad(head.weight, (0, 0, 0, -V % 64)) if V % 64 else head.weight
    transposed = weight.T  # (C, V or more)
    return lambda x: torch.mm(x, transposed)[:, :V]


class _LargeLinear:
    """Products limited by the memory bandwidth.

    On AMD, MKL's `mm` uses one thread and a third of the bandwidth for few rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight  # (O, I)
        self.bias = bias  # (O,)
        # For oneDNN, packed when it is first used; a larger weight is used as it is.
        self.packed = None if weight.numel() < _MAX_COPIED_NUMEL else weight
        self.slices = weight.reshape(math.gcd(len(weight), 8), -1, weight.size(1))  # (n, O/n, I)

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) < 4 and _IS_AMD:
            y = torch.bmm(self.slices, x.T.expand(len(self.slices), -1, -1))  # (n, O/n, B)
            y = y.flatten(0, 1).T.contiguous()  # (B, O)
            return y if self.bias is None else y.add_(self.bias)
        if len(x) < 4 or x.dtype != self.weight.dtype:  # under autocast
            return F.linear(x, self.weight, self.bias)
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def _scaled_gelu(x: Tensor) -> Tensor:
    """√2 GELU(√2 x), for scaled weights: 18 % more tokens/s than torch's with nano on a CPU."""
    return torch.addcmul(x, x, x.erf())
