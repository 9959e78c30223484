"""The command `minigpt` in the clone; `test_wheel.py` runs it from a wheel."""

import subprocess
import sys
from importlib.metadata import version

import pytest
from small_runs import ROOT

from minigpt.utils import scripts


def test_minigpt_lists_the_scripts_without_importing_a_dependency():
    imports = "import sys; from minigpt.__main__ import main"
    program = f"{imports}; main(); print(*sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", program, "--help"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    assert not {"hydra", "matplotlib", "numpy", "omegaconf", "torch", "wandb"} & set(
        listed.stderr.split()
    )
    usage, _, *lines = listed.stdout.splitlines()
    assert usage.startswith("usage: minigpt COMMAND")
    names = {file.stem.replace("_", "-") for file in (ROOT / "scripts").glob("[!_]*.py")}
    assert {line.split()[0] for line in lines} == names


def test_minigpt_prints_its_version():
    command = [sys.executable, "-m", "minigpt", "--version"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    assert printed.stdout == f"minigpt {version('minigpt')}\n"


def test_every_message_names_a_command_of_the_clone_or_of_the_package(
    monkeypatch: pytest.MonkeyPatch,
):
    assert scripts.usage("sweep_report") == "python scripts/sweep_report.py"
    monkeypatch.setattr(scripts, "INSTALLED", True)
    assert scripts.usage("sweep_report") == "minigpt sweep-report"
