"""The text of tokens as they come one by one, in whole characters, up to the first stop string."""

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
        prompt: ids before the text; if they end within a character, the text completes it.

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
        self.tokenizer = tokenizer
        self.stopped = False
        self.held = ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        if tokenizer:
            # An incomplete character has at most 3 bytes.
            self._utf8.decode(tokenizer.decode_bytes(prompt[-3:]))

    def append(self, token: int, *, last: bool = False) -> str:
        """Append a token and return the characters that it completes.

        The characters end with the stop string, even within a token. Those of the last token
        include the replacement character for an incomplete character. After the end of the text,
        they are empty.
        """
        if self.stopped:
            return ""
        self.stopped = token in self.stop_ids
        if self.tokenizer is None:
            return ""
        last |= self.stopped
        new = self._utf8.decode(self.tokenizer.decode_bytes([token]), last)
        if not self.stop_strings:
            return new
        # Find the end of the text, or hold what may become a stop string.
        text = self.held + new
        ends = [(text.find(s) + len(s), text.find(s)) for s in self.stop_strings if s in text]
        if ends:
            end, begin = min(ends)  # of those that are complete first, the longest
            new = text[len(self.held) : end]
            self.held = text[begin:end]
            self.stopped = True
        else:
            suffixes = [] if last else [text[begin:] for begin in range(len(text))]
            self.held = next(filter(self._begins_stop_string, suffixes), "")
        return new

    def _begins_stop_string(self, text: str) -> bool:
        return any(string.startswith(text) for string in self.stop_strings)
