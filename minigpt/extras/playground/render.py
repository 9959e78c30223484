"""The page as one HTML file, which holds its style, its modules and the data of its backend.

The file makes no request, and its content security policy allows only its own style and script.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from importlib import resources
from typing import Any

from minigpt.config import GPTConfig
from minigpt.utils.errors import require

MAX_MAP_TOKENS = 1024  # of a map of attention weights
_STYLE, _SCRIPT = '<link rel="stylesheet" href="style.css">\n', '<script type="module" src="server.js"></script>\n'
_SUPPORTED = re.compile(r"const SUPPORTED = (\{[^}]*\})")
_IMPORT = re.compile(r'^import \{[\w, ]+\} from "\./([\w.]+)";\n', re.MULTILINE)


def render(data: Mapping[str, Any], weights: str = "") -> str:
    """Return the HTML of the page with the backend of browser.js.

    Args:
        data: written as JSON to the element with the id "data".
        weights: text in base64 for the element with the id "weights".
    """
    style, script = _read("style.css"), "\n".join(_modules("browser.js", {}).values())
    digests = (hashlib.sha256(text.encode("utf-8")).digest() for text in (style, script))
    style_hash, script_hash = (f"'sha256-{base64.b64encode(digest).decode('ascii')}'" for digest in digests)
    policy = f"default-src 'none'; style-src {style_hash}; script-src {script_hash}; img-src data:; "
    policy += "base-uri 'none'; form-action 'none'"
    inline_style = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
    # JSON in ASCII; <, > and & are the only characters left that HTML interprets.
    values = json.dumps(data, separators=(",", ":"), allow_nan=False)
    values = re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", values)
    elements = f'<script type="application/json" id="data">{values}</script>\n'
    elements += f'<script type="text/plain" id="weights">{weights}</script>\n'
    elements += f'<script type="module">{script}</script>\n</body>'
    return _read("index.html").replace(_STYLE, inline_style).replace(_SCRIPT, "").replace("</body>", elements)


def check_supported(config: GPTConfig) -> None:
    """Raise UserError for a value that model.js does not compute; a setting that it lacks must have its default."""
    supported = json.loads(_SUPPORTED.findall(_read("model.js"))[0])
    for field in fields(config):
        values = supported.get(field.name, [field.default])
        if values is not None:
            found, expected = getattr(config, field.name), " or ".join(map(str, values))
            require(f"model.{field.name}", found, values.__contains__, expected, "the page computes no other")


def describe(name: str, config: GPTConfig, tokenizer: str, weights: str = "") -> dict[str, Any]:
    """Return the description of a model for the page; `weights` is a note about their format."""
    L, H, T = config.n_layer, config.n_head, config.block_size
    facts = f"A GPT with {config.num_params():,} parameters{weights}: {L} layers, {H} heads, "
    facts += f"width {config.n_embd}, a context of {T} tokens, tokenizer {tokenizer}."
    return {"name": name, "facts": facts, "n_layer": L, "n_head": H, "block_size": min(T, MAX_MAP_TOKENS)}


def _modules(name: str, found: dict[str, str]) -> dict[str, str]:
    """Add the source of a module by its name to those that were found, after the sources that it imports."""
    source = _read(name)
    for imported in _IMPORT.findall(source):
        if imported not in found:
            _modules(imported, found)
    found[name] = re.sub("^export ", "", _IMPORT.sub("", source), flags=re.MULTILINE)
    return found


def _read(name: str) -> str:
    return resources.files("minigpt.extras.playground").joinpath("page", name).read_text(encoding="utf-8")
