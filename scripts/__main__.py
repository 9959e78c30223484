"""The command `minigpt`: `minigpt sweep-report FOLDER` runs `sweep_report.py FOLDER` of this
folder.
"""

import ast
import runpy
import sys
from pathlib import Path

from minigpt import __version__
from minigpt.utils.cli import cli_entrypoint
from minigpt.utils.errors import UserError
from minigpt.utils.terminal import did_you_mean


@cli_entrypoint
def main() -> None:
    """Run the script that the first argument names; without one, list the scripts."""
    scripts = {
        file.stem.replace("_", "-"): file for file in sorted(Path(__file__).parent.glob("[!_]*.py"))
    }
    if sys.argv[1:] == ["--version"]:
        print(f"minigpt {__version__}")
        return
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        print(
            "usage: minigpt COMMAND [ARGUMENT] ...   (minigpt COMMAND --help lists the arguments)\n"
        )
        for name, file in scripts.items():
            summary = str(ast.get_docstring(ast.parse(file.read_bytes()))).splitlines()[0]
            print(f"  {name:14}{summary.partition(':')[0]}")
        return
    name = sys.argv.pop(1)
    if name not in scripts:
        close, known = did_you_mean(name, scripts), ", ".join(scripts)
        raise UserError(f"minigpt {name} does not exist{close}; the commands are {known}")
    runpy.run_path(str(scripts[name]), run_name="__main__")


if __name__ == "__main__":
    main()
