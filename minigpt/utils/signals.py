"""Signals that end a run: with a checkpoint, and an exit code for schedulers."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

REQUEUE_SIGNAL = getattr(signal, "SIGUSR1", None)  # asks a run to make place, and to be started again; not on Windows
END_SIGNALS = [
    signal.SIGINT,
    signal.SIGTERM,
    *([REQUEUE_SIGNAL] if REQUEUE_SIGNAL else []),
]  # what asks a run to end in order
_TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h


class Interrupted(BaseException):
    """A signal asked the run to end; raised at a moment when it can end in order.

    It is no Exception, which whatever was at work would take for an error of its own.

    Schedulers send SIGUSR1 before they take the machine away: the exit code is then that of a failure which passes
    (EX_TEMPFAIL), and the job is to be queued again.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.exit_code = _TRY_AGAIN if signum == REQUEUE_SIGNAL else 128 + signum


def requeue_at_once() -> None:
    """Have SIGUSR1 end a run that has not begun with the code that has it queued again."""
    if REQUEUE_SIGNAL and signal.getsignal(REQUEUE_SIGNAL) == signal.SIG_DFL:
        signal.signal(REQUEUE_SIGNAL, _begin_again)


def _begin_again(signum: int, frame: FrameType | None) -> None:
    os._exit(_TRY_AGAIN)


@contextmanager
def raise_on_signal() -> Iterator[None]:
    """Have signals that would end the process at once raise `Interrupted`, which ends it in order.

    Signals that somebody else looks after are left to them: a worker of a cluster's scheduler has its own ways.
    """
    in_main = threading.current_thread() is threading.main_thread()
    before = {signum: signal.getsignal(signum) for signum in END_SIGNALS if in_main}
    immediate = (signal.SIG_DFL, signal.default_int_handler, _begin_again)
    ours = [signum for signum, handler in before.items() if handler in immediate]
    for signum in ours:
        signal.signal(signum, interrupt)
    try:
        yield
    finally:
        for signum in ours:
            signal.signal(signum, before[signum])


def interrupt(signum: int, frame: FrameType | None) -> None:
    """A signal's handler."""
    raise Interrupted(signum)
