"""Calls in threads, with the results in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def map_in_threads(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """Yield `function(item)` of each item, in order; `threads` threads work on the next ones."""
    pending: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
