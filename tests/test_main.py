"""The command `minigpt` in the clone; `integration/test_wheel.py` runs it from a wheel."""

import subprocess
import sys

import pytest
from small_runs import ROOT

from minigpt.__main__ import main
from minigpt.utils import scripts

DEPENDENCIES = {"hydra", "lightning", "matplotlib", "numpy", "omegaconf", "torch", "wandb"}


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_minigpt_lists_the_scripts(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["minigpt", *arguments])
    main()
    usage, empty, *lines = capsys.readouterr().out.splitlines()
    assert usage.startswith("usage: minigpt COMMAND")
    assert not empty
    names = {file.stem.replace("_", "-") for file in (ROOT / "scripts").glob("[!_]*.py")}
    assert {line.split()[0] for line in lines} == names
    assert "  train         Train a GPT" in lines


def test_an_unknown_command_is_one_line_with_a_suggestion(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["minigpt", "sweep_report"])
    with pytest.raises(SystemExit, match=r"^2$"):
        main()
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: minigpt sweep_report does not exist (did you mean sweep-report?); ")
    assert err.count("\n") == 1


def test_minigpt_passes_the_other_arguments_to_the_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["minigpt", "sample", "--top-k", "0"])
    with pytest.raises(SystemExit, match=r"^2$"):
        main()
    assert capsys.readouterr().err.startswith("error: --top-k must be an integer ≥ 1, got 0")


def test_listing_the_scripts_imports_no_dependency() -> None:
    program = "import sys; from minigpt.__main__ import main; main(); print(*sys.modules, file=sys.stderr)"
    listed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not DEPENDENCIES & set(listed.stderr.split())


def test_every_message_names_a_command_of_the_clone_or_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scripts.usage("sweep_report") == "python scripts/sweep_report.py"
    monkeypatch.setattr(scripts, "INSTALLED", True)
    assert scripts.usage("sweep_report") == "minigpt sweep-report"
