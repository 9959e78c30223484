"""Where configs and scripts lie, and how users run the scripts: in a clone, or in an installed package."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = (_PACKAGE / "configs").is_dir()  # a wheel has configs/ and scripts/ inside the package
ROOT = _PACKAGE if INSTALLED else _PACKAGE.parent  # the folder of configs/ and scripts/
PIP_INSTALL = 'pip install "minigpt[{}]"' if INSTALLED else 'pip install -e ".[{}]" -c constraints.txt'


def usage(script: str) -> str:
    """Return how to run a script, for messages: `python scripts/sweep_report.py` or `minigpt sweep-report`."""
    return f"minigpt {script.replace('_', '-')}" if INSTALLED else f"python scripts/{script}.py"
