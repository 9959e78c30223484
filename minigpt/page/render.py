"""The page as one HTML file: style and modules in place of links to them, and the data that its backend reads.

The file makes no request, and its content security policy allows only its own style and script.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from minigpt.config import GPTConfig

MAX_MAP_TOKENS = 1024  # of a map of attention weights
_STYLE, _SCRIPT = '<link rel="stylesheet" href="style.css">\n', '<script type="module" src="server.js"></script>\n'
_IMPORT = re.compile(r'^import \{[\w, ]+\} from "\./([\w.]+)";\n', re.MULTILINE)


def render(entry: str, data: Mapping[str, Any], texts: Mapping[str, str] | None = None) -> str:
    """Return the HTML of the page with the backend of a module.

    Args:
        entry: name of the module: "browser.js" or "saved.js".
        data: is JSON in the element with the id "data".
        texts: plain texts without `<` by the ids of their elements.
    """
    style, script = _read("style.css"), "\n".join(_modules(entry, {}).values())
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
    policy += "base-uri 'none'; form-action 'none'"
    inline_style = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
    # JSON in ASCII; <, > and & are the only characters left that HTML interprets.
    values = json.dumps(data, separators=(",", ":"), allow_nan=False)
    values = re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", values)
    elements = [
        f'<script type="application/json" id="data">{values}</script>\n',
        *(f'<script type="text/plain" id="{name}">{text}</script>\n' for name, text in (texts or {}).items()),
        f'<script type="module">{script}</script>\n</body>',
    ]
    page = _read("index.html").replace(_STYLE, inline_style).replace(_SCRIPT, "")
    return page.replace("</body>", "".join(elements))


def describe(name: str, config: GPTConfig, tokenizer: str, weights: str = "") -> dict[str, Any]:
    """Return the description of a model for the page; `tokenizer` is its name, `weights` a note about them."""
    facts = (
        f"A GPT with {config.num_params():,} parameters{weights}: {config.n_layer} layers, {config.n_head} heads, "
        f"width {config.n_embd}, a context of {config.block_size} tokens, tokenizer {tokenizer}."
    )
    block_size = min(config.block_size, MAX_MAP_TOKENS)
    shape = {"n_layer": config.n_layer, "n_head": config.n_head, "block_size": block_size}
    return {"name": name, "facts": facts, **shape}


def _modules(name: str, found: dict[str, str]) -> dict[str, str]:
    """Add a module to those that were found, after all that it imports: its source, by its name."""
    source = _read(name)
    for imported in _IMPORT.findall(source):
        if imported not in found:
            _modules(imported, found)
    found[name] = re.sub("^export ", "", _IMPORT.sub("", source), flags=re.MULTILINE)
    return found


def _read(name: str) -> str:
    return resources.files("minigpt.page").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
