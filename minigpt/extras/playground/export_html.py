"""Write a model as one HTML page that generates text in a browser, without a server and without a
network.

The page holds the style and the scripts of `page/`, the tokenizer, and the weights in base64. The
scripts repeat the forward pass of `minigpt.model.gpt` and the filters and draws of
`minigpt.sampling.filters`. The page makes no request, and its content security policy allows only
its own style and script.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from minigpt.checkpoints.init_from import Pretrained
from minigpt.checkpoints.load import load_checkpoint
from minigpt.data.tokenizer import (
    PATTERNS,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
)
from minigpt.extras.conversations.encoding import QUESTION
from minigpt.extras.conversations.encoding import render as render_chat
from minigpt.extras.playground.loaded_models import named_path
from minigpt.model.config import GPTConfig
from minigpt.model.gpt import GPT
from minigpt.utils.errors import UserError, require
from minigpt.utils.files import atomic_write

PAGE = Path(__file__).parent / "page"
BYTES_PER_WEIGHT = {"float16": 2, "float32": 4}  # of the matrices, by format
MAX_WEIGHT_BYTES = 64_000_000
MAX_PAGE_BYTES = 46_500_000  # of the weights in base64, with snapshots
MAX_MAP_TOKENS = 1024  # of a map of attention weights
_STYLE, _SCRIPT = (
    '<link rel="stylesheet" href="style.css">\n',
    '<script type="module" src="server.js"></script>\n',
)
_SUPPORTED = re.compile(r"const SUPPORTED = (\{[^}]*\})")
_IMPORT = re.compile(r'^import \{[\w, ]+\} from "\./([\w.]+)";\n', re.MULTILINE)


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
        history: the losses and samples of its training, from
            `minigpt.extras.playground.history.read_history`.
        snapshots: of its run, by step; evenly spaced ones among them, as many as fit into
            `MAX_PAGE_BYTES`.
        learned: their measurements, from `minigpt.extras.interpret.learning`.

    Raises:
        UserError: the weights are too large, or the page lacks the tokenizer or a setting of the
            model.
    """
    check_supported(pretrained.config)
    size = pretrained.config.num_params() * BYTES_PER_WEIGHT[weight_format]
    require(
        "the weights in the page",
        f"{size / 1e6:.0f} MB of {weight_format}",
        lambda _: size <= MAX_WEIGHT_BYTES,
        f"at most {MAX_WEIGHT_BYTES / 1e6:.0f} MB",
        "use a smaller model",
    )
    tokenizer = pretrained.tokenizer
    require(
        "the tokenizer of the page",
        tokenizer.name,
        lambda _: isinstance(tokenizer, CharTokenizer | ByteTokenizer | BPETokenizer),
        "char, byte or bpe",
        "use --to huggingface",
    )
    model = pretrained.load()
    tensors = dict(model.named_parameters())  # each once, also if blocks or embeddings share it
    weights = [_pack_all(model, tensors, weight_format)]
    steps = _spaced(list(snapshots), int(MAX_PAGE_BYTES / len(weights[0])) - 1)
    weights += [
        _pack_all(load_checkpoint(snapshots[step])[0], tensors, weight_format) for step in steps
    ]
    description = describe(model_name(pretrained), model.config, tokenizer, f" in {weight_format}")
    description["facts"] += " The model runs in this page: the text never leaves your device."
    messages = [{"role": "user", "content": QUESTION}]
    chat = render_chat(tokenizer.chat, messages, prompt=True) if tokenizer.chat else None
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
            "special": tokenizer.special,
            "reads_special": tokenizer.reads_special,
            "chat": chat,
        },
        "tensors": [(name, tensor.shape) for name, tensor in tensors.items()],
        "format": weight_format,
    }
    page = render(data, "\n".join(weights))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        partial.write_text(page, encoding="utf-8", newline="\n")
    return steps


