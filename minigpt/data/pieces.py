"""The text of each token: the characters that it completes."""

import codecs
from collections.abc import Callable, Sequence

from minigpt.data.tokenizer import Tokenizer


def token_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Split the text of ids (T,) into the characters that each of them completes; joined, they are the text."""
    decode = piece_decoder(tokenizer)
    return [decode([id_], final=i == len(ids)) for i, id_ in enumerate(ids, start=1)]


def piece_decoder(tokenizer: Tokenizer) -> Callable[..., str]:
    """Return a function that decodes the next ids of a text to the characters that they complete.

    With `final=True` as its second argument, it also returns what is left of an incomplete character.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return lambda ids, final=False: decoder.decode(tokenizer.decode_bytes(ids), final)
