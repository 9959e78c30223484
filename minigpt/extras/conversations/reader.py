"""Conversations of files and data sets, read row by row and rendered with marks.

Rows are recognized by their keys: `messages` (OpenAI, Hugging Face), `conversations` (ShareGPT),
`instruction` and `output` (Alpaca). The marks are those of `encoding`.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from minigpt.data.readers import TextChunk, read_jsonl, read_lines
from minigpt.data.tokenizer import Tokenizer, whole_characters
from minigpt.extras.conversations.encoding import (
    ANSWER,
    CONVERSATION,
    END,
    QUESTION,
    Message,
    chat_of,
    escape,
    render,
    special_names,
)
from minigpt.utils.checks import Settings
from minigpt.utils.errors import UserError
from minigpt.utils.terminal import warn_once

# Marks, and other characters that Unicode reserves for use within a program
_RESERVED = re.compile("[\ufdd0-\ufdef]")
_SHAREGPT = {"human": "user", "gpt": "assistant"}  # roles
_UNSUPPORTED = ("tools", "functions", "tool_calls", "function_call", "history")


class ConversationReader:
    """Read the conversation of a row, as `data.field` of `read_documents`.

    Args:
        tokenizer: of pretrained weights; None: it is built from the conversations.
        field: that holds the messages; None: it is recognized.
    """

    def __init__(self, tokenizer: Tokenizer | None, field: str | None) -> None:
        self.chat = chat_of(tokenizer)
        self.field = field
        self.tokenizer = tokenizer
        self.names = special_names(tokenizer)

    def __call__(self, row: object, where: str) -> TextChunk:
        """Return a rendered conversation; raise UserError, with its place, if it has none."""
        try:
            messages = escape(self.tokenizer, read_messages(row, self.field))
            return TextChunk(mark(self.chat, messages, self.names), True)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error


def read_json_rows(
    file: Path, field: Callable[[object, str], TextChunk]
) -> Iterator[TextChunk | None]:
    """Read a file without a suffix of rows: JSON Lines, or one array."""
    begin = next(filter(str.strip, read_lines(file)), "").lstrip()
    if not begin.startswith("["):
        yield from read_jsonl(file, field)
        return
    try:
        rows = json.loads("\n".join(read_lines(file)))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({error})") from error
    for number, row in enumerate(rows, 1):
        yield field(row, f"{file}, item {number:,}")


def read_messages(row: object, field: str | None) -> list[Message]:
    """Return the messages of a row; raise UserError if they are no conversation to learn from."""
    cells = _present(row)
    given = cells
    if field is not None:
        given = {"messages": cells[field]} if field in cells else {}
    match given:
        case {"messages": messages} | {"conversations": messages}:
            pass
        case {"instruction": question, "output": answer}:
            parts = filter(None, [question, cells.get("input")])
            asked = {"role": "user", "content": "\n\n".join(map(str, parts))}
            messages = [asked, {"role": "assistant", "content": answer}]
        case _:
            raise UserError(
                "a conversation must have "
                f"{field or 'messages, conversations, or instruction and output'}, "
                f"got {', '.join(map(str, cells)) or row!r:.80}"
            )
    if not isinstance(messages, list):
        raise UserError(f"the messages must be a list, got {messages!r:.80}")
    found = [_read_message(each, f"message {i}") for i, each in enumerate(messages, 1)]
    if not any(each["role"] == "assistant" and each.get("weight", 1) for each in found):
        raise UserError(
            "a conversation must have a message of the role assistant, from which to learn, got "
            + (", ".join(dict.fromkeys(each["role"] for each in found)) or "no message")
        )
    if cells.get("system") and found[0]["role"] != "system":
        system = {"role": "system", "content": cells["system"]}
        found.insert(0, _read_message(system, "the system message"))
    return found


def _present(row: object) -> dict[str, Any]:
    # The cells of a row that hold something: a table has all of them in every row.
    cells = row if isinstance(row, Mapping) else {}
    found = {key: value for key, value in cells.items() if value is not None}
    for key in _UNSUPPORTED:
        if found.get(key):
            raise UserError(f"{key} is not supported; leave such conversations out")
    return found


def _read_message(given: object, name: str) -> Message:
    values = _present(given)
    role = values.get("role")
    content = values.get("content")
    if "from" in values and "value" in values:
        role = _SHAREGPT.get(str(values["from"]), values.pop("from"))
        content = values.pop("value")
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        parts = [(part.get("type"), part.get("text")) for part in content]
        texts = [text for kind, text in parts if kind == "text" and isinstance(text, str)]
        content = "".join(texts) if len(texts) == len(content) else content
    if not isinstance(role, str) or not isinstance(content, str):
        raise UserError(f"{name} must have a role and a content that are texts, got {given!r:.80}")
    if role == "assistant" and not content.strip():
        raise UserError(f"{name} is an empty answer; leave it out")
    if values.get("weight", 1) not in (0, 1):
        raise UserError(f"the weight of {name} must be 0 or 1, got {values['weight']!r:.80}")
    values |= {"role": role, "content": content}
    return {key: _clean(value) for key, value in values.items()}


def _clean(value: Any) -> Any:
    return _RESERVED.sub("\ufffd", whole_characters(value)) if isinstance(value, str) else value


def mark(chat: Settings, messages: Sequence[Message], names: re.Pattern[str]) -> str:
    """Return a conversation as text with marks.

    A template that renders an answer otherwise once another message follows gives a text per
    answer, each after `CONVERSATION`.

    Args:
        names: of special tokens.

    Raises:
        UserError: the template does not take the messages, or leaves some out.
    """
    # What the template renders, and whether it is everything
    answers = [i for i, each in enumerate(messages) if each["role"] == "assistant"]
    texts = _render_answers(chat, messages, answers, names)
    for i, each in enumerate(messages[: answers[-1]], 1):
        if each["role"] != "assistant" and each["content"].strip() not in texts[-1][0]:
            raise UserError(f"the chat template leaves out message {i}, of the role {each['role']}")
    # Marks at their places; answers of weight 0 are not learned, as in OpenAI's files
    marked = ""
    for text, spans in texts:
        places = [(0, CONVERSATION)]
        for i, (start, end) in spans.items():
            if messages[i].get("weight", 1):
                places += [(start, ANSWER), (end, END)]
            if i + 1 < len(messages) and messages[i + 1]["role"] == "user":
                places.append((_start_of_question(text, end, names), QUESTION))
        for place, sign in reversed(places):
            text = text[:place] + sign + text[place:]
        marked += text
    return marked


def _render_answers(
    chat: Settings, messages: Sequence[Message], answers: Sequence[int], names: re.Pattern[str]
) -> list[tuple[str, dict[int, tuple[int, int]]]]:
    """Return the rendered text, and where in it each answer starts and ends, by its message.

    If the template renders an answer otherwise once another message follows, return a text per
    answer.
    """
    # By the marks of the template
    parts = re.split(f"[{ANSWER}{END}]", render(chat, messages, prompt=False))
    text = "".join(parts)
    if len(parts) > 1:
        ends = list(accumulate(map(len, parts)))
        found = list(zip(ends[:-1:2], ends[1::2], strict=True))
        if len(found) != len(answers):
            raise UserError(f"the chat template marks {len(found)} answers of {len(answers)}")
        return [(text, dict(zip(answers, found, strict=True)))]
    # Turn by turn
    texts = {}
    spans = {}
    for i in answers:
        begin = render(chat, messages[:i], prompt=True)
        texts[i] = render(chat, messages[: i + 1], prompt=False)
        if not texts[i].startswith(begin):
            raise UserError(
                f"the chat template starts message {i + 1} with {begin[-20:]!r}, but renders "
                "it otherwise; give it {% generation %}, or leave the message out"
            )
        end = _end_of_answer(texts[i], len(begin), messages[i]["content"], names)
        spans[i] = (len(begin), end)
    if all(text.startswith(texts[i][:end]) for i, (_, end) in spans.items()):
        return [(text, spans)]
    return [(texts[i], {i: spans[i]}) for i in answers]


def _end_of_answer(text: str, start: int, content: str, names: re.Pattern[str]) -> int:
    # After the first special token behind the content. Of a content that the template changes, the
    # last one of the text. The content is not looked for within names of special tokens.
    content = content.strip()
    hidden = [names.sub(lambda name: "\0" * len(name[0]), each) for each in (text, content)]
    at = hidden[0].rfind(hidden[1], start)
    tokens = list(names.finditer(text, start if at < 0 else at + len(content)))
    if tokens:
        return tokens[-1 if at < 0 else 0].end()
    warn_once("the chat template ends answers with no special token: no end is learned")
    return len(text.rstrip())


def _start_of_question(text: str, end: int, names: re.Pattern[str]) -> int:
    # After white space that follows the end of an answer, and after the special token that ends it,
    # if the template does not mark this token as a part of the answer
    rest = text[end:]
    if not re.search(rf"(?:{names.pattern})\s*\Z", text[:end]):
        rest = re.sub(rf"\A(?:{names.pattern})", "", rest)
    return len(text) - len(rest.lstrip())
