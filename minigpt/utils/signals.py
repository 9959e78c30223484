"""Signals that end a run, and the exit code that makes a scheduler requeue it."""

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

# Windows has neither.
REQUEUE_SIGNAL: int | None = getattr(signal, "SIGUSR1", None)  # before preemption, by schedulers
# Sent twice when a terminal closes: by the shell and the system.
HANGUP_SIGNAL: int | None = getattr(signal, "SIGHUP", None)
END_SIGNALS: list[int] = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGBREAK", "SIGHUP", "SIGUSR1")  # Ctrl-Break of Windows
    if hasattr(signal, name)
]
REQUEUE_EXIT_CODE = 75  # EX_TEMPFAIL, which Windows does not define: a job script requeues on it


class Interrupted(BaseException):
    """A signal ended the run; not an Exception, because libraries swallow those."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.exit_code = REQUEUE_EXIT_CODE if signum == REQUEUE_SIGNAL else 128 + signum

    def _render_traceback_(self) -> list[str]:  # what a notebook shows
        return [str(self)]


def exit_on_requeue_signal() -> None:
    """Make SIGUSR1 end the process with the code for a requeue, until `raise_on_signal`."""
    if REQUEUE_SIGNAL and signal.getsignal(REQUEUE_SIGNAL) == signal.SIG_DFL:
        signal.signal(REQUEUE_SIGNAL, _exit_for_requeue)


def _exit_for_requeue(signum: int, frame: FrameType | None) -> None:
    os._exit(REQUEUE_EXIT_CODE)


def raise_on_signal() -> AbstractContextManager[None]:
    """Raise `Interrupted` on signals that would kill the process.

    Other handlers, such as submitit's, stay.
    """
    default = (signal.SIG_DFL, signal.default_int_handler, _exit_for_requeue)
    signums = [signum for signum in END_SIGNALS if signal.getsignal(signum) in default]
    return handle_signals(signums, raise_interrupted)


@contextmanager
def handle_signals(
    signums: Collection[int], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Handle signals with a function, and with their previous handlers afterwards.

    Ignored ones stay ignored, and in a thread all stay as they are.
    """
    in_main = threading.current_thread() is threading.main_thread()
    previous = {signum: signal.getsignal(signum) for signum in END_SIGNALS if in_main}
    for signum, before in previous.items():
        if signum in signums and before != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, before in previous.items():
            if before is not None:  # a handler of a library in C
                signal.signal(signum, before)


def raise_interrupted(signum: int, frame: FrameType | None) -> None:
    """Raise `Interrupted` for a signal, once for those of a terminal that closes."""
    if signum == HANGUP_SIGNAL:
        signal.signal(signum, signal.SIG_IGN)
    raise Interrupted(signum)
