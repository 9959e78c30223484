"""Errors that a user caused or must hear of, and the one place that turns them into one line.

Everything that is wrong with the input raises `UserError` (exit code 2), everything that goes wrong
while a run works raises `RunError` (exit code 1). `one_line` prints either as a single line without a
traceback; `MINIGPT_TRACEBACK=1` shows the traceback instead. What is printed here and elsewhere may come from a
file: `clean` and `legible` keep a terminal from obeying it.
"""

import difflib
import errno
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from math import isfinite
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_CONFIGS = Path(__file__).resolve().parents[2] / "configs"
_LONGEST = 1000  # characters of a line
# Unicode's pictures of control characters, but for line breaks and tabs; the later controls and the marks of direction
# have none.
_SIGNS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {
    code: f"⟨U+{code:04X}⟩" for code in (*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
_SIGNS[127] = "␡"

REQUEUE_SIGNAL = getattr(signal, "SIGUSR1", None)  # asks a run to make place, and to be started again; not on Windows
END_SIGNALS = [
    signal.SIGINT,
    signal.SIGTERM,
    *([REQUEUE_SIGNAL] if REQUEUE_SIGNAL else []),
]  # what asks a run to end in order
_TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h


class UserError(Exception):
    """The input or the configuration is wrong: says what, what was expected and what to do."""

    exit_code = 2


class RunError(UserError):
    """The input was right and the run failed all the same."""

    exit_code = 1


class Diverged(RunError):
    """The loss of optimizer step `step` is no number any more, or its gradient is none; every process raises it."""

    def __init__(self, loss: float, step: int, learning_rate: float) -> None:
        what = "the gradient is no number" if isfinite(loss) else f"the loss became {loss}"
        self.what, self.step = f"{what} at step {step} (learning rate {learning_rate:.3g})", step
        super().__init__(f"{self.what}; try a lower optimizer.lr, more schedule.warmup_steps, or on_divergence=skip")


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


def cli_entrypoint(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a program's entry: what it raises becomes one line on stderr and an exit code."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # as a script has it during its imports
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            result = function(*args, **kwargs)
            sys.stdout.flush()  # a closed pipe is noticed here, not when the interpreter ends
            return result
        except (KeyboardInterrupt, Interrupted, Exception) as error:
            if os.environ.get("MINIGPT_TRACEBACK") == "1":
                raise
            message, code = explain(error)
            # Bad input, signals and a loss that is no number concern every process of several; one says it.
            own = code == 1 and not isinstance(error, Diverged)
            if message and (own or is_rank_zero()):
                print(message, file=sys.stderr)
            try:
                sys.stdout.flush()
            except OSError:  # closed, or full: the interpreter would flush once more, and complain
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(code)

    return wrapper


def explain(error: BaseException) -> tuple[str, int]:
    """The line that tells a user what happened, and the exit code that goes with it."""
    message, code = _explain(error)
    return sanitize_line(message), code


def _explain(error: BaseException) -> tuple[str, int]:
    if isinstance(error, UserError):
        return f"error: {error}", error.exit_code
    if isinstance(error, Interrupted):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, BrokenPipeError):
        return "", 0
    if {type(error).__module__.partition(".")[0], _raised_in(error)} & {"hydra", "omegaconf", "antlr4"}:
        return _explain_hydra(error)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "; free some space, or choose another folder" if full else "; choose another folder" if where else ""
        return f"error: {where}{error.strerror.lower()}{advice}", 2 if where and not full else 1
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "error: out of memory; lower data.batch_size (or --num-samples), or choose a smaller model", 1
    return f"error: {type(error).__name__}: {error} (MINIGPT_TRACEBACK=1 shows where)", 1


def _raised_in(error: BaseException) -> str:
    """The package that raised an error: Hydra has plain ones for some of what it cannot read."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__", "")).partition(".")[0] if frames else ""


def warn(message: str) -> None:
    """Say one line that the user should know of, once however many processes train."""
    if is_rank_zero():
        print(f"warning: {sanitize_line(message)}", file=sys.stderr)


def sanitize_line(text: str) -> str:
    """Any text as one line that a terminal shows and does not obey, and a person reads to its end."""
    line = " ".join(text.split())
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"


def escape_control_chars(text: str) -> str:
    """A text for a terminal, with signs for the characters that would move its cursor, or hide and turn others."""
    return text.translate(_SIGNS)


def is_rank_zero() -> bool:
    """Whether this is the first of the processes that train one model, as who started them says; before torch knows."""
    environment = os.environ
    if "RANK" in environment:  # torchrun
        return environment["RANK"] == "0"
    if "LOCAL_RANK" in environment:  # Lightning
        return environment["LOCAL_RANK"] == environment.get("NODE_RANK", "0") == "0"
    return environment.get("SLURM_PROCID", "0") == "0"  # srun


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for the known name closest to `name`, or nothing when none is close or it is `name`."""
    known = sorted(set(known) - {name})
    leaf = name.rpartition(".")[2]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6) or [
        key for key in known if difflib.get_close_matches(leaf, [key.rpartition(".")[2]], cutoff=0.75)
    ]
    return f" (did you mean {close[0]}?)" if close else ""


def _explain_hydra(error: BaseException) -> tuple[str, int]:
    """Hydra says several lines and mentions its own syntax; say the one thing that matters."""
    cause = error.__cause__
    # An object that failed to be built from the configuration: what failed is the cause.
    if type(error).__name__ == "InstantiationException" and cause is not None:
        return explain(cause)
    text = str(error)
    if (override := getattr(error, "override", None)) is not None:
        return f"error: cannot read the override {override}; write setting=value, and '…' around odd characters", 2
    if missing := re.search(r"Could not find '([\w./@-]+)/([^'/]*)'", text):
        group, choice = missing.groups()
        options = re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE)
        if options:
            takes = ", ".join(options)
            return f"error: {group}={choice} does not exist{did_you_mean(choice, options)}; {group}= takes {takes}", 2
    if unknown := re.search(r"Could not (?:override|delete|append) '([^']+)'", text):
        name = unknown[1]
        if chosen := _choices_with(name):
            return f"error: there is no setting {name} here; it belongs to {', '.join(chosen)}", 2
        return f"error: there is no setting {name}{did_you_mean(name, _known_settings())}; --help lists them", 2
    full_key = getattr(error, "full_key", None) or getattr(cause, "full_key", None)
    detail = " ".join(str(cause or error).split()).split(" full_key:")[0]
    where = f"{full_key}: " if full_key else ""
    return f"error: {where}{re.sub(r' See https?://.*', '', detail)}", 2


