"""Fast decoding of one token per sample and step, for models that their user did not change. Depends on torch alone.

The model is copied to plain objects, without hooks and always in evaluation mode. `GPT.forward` reads the prompts.
`FastDecoder.step` runs the same `GPT.embed`, `Block.forward` and `GPT.logits`, with weights laid out for few rows: one
token of a small model costs the overhead of its operations, not their arithmetic. Tokens/s against
`GPT.forward(cache=…)` are in docs/sampling.md.

A text may be longer than `block_size`: see `drop_older_half`. Samples can join and leave the batch between steps
(`FastDecoder.add` and `drop`), for a server. All calls must be in the same mode, `torch.inference_mode` or
`torch.no_grad`.

Shapes: B samples, C n_embd, V vocab, L layers, K key-value heads, D head width, S visible slots.
"""

import copy
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.model.changes import original, plain_kind
from minigpt.model.evaluation import evaluation
from minigpt.model.gpt import GPT, Cache
from minigpt.model.ops import CPU
from minigpt.sampling.decoder import drop_older_half, first_window

_MAX_COPIED_NUMEL = 1 << 20  # of a weight matrix that is copied to a faster layout
_MIN_LARGE_NUMEL = 1 << 17  # smaller matrices take less time by `mm`
_HAS_ONEDNN = torch.backends.mkldnn.is_available()
# By name, so that a machine always computes the same. On a Xeon, slices take 2.2 to 2.7 times as long as `F.linear`.
_IS_AMD = str(CPU.get("cpu_name")).startswith("AMD")