def render(data: Mapping[str, Any], weights: str = "") -> str:
    """Return the HTML of the page with the backend of browser.js.

    Args:
        data: written as JSON to the element with the id "data".
        weights: text in base64 for the element with the id "weights".
    """
    style, script = _read("style.css"), "\n".join(_modules("browser.js", {}).values())
    digests = (hashlib.sha256(text.encode("utf-8")).digest() for text in (style, script))
    style_hash, script_hash = (
        f"'sha256-{base64.b64encode(digest).decode('ascii')}'" for digest in digests
    )
    policy = (
        f"default-src 'none'; style-src {style_hash}; script-src {script_hash}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    inline_style = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
    )
    # JSON in ASCII; <, > and & are the only characters left that HTML interprets.
    values = json.dumps(data, separators=(",", ":"), allow_nan=False)
    values = re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", values)
    elements = (
        f'<script type="application/json" id="data">{values}</script>\n'
        f'<script type="text/plain" id="weights">{weights}</script>\n'
        f'<script type="module">{script}</script>\n</body>'
    )
    return (
        _read("index.html")
        .replace(_STYLE, inline_style)
        .replace(_SCRIPT, "")
        .replace("</body>", elements)
    )


def check_supported(config: GPTConfig) -> None:
    """Raise UserError for a value that model.js does not compute; a setting that it lacks must have
    its default.
    """
    supported = json.loads(_SUPPORTED.findall(_read("model.js"))[0])
    for field in fields(config):
        values = supported.get(field.name, [field.default])
        if values is not None:
            require(
                f"model.{field.name}",
                getattr(config, field.name),
                values.__contains__,
                " or ".join(map(str, values)),
                "the page computes no other",
            )


def model_name(pretrained: Pretrained) -> str:
    """Return the id of the Hub, or the name of the folder, of the run or of the file."""
    if pretrained.revision:
        return pretrained.source
    path = pretrained.path
    if path.is_dir():  # of Hugging Face
        return path.name
    path = named_path(path)
    # A run of a sweep is a number
    return "/".join(path.parts[-2:]) if path.name.isdigit() else path.name


def describe(
    name: str, config: GPTConfig, tokenizer: Tokenizer, weights: str = ""
) -> dict[str, Any]:
    """Return the description of a model for the page; `weights` is a note about their format."""
    L, H, T = config.n_layer, config.n_head, config.block_size
    return {
        "name": name,
        "facts": f"A GPT with {config.num_params():,} parameters{weights}: {L} layers, {H} heads, "
        f"width {config.n_embd}, a context of {T} tokens, tokenizer {tokenizer.name}.",
        "n_layer": L,
        "n_head": H,
        "block_size": min(T, MAX_MAP_TOKENS),
        "chat": tokenizer.chat is not None,
    }


def _modules(name: str, found: dict[str, str]) -> dict[str, str]:
    """Add the source of a module by its name to those that were found, after the sources that it
    imports.
    """
    source = _read(name)
    for imported in _IMPORT.findall(source):
        if imported not in found:
            _modules(imported, found)
    found[name] = re.sub("^export ", "", _IMPORT.sub("", source), flags=re.MULTILINE)
    return found


def _read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def _spaced(items: list[int], count: int) -> list[int]:
    """Return up to `count` evenly spaced items, the first and the last among them; none for a count
    below two.
    """
    count = min(count, len(items))
    return (
        [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]
        if count > 1
        else []
    )


def _pack_all(model: GPT, names: Iterable[str], weight_format: str) -> str:
    """Return tensors of a model, one after the other, as little-endian bytes in base64."""
    state, packed = model.state_dict(), []
    for name in names:
        array = state[name].float().numpy()
        halved = array.ndim > 1 and weight_format == "float16"
        if halved and (largest := abs(array).max()) >= 65504:
            raise UserError(
                f"--weights must be float32 for {name}, which holds {largest:.3g}, got "
                f"{weight_format}"
            )
        packed.append(array.astype("<f2" if halved else "<f4").tobytes())
    return base64.b64encode(b"".join(packed)).decode("ascii")
