"""Chat templates of Hugging Face, found in a folder and rendered as transformers does, in Jinja's
sandbox.

Source: https://huggingface.co/docs/transformers/chat_templating
"""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from minigpt.utils.errors import UserError
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


def render(template: str, tokens: Mapping[str, str], messages: list[dict[str, str]]) -> str:
    """Return the text of messages up to the start of the answer; raise UserError if the template
    does not take them.

    Args:
        tokens: special tokens by name, such as bos_token, which the template reads.
    """
    from jinja2 import nodes  # jinja2 is a dependency of torch
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):  # marks answers for training, and renders what it holds
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

        def _render(self, caller: Any) -> Any:
            return caller()

    def refuse(message: str) -> None:
        raise UserError(message)

    environment = ImmutableSandboxedEnvironment(  # as transformers
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    values = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
    try:
        return environment.from_string(template).render({**tokens, **values})
    except Exception as error:  # of any kind: the template is foreign code
        raise UserError(
            f"the chat template does not take these messages: {error!s:.200}"
        ) from error