class FastDecoder:
    """Decode a batch of samples token by token; `logits` (B, V) are those of the next token.

    All samples write to the same slot of the cache, so prompts are aligned at their ends.

    Args:
        model: one without changes, for which `find_change` of `minigpt.model.changes` returns None.
        prompts, num_samples, max_new_tokens: as for `make_decoder` of `minigpt.sampling.generation`.
    """

    def __init__(
        self,
        model: GPT,
        prompts: Sequence[Sequence[int]] = (),
        num_samples: int = 1,
        max_new_tokens: int | None = None,
    ) -> None:
        config = model.config
        self.config, self.block_size = config, config.block_size
        self._reader = _plain(model)
        self._fast_model = _fast_model(self._reader)
        # Of what is read, only keys and values are used; its logits would take more memory than the rest.
        self._reader.logits = lambda x: x
        self._reader.blocks[-1].mlp = lambda x: x
        weight = self._fast_model.wte.weight
        self.device = weight.device
        rotary = self._fast_model.rotary
        self._rotary: Tensor | None = (
            None if rotary is None else rotary.to(weight)
        )  # (2, block_size, 1, D)

        self.windows: list[list[int]] = []  # the tokens of each sample that the next one sees
        self._begins: list[int] = []  # slot of position 0 of each sample
        self._end, slots = 0, 0  # first free slot
        if max_new_tokens is not None:
            longest = max(len(prompt) for prompt in prompts)
            self._end = min(longest, self.block_size) - 1
            # Above 2 block_size, the window moves to the front of the cache once per block_size tokens.
            slots = min(longest - 1 + max_new_tokens, 2 * self.block_size)
        heads, rows = config.n_kv_head or config.n_head, len(prompts) * num_samples
        # Keys and values of each layer in turn, (2L, rows, K, slots, D); the first rows are in use.
        self._cache = weight.new_zeros(2 * config.n_layer, rows, heads, slots, config.head_width)
        self._inputs = model.new_cache(0, 0)  # for the previous inputs of smear and n-grams alone
        for prompt in prompts:
            self.add(prompt, num_samples)
        if prompts:
            last = [prompt[-1] for prompt in prompts for _ in range(num_samples)]
            self.step(torch.tensor(last, device=self.device))

    def add(self, prompt: Sequence[int], num_samples: int = 1) -> None:
        """Read a prompt once, for new samples at the end of the batch; the next `step` is to add its last token.

        Other samples are as before.
        """
        window, B = first_window(prompt, self.block_size), len(self.windows)
        rows = range(B, B + num_samples)
        if rows.stop > self._cache.size(1) or len(window) > self._end:
            self._resize(rows.stop, len(window))
        self.windows += [list(window) for _ in rows]
        self._begins += [self._end for _ in rows]  # set by `_read`
        old, new = self._inputs, self._reader.new_cache(num_samples, 0)
        last_embeddings = torch.cat((old.last_embeddings, new.last_embeddings))
        self._inputs = Cache([], last_embeddings, torch.cat((old.last_tokens, new.last_tokens)))
        self._read([window], rows)
        # Masked slots count with weight 0, which does not remove NaN of an earlier sample.
        self._cache[:, B : rows.stop, :, : self._begins[B]] = 0

    def drop(self, row: int) -> None:
        """Remove a sample; the last one of the batch takes its row."""
        window, begin = self.windows.pop(), self._begins.pop()
        last = len(self.windows)
        if row < last:
            self.windows[row], self._begins[row] = window, begin
            self._cache[:, row, :, : self._end] = self._cache[:, last, :, : self._end]
        rows, inputs = [last if i == row else i for i in range(last)], self._inputs
        self._inputs = Cache([], inputs.last_embeddings[rows], inputs.last_tokens[rows])

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token (B,) to each sample and return the logits (B, V) after it."""
        self.slide_window()
        for window, token in zip(self.windows, tokens.tolist(), strict=True):
            window.append(token)
        slot, self._end = self._end, self._end + 1
        self.logits: Tensor = self._next_logits(tokens, slot)
        return self.logits

    def _next_logits(self, tokens: Tensor, slot: int) -> Tensor:
        """Return the logits (B, V) after tokens (B,), whose keys and values are written to `slot`."""
        first = min(self._begins)  # visible slot
        positions: Any = slot - first  # or (B, 1)
        mask = None
        if first != max(self._begins):
            begins = torch.tensor(self._begins, device=self.device)[:, None]  # (B, 1)
            positions = slot - begins
            slots = torch.arange(first, self._end, device=self.device)
            mask = (slots >= begins)[:, None, None]  # (B, 1, 1, S)
        # Cosines and sines, (1, D) or (B, 1, 1, D) each
        rotary = None if self._rotary is None else self._rotary[:, positions].unbind()
        x = self._fast_model.embed(tokens[:, None], positions, self._inputs)[:, 0]  # (B, C)
        cache = self._cache.narrow(1, 0, len(self.windows))
        written = cache.narrow(3, slot, 1).transpose(2, 3).unbind()  # (B, 1, K, D) each
        visible = cache.narrow(3, first, self._end - first).unbind()  # (B, K, S, D) each
        for i, block in enumerate(self._fast_model.blocks):
            x = block(x, rotary, _CacheSlots(written, visible, 2 * i), mask)
        return self._fast_model.logits(x)

    def cache_bytes(self, rows: int, length: int) -> int:
        """Return the most memory of the keys and values of `rows` samples that join, of up to `length` tokens each."""
        layers, _, heads, _, width = self._cache.shape  # keys and values
        return (
            layers
            * rows
            * heads
            * 2
            * min(length, self.block_size)
            * width
            * self._cache.element_size()
        )

    def slide_window(self) -> None:
        """Make room for one more token: of a full window, the newer half is read again from position 0."""
        full = [
            row
            for row, window in enumerate(self.windows)
            if drop_older_half(window, self.block_size)
        ]
        if full:
            self._read([self.windows[row] for row in full], full)
        if self._end == self._cache.size(3):
            B, first = len(self.windows), min(self._begins)
            if 2 * (self._end - first) > self._end:
                self._resize(B, 0)
            else:  # move the window to the front
                self._cache[:, :B, :, : self._end - first] = self._cache[:, :B, :, first:]
                self._shift(-first)
                self._cache[:, :, :, self._end :] = (
                    0  # no NaN of an earlier sample, for GraphDecoder
                )

    def _resize(self, rows: int, end: int) -> None:
        """Move to a cache of `rows` rows and twice as many slots as are visible, of which `end` are before the next."""
        B, first = len(self.windows), min(self._begins, default=self._end)
        visible, old = self._cache[:, :B, :, first : self._end], self._cache
        end = max(end, self._end - first)
        slots = min(2 * (end + 1), 2 * self.block_size)
        self._cache = old.new_zeros(len(old), rows, old.size(2), slots, old.size(4))
        self._cache[:, :B, :, end - visible.size(3) : end] = visible
        self._shift(end - self._end)

    def _shift(self, slots: int) -> None:
        self._begins = [begin + slots for begin in self._begins]
        self._end += slots

    def _read(self, contexts: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Fill the cache of the given samples: one context for all of them, or one each, of equal length."""
        rows, length = list(rows), len(contexts[0])
        begin = self._end - length
        for row in rows:
            self._begins[row] = begin
        # Not in inference mode, so that the model can be trained afterwards.
        with torch.inference_mode(False), torch.no_grad(), evaluation():
            read = self._reader.new_cache(len(contexts), length)
            if length:
                self._reader(torch.tensor(contexts, device=self.device), cache=read)
        for i, layer in enumerate(read.layers):
            for kind, values in enumerate((layer.k, layer.v)):
                self._cache[2 * i + kind, rows, :, begin : self._end] = values
        self._inputs.last_embeddings[rows] = read.last_embeddings
        self._inputs.last_tokens[rows] = read.last_tokens


