"""Setting up: make with uv and with pip, the dependency group, and the workflow of GitHub."""

import os
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import yaml
from small_runs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Scripts in the place of uv, pip and pyenv; those of uv and pip write down their arguments.
UV = f"""#!/bin/sh
[ "$1" = --version ] || echo "$@" >> uv.txt
[ "$1" != venv ] || {sys.executable} -m venv --without-pip .venv
"""
SUDO = 'sudo --preserve-env=CI env "PATH=$PATH" '  # of the workflow
PYTHON_WITH_PIP = '#!/bin/sh\n[ "$1" = -c ] || echo "$@" >> pip.txt\n'
PYENV = f"""#!/bin/sh
[ ! -e .python-version ] || {{ echo "not installed" >&2; exit 1; }}
exec {sys.executable} "$@"
"""


def write_script(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    file.chmod(0o755)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with those files of a clone that make needs."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", ".python-version"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    return tmp_path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("UV", "PYTHON", "MAKEFLAGS")
    }
    env["PATH"] = f"{folder}/tools{os.pathsep}{env['PATH']}"
    return subprocess.run(
        ["make", *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("first", [[], ["venv", ".venv"]], ids=["nothing", "a .venv of uv"])
def test_make_installs_with_uv_where_it_is_installed(clone, first):
    write_script(clone / "tools/uv", UV)
    if first:
        subprocess.run([clone / "tools/uv", *first], cwd=clone, check=True)
    done = make(clone, ".venv/.dev")
    assert done.returncode == 0, done.stderr
    created, *installed = (clone / "uv.txt").read_text().splitlines()
    # A .venv that is there is kept
    assert created == " ".join(first or ["venv --quiet --seed .venv"])
    assert [re.split("-c constraints.txt ", line)[1] for line in installed] == [
        "torch",
        "-e .",
        "--group dev",
    ]
    assert all(line.startswith("pip install --python .venv/bin/python ") for line in installed)
    assert make(clone, ".venv/.dev").returncode == 0
    assert len((clone / "uv.txt").read_text().splitlines()) == 4  # installed once


def test_make_takes_pip_without_uv_and_has_one_that_knows_groups(clone):
    write_script(clone / "tools/uv", UV)
    write_script(clone / ".venv/bin/python", PYTHON_WITH_PIP)
    assert make(clone, ".venv/.dev", "UV=").returncode == 0
    lines = (clone / "pip.txt").read_text().splitlines()
    assert all(line.startswith("-m pip install ") for line in lines)
    installed = [line.split("-c constraints.txt ")[1] for line in lines]
    assert installed == ["torch", "-e .", "pip>=25.1", "--group dev"]
    assert not (clone / "uv.txt").exists()


def test_make_refuses_a_venv_without_pip_where_uv_is_missing_and_keeps_it(clone):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", clone / ".venv"], check=True)
    done = make(clone, "train", "UV=")
    assert done.returncode == 2
    assert done.stderr.startswith(
        ".venv has no pip and uv is not on PATH; install uv, or remove .venv with 'make clean'"
    )
    assert (clone / ".venv/bin/python").exists()


@pytest.mark.parametrize("uv", ["UV=", "UV=uv"])
def test_make_refuses_a_broken_venv_and_keeps_it(clone, uv):
    write_script(clone / ".venv/bin/python", "#!/bin/sh\nexit 1\n")
    done = make(clone, "train", uv)
    assert done.returncode == 2
    assert done.stderr.startswith(".venv is broken or older than Python 3.11; ")
    assert (clone / ".venv/bin/python").exists()


def test_make_finds_a_python_of_pyenv_that_is_not_the_one_of_python_version(clone):
    write_script(clone / "tools/python3", PYENV)
    done = make(clone, "--dry-run", "check-venv", "UV=")
    assert f"{sys.executable} -m venv .venv" in done.stdout


def test_the_test_dependencies_include_those_of_all_extras():
    extras = chain.from_iterable(PROJECT["project"]["optional-dependencies"].values())
    assert {*extras} <= {*PROJECT["dependency-groups"]["dev"]}


def test_the_workflow_runs_commands_of_the_documents():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    run = {
        step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step
    }
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docs/platforms.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    blocks = "\n".join(re.findall(r"(?s)```\w*\n(.*?)```", text))
    documented = {line.partition("  #")[0].rstrip() for line in blocks.splitlines()}
    # Of the version that the step before set
    documented |= {line.replace("py -m", "python -m") for line in documented}
    documented |= {*re.findall("`([^`\n]+)`", text)}
    others = {command for command in run if command.removeprefix(SUDO) not in documented}
    # Which only changes a constraint
    assert [command.split("=")[0] for command in others] == ["oldest"]
