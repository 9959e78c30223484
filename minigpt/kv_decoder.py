"""The step of decoding: the next logits of every sample from one more token each. Depends on torch alone.

A token at a time, a small model is not slow by its arithmetic but by the number of operations, so this is the
model written with few of them: no modules, one write of keys and values a layer, one mask a step. The model
itself reads prompts; tests hold the two against each other for every architecture.

Keys and values lie in one buffer, and the newest of every sample in the same place. A window of up to
`block_size` slides over the buffer, and is moved back to its beginning when it comes to the end. With rotary
positions it slides token by token: what fell out of the window is not seen again, and nothing is computed
anew. Learned positions end with `block_size`: there the newer half of the window is read again, as its own
text, so that a step costs the same however long the text grows.

Shapes: B samples, C n_embd, V vocab, H query heads, K key-value heads, D head width, S positions of the buffer.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.attention import rotary_table
from minigpt.model import GPT, Block, Cache, smear
from minigpt.ops import ACTIVATIONS, NORMS, rms_norm

_SMALL = 1 << 20  # numbers of a matrix of which a copy in the order of the product is worth its memory
_TURNED = 256  # positions of which the rotation is computed at a time


class Decoder:
    """Samples of a model: what was read of each, and the step that adds a token to each.

    Args:
        prompts: token ids of each prompt, at least one; of a prompt beyond `block_size` the end is read.
        num_samples: of each prompt, which is read once.
        new_tokens: how many will come, which says how large the buffer is.
        compile: the step, once for all decoders of a shape.

    `logits` (B, V) are those after the prompts, then those after the last step.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: GPT,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        new_tokens: int,
        *,
        compile: bool = False,
    ) -> None:
        config = model.config
        if config.position not in ("learned", "rope", "none"):
            raise ValueError(f"unknown position {config.position!r}")
        activation = ACTIVATIONS[config.activation]
        if activation is F.gelu and config.n_embd * config.inner_width < _SMALL:
            activation = _scaled_gelu
        self.model, self.config, self.block_size, self.compile = model, config, config.block_size, compile
        before = [list(prompt[:-1]) for prompt in prompts]  # the last token of each is the first step's
        self.texts = [list(text) for text in before for _ in range(num_samples)]  # all tokens of each sample
        self._kind = BlockSpec(
            config.n_head,
            config.n_kv_head or config.n_head,
            config.head_width,
            NORMS[config.norm],
            {"pre": True, "post": False}[config.norm_position],
            config.qk_norm,
            config.attention_scale,
            activation,
        )
        self._layers = [BlockWeights.of(block, self._kind) for block in model.blocks]
        self._norm, (self._head, _) = _norm_weights(model.final_norm), _linear_weights(model.lm_head)
        weight = self._wte = _whole(model.wte.weight)
        self._wpe = _whole(model.wpe.weight) if config.position == "learned" else weight[:0]
        self.device, batch, longest = weight.device, len(self.texts), max(map(len, before))
        # All in one piece if that is short, and else twice the window: it moves back once in block_size tokens.
        self._size = min(longest + new_tokens, 2 * self.block_size)
        if compile:  # few sizes: each is compiled for itself
            self._size = self.block_size if self._size <= self.block_size else 2 * self.block_size
        shape = (batch, self._kind.n_kv_head, self._size, config.head_width)
        # Keys and values of every layer, zeros at first: compiled, what is not seen is multiplied, by zero.
        if compile:
            self._kept = [(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in self._layers]
        else:  # one tensor, so that places of all layers are found at once
            self._buffer = weight.new_zeros(len(self._layers), batch, 2 * shape[1], *shape[2:])
            self._kept = [(layer[:, : shape[1]], layer[:, shape[1] :]) for layer in self._buffer]
        self._end = min(longest, self.block_size - 1)
        self._starts = [self._end] * batch  # of each sample's window
        self._offsets = [-self._end] * batch  # from a place in the buffer to the position in the sample
        self._turns: tuple[int, Tensor] | None = None  # first position, and rotations from there on
        self._state = Cache([])  # what smear and n-grams remember; at first, that nothing was there
        if config.smear:
            self._state.last = weight.new_zeros(batch, config.smear, config.n_embd)
        if config.ngram:
            self._state.last_tokens = torch.full((batch, config.ngram - 1), config.vocab_size, device=self.device)
        for i, text in enumerate(before):
            if text:
                length = min(len(text), self._end)
                self._read([text[len(text) - length :]], range(i * num_samples, (i + 1) * num_samples))
        last = [prompt[-1] for prompt in prompts for _ in range(num_samples)]
        self.logits = self.step(torch.tensor(last, device=self.device))

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Add a token to each sample, (B,); returns the logits after it, (B, V)."""
        self._make_room()
        for text, token in zip(self.texts, tokens.tolist(), strict=True):
            text.append(token)
        at, self._end = self._end, self._end + 1
        if self.config.position != "learned":
            self._starts = [max(start, self._end - self.block_size) for start in self._starts]
        x = self._embed(tokens, at)  # (B, C)
        turn = self._turn(at) if self.config.position == "rope" else None
        if self.compile:
            mask = self._mask(0, self._size)
            place = torch.tensor([at], device=self.device)
            x = _compiled(self.device.type)(self._kind, self._layers, x, turn, mask, self._kept, place)
        else:
            first = min(self._starts)
            hidden = None if first == max(self._starts) else self._mask(first, self._end)
            new = self._buffer[..., at : self._end, :].unbind()  # (B, 2K, 1, D), a layer each
            keys, values = self._buffer[..., first : self._end, :].chunk(2, dim=2)
            seen = list(zip(keys.unbind(), values.unbind(), strict=True))  # (B, K, S, D) each, a layer

            def store(i: int, kv: Tensor) -> tuple[Tensor, Tensor]:
                new[i].copy_(kv)
                return seen[i]

            x = _blocks(self._kind, self._layers, x, turn, hidden, store)
        x = self._kind.norm(x, *self._norm) if self._kind.pre_norm else x
        self.logits = torch.mm(x if self.config.width_ratio == 1 else x / self.config.width_ratio, self._head)
        return self.logits

    def _read(self, texts: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Have the model read texts of one length, for samples that go on from them: one text for all, or one each."""
        rows, length = list(rows), len(texts[0])
        begin = self._end - length
        for row in rows:
            self._starts[row], self._offsets[row] = begin, -begin
        # Not in inference mode, whose tensors a model that goes on training must not keep.
        with torch.inference_mode(False), torch.no_grad():
            read = self.model.new_cache(len(texts))
            if length:
                self.model(torch.tensor(texts, device=self.device), cache=read)
        if length:
            for layer, (keys, values) in zip(read.layers, self._kept, strict=True):
                keys[rows, :, begin : self._end] = layer.k[:, :, :length]
                values[rows, :, begin : self._end] = layer.v[:, :, :length]
        if self._state.last is not None:
            self._state.last[rows] = 0 if read.last is None else read.last
        if self._state.last_tokens is not None:
            nothing = self.config.vocab_size
            self._state.last_tokens[rows] = nothing if read.last_tokens is None else read.last_tokens

    def _make_room(self) -> None:
        """Where the window of learned positions is full, read its newer half again; where the buffer is, move back."""
        full = [row for row, start in enumerate(self._starts) if self._end - start == self.block_size]
        if full and self.config.position == "learned":
            again = max(1, self.block_size // 2) - 1  # and the token that is added
            self._read([self.texts[row][len(self.texts[row]) - again :] for row in full], full)
        if self._end == self._size:
            first = min(self._starts)
            for kept in chain.from_iterable(self._kept):
                kept[:, :, : self._end - first] = kept[:, :, first : self._end].clone()
            self._starts = [start - first for start in self._starts]
            self._offsets = [offset + first for offset in self._offsets]
            self._end -= first

    def _mask(self, first: int, last: int) -> Tensor:
        """Which of the places from `first` to before `last` each sample sees, (B, 1, 1, S)."""
        places = torch.arange(first, last, device=self.device)
        starts = torch.tensor(self._starts, device=self.device)[:, None]
        return ((places >= starts) & (places < self._end))[:, None, None]

    def _embed(self, tokens: Tensor, at: int) -> Tensor:
        """What enters the first block, (B, C)."""
        model, config = self.model, self.config
        x = self._wte.index_select(0, tokens)
        if config.ngram:
            x = x + model.ngrams(tokens[:, None], self._state)[:, 0]
        if config.smear:
            mixed, self._state.last = smear(x[:, None], tuple(model.smear), self._state.last)
            x = mixed[:, 0]
        if config.position == "learned":
            x = x + self._pick(self._wpe, at)
        return rms_norm(x) if config.embed_norm else x

    def _turn(self, at: int) -> Tensor:
        """Factors of a head and of its halves exchanged, for the next positions: (2, D), or (2, B, 1, 1, D)."""
        least, most = at + min(self._offsets), at + max(self._offsets)
        if self._turns is None or most >= self._turns[0] + self._turns[1].size(1):
            D, config = self.config.head_width, self.config
            cos, sin = rotary_table(most - least + _TURNED, D, config.rope_base, start=least)
            table = torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))
            self._turns = least, table.to(self._head)  # (2, positions, D)
        begin, table = self._turns
        if least == most:
            return table[:, least - begin]
        return self._pick(table.movedim(0, 1), at - begin).movedim(0, 1)[:, :, None, None]

    def _pick(self, table: Tensor, at: int) -> Tensor:
        """The row of a table that each sample's next position has: one for all where they agree."""
        if min(self._offsets) == max(self._offsets):
            return table[at + self._offsets[0]]
        return table[torch.tensor(self._offsets, device=self.device) + at]


