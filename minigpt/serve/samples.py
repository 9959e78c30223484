"""The samples of one request as pieces of text that can be sent."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace

from minigpt.data.pieces import piece_decoder
from minigpt.data.tokenizer import Tokenizer
from minigpt.serve.engine import Token, TokenStream


@dataclass
class Piece:
    """A part of a sample.

    Args:
        tokens: its tokens with their offsets in the text of the sample.
        reason: "stop" or "length" in the last piece.
    """

    text: str = ""
    tokens: list[tuple[Token, int]] = field(default_factory=list)
    reason: str | None = None


class TextSplitter:
    """Turn tokens into pieces of whole characters; what may begin a stop string is held back until it is decided."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self.stop, self._decode = stop, piece_decoder(tokenizer)
        self._held, self._sent = "", 0  # text, and characters
        self._tokens: list[tuple[Token, int]] = []  # of text that is held

    def prompt(self, tokens: list[Token]) -> Piece:
        """Return the text of a prompt, in which stop strings are ordinary text."""
        piece = Piece()
        for token in tokens:
            piece.tokens.append((token, len(piece.text)))
            piece.text += self._decode([token.id])
        self._sent = len(piece.text)
        return piece

    def add(self, token: Token) -> Piece:
        """Return the text that a generated token completes."""
        self._tokens.append((token, self._sent + len(self._held)))
        final = token.reason is not None
        text = self._held + self._decode([token.id], final)
        end = len(text)
        if token.reason == "stop":
            end = min((at for string in self.stop if (at := text.find(string)) >= 0), default=end)
        elif self.stop and not final:
            end = next((i for i in range(end) if any(string.startswith(text[i:]) for string in self.stop)), end)
        self._held, self._sent = text[end:], self._sent + end
        everything = token.reason == "length"
        sent = [entry for entry in self._tokens if everything or entry[1] < self._sent]
        self._tokens = self._tokens[len(sent) :]
        return Piece(text[:end], sent, token.reason)


async def pieces(
    tokenizer: Tokenizer, call: SimpleNamespace, echoed: list[list[Token]], tokens: TokenStream
) -> AsyncIterator[tuple[int, Piece]]:
    """Yield the index of a sample and its next piece, which may be empty; the last one has a reason.

    Args:
        call: of `read_call`.
        echoed: tokens of each prompt that begin its samples.
        tokens: of all samples; sample i of prompt p has the index p × n + i.
    """
    splitters = [TextSplitter(tokenizer, call.stop) for _ in range(len(echoed) * call.n)]
    for i, splitter in enumerate(splitters):
        piece = splitter.prompt(echoed[i // call.n])
        piece.reason = None if call.max_tokens else "length"
        yield i, piece
    async for token in tokens:
        yield token.sample, splitters[token.sample].add(token)