def _known_settings() -> set[str]:
    """Every group and dotted setting that the files in `configs/` name."""
    known: set[str] = set()
    for file in _CONFIGS.rglob("*.yaml"):
        known |= {file.parent.relative_to(_CONFIGS).as_posix()} | set(_settings_of(file))
    # What a sweep sets is no setting, nor is a line of a file for the agent of Weights & Biases.
    return {name for name in known - {"."} if not name.startswith(("hydra.sweeper.params.", "sweep."))}


def _choices_with(name: str) -> list[str]:
    """The choices of a setting's group whose files name it, such as tokenizer=bpe for tokenizer.vocab_size."""
    group = name.partition(".")[0]
    files = sorted((_CONFIGS / group).glob("*.yaml"))
    return [f"{group}={file.stem}" for file in files if name in _settings_of(file)]


def _settings_of(file: Path) -> Iterator[str]:
    import yaml  # a dependency of Hydra

    group, text = file.parent.relative_to(_CONFIGS).as_posix(), file.read_text(encoding="utf-8")
    inside = group in (".", "hydra/help") or "@package _global_" in text
    return _keys(yaml.load(text, yaml.CSafeLoader), "" if inside else f"{group}.")


def _keys(node: Any, prefix: str) -> Iterator[str]:
    for key in node if isinstance(node, dict) else ():
        yield f"{prefix}{key}"
        yield from _keys(node[key], f"{prefix}{key}.")
