"""The entry point of a script: print an error as one line, and exit with its code."""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import wraps

from minigpt.utils.errors import UserError
from minigpt.utils.hydra_errors import explain_hydra
from minigpt.utils.ranks import is_rank_zero
from minigpt.utils.signals import Interrupted
from minigpt.utils.terminal import replace_dead_output, sanitize_line

IMPORTED_FROM = "modules are imported from the working folder and the installed packages"


def cli_entrypoint(function: Callable[..., object]) -> Callable[..., object]:
    """Decorate a main function: print its exceptions as one line on stderr, exit with a code."""

    @wraps(function)
    def wrapper(*args: object, **kwargs: object) -> object:
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
            replace_dead_output(ends_script=False)  # the interpreter flushes again at exit
            # All ranks have bad input, signals, and a loss that is not finite.
            if message and (is_rank_zero() or not getattr(error, "of_all_ranks", code != 1)):
                print(message, file=sys.stderr)
            sys.stdout.flush()
            sys.exit(code)

    return wrapper


def error_text(error: BaseException) -> str:
    """Return the line of an error without its prefix, for a warning or a summary."""
    return explain(error)[0].removeprefix("error: ")


def explain(error: BaseException) -> tuple[str, int]:
    """Return one line for an error and its exit code."""
    # Hydra wraps the real error, and an extension module a signal during its import.
    name = type(error).__name__
    cause = error.__cause__
    if name == "InstantiationException" and isinstance(cause, ImportError):
        key = str(error).rpartition("full_key: ")[2].strip()
        return sanitize_line(f"error: {key}._target_: {cause}; {IMPORTED_FROM}"), 2
    is_signal = isinstance(cause, KeyboardInterrupt | Interrupted)
    if cause and (is_signal or name == "InstantiationException"):
        return explain(cause)

    # Sockets raise the errors of streams, and Hydra raises built-in errors for some of its syntax:
    # the modules that raise them make the difference.
    modules = [
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    packages = {module.partition(".")[0] for module in (type(error).__module__, *modules[-1:])}
    is_loop = name == "RecursionError" and "hydra._internal.defaults_list" in modules
    match error:
        case UserError():
            return sanitize_line(f"error: {error}"), error.exit_code
        case Interrupted():
            return str(error), error.exit_code
        case KeyboardInterrupt():
            return "interrupted", 130
        case BrokenPipeError() if modules[-1:] == [replace_dead_output.__module__]:
            return "", 0
        case _ if is_loop or packages & {"hydra", "omegaconf", "antlr4", "yaml"}:
            return sanitize_line(f"error: {explain_hydra(error)}"), 2
        case OSError(strerror=str(reason)) if reason and not isinstance(error, ConnectionError):
            where = f"{error.filename}: " if error.filename else ""
            message = f"error: {where}{reason.lower()}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return sanitize_line(f"{message}; free some space, or choose another folder"), 1
            if where:
                return sanitize_line(f"{message}; choose another folder"), 2
            return sanitize_line(message), 1
        case _ if isinstance(error, MemoryError) or name == "OutOfMemoryError":
            return (
                "error: out of memory; lower data.batch_size (or --num-samples), "
                "or choose a smaller model"
            ), 1
    return sanitize_line(f"error: {name}: {error} (MINIGPT_TRACEBACK=1 shows where)"), 1
