"""The entry point of a script: print an error as one line, and exit with its code."""

import errno
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from minigpt.utils.errors import UserError
from minigpt.utils.scripts import ROOT
from minigpt.utils.signals import Interrupted
from minigpt.utils.terminal import did_you_mean, is_rank_zero, sanitize_line

IMPORTED_FROM = "modules are imported from the working folder and the installed packages"


def cli_entrypoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a script's main function: print its exceptions as one line on stderr, and exit with a code."""

    @wraps(function)
    def wrapper(*args: object, **kwargs: object) -> Any:
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
    if cause and (name == "InstantiationException" or isinstance(cause, KeyboardInterrupt | Interrupted)):
        return explain(cause)
    # Hydra raises built-in errors for some of its syntax.
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)][-1:]
    packages = {module.partition(".")[0] for module in (type(error).__module__, *modules)}
    if isinstance(error, UserError):
        message, code = f"error: {error}", error.exit_code
    elif isinstance(error, Interrupted):
        message, code = str(error), error.exit_code
    elif isinstance(error, KeyboardInterrupt):
        message, code = "interrupted", 130
    elif isinstance(error, BrokenPipeError):
        message, code = "", 0
    elif packages & {"hydra", "omegaconf", "antlr4"}:
        message, code = f"error: {_explain_hydra(error)}", 2
    elif isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "; free some space, or choose another folder" if full else "; choose another folder" if where else ""
        message, code = f"error: {where}{error.strerror.lower()}{advice}", 2 if where and not full else 1
    elif isinstance(error, MemoryError) or name == "OutOfMemoryError":
        message = "error: out of memory; lower data.batch_size (or --num-samples), or choose a smaller model"
        code = 1
    else:
        message, code = f"error: {name}: {error} (MINIGPT_TRACEBACK=1 shows where)", 1
    return sanitize_line(message), code


def written_as(name: str) -> str:
    """Return the setting that a name of another program, or the last part of a setting, stands for; else the name."""
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    found = [key for key in _settings() if key.rpartition(".")[2] == name]
    return found[0] if len(found) == 1 else name


# Settings of other programs for training, by their names there.
_ELSEWHERE = {
    **{"device": "trainer", "dataset": "data", "learning_rate": "optimizer.lr", "max_iters": "max_steps"},
    **{"eval_interval": "eval_every", "eval_iters": "eval_batches", "log_interval": "log_every"},
    **{"warmup_iters": "schedule.warmup_steps", "grad_clip": "trainer.gradient_clip_val", "dtype": "trainer.precision"},
    **{"gradient_accumulation_steps": "trainer.accumulate_grad_batches", "out_dir": "hydra.run.dir"},
    **{"epochs": "max_steps", "max_epochs": "max_steps", "batch_size": "data.batch_size"},
}


def _explain_hydra(error: BaseException) -> str:
    """Return one line for an error of Hydra, whose own messages have several lines."""
    cause, text = error.__cause__, str(error)
    if (override := getattr(error, "override", None)) is not None:
        key, equals, value = override.partition("=")
        written = "key=value" if not equals or re.search(r"['\"$`\\!]", value) else f"\"{key}='{value}'\""
        return f"cannot parse the override {override}; in a shell, write {written}"
    missing = re.search(r"Could not find '([\w./@-]+)/([^'/]*)'", text)
    if missing and (options := re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE)):
        group, choice = missing.groups()
        meant = did_you_mean(choice, options)
        return f"{group}={choice} does not exist{meant}; {group}= takes {', '.join(options)}"
    if unknown := re.search(r"Could not (?:override|delete|append) '([^']+)'", text):
        name, settings = unknown[1], _settings()
        group = name.partition(".")[0]
        if chosen := [choice for choice in settings.get(name, ()) if choice.startswith(f"{group}=")]:
            return f"{name} does not exist here; it belongs to {', '.join(chosen)}"
        if name in _ELSEWHERE:
            return f"{name} does not exist; write {_ELSEWHERE[name]}=…"
        return f"{name} does not exist{did_you_mean(name, settings)}; --help lists them"
    full_key = getattr(error, "full_key", None) or getattr(cause, "full_key", None)
    detail = " ".join(str(cause or error).split()).split(" full_key:")[0]
    where = f"{full_key}: " if full_key else ""
    return where + re.sub(r" See https?://.*", "", detail)


def _settings() -> dict[str, list[str]]:
    """Return the groups and dotted settings in `configs/`, without those of sweeps, and GROUP=CHOICE of their files."""
    import yaml  # a dependency of Hydra

    found, configs = dict[str, list[str]](), ROOT / "configs"
    for file in sorted(configs.rglob("*.yaml")):
        group, text = file.parent.relative_to(configs).as_posix(), file.read_text(encoding="utf-8")
        found.setdefault(group, [])
        inside = group in (".", "hydra/help") or "@package _global_" in text
        for key in _keys(yaml.load(text, yaml.CSafeLoader), "" if inside else f"{group}."):
            found.setdefault(key, []).append(f"{group}={file.stem}")
    return {key: files for key, files in found.items() if not key.startswith((".", "hydra.sweeper.params.", "sweep."))}


def _keys(node: Any, prefix: str) -> Iterator[str]:
    for key in node if isinstance(node, dict) else ():
        yield f"{prefix}{key}"
        yield from _keys(node[key], f"{prefix}{key}.")
