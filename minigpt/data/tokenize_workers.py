"""Tokenize batches in several processes; the ids come back in the order of the batches."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from typing import Any

import numpy as np

from minigpt.data.tokenizer import ByteTokenizer, CharTokenizer, Ids, Tokenizer, from_dict, token_dtype
from minigpt.utils.errors import RunError

_SINGLE_PROCESS_BATCHES = 16  # tokenizing so few takes less time than starting other processes

TokenizeBatch = list[tuple[int, bool, str]]  # split, whether a separator precedes the text, text


def tokenize(tokenizer: Tokenizer, batches: Iterable[TokenizeBatch], processes: int | None) -> Iterator[list[Ids]]:
    """Tokenize batches in `processes` (None: one per core); yield the ids of each split, per batch."""
    from loky import cpu_count

    processes, batches = processes or cpu_count(), iter(batches)
    head = list(islice(batches, _SINGLE_PROCESS_BATCHES))
    batches = chain(head, batches)
    # Char and byte tokenizers take less time than sending the text.
    if processes == 1 or isinstance(tokenizer, CharTokenizer | ByteTokenizer) or len(head) < _SINGLE_PROCESS_BATCHES:
        yield from (_encode(batch, tokenizer) for batch in batches)
        return
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer.to_dict(),),
    )
    pending: deque[Future[list[Ids]]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(_encode, batch))
            if len(pending) > 3 * processes:  # bounds the texts in memory
                yield pending.popleft().result()
        for ids in pending:
            yield ids.result()
    except BrokenProcessPool as error:
        raise RunError(
            "a tokenizing process was killed (out of memory?); start again to resume, with fewer data.processes "
            "if memory is short"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker_tokenizer: Tokenizer


def _start_worker(tokenizer: Mapping[str, Any]) -> None:
    global _worker_tokenizer
    _worker_tokenizer = from_dict(tokenizer)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process shuts its workers down
    threading.Thread(target=_exit_with_parent, daemon=True).start()  # if it is killed, the pool does not


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(batch: TokenizeBatch, tokenizer: Tokenizer | None = None) -> list[Ids]:
    tokenizer = tokenizer or _worker_tokenizer
    dtype = token_dtype(tokenizer.vocab_size)
    ids: list[list[Ids]] = [[np.empty(0, dtype)], [np.empty(0, dtype)]]
    for split, separated, text in batch:
        if separated:
            ids[split].append(tokenizer.separator)
        ids[split].append(tokenizer.encode(text))
    return [np.concatenate(row, dtype=dtype) for row in ids]
