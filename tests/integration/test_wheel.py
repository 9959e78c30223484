"""The command `minigpt` from a wheel: train, sample, sweep and resume in a folder without a clone."""

import os
import shlex
import string
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from small_runs import ROOT
from test_readme import SHORT, commands

pytestmark = pytest.mark.slow
# Without it, pip downloads the setuptools that pyproject.toml requires.
NO_ISOLATION = ["--no-build-isolation"] if int(version("setuptools").partition(".")[0]) >= 77 else []


def pip(*arguments: object, python: object = sys.executable) -> None:
    command = [sys.executable, "-m", "pip", "--no-cache-dir", "--python", python, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the clone, in which builds leave their files."""
    folder = tmp_path_factory.mktemp("source")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", *NO_ISOLATION, "-w", folder, source)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A virtual environment with the wheel, which no run changes; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # The .pth files in that folder, as of an editable install of the clone, have no effect.
    (packages / "dependencies.pth").write_text(str(Path(pytest.__file__).parents[1]))
    pip("install", "--no-deps", wheel, python=folder / "bin" / "python")
    files = installed_files(folder)
    yield folder
    assert installed_files(folder) == files


def installed_files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def shell_env(*path: Path) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MINIGPT_DATA_DIR")}
    return env | {"PATH": os.pathsep.join([*map(str, path), env["PATH"]])}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    (folder / "my.txt").write_text(f"{string.printable}\n" * 200)  # contains the characters of all prompts
    return folder


@pytest.fixture(scope="module")
def shell(environment: Path, work: Path) -> Callable[..., Any]:
    """Run a command line in the working directory, with the environment on PATH."""

    def run(line: str, *arguments: str, code: int = 0) -> Any:
        command, env = [*shlex.split(line), *arguments], shell_env(environment / "bin")
        done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == code, done.stderr
        return done

    return run


@pytest.fixture(scope="module")
def trained(shell: Callable[..., Any]) -> str:
    """The output of the first command `minigpt` of the documents, with few steps."""
    train, _ = commands("minigpt")
    return shell(shlex.join(train), *SHORT, "data.path=my.txt").stdout


def test_a_wheel_holds_every_module_config_and_script(source: Path, wheel: Path) -> None:
    files = [file for folder in ("minigpt", "hydra_plugins", "configs") for file in (source / folder).rglob("*.*")]
    files += (source / "scripts").glob("*.py")  # without scripts/bench/
    names = [file.relative_to(source).as_posix() for file in files]
    inside = {f"minigpt/{name}" if name.startswith(("configs/", "scripts/")) else name for name in names}
    assert {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name} == inside
    assert "minigpt/configs/hydra/help/minigpt.yaml" in inside


def test_the_commands_of_the_documents_and_of_a_run_sample(shell: Callable[..., Any], trained: str, work: Path) -> None:
    assert {path.name for path in work.iterdir()} == {"my.txt", "data", "runs"}
    _, sample = commands("minigpt")
    (line,) = (line for line in trained.splitlines() if line.startswith("sample again"))
    again = line.removeprefix("sample again").strip()
    assert again.startswith("minigpt sample runs/")
    for command in (shlex.join(sample), again):
        assert shell(command, "--max-new-tokens", "5").stdout


def test_the_other_commands_run(shell: Callable[..., Any], trained: str, work: Path) -> None:
    assert "layer  head" in shell('minigpt attention --prompt "ROMEO: What light" --out runs/maps.png').stdout
    assert (work / "runs" / "maps.png").exists()
    prepared = shell("minigpt prepare data=text data.path=my.txt tokenizer=byte").stdout
    assert "folder           data/tokens/my.txt-" in prepared
    assert "MiniGPTForCausalLM" in shell("minigpt export --to huggingface --out runs/exported").stdout
    assert "class GPT(" in (work / "runs" / "exported" / "modeling_minigpt.py").read_text()


def test_a_sweep_runs_and_is_reported_again(shell: Callable[..., Any], text: Path, work: Path) -> None:
    shell("minigpt train -m model.n_embd=8,16 model.n_head=2", *SHORT, f"data.path={text}")
    reported = shell("minigpt sweep-report").stdout
    assert reported.count("completed") == 2
    assert (work / "runs" / "sweeps" / "latest" / "sweep.png").exists()


def test_a_printed_command_runs_without_minigpt_on_path(environment: Path, tmp_path: Path) -> None:
    """As `resume with` of a run does, which test_end_to_end.py runs in the clone."""

    def run(*command: object) -> str:
        return subprocess.run(command, cwd=tmp_path, env=shell_env(), capture_output=True, text=True, check=True).stdout

    python = environment / "bin" / "python"
    program = "from minigpt.runs.run_dir import command; print(command('train', '--help', 'a b'))"
    words = shlex.split(run(python, "-c", program))
    assert words == [str(python), "-m", "minigpt", "train", "--help", "a b"]
    assert "usage: minigpt train [" in run(*words[:-1])