class BlockSpec(NamedTuple):
    """What blocks are alike in."""

    n_head: int
    n_kv_head: int
    width: int  # D
    norm: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
    pre_norm: bool
    qk_norm: bool
    scale: float | None
    activation: Callable[[Tensor], Tensor]


class BlockWeights(NamedTuple):
    """The weights of a block, matrices as they stand in a product with rows (B, ·)."""

    norm_1: Tensor | None
    norm_1_bias: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    norm_2: Tensor | None
    norm_2_bias: Tensor | None
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    @classmethod
    def of(cls, block: nn.Module, kind: BlockSpec) -> "BlockWeights":
        assert isinstance(block, Block)
        attention, mlp = block.attention, block.mlp
        (up, up_bias), (down, down_bias) = _linear_weights(mlp.up), _linear_weights(mlp.down)
        if kind.activation is _scaled_gelu:
            half = math.sqrt(0.5)
            up, up_bias, down = up * half, None if up_bias is None else up_bias * half, down * half
        return cls(
            *_norm_weights(block.norm_1),
            *_linear_weights(attention.qkv),
            *_linear_weights(attention.out),
            *_norm_weights(block.norm_2),
            up,
            up_bias,
            down,
            down_bias,
        )


def _linear_weights(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    assert isinstance(layer, nn.Linear)
    weight = _whole(layer.weight).T
    weight = weight.contiguous() if weight.numel() < _SMALL else weight
    return weight, None if layer.bias is None else _whole(layer.bias)


def _norm_weights(layer: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    return None if weight is None else _whole(weight), None if bias is None else _whole(bias)


def _whole(weight: Tensor) -> Tensor:
    """A weight that may be spread over processes, in one piece."""
    whole: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight.detach()
    return whole


def _blocks(
    kind: BlockSpec,
    layers: Sequence[BlockWeights],
    x: Tensor,
    turn: Tensor | None,
    mask: Tensor | None,
    store: Callable[[int, Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """The blocks for one position of each sample: (B, C) to (B, C).

    Args:
        turn: rotation of queries and keys, see `Decoder._turn`.
        mask: (B, 1, 1, S), true where a sample may look.
        store: takes the number of a layer and its new keys and values (B, 2K, 1, D), and gives all of them that are to
            be seen, (B, K, S, D) each.
    """
    B, H, K, D = len(x), kind.n_head, kind.n_kv_head, kind.width
    for i, layer in enumerate(layers):
        h = kind.norm(x, layer.norm_1, layer.norm_1_bias) if kind.pre_norm else x
        heads = _linear(h, layer.qkv, layer.qkv_bias).view(B, H + 2 * K, 1, D)
        q, kv = heads.narrow(1, 0, H), heads.narrow(1, H, 2 * K)  # (B, H, 1, D), (B, 2K, 1, D)
        if kind.qk_norm or turn is not None:
            qk = heads.narrow(1, 0, H + K)  # changed in place, which changes q and kv
            if kind.qk_norm:
                qk.copy_(rms_norm(qk))
            if turn is not None:
                turned = qk.roll(D // 2, dims=-1).mul_(turn[1])
                qk.mul_(turn[0]).add_(turned)
        keys, values = store(i, kv)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=kind.scale, enable_gqa=H != K)
        x = _linear(y.view(B, H * D), layer.out, layer.out_bias, onto=x)
        if not kind.pre_norm:
            x = kind.norm(x, layer.norm_1, layer.norm_1_bias)
        h = kind.norm(x, layer.norm_2, layer.norm_2_bias) if kind.pre_norm else x
        h = kind.activation(_linear(h, layer.up, layer.up_bias))
        x = _linear(h, layer.down, layer.down_bias, onto=x)
        if not kind.pre_norm:
            x = kind.norm(x, layer.norm_2, layer.norm_2_bias)
    return x


def _blocks_in_place(
    kind: BlockSpec,
    layers: Sequence[BlockWeights],
    x: Tensor,
    turn: Tensor | None,
    mask: Tensor,
    kept: Sequence[tuple[Tensor, Tensor]],
    at: Tensor,
) -> Tensor:
    """`_blocks` over all places of `kept`: nothing but the contents of tensors changes from step to step."""

    def store(i: int, kv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = kept[i]
        keys.index_copy_(2, at, kv[:, : kind.n_kv_head])
        values.index_copy_(2, at, kv[:, kind.n_kv_head :])
        return keys, values

    return _blocks(kind, layers, x, turn, mask, store)


@cache
def _compiled(device: str) -> Callable[..., Tensor]:
    # On a CPU what calls the compiled parts is worth compiling too.
    return torch.compile(_blocks_in_place, options={"cpp_wrapper": device == "cpu"})


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, onto: Tensor | None = None) -> Tensor:
    """x @ weight + bias + onto, in one operation where only one of them is there."""
    if onto is None:
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
    return torch.addmm(onto if bias is None else onto + bias, x, weight)


def _scaled_gelu(x: Tensor) -> Tensor:
    """√2 gelu(√2 x), of weights that are scaled to match: on a CPU torch's own takes as long as a product."""
    return torch.addcmul(x, x, x.erf())
