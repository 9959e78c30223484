"""The command `minigpt` from a wheel: train, sample, sweep, export in a folder without a clone."""

import os
import re
import shlex
import string
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from small_runs import ROOT
from test_readme import SHORT, commands

pytestmark = [pytest.mark.slow, pytest.mark.ci]
# Without it, pip downloads the setuptools that pyproject.toml requires.
NO_ISOLATION = (
    ["--no-build-isolation"] if int(version("setuptools").partition(".")[0]) >= 77 else []
)


def output(*command: object, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    words = list(map(str, command))
    done = subprocess.run(
        words, cwd=cwd, env=env, capture_output=True, encoding="utf-8", timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def built(once: Callable[..., Path]) -> Path:

    def build(folder: Path) -> None:
        source = folder / "source"  # a copy of the clone, in which builds leave their files
        venv = folder / "venv"
        for name in filter(None, output("git", "ls-files", "-z").split("\0")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
        pip = [sys.executable, "-m", "pip", "--no-cache-dir", "--python"]
        output(*pip, sys.executable, "wheel", "--no-deps", *NO_ISOLATION, "-w", folder, source)
        output(sys.executable, "-m", "venv", "--without-pip", venv)
        (packages,) = venv.glob("lib/python*/site-packages")
        # The .pth files in that folder, as of an editable install of the clone, have no effect.
        installed = str(Path(pytest.__file__).parents[1])
        (packages / "dependencies.pth").write_text(installed, encoding="utf-8")
        output(*pip, venv / "bin/python", "install", "--no-deps", *folder.glob("*.whl"))

    return once("wheel", build)


def test_a_wheel_holds_every_module_config_and_script(built):
    names = output("git", "ls-files", "minigpt", "hydra_plugins", "configs", "scripts/*.py").split()
    names = [name for name in names if not re.search("^scripts/bench/|README.md$", name)]
    inside = {re.sub("^(configs|scripts)/", r"minigpt/\1/", name) for name in names}
    (wheel,) = built.glob("*.whl")
    assert {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name} == inside
    assert "minigpt/configs/hydra/help/minigpt.yaml" in inside


def test_the_command_trains_samples_sweeps_and_exports(built, tmp_path):
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "MINIGPT_DATA_DIR")
    }
    env |= {"PATH": f"{built}/venv/bin{os.pathsep}{env['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}

    def shell(line: str, *arguments: str) -> Any:
        return output(*shlex.split(line), *arguments, cwd=tmp_path, env=env)

    # Contains the characters of all prompts
    (tmp_path / "my.txt").write_text(f"{string.printable}\n" * 200, encoding="utf-8")
    train, sample = map(shlex.join, commands("minigpt"))
    trained = shell(train, *SHORT, "data.path=my.txt")
    assert {path.name for path in tmp_path.iterdir()} == {"my.txt", "data", "runs"}
    (line,) = (line for line in trained.splitlines() if line.startswith("sample again"))
    again = line.removeprefix("sample again").strip()
    assert again.startswith("minigpt sample runs/")
    for command in (sample, again):
        assert shell(command, "--max-new-tokens", "5")
    prepared = shell("minigpt prepare data=text data.path=my.txt tokenizer=byte")
    assert "folder           data/tokens/my.txt-" in prepared
    assert "MiniGPTForCausalLM" in shell("minigpt export --to huggingface --out runs/exported")
    code = (tmp_path / "runs/exported/modeling_minigpt.py").read_text(encoding="utf-8")
    assert "class GPT(" in code
    sweep = "minigpt train -m model.n_embd=8,16 model.n_head=2 hydra/launcher=basic"
    shell(sweep, *SHORT, "data.path=my.txt")
    assert shell("minigpt sweep-report").count("completed") == 2
    assert (tmp_path / "runs/sweeps/latest/sweep.png").exists()
