"""Decoding: prefill the prompt once, then one token a step from cached keys and values. Torch alone.

`generate` returns whole samples and `stream` yields them token by token. Every sample draws from a
generator of its own, so sample i is the same text however many others run beside it.

Past `block_size` the context is cropped to its newer half and read again, so that a step costs the
same however long the text grows; nanoGPT's loop, which crops by one token, reads it again every step.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from minigpt.errors import UserError
from minigpt.model import GPT


def generate(
    model: GPT,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    num_samples: int = 1,
) -> Tensor:
    """Continue a prompt.

    Args:
        prompt: (T,) token ids, at least one. Of a prompt longer than `block_size` the end is read.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: keep the k likeliest tokens; None keeps all.
        seed: sample i draws from its own generator, seeded with seed + i.

    Returns:
        (num_samples, max_new_tokens) token ids, without the prompt.

    Raises:
        UserError: a setting is impossible.
    """
    steps = stream(
        model,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        num_samples=num_samples,
    )
    return torch.stack(list(steps), dim=1)


@torch.no_grad()
def stream(
    model: GPT,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    num_samples: int = 1,
) -> Iterator[Tensor]:
    """`generate`, yielding the next token of every sample, (num_samples,), as soon as it is drawn."""
    check_settings(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed, num_samples=num_samples
    )
    if prompt.dim() != 1 or len(prompt) == 0:
        raise UserError("the prompt must be a row of at least one token")
    device, block_size = prompt.device, model.config.block_size
    generators = [torch.Generator(device).manual_seed(seed + i) for i in range(num_samples)]
    context = prompt[-block_size:].repeat(num_samples, 1)  # (N, T)
    training = model.training
    model.eval()
    try:
        cache = model.new_cache(num_samples)
        new = context
        for _ in range(max_new_tokens):
            if cache.length + new.size(1) > block_size:
                context = new = context[:, -max(1, block_size // 2) :]
                cache.clear()
            logits = model(new, cache=cache)[:, -1].float()  # (N, V)
            new = _sample(logits, temperature, top_k, generators)  # (N, 1)
            context = torch.cat((context, new), dim=1)[:, -block_size:]
            yield new[:, 0]
    finally:
        model.train(training)


def check_settings(
    *, max_new_tokens: int, temperature: float, top_k: int | None, seed: int = 0, num_samples: int = 1
) -> None:
    """Raises UserError, naming the setting, for one that is impossible."""
    for name, value, least in (
        ("max_new_tokens", max_new_tokens, 1),
        ("seed", seed, 0),
        ("num_samples", num_samples, 1),
        ("top_k", 1 if top_k is None else top_k, 1),
    ):
        if not isinstance(value, int) or not least <= value < 1 << 63:
            raise UserError(f"{name}={value} is not possible; it takes a whole number of at least {least}")
    if not isinstance(temperature, int | float) or not 0 <= temperature < float("inf"):
        raise UserError(f"temperature={temperature} is not possible; it takes a number of at least 0")


def _sample(logits: Tensor, temperature: float, top_k: int | None, generators: list[torch.Generator]) -> Tensor:
    """Draw a token a row from logits (N, V); returns (N, 1)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None and top_k < logits.size(-1):
        kept, index = logits.topk(top_k)  # exactly k, also where logits tie
        logits = torch.full_like(logits, float("-inf")).scatter(-1, index, kept)
    # The largest of p / Exp(1) is a draw from p, and each row can have a generator of its own.
    noise = torch.stack(
        [torch.empty_like(row).exponential_(generator=g) for row, g in zip(logits, generators, strict=True)]
    )
    logits = logits - logits.amax(dim=-1, keepdim=True)  # a tiny temperature must not make inf - inf
    return ((logits / temperature).softmax(dim=-1) / noise).argmax(dim=-1, keepdim=True)
