"""Errors that a user caused or must hear of, and the one place that turns them into one line.

Everything that is wrong with the input raises `UserError` (exit code 2), everything that goes wrong
while a run works raises `RunError` (exit code 1). `one_line` prints either as a single line without a
traceback; `MINIGPT_TRACEBACK=1` shows the traceback instead.
"""

import difflib
import errno
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class UserError(Exception):
    """The input or the configuration is wrong: says what, what was expected and what to do."""

    exit_code = 2


class RunError(UserError):
    """The input was right and the run failed all the same."""

    exit_code = 1


class Interrupted(Exception):
    """A signal asked the run to end; raised at a moment when it can end in order."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


def one_line(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a program's entry: what it raises becomes one line on stderr and an exit code."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # as a script has it during its imports
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            result = function(*args, **kwargs)
            sys.stdout.flush()  # a closed pipe is noticed here, not when the interpreter ends
            return result
        except (KeyboardInterrupt, BrokenPipeError, Exception) as error:
            if os.environ.get("MINIGPT_TRACEBACK") == "1":
                raise
            message, code = explain(error)
            # Bad input and signals concern every process of several; one says it.
            if message and (code == 1 or os.environ.get("LOCAL_RANK", "0") == "0"):
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
    return " ".join(message.split()), code


def _explain(error: BaseException) -> tuple[str, int]:
    if isinstance(error, UserError):
        return f"error: {error}", error.exit_code
    if isinstance(error, Interrupted):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, BrokenPipeError):
        return "", 0
    if type(error).__module__.startswith(("hydra.", "omegaconf.", "antlr4.")):
        return _explain_hydra(error)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "; free some space, or choose another folder" if full else "; choose another folder" if where else ""
        return f"error: {where}{error.strerror.lower()}{advice}", 2 if where and not full else 1
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "error: out of memory; lower data.batch_size (or --num-samples), or choose a smaller model", 1
    return f"error: {type(error).__name__}: {error} (MINIGPT_TRACEBACK=1 shows where)", 1


def warn(message: str) -> None:
    """Say one line that the user should know of, once however many processes train."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"warning: {message}", file=sys.stderr)


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for the known name closest to `name`, or nothing when none is close."""
    known = sorted(set(known))
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
            return f"error: {group}={choice} does not exist{nearest(choice, options)}; {group}= takes {takes}", 2
    if unknown := re.search(r"Could not (?:override|delete|append) '([^']+)'", text):
        name = unknown[1]
        return f"error: there is no setting {name}{nearest(name, _known_settings())}; --help lists them", 2
    full_key = getattr(error, "full_key", None) or getattr(cause, "full_key", None)
    detail = " ".join(str(cause or error).split()).split(" full_key:")[0]
    where = f"{full_key}: " if full_key else ""
    return f"error: {where}{re.sub(r' See https?://.*', '', detail)}", 2


def _known_settings() -> set[str]:
    """Every group and dotted setting that the files in `configs/` name."""
    import yaml  # a dependency of Hydra

    configs = Path(__file__).resolve().parents[1] / "configs"
    known: set[str] = set()
    for file in configs.rglob("*.yaml"):
        group = file.parent.relative_to(configs).as_posix()
        text = file.read_text(encoding="utf-8")
        inside = group in (".", "hydra/help") or "@package _global_" in text
        known |= {group} | set(_keys(yaml.load(text, yaml.CSafeLoader), "" if inside else f"{group}."))
    return known - {"."}


def _keys(node: Any, prefix: str) -> Iterator[str]:
    for key in node if isinstance(node, dict) else ():
        yield f"{prefix}{key}"
        yield from _keys(node[key], f"{prefix}{key}.")
