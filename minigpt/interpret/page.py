"""Attention as an interactive HTML page: each token colored by its probability and by its attention weights.

The page is self-contained: `page.html` holds style and script, and the data is embedded as escaped JSON. Each weight
takes 12 bits of its square root in two base64 characters (error below √weight / 4000), so that 36 heads × 256 tokens
stay below 3 MB.
"""

import base64
import hashlib
import html
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigpt.interpret.attention_maps import visible_text
from minigpt.utils.files import atomic_write

MAX_LEVEL = 4095  # largest 12-bit integer


def write_page(path: Path, *, labels: list[str], weights: Tensor, probabilities: Tensor) -> None:
    """Write the page atomically.

    Args:
        labels: text of each of the T tokens.
        weights: (L, H, T, T), causal, each row with sum 1.
        probabilities: (T,), the probability that the model assigned to each token; NaN if there is none.

    Raises:
        ValueError: a weight is not finite.
    """
    if not weights.isfinite().all():
        raise ValueError("weights must be finite; the model may have diverged")
    data = {
        "labels": [visible_text(label).replace("⏎", "⏎\n") for label in labels],
        "layers": weights.size(0),
        "heads": weights.size(1),
        "probabilities": [None if p != p else float(f"{min(p, 1.0):.4g}") for p in probabilities.tolist()],
        "weights": _pack(weights),
    }
    with atomic_write(path) as partial:
        partial.write_text(_render(data), encoding="utf-8", newline="\n")


def _pack(weights: Tensor) -> str:
    """Encode the lower triangles, row by row, as big-endian 12-bit integers in base64."""
    T = weights.shape[-1]
    row, column = torch.tril_indices(T, T)
    values = weights.detach().to("cpu", torch.float32)[:, :, row, column].flatten()  # (L·H·T(T+1)/2,)
    levels = (values.clamp(0, 1).sqrt() * MAX_LEVEL).round().to(torch.int32)
    pairs = torch.nn.functional.pad(levels, (0, levels.numel() % 2)).view(-1, 2)
    first, second = pairs.unbind(1)
    packed = torch.stack((first >> 4, (first & 15) << 4 | second >> 8, second & 255), dim=1)
    return base64.b64encode(packed.to(torch.uint8).numpy().tobytes()).decode("ascii")


def _render(data: dict[str, Any]) -> str:
    """Fill the template, with a content security policy that allows only its own script."""
    template = resources.files("minigpt.interpret").joinpath("page.html").read_text(encoding="utf-8")
    script = template.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    # JSON in ASCII; <, > and & are the only characters left that HTML interprets.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    text = re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", text)
    return template.replace("{{policy}}", html.escape(policy)).replace("{{data}}", text)
