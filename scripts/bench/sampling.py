"""Decoding in tokens/s against a loop without a cache, transformers, and the limit of the memory bandwidth."""

import argparse
import copy
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import ROOT, seconds

SAMPLE = ROOT / "scripts" / "sample.py"
SHAPES = {  # nanoGPT's recipes for a CPU and for a GPU
    "nano": {"block_size": 64, "n_layer": 4, "n_head": 4, "n_embd": 128},
    "baby": {"block_size": 256, "n_layer": 6, "n_head": 6, "n_embd": 384},
}
BANDWIDTH_BYTES = 256 << 20  # more than any CPU cache holds


def sampling(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure one block of tokens after a prompt of one: untrained models of nanoGPT's shapes on a CPU."""
    import torch

    from minigpt.config import GPTConfig
    from minigpt.int8 import quantize
    from minigpt.model import GPT

    rows = []
    for _ in range(args.rounds):
        row: dict[str, Any] = {}
        gb_s = bandwidth()
        row["memory GB/s"] = gb_s
        for name, shape in SHAPES.items():
            torch.manual_seed(0)
            model = GPT(GPTConfig(vocab_size=65, bias=False, **shape)).eval()
            theirs, in_int8 = in_transformers(model), quantize(copy.deepcopy(model))
            for streams in (1, 16):
                n = model.config.block_size - 1
                title = f"{name}, {streams} stream{'s'[: streams > 1]}"
                # With 16 streams of the larger model, the loop is run at every eighth length only.
                stride = 8 if streams * model.config.n_embd > 4096 else 1
                loop = without_cache(model, n, streams, stride)
                ours = n * streams / seconds(lambda m=model, n=n, s=streams: minigpt_tokens(m, n, s), times=3)
                other = n * streams / seconds(lambda m=theirs, n=n, s=streams: transformers_tokens(m, n, s), times=3)
                int8 = n * streams / seconds(lambda m=in_int8, n=n, s=streams: minigpt_tokens(m, n, s), times=3)
                row |= {
                    f"{title}: no cache tokens/s": loop,
                    f"{title}: transformers tokens/s": other,
                    f"{title}: minigpt tokens/s": ours,
                    f"{title}: minigpt int8 tokens/s": int8,
                    f"{title}: over no cache": ours / loop,
                    f"{title}: over transformers": ours / other,
                }
                if streams == 1:
                    beyond = beyond_block(model)
                    full = without_cache(model, 1, 1, 1, context=model.config.block_size, times=16)
                    row |= {
                        f"{name}, beyond its block: no cache tokens/s": full,
                        f"{name}, beyond its block: minigpt tokens/s": beyond,
                        f"{name}, beyond its block: over no cache": beyond / full,
                    }
                    limit = gb_s * 1e9 / (4 * model.config.num_params(positions=False))
                    row[f"{title}: share of the bandwidth limit"] = ours / limit
            row |= startup(model, name, folder)
        rows.append(row)
    return rows


def without_cache(model: Any, n: int, streams: int, stride: int, context: int = 1, times: int = 1) -> float:
    """Return the tokens/s of nanoGPT's loop, which reads the whole text for every token.

    Args:
        n: number of text lengths, `context` + 0 … n - 1; every `stride`-th of them is timed.
        times: repetitions per length.
    """
    import torch

    taken = 0.0
    with torch.no_grad():
        for length in range(context, context + n, stride):
            text = torch.zeros(streams, length, dtype=torch.long)
            for _ in range(times):
                start = time.perf_counter()
                logits = model(text)[:, -1] / 0.8
                torch.cat((text, torch.multinomial(logits.softmax(dim=-1), 1)), dim=1)
                taken += time.perf_counter() - start
    return streams * times * len(range(0, n, stride)) / taken


def beyond_block(model: Any) -> float:
    """Return the tokens/s of minigpt in the second block of a text."""
    from minigpt.generation import stream

    n, start = model.config.block_size, 0.0
    for i, _ in enumerate(stream(model, [0], max_new_tokens=2 * n, temperature=0.8)):
        if i == n:
            start = time.perf_counter()
    return (n - 1) / (time.perf_counter() - start)


def minigpt_tokens(model: Any, n: int, streams: int) -> None:
    """Generate `n` tokens per stream with minigpt from a prompt of one token."""
    from minigpt.generation import generate

    generate(model, [0], max_new_tokens=n, temperature=0.8, num_samples=streams)


def in_transformers(model: Any) -> Any:
    """Return transformers' GPT-2 with the same weights and zero biases."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = model.config
    settings = {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd}
    shape = {"vocab_size": config.vocab_size, "n_positions": config.block_size, "activation_function": "gelu"}
    theirs = GPT2LMHeadModel(GPT2Config(**settings, **shape, bos_token_id=None, eos_token_id=None)).eval()
    weights = {name: torch.zeros_like(value) for name, value in theirs.state_dict().items()}
    weights |= {"transformer.wte.weight": model.wte.weight, "transformer.wpe.weight": model.wpe.weight}
    weights |= {"lm_head.weight": model.wte.weight, "transformer.ln_f.weight": model.final_norm.weight}
    for i, block in enumerate(model.blocks):
        weights |= {
            f"transformer.h.{i}.ln_1.weight": block.norm_1.weight,
            f"transformer.h.{i}.attn.c_attn.weight": block.attention.qkv.weight.T,
            f"transformer.h.{i}.attn.c_proj.weight": block.attention.out.weight.T,
            f"transformer.h.{i}.ln_2.weight": block.norm_2.weight,
            f"transformer.h.{i}.mlp.c_fc.weight": block.mlp.up.weight.T,
            f"transformer.h.{i}.mlp.c_proj.weight": block.mlp.down.weight.T,
        }
    theirs.load_state_dict(weights)
    tokens = torch.randint(config.vocab_size, (2, 8))
    with torch.no_grad():
        assert (theirs(tokens).logits - model(tokens)).abs().max() < 1e-4
    return theirs


def transformers_tokens(model: Any, n: int, streams: int, *, static: bool = False) -> None:
    """Generate `n` tokens per stream with transformers and its cache; a static cache compiles the step on a GPU."""
    import torch

    prompt = torch.zeros(streams, 1, dtype=torch.long, device=model.device)
    options = {"cache_implementation": "static"} if static else {}
    options |= {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0}
    model.generate(prompt, max_new_tokens=n, do_sample=True, temperature=0.8, top_k=0, **options)


def startup(model: Any, name: str, folder: Path) -> dict[str, float]:
    """Return the seconds from launch to the first character, minus those of importing torch."""
    from minigpt.checkpoints.load import save_checkpoint
    from minigpt.data.tokenizer import CharTokenizer

    file = folder / f"{name}.safetensors"
    save_checkpoint(model, CharTokenizer.of(map(chr, range(32, 97))), file)
    beyond = []
    for _ in range(3):
        torch_s = seconds(lambda: subprocess.run([sys.executable, "-c", "import torch"], check=True))
        start = time.perf_counter()
        with subprocess.Popen([sys.executable, SAMPLE, file], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
            assert run.stdout
            run.stdout.read(1)
            beyond.append(time.perf_counter() - start - torch_s)
    return {f"{name}: launch to first character beyond torch s": statistics.median(beyond)}


def bandwidth() -> float:
    """Return the memory bandwidth of all threads in GB/s."""
    import torch

    numbers = torch.ones(BANDWIDTH_BYTES // 4)  # written first: untouched pages all map to one page of zeros
    return BANDWIDTH_BYTES / 1e9 / min(seconds(numbers.sum) for _ in range(5))
