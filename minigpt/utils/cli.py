"""The entry point of a script: print an error as one line, and exit with its code."""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from minigpt.utils.errors import UserError
from minigpt.utils.hydra_errors import explain_hydra
from minigpt.utils.ranks import is_rank_zero
from minigpt.utils.signals import Interrupted
from minigpt.utils.terminal import sanitize_line

R = TypeVar("R")


def cli_entrypoint(function: Callable[..., R]) -> Callable[..., R]:
    """Decorate a script's main function: print its exceptions as one line on stderr, and exit with a code."""

    @wraps(function)
    def wrapper(*args: object, **kwargs: object) -> R:
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # set by a script during its imports
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            result = function(*args, **kwargs)
            sys.stdout.flush()  # raises here if the pipe is closed
            return result
        except (KeyboardInterrupt, Interrupted, Exception) as error:
            if os.environ.get("MINIGPT_TRACEBACK") == "1":
                raise
            message, code = explain(error)
            of_all_ranks = getattr(error, "of_all_ranks", code != 1)  # bad input, signals, divergence
            if message and (is_rank_zero() or not of_all_ranks):
                print(message, file=sys.stderr)
            try:
                sys.stdout.flush()
            except OSError:  # closed or full: the interpreter would flush again at exit, and print an error
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(code)

    return wrapper


def explain(error: BaseException) -> tuple[str, int]:
    """Return one line for an error and its exit code."""
    message, code = _explain(error)
    return sanitize_line(message), code


def error_text(error: BaseException) -> str:
    """Return the line of an error without its prefix, for a warning or a summary."""
    return explain(error)[0].removeprefix("error: ")


def _explain(error: BaseException) -> tuple[str, int]:
    name = type(error).__name__
    if isinstance(error, UserError):
        return f"error: {error}", error.exit_code
    if isinstance(error, Interrupted):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, BrokenPipeError):
        return "", 0
    # Hydra's error around the real one; and an extension module turns a signal during its import into an ImportError.
    interrupted = isinstance(error.__cause__, KeyboardInterrupt | Interrupted)
    if error.__cause__ is not None and (interrupted or name == "InstantiationException"):
        return _explain(error.__cause__)
    # Hydra raises built-in errors for some of its syntax.
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)][-1:]
    if {module.partition(".")[0] for module in (type(error).__module__, *modules)} & {"hydra", "omegaconf", "antlr4"}:
        return explain_hydra(error)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "; free some space, or choose another folder" if full else "; choose another folder" if where else ""
        return f"error: {where}{error.strerror.lower()}{advice}", 2 if where and not full else 1
    if isinstance(error, MemoryError) or name == "OutOfMemoryError":
        return "error: out of memory; lower data.batch_size (or --num-samples), or choose a smaller model", 1
    return f"error: {name}: {error} (MINIGPT_TRACEBACK=1 shows where)", 1
