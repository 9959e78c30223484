"""Write a model as one HTML page that generates text in a browser, without a server and without a network.

The page holds the scripts of the folder page/, the tokenizer, and the weights in base64. The scripts repeat the forward
pass of `minigpt.model` and the draws of `minigpt.sampling`.
"""

import base64
import hashlib
import html
import json
import re
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from minigpt.checkpoints.pretrained import Pretrained
from minigpt.data.tokenizer import ENCODINGS, PATTERNS, HuggingFaceTokenizer
from minigpt.model import GPT
from minigpt.utils.errors import UserError, require
from minigpt.utils.files import atomic_write

FORMATS = {"float16": 2, "int8": 1, "float32": 4}  # of the matrices; bytes per weight
MAX_WEIGHT_BYTES = 64_000_000
_SCRIPTS = ("model.js", "weights.js", "tokenizer.js", "sampling.js", "app.js")


def export_html(pretrained: Pretrained, path: Path, weight_format: str = "float16") -> None:
    """Write the page atomically.

    Args:
        weight_format: one of `FORMATS`. int8 has one scale per row. Vectors are float32 in every format.

    Raises:
        UserError: the weights are too large, or the tokenizer is one of Hugging Face.
    """
    size = pretrained.config.num_params() * FORMATS[weight_format]
    if size > MAX_WEIGHT_BYTES:
        raise UserError(
            f"the weights in the page must be at most {MAX_WEIGHT_BYTES / 1e6:.0f} MB, got {size / 1e6:.0f} MB of "
            f"{weight_format}; use a smaller model" + (" or --weights int8" if weight_format != "int8" else "")
        )
    if isinstance(pretrained.tokenizer, HuggingFaceTokenizer):
        raise UserError("the tokenizer of the page must be char, byte or bpe, got huggingface; use --to huggingface")
    text = _render(pretrained, pretrained.load(), weight_format)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def _render(pretrained: Pretrained, model: GPT, weight_format: str) -> str:
    """Fill the template, with a content security policy that allows only its own script and style."""
    config, tokenizer = model.config, pretrained.tokenizer
    tensors = model.state_dict()
    if config.tie_embeddings:
        del tensors["lm_head.weight"]
    packed = b"".join(_pack(name, tensor, weight_format) for name, tensor in tensors.items())
    encoding = {
        "start": tokenizer.start.tolist(),
        "stop": tokenizer.end_token if tokenizer.separated else None,  # as scripts/sample.py
        "pattern": PATTERNS[ENCODINGS.get(tokenizer.name, "gpt2")],
    }
    data = {
        "config": config.to_dict(),
        "tokenizer": tokenizer.to_dict() | encoding,
        "tensors": [(name, tensor.shape) for name, tensor in tensors.items()],
        "format": weight_format,
    }
    folder = resources.files("minigpt.checkpoints") / "page"
    template, style, *scripts = (
        folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "style.css", *_SCRIPTS)
    )
    script = '"use strict";\n' + "".join(scripts)
    allowed = f"style-src {_source(style)}; script-src {_source(script)}; base-uri 'none'; form-action 'none'"
    facts = (
        f"A GPT with {config.num_params():,} parameters in {weight_format}: {config.n_layer} layers, {config.n_head} "
        f"heads, width {config.n_embd}, a context of {config.block_size} tokens, tokenizer {tokenizer.name}."
    )
    parts = {
        "policy": html.escape(f"default-src 'none'; {allowed}"),
        "facts": html.escape(facts),
        "style": style,
        "script": script,
        # JSON in ASCII; <, > and & are the only characters left that HTML interprets.
        "data": re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", json.dumps(data, separators=(",", ":"))),
        "weights": base64.b64encode(packed).decode("ascii"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _pack(name: str, tensor: Tensor, weight_format: str) -> bytes:
    """Return the little-endian bytes of a tensor; those of int8 follow the float32 scales of the rows."""
    array = tensor.float().numpy()
    if tensor.dim() == 1 or weight_format == "float32":
        return array.astype("<f4").tobytes()
    if weight_format == "float16":
        largest = tensor.abs().max().item()
        require("--weights", weight_format, lambda _: largest < 65504, f"float32 for {name}, which holds {largest:.3g}")
        return array.astype("<f2").tobytes()
    scales = (tensor.abs().amax(dim=1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)  # (rows, 1)
    return scales.numpy().astype("<f4").tobytes() + (tensor / scales).round().to(torch.int8).numpy().tobytes()


def _source(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
