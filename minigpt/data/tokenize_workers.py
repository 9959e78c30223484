"""Texts to token ids with all cores: processes take texts, and ids come back in the order of the texts."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from minigpt.data.tokenizer import BPETokenizer, Ids, Tokenizer, from_dict, token_dtype
from minigpt.utils.errors import RunError

T = TypeVar("T")
Texts = list[tuple[int, bool, str]]  # split, whether a separator stands before, text
TokenizeFunction = Callable[[Iterable[tuple[T, Texts]]], Iterator[tuple[T, list[Ids]]]]


@contextmanager
def tokenizing(tokenizer: Tokenizer, processes: int) -> Iterator[TokenizeFunction[Any]]:
    """A function that tokenizes texts in their order, each with what it belongs to; a row of ids for each split.

    This process is one of the `processes`: it hands texts to the others, and takes one itself when they have enough.
    """
    if processes == 1 or not isinstance(tokenizer, BPETokenizer):  # the others are faster than handing a text over
        yield lambda units: ((unit, _encode(tokenizer, texts)) for unit, texts in units)
        return
    others = processes - 1
    pool = ProcessPoolExecutor(
        others,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer.to_dict(),),
    )

    def ordered(units: Iterable[tuple[T, Texts]]) -> Iterator[tuple[T, list[Ids]]]:
        ahead: deque[tuple[T, Future[list[Ids]]]] = deque()
        try:
            for unit, texts in units:
                if sum(not ids.done() for _, ids in ahead) < 2 * others:
                    ahead.append((unit, pool.submit(_work, texts)))
                else:
                    ids = Future[list[Ids]]()
                    ids.set_result(_encode(tokenizer, texts))
                    ahead.append((unit, ids))
                while ahead and (ahead[0][1].done() or len(ahead) > 4 * processes):
                    first, ids = ahead.popleft()
                    yield first, ids.result()
            for first, ids in ahead:
                yield first, ids.result()
        except BrokenProcessPool as error:
            raise RunError(
                "a process that tokenizes was killed (out of memory?); start again to carry on, with fewer "
                "data.processes where memory is short"
            ) from error

    try:
        yield ordered
    finally:
        pool.shutdown(cancel_futures=True)


_of_worker: Tokenizer  # of a process that tokenizes


def _start_worker(tokenizer: Mapping[str, Any]) -> None:
    global _of_worker
    _of_worker = from_dict(tokenizer)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that hands out the work ends in order
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(texts: Texts) -> list[Ids]:
    return _encode(_of_worker, texts)


def _encode(tokenizer: Tokenizer, texts: Sequence[tuple[int, bool, str]]) -> list[Ids]:
    rows: list[list[Ids]] = [[], []]
    for split, separated, text in texts:
        if separated:
            rows[split].append(tokenizer.separator)
        rows[split].append(tokenizer.encode(text))
    dtype = token_dtype(tokenizer.vocab_size)
    return [np.concatenate(row).astype(dtype, copy=False) if row else np.empty(0, dtype) for row in rows]
