"""Chat templates, rendered as transformers does, in Jinja's sandbox, and the two of our own.

Source: https://huggingface.co/docs/transformers/chat_templating
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

import numpy as np

from minigpt.data.tokenizer import Tokenizer, token_dtype, whole_characters
from minigpt.utils.checks import Settings
from minigpt.utils.errors import UserError

Message = Mapping[str, Any]  # with a `role` and a `content`

# Around an answer that a template marks by {% generation %}. These and other characters of this
# kind, which Unicode keeps for the use within a program, are removed from messages.
ANSWER, END = "\ufdd2", "\ufdd3"

# Of a model that is trained on conversations from scratch. The two names are special tokens.
_ROLES = """{% for message in messages %}
{% if message.role not in ('system', 'user', 'assistant') %}
{{ raise_exception('a role must be system, user or assistant, got ' ~ message.role) }}
{% endif %}
"""
_CHATML = (
    _ROLES
    + """{{ '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.role == 'assistant' %}
{% generation %}{{ message.content ~ '<|im_end|>' }}{% endgeneration %}
{% else %}
{{ message.content ~ '<|im_end|>' }}
{%- endif %}
{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
)
CHATML = {"template": _CHATML, "tokens": {}, "marks": ["<|im_start|>", "<|im_end|>"]}
# Of a pretrained model without a template, which has an end-of-text token alone.
_PLAIN = (
    _ROLES
    + """{%- if message.role == 'assistant' %}
{{- 'Assistant:' }}{% generation %}{{ ' ' ~ message.content ~ eos_token }}{% endgeneration %}
{{- '\\n' }}
{%- else %}
{{- message.role | capitalize ~ ': ' ~ message.content ~ '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- 'Assistant:' }}
{%- endif %}"""
)


def chat_of(tokenizer: Tokenizer | None) -> Settings:
    """Return how conversations are written with a tokenizer, as `add_chat` takes it.

    Args:
        tokenizer: of pretrained weights; None: it is trained from scratch.

    Raises:
        UserError: the weights have no token that can end an answer.
    """
    if tokenizer is None:
        return CHATML
    if tokenizer.chat:
        return tokenizer.chat
    if tokenizer.end_token is None:
        raise UserError(
            "init_from has no token that could end an answer; start from a model that was trained "
            "with data=conversations, or from scratch"
        )
    end = tokenizer.names([tokenizer.end_token])
    return {"template": _PLAIN, "tokens": {"eos_token": end}, "marks": []}


def add_chat(tokenizer: Tokenizer, chat: Settings) -> None:
    """Set how conversations are written with a tokenizer, and add the special tokens for it.

    Args:
        chat: `template`, in Jinja; `tokens`, the special tokens that it reads, by name; `marks`,
            special tokens to add, the last of which ends a turn, and with it a text.

    Raises:
        UserError: the chat, which may be that of a checkpoint, has other values.
    """
    template, tokens, marks = (chat[key] for key in ("template", "tokens", "marks"))
    texts = (template, *tokens, *tokens.values(), *marks)
    if not all(isinstance(each, str) and each for each in texts):
        raise UserError("the template, tokens and marks of a chat must be texts, none empty")
    tokenizer.chat = {"template": template, "tokens": dict(tokens), "marks": list(marks)}
    for name in [name for name in marks if name not in tokenizer.special]:
        tokenizer.special = {**tokenizer.special, name: tokenizer.vocab_size}
        tokenizer.token_bytes = {**tokenizer.token_bytes, tokenizer.vocab_size: b""}
        tokenizer.vocab_size += 1
    if marks:
        end = tokenizer.special[marks[-1]]
        tokenizer.reads_special = True
        tokenizer.separator = np.array([end], token_dtype(tokenizer.vocab_size))
    tokenizer.separated = tokenizer.end_token is not None


def render(chat: Settings, messages: Sequence[Message], *, prompt: bool) -> str:
    """Return the text of messages, with `ANSWER` and `END` around what the template marks.

    Args:
        prompt: add the start of an answer.

    Raises:
        UserError: the template does not take the messages.
    """
    values = {"messages": messages, "tools": None, "documents": None}
    try:
        template = _compiled(chat["template"])
        text = template.render({**chat["tokens"], **values, "add_generation_prompt": prompt})
        return whole_characters(text)
    except Exception as error:  # of any kind: the template is foreign code
        raise UserError(
            f"the chat template does not take these messages: {error!s:.200}"
        ) from error


@lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    from jinja2 import nodes  # jinja2 is a dependency of torch
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

        def _render(self, caller: Any) -> Any:
            return ANSWER + caller() + END

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
    return environment.from_string(template)
