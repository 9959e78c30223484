"""The command `minigpt`, and `python -m minigpt`: `scripts/__main__.py`, which a wheel has too."""

import runpy

from minigpt.utils.scripts import ROOT


def main() -> None:
    """Run a script by its name."""
    runpy.run_path(str(ROOT / "scripts" / "__main__.py"), run_name="__main__")


if __name__ == "__main__":
    main()
