"""Decoding in tokens/s against a loop without a cache, transformers, and the limit of the memory
bandwidth.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from common import seconds

from minigpt.model.config import GPTConfig
from minigpt.model.gpt import GPT
from minigpt.sampling.generation import generate

SHAPES = {  # nanoGPT's recipes for a CPU and for a GPU
    "nano": {"block_size": 64, "n_layer": 4, "n_head": 4, "n_embd": 128},
    "baby": {"block_size": 256, "n_layer": 6, "n_head": 6, "n_embd": 384},
}
BANDWIDTH_BYTES = 256 << 20  # more than any CPU cache holds


def sampling(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure one block of tokens after a prompt of one: untrained models of nanoGPT's shapes on a
    CPU.
    """
    rows = []
    for _ in range(args.rounds):
        row: dict[str, Any] = {}
        gb_s = bandwidth()
        row["memory GB/s"] = gb_s
        for name, shape in SHAPES.items():
            torch.manual_seed(0)
            model = GPT(GPTConfig(vocab_size=65, bias=False, **shape)).eval()
            theirs = in_transformers(model.config)
            for streams in (1, 16):
                n = model.config.block_size - 1
                title = f"{name}, {streams} stream{'s'[: streams > 1]}"
                # With 16 streams of the larger model, the loop is run at every eighth length only.
                stride = 8 if streams * model.config.n_embd > 4096 else 1
                loop = without_cache(model, n, streams, stride)
                ours = (
                    n
                    * streams
                    / seconds(lambda m=model, n=n, s=streams: minigpt_tokens(m, n, s), times=3)
                )
                other = (
                    n
                    * streams
                    / seconds(
                        lambda m=theirs, n=n, s=streams: transformers_tokens(m, n, s), times=3
                    )
                )
                row |= {
                    f"{title}: no cache tokens/s": loop,
                    f"{title}: transformers tokens/s": other,
                    f"{title}: minigpt tokens/s": ours,
                    f"{title}: over no cache": ours / loop,
                    f"{title}: over transformers": ours / other,
                }
                if streams == 1:
                    limit = gb_s * 1e9 / (4 * model.config.num_params(positions=False))
                    row[f"{title}: share of the bandwidth limit"] = ours / limit
        rows.append(row)
    return rows


def without_cache(model: GPT, n: int, streams: int, stride: int) -> float:
    """Return the tokens/s of nanoGPT's loop, which reads the whole text for every token.

    Args:
        n: number of text lengths, 1 … n; every `stride`-th of them is timed.
    """
    lengths, taken = range(1, 1 + n, stride), 0.0
    with torch.no_grad():
        for length in lengths:
            text = torch.zeros(streams, length, dtype=torch.long)
            start = time.perf_counter()
            logits = model(text)[:, -1] / 0.8
            torch.cat((text, torch.multinomial(logits.softmax(dim=-1), 1)), dim=1)
            taken += time.perf_counter() - start
    return streams * len(lengths) / taken


def minigpt_tokens(model: GPT, n: int, streams: int) -> None:
    """Generate `n` tokens per stream with minigpt from a prompt of one token."""
    generate(model, [0], max_new_tokens=n, temperature=0.8, num_samples=streams)


def in_transformers(config: GPTConfig) -> Any:
    """Return transformers' GPT-2 of the same shape, with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd}
    sizes |= {"vocab_size": config.vocab_size, "n_positions": config.block_size}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()


def transformers_tokens(model: Any, n: int, streams: int, *, static: bool = False) -> None:
    """Generate `n` tokens per stream with transformers and its cache; a static cache compiles the
    step on a GPU.
    """
    prompt = torch.zeros(streams, 1, dtype=torch.long, device=model.device)
    options = {"cache_implementation": "static"} if static else {}
    options |= {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0}
    model.generate(prompt, max_new_tokens=n, do_sample=True, temperature=0.8, top_k=0, **options)


def bandwidth() -> float:
    """Return the memory bandwidth of all threads in GB/s."""
    # Written first: untouched pages all map to one page of zeros
    numbers = torch.ones(BANDWIDTH_BYTES // 4)
    return BANDWIDTH_BYTES / 1e9 / min(seconds(numbers.sum) for _ in range(5))
