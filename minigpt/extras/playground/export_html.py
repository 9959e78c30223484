"""Write a model as one HTML page that generates text in a browser, without a server and without a network.

The page holds the scripts of `page/`, the tokenizer, and the weights in base64. The scripts repeat the forward
pass of `minigpt.model` and the filters and draws of `minigpt.sampling`.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minigpt.checkpoints.init_from import Pretrained
from minigpt.checkpoints.load import load_checkpoint
from minigpt.data.tokenizer import PATTERNS, BPETokenizer, ByteTokenizer, CharTokenizer
from minigpt.extras.playground.render import check_supported, describe, render
from minigpt.model import GPT
from minigpt.utils.errors import UserError, require
from minigpt.utils.files import atomic_write

BYTES_PER_WEIGHT = {"float16": 2, "float32": 4}  # of the matrices, by format
MAX_WEIGHT_BYTES = 64_000_000
MAX_PAGE_BYTES = 15_500_000  # of the weights in base64, with snapshots


def export_html(
    pretrained: Pretrained,
    path: Path,
    weight_format: str = "float16",
    history: Mapping[str, Any] | None = None,
    *,
    snapshots: Mapping[int, Path] = {},
    learned: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Write the page atomically; return the steps of the snapshots in it.

    Args:
        weight_format: one of `BYTES_PER_WEIGHT`. Vectors are float32 in both.
        history: the losses and samples of its training, from `minigpt.runs.history.read_history`.
        snapshots: of its run, by step; evenly spaced ones among them, as many as fit into `MAX_PAGE_BYTES`.
        learned: their measurements, from `minigpt.extras.interpret.learning`.

    Raises:
        UserError: the weights are too large, or the page lacks the tokenizer or a setting of the model.
    """
    check_supported(pretrained.config)
    size = pretrained.config.num_params() * BYTES_PER_WEIGHT[weight_format]
    most, found = f"at most {MAX_WEIGHT_BYTES / 1e6:.0f} MB", f"{size / 1e6:.0f} MB of {weight_format}"
    require("the weights in the page", found, lambda _: size <= MAX_WEIGHT_BYTES, most, "use a smaller model")
    tokenizer = pretrained.tokenizer
    if not isinstance(tokenizer, CharTokenizer | ByteTokenizer | BPETokenizer):
        problem = f"the tokenizer of the page must be char, byte or bpe, got {tokenizer.name}"
        raise UserError(f"{problem}; use --to huggingface")
    model = pretrained.load()
    tensors = model.state_dict()
    if model.config.tie_embeddings:
        del tensors["lm_head.weight"]
    weights = [_pack_all(model, tensors, weight_format)]
    steps = _spaced(list(snapshots), int(MAX_PAGE_BYTES / len(weights[0])) - 1)
    weights += [_pack_all(load_checkpoint(snapshots[step])[0], tensors, weight_format) for step in steps]
    description = describe(pretrained.name, model.config, tokenizer.name, f" in {weight_format}")
    description["facts"] += " The model runs in this page: the text never leaves your device."
    data = {
        "description": description,
        "history": {**(history or {}), "steps": steps},
        "learned": [snapshot for snapshot in learned if snapshot["step"] in steps],
        "config": model.config.to_dict(),
        "tokenizer": {
            **tokenizer.to_dict(),
            "start": tokenizer.start.tolist(),
            "stop": tokenizer.end_token if tokenizer.separated else None,  # as scripts/sample.py
            "pattern": PATTERNS.get(tokenizer.name, PATTERNS["gpt2"]),
        },
        "tensors": [(name, tensor.shape) for name, tensor in tensors.items()],
        "format": weight_format,
    }
    page = render(data, "\n".join(weights))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        partial.write_text(page, encoding="utf-8", newline="\n")
    return steps


def _spaced(items: list[int], count: int) -> list[int]:
    """Return up to `count` evenly spaced items, the first and the last among them; none for a count below two."""
    count = min(count, len(items))
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)] if count > 1 else []


def _pack_all(model: GPT, names: Iterable[str], weight_format: str) -> str:
    """Return tensors of a model, one after the other, as little-endian bytes in base64."""
    state, packed = model.state_dict(), []
    for name in names:
        array = state[name].float().numpy()
        halved = array.ndim > 1 and weight_format == "float16"
        if halved and (largest := abs(array).max()) >= 65504:
            raise UserError(f"--weights must be float32 for {name}, which holds {largest:.3g}, got {weight_format}")
        packed.append(array.astype("<f2" if halved else "<f4").tobytes())
    return base64.b64encode(b"".join(packed)).decode("ascii")
