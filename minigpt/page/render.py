"""The page as one HTML file: style and modules in place of links to them, and the data that its backend reads.

The file makes no request, and its content security policy allows only its own style and script.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minigpt.config import GPTConfig

MAX_MAP_TOKENS = 1024  # of a map of attention weights
_STYLE, _SCRIPT = '<link rel="stylesheet" href="style.css">\n', '<script type="module" src="server.js"></script>\n'
_IMPORT = re.compile(r'^import \{[\w, ]+\} from "\./([\w.]+)";\n', re.MULTILINE)
_DECLARATION = re.compile(r"^(?:async )?(?:function\*?|class|const|let) (\w+)", re.MULTILINE)


def render(entry: str, data: Mapping[str, Any], texts: Mapping[str, str] | None = None) -> str:
    """Return the HTML of the page with the backend of a module.

    Args:
        entry: name of the module: "browser.js" or "saved.js".
        data: is JSON in the element with the id "data".
        texts: plain texts without `<` by the ids of their elements.
    """
    style, script = _read("style.css"), _bundle(entry)
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
    policy += "base-uri 'none'; form-action 'none'"
    start, _, rest = _read("index.html").partition(_STYLE)
    head, _, rest = rest.partition(_SCRIPT)
    body, _, end = rest.partition("</body>")
    # JSON in ASCII; <, > and & are the only characters left that HTML interprets.
    values = json.dumps(data, separators=(",", ":"), allow_nan=False)
    values = re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", values)
    parts = [
        f'{start}<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n{head}{body}',
        f'<script type="application/json" id="data">{values}</script>\n',
        *(f'<script type="text/plain" id="{name}">{text}</script>\n' for name, text in (texts or {}).items()),
        f'<script type="module">{script}</script>\n</body>{end}',
    ]
    return "".join(parts)


def describe(name: str, config: "GPTConfig", tokenizer: str, weights: str = "") -> dict[str, Any]:
    """Return the description of a model for the page; `tokenizer` is its name, `weights` a note about them."""
    facts = (
        f"A GPT with {config.num_params():,} parameters{weights}: {config.n_layer} layers, {config.n_head} heads, "
        f"width {config.n_embd}, a context of {config.block_size} tokens, tokenizer {tokenizer}."
    )
    block_size = min(config.block_size, MAX_MAP_TOKENS)
    shape = {"n_layer": config.n_layer, "n_head": config.n_head, "block_size": block_size}
    return {"name": name, "facts": facts, **shape}


def _bundle(entry: str) -> str:
    """Join a module and all that it imports, directly or not, into one script."""
    modules: dict[str, str] = {}
    _collect(entry, modules)
    script = "\n".join(modules.values())
    names = _DECLARATION.findall(script)
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(
            f"the modules of {entry} must declare different names, got {', '.join(sorted(repeated))} twice"
        )
    return script


def _collect(name: str, modules: dict[str, str]) -> None:
    """Add the source of a module after those of the modules that it imports."""
    source = _read(name)
    for imported in _IMPORT.findall(source):
        if imported not in modules:
            _collect(imported, modules)
    modules[name] = re.sub("^export ", "", _IMPORT.sub("", source), flags=re.MULTILINE)


def _read(name: str) -> str:
    return resources.files("minigpt.page").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
