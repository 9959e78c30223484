"""Chat templates of Hugging Face, found in a folder.

Source: https://huggingface.co/docs/transformers/chat_templating
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minigpt.utils.files import read_json

_SINGLE, _OTHERS, _OF_PROCESSOR = (
    "chat_template.jinja",
    "additional_chat_templates",
    "chat_template.json",
)
TEMPLATE_FILES = [_SINGLE, f"{_OTHERS}/*.jinja", _OF_PROCESSOR]
_NO_DEFAULT = '{{ raise_exception("the folder has several templates, and none is named default") }}'


def find_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the template of a chat without tools, if there is one; `config` is that of the
    tokenizer.

    Files come before the configuration, as in transformers; a list there names its templates.
    """
    files = {file.stem: file for file in sorted((folder / _OTHERS).glob("*.jinja"))}
    if (folder / _SINGLE).is_file():
        files["default"] = folder / _SINGLE
    named: Any = {
        name: file.read_text(encoding="utf-8") for name, file in files.items()
    } or config.get("chat_template")
    if not named and (folder / _OF_PROCESSOR).is_file():
        named = read_json(folder / _OF_PROCESSOR)["chat_template"]
    if isinstance(named, list):
        named = {each["name"]: each["template"] for each in named}
    found: str | None = named.get("default", _NO_DEFAULT) if isinstance(named, dict) else named
    return found or None
