"""Every command of the README and of the pages in docs/ runs, with few training steps."""

import json
import os
import re
import shlex
import string
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hosts import needs_hosts, start_hosts
from servers import make_instruct_folder
from small_runs import ROOT

import minigpt

TRAINING = (ROOT / "docs/training.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = "".join(page.read_text(encoding="utf-8") for page in PAGES if page.name != "gpu.md")  # run by test_bench.py
SHORT = [
    *("max_steps=2", "eval_every=2", "model.n_layer=2", "model.block_size=32", "compile=false"),
    "callbacks.samples.max_new_tokens=5",
]
SMALL_SWEEP = ["model.n_head=2", "model.n_embd=8,16", "hydra/launcher=basic"]  # in this process
SUBPROCESS = {"trainer.devices=2", "logger=wandb"}  # arguments that need a new process
ELSEWHERE = {"scripts/serve.py", "scripts/bench"}  # run by tests/serve/test_serve_script.py, and by test_bench.py
SLOW = {"-m", "trainer.devices=2", "logger=wandb"}


def commands(first: str) -> list[list[str]]:
    """The distinct commands whose first word is `first`."""
    blocks = re.findall(r"```bash\n(.*?)```", TEXTS, re.DOTALL)
    lines = (words for line in "".join(blocks).splitlines() if (words := shlex.split(line, comments=True)))
    return [list(words) for words in dict.fromkeys(map(tuple, lines)) if words[0] == first]


def call_in_subprocess(script: str, *arguments: str, folder: Path) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    env |= {"HOME": str(folder), "NETRC": str(folder / "none")}
    result = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        cwd=folder,
        env=env,
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
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        minigpt.train([f"data.path={folder}/all.txt", *SHORT])
    (folder / "runs" / "sweeps").mkdir()
    (folder / "runs" / "sweeps" / "latest").symlink_to((folder / "runs" / "latest").resolve())
    return folder


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
    call: Callable[..., Any],
) -> None:
    script, *arguments = command[1:]
    (tmp_path / "my.txt").write_bytes(text.read_bytes() if script == "scripts/train.py" else b"But soft!")
    for folder in ("runs", "data"):
        (tmp_path / folder).symlink_to(trained / folder)
    (tmp_path / "openai-community").mkdir()
    for model in ("gpt2", "openai-community/gpt2@607a30d783dfa663caf39e06633721c8d4cfcd7e"):
        (tmp_path / model).symlink_to(gpt2_folder)  # a folder comes before a model of the Hub
    if "--chat" in arguments:
        make_instruct_folder(tmp_path / arguments[0])
    if script == "scripts/train.py" and "--help" not in arguments:
        folders = [f"hydra.run.dir={tmp_path}/run", f"hydra.sweep.dir={tmp_path}/sweep"]
        pretrained = any("init_from=" in argument or "finetune" in argument for argument in arguments)
        arguments += [*(option for option in SHORT if not (pretrained and "n_layer" in option)), *folders]
        arguments += [] if "data.path=my.txt" in arguments else [f"data.path={text}"]
        arguments += [*SMALL_SWEEP, f"data.folder={tmp_path}/data"] if "-m" in arguments else []
        arguments += ["trainer.accelerator=cpu"] if "trainer.devices=2" in arguments else []
    if SUBPROCESS & set(arguments):
        output = call_in_subprocess(script, *arguments, folder=tmp_path)
    else:
        done = call(script.removeprefix("scripts/"), *arguments, small=False)
        assert done.returncode == 0, done.stderr
        output = done.stdout
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
        (run,) = (path for path in (hosts.disk / "runs").iterdir() if not path.is_symlink())
        assert json.loads((run / "summary.json").read_text())["world_size"] == 4


def test_every_make_target_exists() -> None:
    targets = {words[1] for words in commands("make")}
    assert {"train", "test"} <= targets
    subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, check=True, capture_output=True)


def test_every_extra_of_the_documents_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = re.findall(r'pip install -e "\.\[(\w+)\]"', TEXTS)
    assert {"serve", "data", "huggingface", "tensorboard"} <= {*named} <= {*extras}
    assert (ROOT / "constraints.txt").read_text(encoding="utf-8").count("\ntorch==2.13.0\n") == 1


def test_the_python_example_runs(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", TRAINING, re.DOTALL)
    text = f'"data.path={trained}/all.txt", '  # no download
    assert example.count('train(["') == 1
    monkeypatch.chdir(tmp_path)
    exec(example.replace('train(["', f'train([{text}"'), {})
    assert (tmp_path / "my.safetensors").exists()


@pytest.mark.parametrize(
    "document", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"], ids=lambda page: page.name
)
def test_every_file_that_a_document_names_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        file = document.parent / target if target else document
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), anchor
    paths = re.findall(r"`((?:minigpt|scripts|configs|tests|docs|hydra_plugins)/[\w./]*)`", text)
    assert not [path for path in paths if not (ROOT / path).exists()]


def anchors(text: str) -> list[str]:
    """The anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
