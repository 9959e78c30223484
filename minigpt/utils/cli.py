"""The entry point of a script: print an error as one line, and exit with its code."""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any

from minigpt.utils.errors import UserError
from minigpt.utils.hydra_errors import explain_hydra
from minigpt.utils.ranks import is_rank_zero
from minigpt.utils.signals import Interrupted
from minigpt.utils.terminal import replace_dead_output, sanitize_line

IMPORTED_FROM = "modules are imported from the working folder and the installed packages"


def cli_entrypoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a script's main function: print its exceptions as one line on stderr, and exit with a code."""

    @wraps(function)
    def wrapper(*args: object, **kwargs: object) -> Any:
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # set by a script during its imports
            signal.signal(signal.SIGINT, signal.default_int_handler)
        replace_dead_output(ends_script=True)
        try:
            result = function(*args, **kwargs)
            sys.stdout.flush()  # raises here if the pipe is closed
            return result
        except (KeyboardInterrupt, Interrupted, Exception) as error:
            if os.environ.get("MINIGPT_TRACEBACK") == "1":
                raise
            message, code = explain(error)
            of_all_ranks = getattr(
                error, "of_all_ranks", code != 1
            )  # bad input, signals, divergence
            replace_dead_output(ends_script=False)  # the interpreter flushes again at exit
            if message and (is_rank_zero() or not of_all_ranks):
                print(message, file=sys.stderr)
            sys.stdout.flush()
            sys.exit(code)

    return wrapper


def error_text(error: BaseException) -> str:
    """Return the line of an error without its prefix, for a warning or a summary."""
    return explain(error)[0].removeprefix("error: ")


def explain(error: BaseException) -> tuple[str, int]:
    """Return one line for an error and its exit code."""
    name, cause = type(error).__name__, error.__cause__
    if name == "InstantiationException" and isinstance(cause, ImportError):
        key = str(error).rpartition("full_key: ")[2].strip()
        return sanitize_line(f"error: {key}._target_: {cause}; {IMPORTED_FROM}"), 2
    # Hydra's error around the real one; and an extension module turns a signal during its import into an ImportError.
    if cause and (
        name == "InstantiationException" or isinstance(cause, KeyboardInterrupt | Interrupted)
    ):
        return explain(cause)
    # Hydra raises built-in errors for some of its syntax. The stream of a script raises others than a socket.
    modules = [
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    packages = {module.partition(".")[0] for module in (type(error).__module__, *modules[-1:])}
    if isinstance(error, UserError):
        message, code = f"error: {error}", error.exit_code
    elif isinstance(error, Interrupted):
        message, code = str(error), error.exit_code
    elif isinstance(error, KeyboardInterrupt):
        message, code = "interrupted", 130
    elif isinstance(error, BrokenPipeError) and modules[-1:] == [replace_dead_output.__module__]:
        message, code = "", 0
    elif packages & {"hydra", "omegaconf", "antlr4", "yaml"} or (
        name == "RecursionError" and "hydra._internal.defaults_list" in modules
    ):
        message, code = f"error: {explain_hydra(error)}", 2
    elif isinstance(error, OSError) and error.strerror and not isinstance(error, ConnectionError):
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = (
            "; free some space, or choose another folder"
            if full
            else "; choose another folder"
            if where
            else ""
        )
        message, code = (
            f"error: {where}{error.strerror.lower()}{advice}",
            2 if where and not full else 1,
        )
    elif isinstance(error, MemoryError) or name == "OutOfMemoryError":
        message = "error: out of memory; lower data.batch_size (or --num-samples), or choose a smaller model"
        code = 1
    else:
        message, code = f"error: {name}: {error} (MINIGPT_TRACEBACK=1 shows where)", 1
    return sanitize_line(message), code
