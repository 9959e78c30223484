"""Marked conversations to token ids, and which of them are answers."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minigpt.data.tokenizer import Ids, Tokenizer
from minigpt.extras.conversations.reader import CONVERSATION, ESCAPE, QUESTION, escape
from minigpt.extras.conversations.template import ANSWER, CHATML, END, Message, render

# What a token is: of the context, of an answer, or the first one of a question that follows an
# answer, or of a conversation.
IN_CONTEXT, IN_ANSWER, STARTS_QUESTION, STARTS_CONVERSATION = range(4)
KINDS = 4
WHOLE = "huggingface"  # tokenizers of this name encode a conversation as a whole
_MARKS = f"[{CONVERSATION}{QUESTION}{ANSWER}{END}]"


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Return the ids of messages, each with a role and a content, up to the start of the answer.

    With a tokenizer of Hugging Face, special tokens in a message become their ids, as in
    transformers; else they are ordinary text.

    Raises:
        UserError: the chat template does not take the messages.
    """
    assert tokenizer.chat is not None
    if tokenizer.name != WHOLE:
        names = "|".join(map(re.escape, tokenizer.special)) or "(?!)"
        messages = escape(messages, re.compile(names))
    marked = render(tokenizer.chat, messages, prompt=True)
    ids: list[int] = (TurnEncoder(tokenizer).encode(CONVERSATION + marked) // KINDS).tolist()
    return ids


class TurnEncoder:
    """Encode marked conversations as a tokenizer does a text, to `KINDS` × id + kind."""

    end_token = 0  # they need no list of where documents start

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = KINDS * tokenizer.vocab_size
        self.separator = np.array([], np.uint32)  # between conversations: none

    def encode(self, marked: str) -> NDArray[np.uint32]:
        """Encode a text of one or several conversations, (N,)."""
        encode = _encode_whole if self.tokenizer.name == WHOLE else _encode_pieces
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
    names = sorted(tokenizer.special, key=len, reverse=True)
    ids: list[int] = []
    marks = []
    for piece in re.split("(" + "|".join([_MARKS, *map(re.escape, names)]) + ")", part):
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


def unmarked(alphabet: str, texts: Iterable[str]) -> tuple[str, Iterator[str]]:
    """Return the alphabet and the texts of conversations from which a tokenizer is built."""
    left_out = re.compile("|".join([_MARKS, ESCAPE, *map(re.escape, CHATML["marks"])]))
    return re.sub(f"{_MARKS}|{ESCAPE}", "", alphabet), (left_out.sub("", text) for text in texts)