class _CacheSlots:
    """The cache of one layer in one step, as `KVCache`: the slots that are written, and those that are visible."""

    def __init__(self, written: Sequence[Tensor], visible: Sequence[Tensor], keys: int) -> None:
        self.written, self.visible, self.keys = written, visible, keys

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, 1, K, D) and return the visible ones, (B, K, S, D) each."""
        keys = self.keys
        self.written[keys].copy_(k)
        self.written[keys + 1].copy_(v)
        return self.visible[keys], self.visible[keys + 1]


def _fast_model(plain: Any) -> Any:
    """Copy a plain model, with faster linear layers and GELU in its blocks and head."""
    config, fast = plain.config, copy.copy(plain)
    fast.blocks = [copy.copy(block) for block in plain.blocks]
    for block in fast.blocks:
        block.attention, block.mlp = copy.copy(block.attention), copy.copy(block.mlp)
    is_gelu = all(block.mlp.activation is F.gelu for block in fast.blocks)
    scaled_gelu = is_gelu and config.n_embd * config.inner_width < _MAX_COPIED_NUMEL
    half = math.sqrt(0.5) if scaled_gelu else 1.0
    fast.lm_head = _padded(fast.lm_head) if fast.lm_head.weight.is_cuda else _linear(fast.lm_head)
    for block in fast.blocks:
        block.attention.qkv, block.attention.out = (
            _linear(block.attention.qkv),
            _linear(block.attention.out),
        )
        block.mlp.up, block.mlp.down = (
            _linear(block.mlp.up, half, half),
            _linear(block.mlp.down, half),
        )
        if scaled_gelu:
            block.mlp.activation = _scaled_gelu
    return fast


def _plain(module: nn.Module) -> Any:
    """Copy a module to an object of its code and attributes that is no `nn.Module`; weights are gathered under FSDP."""
    module = original(module)
    if isinstance(module, nn.ModuleList | nn.ParameterList):
        return [
            _plain(item) if isinstance(item, nn.Module) else _full_tensor(item) for item in module
        ]
    kind: Any = type(module)
    plain = _plain_class(kind)()
    tensors = module._parameters | module._buffers
    vars(plain).update(vars(module), training=False)
    vars(plain).update(
        {name: None if value is None else _full_tensor(value) for name, value in tensors.items()}
    )
    vars(plain).update(
        {name: _plain(child) for name, child in module._modules.items() if child is not None}
    )
    return plain


@cache
def _plain_class(kind: Any) -> Any:
    """Return a class with the methods of a module class, whose instances are called without hooks.

    It does not inherit: the `__getattr__` of `nn.Module` makes Python look up every attribute more slowly.
    """
    defined = vars(plain_kind(kind))
    methods = {name: value for name, value in defined.items() if name != "__init__"}
    return type(kind.__name__, (), methods | {"__call__": defined["forward"]})


def _linear(
    layer: Any, weight_factor: float = 1.0, bias_factor: float = 1.0
) -> Callable[[Tensor], Tensor]:
    """Return the fastest function of a plain linear layer for x (B, I), with weights and bias multiplied by factors."""
    bias = None if layer.bias is None else layer.bias * bias_factor
    weight = layer.weight if weight_factor == 1 else layer.weight * weight_factor
    if (
        weight.numel() >= _MIN_LARGE_NUMEL
        and weight.is_cpu
        and weight.dtype == torch.float32
        and _HAS_ONEDNN
    ):
        return _LargeLinear(weight, bias)
    weight = weight.T.contiguous() if weight.numel() < _MAX_COPIED_NUMEL else weight.T
    return (
        (lambda x: torch.mm(x, weight))
        if bias is None
        else (lambda x: torch.addmm(bias, x, weight))
    )


def _padded(head: Any) -> Callable[[Tensor], Tensor]:
    """Return a function of the output head, with zero rows up to a multiple of 64, as kernels of a GPU need them."""
    rows = len(head.weight)
    weight = (F.pad(head.weight, (0, 0, 0, -rows % 64)) if rows % 64 else head.weight).T
    return lambda x: torch.mm(x, weight)[:, :rows]


class _LargeLinear:
    """Products limited by the memory bandwidth: on AMD, MKL's `mm` uses one thread and a third of it for few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.packed = (
            None if weight.numel() < _MAX_COPIED_NUMEL else weight
        )  # a larger one is used as it is
        self.slices = weight.reshape(
            math.gcd(len(weight), 8), -1, weight.size(1)
        )  # (slices, O/slices, I)

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) < 4 and _IS_AMD:
            y = (
                torch.bmm(self.slices, x.T.expand(len(self.slices), -1, -1))
                .flatten(0, 1)
                .T.contiguous()
            )  # (B, O)
            return y if self.bias is None else y.add_(self.bias)
        if len(x) < 4 or x.dtype != self.weight.dtype:  # under autocast
            return F.linear(x, self.weight, self.bias)
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def _full_tensor(weight: Tensor) -> Tensor:
    """Return a weight without gradient, gathered if FSDP shards it."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight.detach()


def _scaled_gelu(x: Tensor) -> Tensor:
    """√2 GELU(√2 x), for weights that are scaled to match: 18 % more tokens/s than torch's with nano on a CPU."""
    return torch.addcmul(x, x, x.erf())
