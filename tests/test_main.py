"""The command `minigpt` in the clone; `integration/test_wheel.py` runs it from a wheel."""

import subprocess
import sys

import pytest
from small_runs import ROOT

from minigpt.utils import scripts

DEPENDENCIES = {"hydra", "lightning", "matplotlib", "numpy", "omegaconf", "torch", "wandb"}


def test_minigpt_lists_the_scripts_without_importing_a_dependency() -> None:
    program = "import sys; from minigpt.__main__ import main; main(); print(*sys.modules, file=sys.stderr)"
    listed = [
        subprocess.run(
            [sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for arguments in ([], ["-h"], ["--help"])
    ]
    assert not DEPENDENCIES & set(listed[0].stderr.split())
    (out,) = {one.stdout for one in listed}
    usage, empty, *lines = out.splitlines()
    assert usage.startswith("usage: minigpt COMMAND")
    assert not empty
    names = {file.stem.replace("_", "-") for file in (ROOT / "scripts").glob("[!_]*.py")}
    assert {line.split()[0] for line in lines} == names
    assert "  train         Train a GPT" in lines


def test_every_message_names_a_command_of_the_clone_or_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scripts.usage("sweep_report") == "python scripts/sweep_report.py"
    monkeypatch.setattr(scripts, "INSTALLED", True)
    assert scripts.usage("sweep_report") == "minigpt sweep-report"
