"""Terminal output before and while a sweep runs, on stderr."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from minigpt.sweeps.results import COMPLETED, SKIPPED, Point
from minigpt.utils.terminal import sanitize_line


def print_plan(points: Sequence[Point], worker_envs: Sequence[Mapping[str, str]]) -> None:
    """Print which points are skipped and why, and how many will run.

    Args:
        worker_envs: one environment per worker process; empty if a cluster or Hydra decides.
    """
    for point in points:
        if point.status == SKIPPED:
            print(sanitize_line(f"{point.folder.name}  skipped: {point.reason}"), file=sys.stderr)
    pending = sum(point.status not in (COMPLETED, SKIPPED) for point in points)
    text = f"{pending} of {len(points)} to run"
    if worker_envs:
        threads = int(worker_envs[0]["OMP_NUM_THREADS"])
        text += f", {len(worker_envs)} at a time with {threads} {'thread' if threads == 1 else 'threads'} each"
    print(text, file=sys.stderr)


@contextmanager
def run_progress(total: int, *, show_bar: bool) -> Iterator[Callable[[Point], None]]:
    """Show a progress bar over runs, if this is a terminal; yield a function that prints a line per ended run."""
    console = Console(stderr=True, highlight=False)
    with Progress(console=console, transient=True, disable=not (show_bar and console.is_terminal)) as progress:
        task = progress.add_task("runs", total=total)

        def on_end(point: Point) -> None:
            progress.advance(task)
            loss = f", val loss {point.val_loss:.4f} after {point.seconds:,.0f} s" if point.val_loss else ""
            reason = f": {point.reason}" if point.reason else ""
            count = f"{progress.tasks[0].completed:.0f}/{total}"
            line = sanitize_line(f"{count} {point.folder.name} {point.status}{loss}{reason}")
            console.print(Text(line), soft_wrap=True)

        yield on_end
