"""Decoding of one token per sample and step. Depends on torch alone.

`Decoder` computes the logits of `model(tokens)` by calling it, so it is right for every model,
however its user changed it. `make_decoder` of `minigpt.sampling.generation` returns one of
`minigpt.sampling.fast` for models that their user did not change.

Shapes: B samples, T tokens, V vocab.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minigpt.model.evaluation import evaluation
from minigpt.model.gpt import GPT
from minigpt.utils.errors import UserError


class Decoder:
    """Decode a batch of samples token by token; `logits` (B, V) are those of the next token.

    The window of each sample, the same as that of `FastDecoder`, is read at every step: `forward`
    may have no cache or ignore it, and a hook may look at positions.
    """

    def __init__(
        self, model: GPT, prompts: Sequence[Sequence[int]] = (), num_samples: int = 1
    ) -> None:
        self.model = model
        self.block_size = model.config.block_size
        self.device = next(model.parameters()).device
        self.windows: list[list[int]] = []  # the tokens of each sample that the next one sees
        self.read_prompts(prompts, num_samples)

    def read_prompts(self, prompts: Sequence[Sequence[int]], num_samples: int) -> None:
        """Add samples of each prompt, and compute the logits after them."""
        last_tokens: list[int] = []
        for prompt in prompts:
            self.add(prompt, num_samples)
            last_tokens += [prompt[-1]] * num_samples
        if last_tokens:
            self.step(torch.tensor(last_tokens, device=self.device))

    def add(self, prompt: Sequence[int], num_samples: int = 1) -> None:
        """Append new samples; the next `step` is to add the last token of their prompt."""
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
        for window, token in zip(self.windows, tokens.tolist(), strict=True):
            drop_older_half(window, self.block_size)
            window.append(token)
        # Equal windows, as those of one prompt, are read once; those of one length in one batch.
        windows = list(map(tuple, self.windows))
        by_length: dict[int, list[tuple[int, ...]]] = {}
        for distinct in dict.fromkeys(windows):
            by_length.setdefault(len(distinct), []).append(distinct)
        logits_after: dict[tuple[int, ...], Tensor] = {}  # of each window, (V,)
        with evaluation(self.model):
            for batch in by_length.values():
                logits = self.model(torch.tensor(batch, device=self.device))  # (b, T, V)
                if not isinstance(logits, Tensor) or logits.dim() != 3:
                    raise UserError(
                        "model(tokens) must return logits, a tensor (B, T, V), "
                        f"got {type(logits).__name__}"
                    )
                logits_after.update(zip(batch, logits[:, -1], strict=True))
        self.logits = torch.stack([logits_after[window] for window in windows])  # (B, V)
        return self.logits


def first_window(prompt: Sequence[int], block_size: int) -> list[int]:
    """Return the tokens that the last one of a prompt sees, without it."""
    context = list(prompt[:-1])
    return context[max(0, len(context) - block_size + 1) :]


def drop_older_half(window: list[int], block_size: int) -> bool:
    """Drop the older half of a window of `block_size` tokens, so that one more has place.

    Returns:
        Whether the window was full.
    """
    is_full = len(window) == block_size
    if is_full:
        kept = max(1, block_size // 2) - 1  # and the token that comes
        del window[: block_size - kept]
    return is_full
