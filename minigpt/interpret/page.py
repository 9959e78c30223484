"""Attention as a page to explore: a text token by token, colored by probability and by what a token attends to.

One HTML file without any reference to another: `page.html` is its style and its program, and the data is put
into it as JSON that no token can break out of. A weight takes two base64 characters: 12 bits of its square root, so
that small weights keep more decimals than large ones (error below √weight / 4000) and 36 heads × 256 tokens stay
below 3 MB.
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

from minigpt.utils.files import atomic_write

LEVELS = 4095  # of a weight's square root: 12 bits
_BREAKS = re.compile(r"\r?\n|[⏎↵␤]\n?|[\u2028\u2029]")


def write_page(path: Path, *, labels: list[str], weights: Tensor, probabilities: Tensor) -> None:
    """Write the page whole or not at all.

    Args:
        labels: the text of each token. A line break, raw or as one of the signs ⏎ ↵ ␤, also breaks the line.
        weights: (L, H, T, T), causal, each row with sum 1.
        probabilities: (T,), what the model gave each token; nan where it predicted none, as for the first.
    """
    _check(labels, weights, probabilities)
    data = {
        "labels": [_legible(label) for label in labels],
        "layers": weights.shape[0],
        "heads": weights.shape[1],
        "probabilities": [None if p != p else float(f"{min(p, 1.0):.4g}") for p in probabilities.tolist()],
        "weights": _pack(weights),
    }
    page = _page(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        partial.write_text(page, encoding="utf-8", newline="\n")


def _check(labels: list[str], weights: Tensor, probabilities: Tensor) -> None:
    T = len(labels)
    if T == 0:
        raise ValueError("there are no tokens to show; give at least one")
    if weights.ndim != 4 or weights.shape[2:] != (T, T) or 0 in weights.shape:
        raise ValueError(f"weights of {T} tokens have shape (layers, heads, {T}, {T}), not {tuple(weights.shape)}")
    if probabilities.shape != (T,):
        raise ValueError(f"probabilities of {T} tokens have shape ({T},), not {tuple(probabilities.shape)}")
    if not weights.isfinite().all():
        raise ValueError("weights hold numbers that are not finite; the model may have diverged")


def _legible(label: str) -> str:
    """Signs for what has none of its own: control characters, odd spaces, marks of direction, nothing at all."""
    text = _BREAKS.sub("⏎\n", label)
    return "".join(c if c.isprintable() or c == "\n" else _sign(c) for c in text) or "∅"


def _sign(character: str) -> str:
    code = ord(character)
    if code == 9:
        return "⇥"
    if code < 32:
        return chr(0x2400 + code)  # Unicode's pictures of control characters
    return "␡" if code == 127 else f"⟨U+{code:04X}⟩"


def _pack(weights: Tensor) -> str:
    """Base64 of the lower triangles, row by row: big-endian 12-bit numbers, so two characters each."""
    T = weights.shape[-1]
    row, column = torch.tril_indices(T, T)
    values = weights.detach().to("cpu", torch.float32)[:, :, row, column].flatten()  # (L·H·T(T+1)/2,)
    levels = (values.clamp(0, 1).sqrt() * LEVELS).round().to(torch.int32)
    pairs = torch.nn.functional.pad(levels, (0, levels.numel() % 2)).view(-1, 2)
    first, second = pairs.unbind(1)
    packed = torch.stack((first >> 4, (first & 15) << 4 | second >> 8, second & 255), dim=1)
    return base64.b64encode(packed.to(torch.uint8).numpy().tobytes()).decode("ascii")


def _page(data: dict[str, Any]) -> str:
    """The template with the data in it, and a policy that lets nothing but its own program run."""
    template = resources.files("minigpt.interpret").joinpath("page.html").read_text(encoding="utf-8")
    program = template.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(program.encode("utf-8")).digest()).decode("ascii")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    # ASCII with \u escapes; of what is left only <, > and & mean anything to HTML.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    text = re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", text)
    return template.replace("{{policy}}", html.escape(policy)).replace("{{data}}", text)
