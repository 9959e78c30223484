"""Where configs and scripts lie, how users run them: in a clone or a wheel."""

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import NoReturn

from minigpt.utils.errors import UserError

_PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = (_PACKAGE / "configs").is_dir()  # a wheel has configs/ and scripts/ inside the package
ROOT = _PACKAGE if INSTALLED else _PACKAGE.parent  # the folder of configs/ and scripts/


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
