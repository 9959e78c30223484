"""Heads silenced by hooks: the reference for models whose weights are changed."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from minigpt.model import GPT


def silence(model: GPT, heads: Iterable[Sequence[int]]) -> ExitStack:
    """Set the output of heads [layer, head], counted from 0, to zero: `with silence(model, [[0, 1]]): …`."""
    stack = ExitStack()
    for layer, head in heads:
        attention: Any = model.blocks[layer].attention
        keep = torch.ones(attention.n_head, attention.head_dim)  # (H, D)
        keep[head] = 0
        hook = attention.out.register_forward_pre_hook(lambda _, args, keep=keep: (args[0] * keep.flatten(),))
        stack.enter_context(hook)
    return stack
