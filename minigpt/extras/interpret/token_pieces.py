"""The text of each token of a text, in whole characters."""

from collections.abc import Sequence

from minigpt.data.tokenizer import Tokenizer
from minigpt.sampling.detokenizer import Detokenizer


def token_pieces(tokenizer: Tokenizer, ids: Sequence[int], *, complete: bool = True) -> list[str]:
    """Split the text of ids (T,) into the characters that each of them completes.

    Args:
        complete: False if the text goes on: an incomplete character at its end is left out.
    """
    text = Detokenizer(tokenizer)
    last = len(ids) if complete else None
    return [text.append(token, last=i == last) for i, token in enumerate(ids, start=1)]
