"""Int8 weights for sampling on a CPU. Depends on torch alone.

A product of int8 matrices is exact, so a row of the result depends on no other row: samples do not depend on their
batch, nor logits on later tokens. `torch.ao.quantization` has one scale for all rows of an input, and is deprecated.

Shapes: N rows, I input channels, O output channels.
"""

import torch
from torch import Tensor, nn

from minigpt.model import GPT

_MAX_INT8 = 127
_LEAST = 1e-30  # scale of a row of zeros


def quantize(model: GPT) -> GPT:
    """Replace the matrices of the blocks and the head of a float32 model by int8 ones, in place."""
    for parent in (*model.blocks.modules(), model):
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Linear) and layer.in_features > 1:  # of one, torch 2.13's product is wrong
                setattr(parent, name, Int8Linear(layer))
    return model


class Int8Linear(nn.Module):
    """A linear layer of int8 weights with a scale per output channel, for inputs that are rounded with a scale per row.

    Source: vector-wise quantization, https://arxiv.org/abs/2208.07339, section 3.1
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach().float()
        # Without VNNI, oneDNN adds pairs of products in int16, which 7 bits do not overflow.
        ones = torch.full((1, 64), _MAX_INT8, dtype=torch.int8)
        max_weight = _MAX_INT8 if int(torch._int_mm(ones, ones.T)) == 64 * _MAX_INT8**2 else _MAX_INT8 // 2
        scale = weight.abs().amax(dim=1).clamp(min=_LEAST) / max_weight
        self.weight = nn.Buffer((weight / scale[:, None]).round().to(torch.int8).T)  # (I, O)
        self.scale = nn.Buffer(scale / _MAX_INT8)  # (O,) with the constant of the row scales
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, I) to (…, O)."""
        return int8_linear(self.weight, self.scale, self.bias, x.flatten(0, -2)).view(*x.shape[:-1], -1)


def int8_linear(weight: Tensor, scale: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Return x @ (weight · scale) + bias for x (N, I), with the tensors of an `Int8Linear`."""
    largest = x.abs().amax(dim=-1, keepdim=True).clamp_(min=_LEAST)  # (N, 1)
    rounded = (x / largest).mul_(_MAX_INT8).round_().to(torch.int8)
    y = torch._int_mm(rounded, weight) * scale  # (N, O)
    return y.mul_(largest) if bias is None else torch.addcmul(bias, y, largest)
