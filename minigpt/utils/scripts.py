"""Where configs and scripts lie, how users run them and install packages: in a clone or a wheel."""

import argparse
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from minigpt.utils.errors import UserError

_PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = (_PACKAGE / "configs").is_dir()  # a wheel has configs/ and scripts/ inside the package
ROOT = _PACKAGE if INSTALLED else _PACKAGE.parent  # the folder of configs/ and scripts/
PIP_INSTALL = (
    'pip install "minigpt[{}]"' if INSTALLED else 'pip install -e ".[{}]" -c constraints.txt'
)


def usage(script: str) -> str:
    """Return how to run a script: `python scripts/sweep_report.py` or `minigpt sweep-report`."""
    return f"minigpt {script.replace('_', '-')}" if INSTALLED else f"python scripts/{script}.py"


def shell_quote(word: str) -> str:
    """Quote a word for the shell of this system; on Windows for both cmd and PowerShell."""
    if sys.platform != "win32":
        return shlex.quote(word)
    escaped = word.replace('"', r"\"")
    return word if re.fullmatch(r"[\w.:=/\\+-]+", word) else f'"{escaped}"'


def shell_join(*words: str) -> str:
    """Return a command line of words, to be copied into a shell."""
    return " ".join(map(shell_quote, words))


def search_path(arguments: list[str]) -> str:
    """Return the `config_path` of a command line: `configs/` and the arguments.

    These may name folders of the user. A plugin in `hydra_plugins/` takes it apart, and lets Hydra
    search the folders of the user first.
    """
    return "\0".join([str(ROOT / "configs"), *arguments, ""])


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose errors are a UserError, one line with the next step."""

    def error(self, message: str) -> NoReturn:
        flag = message.partition(":")[0].removeprefix("argument ")
        dashes = f"; write a value that begins with a dash as {flag}=--x"
        advice = dashes if message.endswith("expected one argument") else ""
        raise UserError(f"{message}{advice}; --help lists the arguments")


def import_extra(module: str, needed_by: str, extra: str) -> Any:
    """Import a module of a package in `minigpt[extra]`; raise UserError if it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"{needed_by} needs {module.partition('.')[0]}; {PIP_INSTALL.format(extra)}"
        ) from error
