"""The text of tokens as they come one by one: whole characters, up to and with the first stop string."""

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minigpt.utils.errors import UserError

if TYPE_CHECKING:
    from minigpt.data.tokenizer import Tokenizer


class Detokenizer:
    """Decode the tokens of one growing text, until a stop string or a stop token ends it.

    Args:
        tokenizer: required by stop strings; without one, the text is empty.
        stop: strings and token ids. The stop string that is complete first ends the text.
        prompt: ids before the text; if they end within a character, the first tokens of the text complete it.

    Attributes:
        stopped: whether the text has ended.
        held: the end of the text that is a stop string or may become one.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer | None",
        stop: Sequence[str | int] = (),
        prompt: Sequence[int] = (),
    ) -> None:
        self.stop_ids = {item for item in stop if isinstance(item, int)}
        self.stop_strings = [item for item in stop if isinstance(item, str)]
        if self.stop_strings and tokenizer is None:
            raise UserError(
                "stop has strings, which need a tokenizer; set tokenizer, or give token ids"
            )
        self.tokenizer, self.stopped, self.held = tokenizer, False, ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        if tokenizer:
            self._utf8.decode(
                tokenizer.decode_bytes(prompt[-3:])
            )  # an incomplete character has at most 3 bytes

    def append(self, token: int, *, last: bool = False) -> str:
        """Append a token and return the characters that it completes.

        The characters end with the stop string, even within a token. Those of the last token include the replacement
        character for an incomplete character. After the end of the text, they are empty.
        """
        if self.stopped:
            return ""
        self.stopped = token in self.stop_ids
        if self.tokenizer is None:
            return ""
        last |= self.stopped
        new = self._utf8.decode(self.tokenizer.decode_bytes([token]), last)
        return self._end_at_stop_string(new, last) if self.stop_strings else new

    def _end_at_stop_string(self, new: str, last: bool) -> str:
        text = self.held + new
        found = [
            (begin + len(string), begin)
            for string in self.stop_strings
            if (begin := text.find(string)) >= 0
        ]
        if found:
            end, begin = min(found)
            new, self.held, self.stopped = text[len(self.held) : end], text[begin:end], True
        else:
            ends = [] if last else [text[i:] for i in range(len(text))]
            self.held = next(
                (end for end in ends if any(s.startswith(end) for s in self.stop_strings)), ""
            )
        return new


def token_pieces(tokenizer: "Tokenizer", ids: Sequence[int], *, complete: bool = True) -> list[str]:
    """Split the text of ids (T,) into the characters that each of them completes; joined, they are the text.

    With `complete=False`, the text goes on: an incomplete character at its end is left out.
    """
    text = Detokenizer(tokenizer)
    return [
        text.append(token, last=complete and i == len(ids)) for i, token in enumerate(ids, start=1)
    ]
