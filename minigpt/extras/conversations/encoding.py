"""Conversations to texts, by a chat template, and to token ids, of which answers are marked.

Templates are rendered as transformers does, in Jinja's sandbox. A rendered conversation is a text
in which single characters mark where it starts, where a question follows an answer, and where the
answers are, so that it goes through the preparation of a corpus as any other text does.

Source: https://huggingface.co/docs/transformers/chat_templating
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minigpt.data.tokenizer import Ids, Tokenizer, token_dtype, whole_characters
from minigpt.utils.checks import Settings
from minigpt.utils.errors import UserError

Message = Mapping[str, Any]  # with a `role` and a `content`

# The marks: before a conversation, before a question that follows an answer, around an answer.
# ESCAPE is within names of special tokens that are ordinary text. Unicode reserves these characters
# for use within a program.
CONVERSATION = "\ufdd0"
QUESTION = "\ufdd1"
ANSWER = "\ufdd2"
END = "\ufdd3"
ESCAPE = "\ufdd4"
_MARKS = f"[{CONVERSATION}{QUESTION}{ANSWER}{END}]"

# Kinds of a token: of the context, of an answer, or the first one of a question that follows an
# answer, or of a conversation.
KINDS = 4
IN_CONTEXT, IN_ANSWER, STARTS_QUESTION, STARTS_CONVERSATION = range(KINDS)
_HUGGING_FACE = "huggingface"  # name of their tokenizers

# What both templates of our own begin with
_ROLES = """{% for message in messages %}
{% if message.role not in ('system', 'user', 'assistant') %}
{{ raise_exception('a role must be system, user or assistant, got ' ~ message.role) }}
{% endif %}
"""
# Of a model that is trained on conversations from scratch. The two names are special tokens.
CHATML = {
    "template": _ROLES
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
{%- endif %}""",
    "tokens": {},
    "marks": ["<|im_start|>", "<|im_end|>"],
}
# Of a pretrained model without a template, whose only special token ends a text.
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


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Return the ids of messages, each with a role and a content, up to the start of the answer.

    With a tokenizer of Hugging Face, names of special tokens in a message become their ids, as in
    transformers; else they are ordinary text.

    Raises:
        UserError: the chat template does not take the messages.
    """
    assert tokenizer.chat is not None
    marked = CONVERSATION + render(tokenizer.chat, escape(tokenizer, messages), prompt=True)
    ids: list[int] = (TurnEncoder(tokenizer).encode(marked) // KINDS).tolist()
    return ids


class TurnEncoder:
    """Encode marked conversations, as a tokenizer does a text, to `KINDS` × id + kind."""

    end_token = 0  # so that no file lists where documents start
    separator = np.array([], np.uint32)  # between conversations: none

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = KINDS * tokenizer.vocab_size

    def encode(self, marked: str) -> NDArray[np.uint32]:
        """Encode a text of one or several conversations, (N,)."""
        encode = _encode_whole if self.tokenizer.name == _HUGGING_FACE else _encode_pieces
        encoded = []
        for part in marked.split(CONVERSATION)[1:]:
            ids, marks = encode(self.tokenizer, part)
            kinds = np.full(len(ids), IN_CONTEXT, np.uint32)
            for (sign, start), (_, end) in pairwise([*marks, ("", len(ids))]):
                if sign == ANSWER:  # up to `END`
                    kinds[start:end] = IN_ANSWER
                elif sign == QUESTION:
                    kinds[start : start + 1] = STARTS_QUESTION
            kinds[:1] = STARTS_CONVERSATION  # no token is before it, from which to learn it
            encoded.append(np.array(ids, np.uint32) * KINDS + kinds)
        return np.concatenate(encoded)


def _encode_pieces(tokenizer: Tokenizer, part: str) -> tuple[list[int], list[tuple[str, int]]]:
    """Return the ids of a text, and the marks in it with the index of the token that follows.

    It is encoded piece by piece, so that an answer follows the same ids as when it is generated.
    """
    ids: list[int] = []
    marks = []
    for piece in re.split(f"({_MARKS}|{special_names(tokenizer).pattern})", part):
        if piece in tokenizer.special:
            ids.append(tokenizer.special[piece])
        elif re.fullmatch(_MARKS, piece):
            marks.append((piece, len(ids)))
        else:
            ids += tokenizer.encode(piece.replace(ESCAPE, "")).tolist()
    return ids, marks


def _encode_whole(tokenizer: Any, part: str) -> tuple[Ids, list[tuple[str, int]]]:
    """Return the same as `_encode_pieces`, of a text that is encoded as a whole."""
    pieces = re.split(f"({_MARKS})", part)
    ids, starts, stops = tokenizer.locate("".join(pieces[::2]))
    marks = []
    for sign, place in zip(pieces[1::2], accumulate(map(len, pieces[::2])), strict=False):
        # A token across the border of an answer is a part of it
        after = np.searchsorted(starts, place)
        holds = np.searchsorted(stops, place, "right")
        marks.append((sign, int(after if sign == END else holds)))
    return ids, marks


def special_names(tokenizer: Tokenizer | None) -> re.Pattern[str]:
    """Return a pattern of the names of special tokens; None: of a tokenizer that is not built."""
    if tokenizer is None:
        return re.compile(r"<\|\w+\|>")  # any that it may have
    names = sorted(tokenizer.special, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or "(?!)")


def escape(tokenizer: Tokenizer | None, messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages in which names of special tokens are ordinary text when they are encoded.

    For a tokenizer of Hugging Face, the messages are returned as they are, as in transformers.
    """
    if tokenizer and tokenizer.name == _HUGGING_FACE:
        return messages
    hide = partial(special_names(tokenizer).sub, lambda name: name[0][0] + ESCAPE + name[0][1:])
    return [{**each, "content": hide(each["content"])} for each in messages]


def unmarked(alphabet: str, texts: Iterable[str]) -> tuple[str, Iterator[str]]:
    """Return the alphabet and the texts of conversations from which a tokenizer is built."""
    left_out = re.compile("|".join([_MARKS, ESCAPE, *map(re.escape, CHATML["marks"])]))
    return re.sub(f"{_MARKS}|{ESCAPE}", "", alphabet), (left_out.sub("", text) for text in texts)


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
    tokens = chat["tokens"]
    marks = chat["marks"]
    texts = (chat["template"], *tokens, *tokens.values(), *marks)
    if not all(isinstance(each, str) and each for each in texts):
        raise UserError("the template, tokens and marks of a chat must be texts, none empty")
    tokenizer.chat = chat
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
            f"the chat template does not take these messages: {str(error) or repr(error):.200}"
        ) from error


@lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # jinja2 is a dependency of torch

    def refuse(message: str) -> None:
        raise UserError(message)

    # With the settings of transformers
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "mark_answer": lambda caller: ANSWER + caller() + END,
    }
    # Tags of Jinja in place of those that transformers adds
    template = re.sub(r"({%[-+]?\s*)generation(\s*[-+]?%})", r"\1call mark_answer()\2", template)
    template = re.sub(r"({%[-+]?\s*)endgeneration(\s*[-+]?%})", r"\1endcall\2", template)
    return environment.from_string(template)
