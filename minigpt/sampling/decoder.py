"""Decoding of one token per sample and step. Depends on torch alone.

`Decoder` computes the logits of `model(tokens)` by calling it, so it is right for every model,
however its user changed it. `decoder_class` of `minigpt.sampling.generation` returns one of
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
    """Decode a batch of samples token by token; the first `step` adds the last of their prompts.

    The window of each sample, the same as that of `FastDecoder`, is read at every step: `forward`
    may have no cache or ignore it, and a hook may look at positions.

    Args:
        prompts: are read once, and are at least one id each.
        num_samples: of each prompt; samples of one prompt are next to each other.
        max_new_tokens: per sample, for which a cache has room.
    """

    def __init__(
        self,
        model: GPT,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        max_new_tokens: int,
    ) -> None:
        self.model = model
        self.block_size = model.config.block_size
        self.device = next(model.parameters()).device
        # The tokens of each sample that the next one sees
        self.windows = [
            first_window(prompts[i // num_samples], self.block_size)
            for i in range(len(prompts) * num_samples)
        ]

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
        return torch.stack([logits_after[window] for window in windows])  # (B, V)


def first_window(prompt: Sequence[int], block_size: int) -> list[int]:
    """Return the tokens that the last one of a prompt sees, without it."""
    return list(prompt[-block_size:-1])


def drop_older_half(window: list[int], block_size: int) -> bool:
    """Drop the older half of a window of `block_size` tokens, so that one more has place.

    Returns:
        Whether the window was full.
    """
    is_full = len(window) == block_size
    if is_full:
        # With the token that comes, the newer half is a window.
        del window[: block_size + 1 - max(1, block_size // 2)]
    return is_full
