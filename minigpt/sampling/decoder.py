"""Decoding of one token per sample and step. Depends on torch alone.

`Decoder` computes the logits of `model(tokens)` by calling it, so it is right for every model, however its user changed
it. `make_decoder` of `minigpt.sampling.generation` returns one of `minigpt.sampling.fast` for models that their user did
not change.

Shapes: B samples, T tokens, V vocab.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minigpt.model.evaluation import evaluation
from minigpt.utils.errors import UserError


class Decoder:
    """Decode a batch of samples token by token; `logits` (B, V) are those of the next token.

    The window of each sample, the same as that of `FastDecoder`, is read at every step: `forward` may have no cache or
    ignore it, and a hook may look at positions.
    """

    def __init__(
        self, model: Any, prompts: Sequence[Sequence[int]] = (), num_samples: int = 1
    ) -> None:
        self.model, self.block_size = model, model.config.block_size
        self.device = next(model.parameters()).device
        self.windows: list[list[int]] = []  # the tokens of each sample that the next one sees
        for prompt in prompts:
            self.add(prompt, num_samples)
        if prompts:
            last = [prompt[-1] for prompt in prompts for _ in range(num_samples)]
            self.step(torch.tensor(last, device=self.device))

    def add(self, prompt: Sequence[int], num_samples: int = 1) -> None:
        """Append new samples to the batch; the next `step` is to add the last token of their prompt."""
        self.windows += [first_window(prompt, self.block_size) for _ in range(num_samples)]

    def drop(self, row: int) -> None:
        """Remove a sample; the last one of the batch takes its row."""
        self.windows[row] = self.windows[-1]
        self.windows.pop()

    # Not in inference mode, so that the model can be trained afterwards.
    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Append one token (B,) to each sample and return the logits (B, V) after it."""
        for own, token in zip(self.windows, tokens.tolist(), strict=True):
            drop_older_half(own, self.block_size)
            own.append(token)
        windows = list(map(tuple, self.windows))
        by_length: dict[int, list[tuple[int, ...]]] = {}
        for window in dict.fromkeys(windows):  # equal ones, as those of one prompt, are read once
            by_length.setdefault(len(window), []).append(window)
        found: dict[tuple[int, ...], Tensor] = {}  # the logits (V,) after each window
        with evaluation(self.model):
            for batch in by_length.values():
                logits = self.model(torch.tensor(batch, device=self.device))  # (B, T, V)
                if not isinstance(logits, Tensor) or logits.dim() != 3:
                    raise UserError(
                        f"model(tokens) must return logits, a tensor (B, T, V), got {type(logits).__name__}"
                    )
                found |= zip(batch, logits[:, -1], strict=True)
        self.logits = torch.stack([found[window] for window in windows])
        return self.logits

    def cache_bytes(self, rows: int, length: int) -> int:
        """Return 0: there is no cache of keys and values."""
        return 0


def first_window(prompt: Sequence[int], block_size: int) -> list[int]:
    """Return the tokens that the last one of a prompt sees, without it."""
    context = list(prompt[:-1])
    return context[max(0, len(context) - block_size + 1) :]


def drop_older_half(window: list[int], block_size: int) -> bool:
    """Return whether a window of `block_size` tokens is full; then drop its older half, so that one more has place."""
    is_full = len(window) == block_size
    if is_full:
        kept = max(1, block_size // 2) - 1  # and the token that comes
        del window[: block_size - kept]
    return is_full
