"""Every command of the README and of docs/huggingface.md runs, with few training steps."""

import json
import os
import re
import runpy
import shlex
import string
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hosts import needs_hosts, start_hosts
from hydra.core.global_hydra import GlobalHydra

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HUGGING_FACE = (ROOT / "docs/huggingface.md").read_text(encoding="utf-8")
SHORT = [
    *("max_steps=2", "eval_every=2", "model.n_layer=2", "model.block_size=32", "compile=false"),
    "callbacks.samples.max_new_tokens=5",
]
SMALL_SWEEP = ["model.n_head=2", "model.n_embd=8,16"]
SUBPROCESS = {"-m", "trainer.devices=2", "logger=wandb", "--interactive"}  # arguments that need a new process
ELSEWHERE = {"scripts/serve.py", "scripts/bench"}  # run by tests/serve/test_serve_script.py, and by test_bench.py
SLOW = {"-m", "trainer.devices=2", "logger=wandb", "experiment=nanogpt_gpu"}


def commands(first: str) -> list[list[str]]:
    """The distinct commands whose first word is `first`."""
    blocks = re.findall(r"```bash\n(.*?)```", README + HUGGING_FACE, re.DOTALL)
    lines = (words for line in "".join(blocks).splitlines() if (words := shlex.split(line, comments=True)))
    return [list(words) for words in dict.fromkeys(map(tuple, lines)) if words[0] == first]


def call(script: str, *arguments: str, folder: Path) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    env |= {"HOME": str(folder), "NETRC": str(folder / "none")}
    result = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        cwd=folder,
        env=env,
        input="ROMEO:\n",  # for --interactive
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with one completed run."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "all.txt").write_text(f"{string.printable}\n" * 200)  # contains the characters of all prompts
    call("scripts/train.py", f"data.path={folder}/all.txt", *SHORT, folder=folder)
    (folder / "runs" / "sweeps").mkdir()
    (folder / "runs" / "sweeps" / "latest").symlink_to((folder / "runs" / "latest").resolve())
    return folder


def call_in_process(script: str, *arguments: str) -> None:
    """Run a script in this process, because the imports of a new process take longer than the command."""
    GlobalHydra.instance().clear()
    code: object = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(ROOT / script), *arguments])
        patch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as exit_:
            code = exit_.code
    assert not code


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(words, marks=[pytest.mark.slow] if SLOW & {*words} else [])
        for words in commands("python")
        if not ELSEWHERE & {*words}
    ],
    ids=" ".join,
)
def test_every_script_command_runs(
    command: list[str],
    text: Path,
    tmp_path: Path,
    trained: Path,
    gpt2_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script, *arguments = command[1:]
    (tmp_path / "my.txt").write_bytes(text.read_bytes() if script == "scripts/train.py" else b"But soft!")
    for folder in ("runs", "data"):
        (tmp_path / folder).symlink_to(trained / folder)
    (tmp_path / "openai-community").mkdir()
    for model in ("gpt2", "openai-community/gpt2@607a30d783dfa663caf39e06633721c8d4cfcd7e"):
        (tmp_path / model).symlink_to(gpt2_folder)  # a folder comes before a model of the Hub
    if script == "scripts/train.py" and "--help" not in arguments:
        folders = [f"hydra.run.dir={tmp_path}/run", f"hydra.sweep.dir={tmp_path}/sweep"]
        pretrained = any("init_from=" in argument or "finetune" in argument for argument in arguments)
        arguments += [*(option for option in SHORT if not (pretrained and "n_layer" in option)), *folders]
        arguments += [*SMALL_SWEEP, f"data.path={text}", f"data.folder={tmp_path}/data"] if "-m" in arguments else []
        arguments += ["trainer.accelerator=cpu"] if "trainer.devices=2" in arguments else []
    if SUBPROCESS & set(arguments):
        output = call(script, *arguments, folder=tmp_path)
    else:
        monkeypatch.chdir(tmp_path)
        call_in_process(script, *arguments)
        output = capsys.readouterr().out
    assert output.strip()


@needs_hosts
@pytest.mark.slow
def test_the_commands_for_two_hosts_train_one_model(text: Path, tmp_path: Path) -> None:
    small = [f"data.path={text}", "data.folder=data", "trainer.accelerator=cpu", *SHORT]
    with start_hosts(2, tmp_path) as hosts:
        launchers = []
        for host, (_, *arguments) in enumerate(commands("torchrun")):
            arguments = [argument.replace("HOST", "a").replace("scripts", f"{ROOT}/scripts") for argument in arguments]
            launchers.append(hosts.run(host, [sys.executable, "-m", "torch.distributed.run", *arguments, *small]))
        assert [launcher.wait(300) for launcher in launchers] == [0, 0]
        (run,) = (path for path in (hosts.folders[0] / "runs").iterdir() if not path.is_symlink())
        assert json.loads((run / "summary.json").read_text())["world_size"] == 4


def test_the_readme_has_commands() -> None:
    assert len(commands("python")) >= 20


def test_every_make_target_exists() -> None:
    targets = {words[1] for words in commands("make")}
    assert {"train", "test"} <= targets
    for target in targets:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_every_extra_of_the_readme_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra in re.findall(r'pip install -e "\.\[(\w+)\]"', README):
        assert extra in extras
    assert (ROOT / "constraints.txt").read_text(encoding="utf-8").count("\ntorch==2.13.0\n") == 1


def test_the_python_example_runs(trained: Path, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    text = f'"data.path={trained}/all.txt", '  # no download
    assert example.count('train(["') == 1
    example = example.replace('train(["', f'train([{text}"')
    subprocess.run([sys.executable, "-c", example], cwd=tmp_path, check=True, capture_output=True)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/reliability.md"])
def test_every_file_that_a_document_names_exists(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    links = [(ROOT / document).parent / target for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text)]
    paths = re.findall(r"`((?:minigpt|scripts|configs|tests|docs|hydra_plugins)/[\w./]*)`", text)
    assert not [str(path) for path in [*links, *map(ROOT.joinpath, paths)] if not path.exists()]


def test_every_module_of_the_layout_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (layout,) = re.findall(r"```\nminigpt/\n(.*?)```", text, re.DOTALL)
    files = {file.name for folder in ("minigpt", "scripts") for file in (ROOT / folder).rglob("*.py")}
    assert not set(re.findall(r"\w+\.py", layout)) - files
