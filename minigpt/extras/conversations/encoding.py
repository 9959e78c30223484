"""Marked conversations to token ids, and which of them are answers."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from minigpt.data.prepare import TextBatches, TokenizeBatch
from minigpt.data.token_files import SPLITS
from minigpt.data.tokenizer import Ids, Tokenizer, token_dtype
from minigpt.extras.conversations.reader import CONVERSATION, ESCAPE, QUESTION, escape
from minigpt.extras.conversations.template import ANSWER, CHATML, END, Message, render
from minigpt.extras.huggingface.tokenizer_json import HuggingFaceTokenizer
from minigpt.utils.files import sync
from minigpt.utils.threads import map_in_threads

TURNS = ".turns"  # file of a split: what each token is (uint8)
# What a token is: of the context, of an answer, or the first of a question that follows an answer,
# or of a conversation.
IN_CONTEXT, IN_ANSWER, STARTS_QUESTION, STARTS_CONVERSATION = range(4)
_MARKS = re.compile("[\ufdd0-\ufdef]")


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Return the ids of messages, each with a role and a content, up to the start of the answer.

    With a tokenizer of Hugging Face, special tokens in a message become their ids, as in
    transformers; else they are ordinary text.

    Raises:
        UserError: the chat template does not take the messages.
    """
    assert tokenizer.chat is not None
    if tokenizer.name != "huggingface":
        messages = escape(messages, [*tokenizer.special])
    text = render(tokenizer.chat, messages, prompt=True)
    return _encode(tokenizer, re.sub(f"[{ANSWER}{END}]", "", text))[0].tolist()


def encode_turns(tokenizer: Tokenizer, marked: str) -> tuple[Ids, NDArray[np.uint8]]:
    """Return the ids of a marked text, and what each token is, (N,) each."""
    ids = []
    kinds = []
    for part in marked.split(CONVERSATION)[1:]:
        # The text, and the places of its marks
        pieces = re.split(f"([{QUESTION}{ANSWER}{END}])", part)
        ends = list(accumulate(map(len, pieces[::2])))
        places: dict[str, list[int]] = {QUESTION: [], ANSWER: [], END: []}
        for sign, place in zip(pieces[1::2], ends[:-1], strict=True):
            places[sign].append(place)
        tokens, starts, stops = _encode(tokenizer, "".join(pieces[::2]))
        # The kinds of its tokens
        kind = np.full(len(tokens), IN_CONTEXT, np.uint8)
        for place in places[QUESTION]:
            kind[np.searchsorted(starts, place)] = STARTS_QUESTION
        for start, stop in zip(places[ANSWER], places[END], strict=True):
            kind[(starts < stop) & (stops > start)] = IN_ANSWER
        kind[:1] = STARTS_CONVERSATION  # it has no token before it, from which it could be learned
        ids.append(tokens)
        kinds.append(kind)
    return np.concatenate(ids), np.concatenate(kinds)


def _encode(tokenizer: Tokenizer, text: str) -> tuple[Ids, Ids, Ids]:
    """Return the ids of a rendered text, and where each starts and stops in it, (N,) each."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.locate(text)
    names = "|".join(map(re.escape, tokenizer.special)) or "(?!)"
    ids: list[int] = []
    stops = [0]  # of each token, in bytes without `ESCAPE`
    for piece in re.split(f"({names})", text):
        if piece in tokenizer.special:
            ids.append(tokenizer.special[piece])
            stops.append(stops[-1] + len(piece))
        else:
            found = tokenizer.encode(piece.replace(ESCAPE, "")).tolist()
            ids += found
            sizes = [len(tokenizer.token_bytes[i]) for i in found]
            stops += accumulate(sizes, initial=stops.pop())
    # The character of each byte
    sizes = [0 if each == ESCAPE else len(each.encode()) for each in text]
    characters = np.repeat(np.arange(len(text)), sizes)
    starts = characters[stops[:-1]]
    return np.array(ids, tokenizer.separator.dtype), starts, characters[np.array(stops[1:]) - 1] + 1


def unmarked(alphabet: str, texts: Iterable[str]) -> tuple[str, Iterator[str]]:
    """Return the alphabet and the texts of conversations from which a tokenizer is built."""
    left_out = re.compile("|".join([_MARKS.pattern, *map(re.escape, CHATML["marks"])]))
    return _MARKS.sub("", alphabet), (left_out.sub("", text) for text in texts)


def write_conversations(
    folder: Path, tokenizer: Tokenizer, batches: TextBatches, threads: int | None
) -> list[dict[str, int]]:
    """Write the ids and the `TURNS` of both splits; return the bytes and tokens of the answers."""
    from loky import cpu_count

    sizes = np.array([len(tokenizer.token_bytes.get(i, b"")) for i in range(tokenizer.vocab_size)])
    answers = [{"bytes": 0, "targets": 0} for _ in SPLITS]

    def encode(batch: TokenizeBatch) -> list[tuple[int, Ids, NDArray[np.uint8]]]:
        return [(split, *encode_turns(tokenizer, text)) for split, _, text in batch]

    with ExitStack() as stack:
        paths = [folder / f"{split}{suffix}" for suffix in (".bin", TURNS) for split in SPLITS]
        files = [stack.enter_context(open(path, "wb")) for path in paths]
        bar = stack.enter_context(tqdm(unit="B", unit_scale=True, delay=1, disable=None))
        for encoded in map_in_threads(encode, batches, threads or cpu_count()):
            for split, ids, kinds in encoded:
                files[split].write(ids.astype(token_dtype(tokenizer.vocab_size)).data)
                files[split + len(SPLITS)].write(kinds.data)
                learned = ids[kinds == IN_ANSWER]
                answers[split]["targets"] += len(learned)
                answers[split]["bytes"] += int(sizes[learned].sum())
            bar.update(sum(batches.bytes) - bar.n)
    for path in paths:
        sync(path)
    return answers
