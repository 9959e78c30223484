"""The packages that extras need, which `pip install "minigpt[EXTRA]"` installs."""

from importlib import import_module
from typing import Any

from minigpt.utils.errors import UserError
from minigpt.utils.scripts import INSTALLED

PIP_INSTALL = (
    'pip install "minigpt[{}]"' if INSTALLED else 'pip install -e ".[{}]" -c constraints.txt'
)


def import_extra(module: str, needed_by: str, extra: str) -> Any:
    """Import a module of a package in `minigpt[extra]`; raise UserError if it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"{needed_by} needs {module.partition('.')[0]}; {PIP_INSTALL.format(extra)}"
        ) from error
