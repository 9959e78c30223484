"""Use fewer CPU threads while other programs use the cores. Depends on torch alone.

The threads of an operation spin while they wait for each other, so on idle cores a step takes as
many CPU seconds per second as it has threads. If it gets less, some thread waits for a core, and
all others for that thread. Results of other numbers of threads are equal within rounding; the steps
of the changes depend on the load of the machine.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Environment variables by which users set the number of threads, or how they wait.
GIVEN_BY = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_THREAD_LIMIT",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "KMP_BLOCKTIME",
)
# Cores that the threads do not get: at most 0.1 on idle cores, at least 0.5 beside a busy process.
_MISSING = 0.4
_GAIN = 1.1  # in speed, without which fewer threads are not kept
_PAUSE = 60.0  # seconds before another number is tried again; doubled until all threads have a core


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Use `count` threads in this context (None: as before), and restore their number after it."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


class ThreadBalancer:
    """Set the number of threads of the calling thread by the clocks of its steps.

    While threads wait for a core, fewer are tried, until each has one. They are kept if the steps
    became faster; all are tried again after a pause, which doubles each time.

    Args:
        window: seconds of steps that are measured together, at least three steps.
        fixed: keep the number, as is done too if an environment variable gives it.
    """

    def __init__(self, *, window: float = 1.0, fixed: bool = False) -> None:
        self.most = torch.get_num_threads()
        self.fixed = fixed or self.most == 1 or any(map(os.environ.get, GIVEN_BY))
        self._window = window
        self._skipped = 3  # the first steps allocate memory and compile
        self._steps: list[tuple[float, float]] = []  # wall and CPU seconds of each
        self._seconds = 0.0  # wall seconds of all
        # In a trial of fewer threads, what was before it: threads, cores, seconds per step.
        self._before: tuple[int, float, float] | None = None
        self._pause = _PAUSE
        self._try_more_at = self._try_fewer_at = 0.0  # by the clock: not before

    def start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def end(self) -> str:
        """End a step; return a line for the log if another number of threads is kept."""
        if self.fixed or self._skipped > 0:
            self._skipped -= 1
            return ""
        now = time.perf_counter()
        self._steps.append((now - self._wall, time.process_time() - self._cpu))
        self._seconds += now - self._wall
        if len(self._steps) < 3 or self._seconds < self._window:
            return ""
        steps = sorted(self._steps)[:-1]  # the slowest may have compiled
        self._steps = []
        self._seconds = 0.0
        wall, cpu = map(sum, zip(*steps, strict=True))
        return self._choose(now, cpu / wall, wall / len(steps))

    def _choose(self, now: float, cores: float, seconds: float) -> str:
        # A thread waits for a core, and all others for that thread.
        count = torch.get_num_threads()
        waiting = cores < count - _MISSING
        if waiting and count > 1 and (self._before or now >= self._try_fewer_at):
            # Begin a trial, or continue it: as many threads as there are cores.
            if self._before is None:
                self._before = (count, cores, seconds)
                self._try_more_at = now + self._pause
                self._pause *= 2
            torch.set_num_threads(max(1, min(count - 1, int(cores))))
        elif self._before:
            # End a trial: keep its threads if they are faster; else restore their number, and try
            # fewer only when more would be tried.
            before, had, slow = self._before
            self._before = None
            if seconds * _GAIN <= slow:
                return (
                    f"{count} thread{'s' if count > 1 else ''} "
                    f"instead of {before}, which had {had:.1f} cores"
                )
            torch.set_num_threads(before)
            self._try_fewer_at = self._try_more_at
        elif count < self.most and now >= self._try_more_at:
            # After the pause, other programs may have ended.
            torch.set_num_threads(self.most)
            return f"{self.most} threads again"
        elif count == self.most and not waiting:
            # Every thread has a core.
            self._pause = _PAUSE
        return ""
