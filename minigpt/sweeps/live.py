"""What a sweep shows before and while it runs: its points, and a line for each run that works, on stderr."""

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from minigpt.sweeps.results import COMPLETED, CRASHED, RUNNING, SKIPPED, WAITING, Point, refresh

_WIDE = 200  # columns, where nobody looks
_EVERY = 0.5  # seconds


def print_points(points: Sequence[Point], *, workers: int, threads: int) -> None:
    """List points before they run: parameters, expected time, and why one cannot be.

    Args:
        workers: runs at a time; 0 where that is not known. threads: of each.
    """
    table = _table("run", "parameters", "about", "")
    for point in points:
        seconds, waiting = point.seconds_expected, point.status == WAITING
        table.add_row(
            Text(point.folder.name),
            f"{point.params:,}" if point.params else "",
            _time(seconds / threads) if seconds and waiting else "",
            Text("" if waiting else ": ".join(filter(None, (point.status, point.reason)))),
        )
    console = _console()
    console.print(table)
    todo = [point for point in points if point.status not in (COMPLETED, SKIPPED)]
    said = f"{len(todo)} of {len(points)} to run"
    if workers:
        said += f", {workers} at a time with {threads} {'thread' if threads == 1 else 'threads'} each"
        if all(point.seconds_expected for point in todo):
            whole = sum(point.seconds_expected or 0 for point in todo) / workers / threads
            said += f", about {_time(whole)}"
    console.print(said)


@contextmanager
def live_progress(points: list[Point]) -> Iterator[None]:
    """While runs work, keep their points up to date, and show a line for each in a terminal.

    Elsewhere a run is a line once it has ended.
    """
    console, over = _console(), threading.Event()
    begun, ended = time.perf_counter(), sum(point.status in (COMPLETED, SKIPPED) for point in points)
    said = [point.status for point in points]

    def update(unsettled: Collection[str]) -> None:
        for i, point in enumerate(points):
            if point.status not in (COMPLETED, SKIPPED):
                points[i] = refresh(point)
                if points[i].status not in (said[i], *unsettled) and not console.is_terminal:
                    said[i] = points[i].status
                    console.print(Text(_ended(points[i], points)))
        if live is not None:
            live.update(_lines(points, time.perf_counter() - begun, ended, console.height), refresh=True)

    def follow() -> None:
        while not over.wait(_EVERY):
            update((RUNNING, WAITING, CRASHED))  # one that begins looks broken off for a moment

    thread = threading.Thread(target=follow, daemon=True)
    with Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else nullcontext() as live:
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            update((RUNNING, WAITING))


def _lines(points: Sequence[Point], seconds: float, before: int, height: int) -> RenderableType:
    """A line for each run that works, and one for all."""
    table = _table("running", "step", "val loss", "tokens/s", "time left")
    running = [point for point in points if point.status == RUNNING]
    for point in running[: max(1, height - 6)]:
        left = point.seconds / point.step * (point.max_steps - point.step) if point.step and point.max_steps else None
        table.add_row(
            Text(point.folder.name),
            f"{point.step:,}/{point.max_steps:,}" if point.max_steps else f"{point.step:,}",
            f"{point.val_loss:.4f}" if point.val_loss else "",
            f"{point.tokens_per_second:,.0f}" if point.tokens_per_second else "",
            "" if left is None else _time(left),
        )
    counts = Counter(point.status for point in points)
    said = ", ".join(f"{number} {status}" for status, number in counts.items())
    part = sum(map(_part, points)) - before
    if part > 0:
        said += f", about {_time(seconds / part * (len(points) - before - part))} left"
    return Group(table, Text(said))


def _part(point: Point) -> float:
    """How much of a run is done, from 0 to 1."""
    if point.status not in (RUNNING, WAITING):
        return 1.0
    return point.step / point.max_steps if point.max_steps else 0.0


def _ended(point: Point, points: Sequence[Point]) -> str:
    number = sum(other.status not in (RUNNING, WAITING) for other in points)
    figures = f", val loss {point.val_loss:.4f} at {point.seconds:,.0f} s" if point.val_loss else ""
    reason = f": {point.reason}" if point.reason else ""
    return f"{number}/{len(points)}  {point.folder.name}  {point.status}{figures}{reason}"


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in (columns[0], "") else "right", overflow="fold")
    return table


def _console() -> Console:
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    return console


def _time(seconds: float) -> str:
    """12 s, 3 min, 2.5 h: as exactly as it is known."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
