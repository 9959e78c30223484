"""Use fewer CPU threads while other programs use the cores. Depends on torch alone.

The threads of an operation spin while they wait for each other, so on idle cores a step takes as many CPU seconds per
second as it has threads. If it gets less, some thread waits for a core, and all others for that thread.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

import torch
from torch import nn

_MIN_PARALLEL_NUMEL = 1 << 17  # of a weight matrix
_MISSING = 0.4  # cores that the threads do not get: at most 0.1 on idle cores, at least 0.5 beside a busy process
_GAIN = 1.1  # in speed, without which fewer threads are not kept
_PAUSE = 60.0  # seconds before more threads are tried again; doubled every time


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Use `count` threads in this context (None: as before it), and restore their number after it."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def decoding_threads(model: nn.Module, rows: int) -> int | None:
    """Return 1 if one thread decodes as fast as two: for fewer than four samples of a small model; else None."""
    small = all(weight.numel() < _MIN_PARALLEL_NUMEL for weight in model.get_submodule("blocks").parameters())
    return 1 if small and rows < 4 and not _are_given() else None


class ThreadBalancer:
    """Set the number of threads of the calling thread by the clocks of its steps, between `start` and `end`.

    Args:
        window: seconds of steps that are measured together, at least three steps.
        fixed: keep the number, as is done too if an environment variable gives it.
    """

    def __init__(self, *, window: float = 1.0, fixed: bool = False) -> None:
        self.most, self._window = torch.get_num_threads(), window
        self.fixed = fixed or self.most == 1 or _are_given()
        self._skipped, self._steps, self._missing = 3, list[tuple[float, float]](), _MISSING
        self._before: tuple[int, float, float] | None = None  # a trial of fewer threads: threads, cores, seconds before
        self._pause, self._retry = _PAUSE, inf

    def start(self) -> None:
        """Begin a step."""
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        if not self._steps:
            self._began = self._wall

    def end(self) -> str:
        """End a step; return a line that says so if the number of threads changes."""
        if self.fixed or self._skipped > 0:  # the first steps allocate memory and compile
            self._skipped -= 1
            return ""
        now, count = time.perf_counter(), torch.get_num_threads()
        self._steps.append((now - self._wall, time.process_time() - self._cpu))
        if len(self._steps) < 3 or now - self._began < self._window:
            return ""
        steps, self._steps = sorted(self._steps)[:-1], []  # the slowest may have compiled
        wall, cpu = map(sum, zip(*steps, strict=True))
        cores, seconds = cpu / wall, wall / len(steps)
        if cores < count - self._missing and count > 1:
            if self._before is None:
                self._before = count, cores, seconds
                self._pause, self._retry = 2 * self._pause, now + self._pause
            return self._set(max(1, min(count - 1, int(cores))))
        before, self._before = self._before, None
        if before and seconds * _GAIN > before[2]:
            self._missing += before[0] - before[1]  # it is usual for these steps
            return self._set(before[0])
        return self._set(self.most) if count < self.most and now > self._retry else ""

    def _set(self, count: int) -> str:
        fewer = count < torch.get_num_threads()
        torch.set_num_threads(count)
        name = f"{count} thread{'s'[: count > 1]}"
        return f"{name} of {self.most}, because other programs use the cores" if fewer else f"{name} again"


def _are_given() -> bool:
    """Whether an environment variable controls the threads."""
    return any(name.startswith(("OMP_", "GOMP_", "KMP_", "MKL_")) for name in os.environ)
