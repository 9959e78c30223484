"""Calls in threads, with the results in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def map_in_threads(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """Yield `function(item)` of each item, in order, while up to `threads` threads work on the next ones.

    The threads do not keep the process from exiting, so a slow read does not delay an interrupt.
    """
    tasks: SimpleQueue[tuple[T, Future[R]] | None] = SimpleQueue()
    pending: deque[Future[R]] = deque()

    def work() -> None:
        while task := tasks.get():
            item, future = task
            try:
                future.set_result(function(item))
            except BaseException as error:
                future.set_exception(error)

    started = 0
    try:
        for item in items:
            pending.append(Future())
            tasks.put((item, pending[-1]))
            if started < min(threads, len(pending)):
                Thread(target=work, daemon=True).start()
                started += 1
            elif len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for _ in range(started):
            tasks.put(None)
