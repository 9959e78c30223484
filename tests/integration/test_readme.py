"""Every command and block of the pages and of the notebook runs; make; the command of a wheel."""

import json
import os
import re
import shlex
import shutil
import string
import subprocess
import sys
import tomllib
from base64 import b64decode
from collections.abc import Callable
from importlib.metadata import version
from io import BytesIO
from itertools import chain
from os.path import basename
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import nbformat
import pytest
import yaml
from clones import clone_in
from matplotlib.image import imread
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from processes import Script
from servers import make_instruct_folder
from small_runs import ROOT, table

import minigpt

TRAINING = (ROOT / "docs/training.md").read_text(encoding="utf-8")
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(ROOT.glob("minigpt/extras/*/README.md")),
]
# Run by test_recipes.py
TEXTS = "".join(page.read_text(encoding="utf-8") for page in PAGES if page.name != "gpu.md")
SHORT = ["max_steps=2", "eval_every=2", "model.n_layer=2", "model.block_size=32", "compile=false"]
SHORT += ["data.batch_size=4", "callbacks.samples.max_new_tokens=5", "originality=null"]
SMALL_SWEEP = ["model.n_head=2", "model.n_embd=8,16", "hydra/launcher=basic"]  # in this process
NARROW = ["model.n_head=2", "model.n_embd=32"]
PROCESSES = {"trainer.devices=2", "logger=wandb"}  # arguments that need a new process
SLOW = {"-m", "minutes=10", "code=v0.1", *PROCESSES}
# Run by test_serve_script.py, by test_recipes.py and, with torchrun, by test_hosts.py; pip and
# pytest are what set up and run this test.
ELSEWHERE = {"scripts/serve.py", "scripts/bench", "pip", "pytest"}


def commands(first):
    blocks = re.findall(r"```bash\n(.*?)```", TEXTS, re.DOTALL)
    # Of lines that continue
    text = "".join(blocks).replace("\\\n", "").replace(".venv/bin/python ", "python ")
    lines = dict.fromkeys(tuple(shlex.split(line, comments=True)) for line in text.splitlines())
    return [list(words) for words in lines if words[:1] == (first,)]


@pytest.fixture
def documents(once, monkeypatch, tmp_path):

    def build(folder):
        # Contains the characters of all prompts
        (folder / "all.txt").write_text(f"{string.printable}\n" * 200, encoding="utf-8")
        monkeypatch.chdir(folder)
        minigpt.train(["data.path=all.txt", *SHORT])
        (folder / "runs/sweeps").mkdir()
        (folder / "runs/sweeps/latest").symlink_to("../latest")

    shutil.copytree(once("documents", build), tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(words, marks=[pytest.mark.slow] if SLOW & {*words} else [])
        for words in commands("python")
        if not ELSEWHERE & {*words}
    ],
    ids=" ".join,
)
def test_every_script_command_runs(command, text, documents, gpt2_folder, call, monkeypatch):
    script, *arguments = command[1:]
    if "code=" in " ".join(arguments):
        clone = clone_in(documents / "clone", monkeypatch)
        for name in ("second", "third", "v0.1"):
            clone.commit(name)
        clone.git("branch", "my-branch")
        # Each run is a process
        fewer = {"seed=range(1,13)": "seed=range(1,5)", "seed=1,2,3,4,5,6": "seed=1,2"}
        arguments = [fewer.get(argument, argument) for argument in arguments]
    Path("my.txt").write_bytes(text.read_bytes() if script == "scripts/train.py" else b"But soft!")
    Path("openai-community").mkdir()
    for model in ("gpt2", "openai-community/gpt2@607a30d783dfa663caf39e06633721c8d4cfcd7e"):
        Path(model).symlink_to(gpt2_folder)  # a folder comes before a model of the Hub
    write_conversations(Path("my.jsonl"))
    write_conversations(Path("plays.jsonl"))
    for folder in re.findall(r"(?<=init_from=)HuggingFaceTB\S+", " ".join(arguments)):
        make_instruct_folder(Path(folder))
    if "--chat" in arguments:
        Path(arguments[0]).unlink(missing_ok=True)  # runs/latest is a link
        make_instruct_folder(Path(arguments[0]))
    if script == "scripts/train.py" and "--help" not in arguments:
        pretrained = re.search("init_from=|finetune", " ".join(arguments))
        fixed = ["model.n_layer"] if pretrained else []
        fixed += ["model.block_size"] if "conversations" in " ".join(arguments) else []
        arguments += [option for option in SHORT if option.partition("=")[0] not in fixed]
        if "data=conversations" in arguments and not pretrained:
            arguments.append("tokenizer.vocab_size=262")
        arguments += [] if "data.path=" in " ".join(arguments) else [f"data.path={text}"]
        if not (pretrained or "-m" in arguments or "model." in " ".join(command)):
            arguments += NARROW
        arguments += SMALL_SWEEP if "-m" in arguments else []
        arguments += ["trainer.accelerator=cpu"] if "trainer.devices=2" in arguments else []
    if "--num-samples" in arguments and "--originality" in arguments:
        arguments += ["--num-samples", "2", "--max-new-tokens", "20"]
    if "--config-dir" in arguments:
        write_own_parts()
    if PROCESSES & {*arguments}:
        monkeypatch.setenv("WANDB_MODE", "offline")
        process = Script(
            script.removeprefix("scripts/"), *arguments, output=documents / "process", cwd=documents
        )
        code = process.wait()
    else:
        process = call(script.removeprefix("scripts/"), *arguments, small=False)
        code = process.returncode
    assert code == 0, process.stderr
    assert process.stdout.strip()


def write_conversations(file):
    rows = []
    for word in string.ascii_lowercase * 2:
        turns = [{"role": "user", "content": word}, {"role": "assistant", "content": word * 2}]
        rows.append(json.dumps({"messages": turns}) + "\n")
    file.write_text("".join(rows), encoding="utf-8")


def write_own_parts():
    # Write the files of the section on own parts, which are indented there
    section = TRAINING.split("## Your own parts")[1].split("```")[0]
    optimizer, schedule, callback, *code = map(dedent, re.findall(r"(?m)(?:^    .*\n)+", section))
    files = {
        "optimizer/sgd": optimizer,
        "schedule/halving": schedule,
        "callbacks/counting": callback,
    }
    for name, text in files.items():
        Path("mine", name).parent.mkdir(parents=True)
        Path("mine", f"{name}.yaml").write_text(text, encoding="utf-8")
    Path("my_code.py").write_text("\n".join(code), encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/platforms.md"])
def test_the_commands_for_powershell_are_those_before_them(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    ((posix, powershell),) = re.findall(r"```bash\n([^`]*)```\n\n```powershell\n([^`]*)```", text)
    for here, there in {"python3 ": "py ", "/bin/": "/Scripts/", "/": "\\"}.items():
        posix = posix.replace(here, there)
    assert posix == powershell


def test_every_make_target_exists():
    targets = {words[1] for words in commands("make")}
    subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, check=True, capture_output=True)


RECIPE = "experiment=fast_cpu"
SWEEP = "+sweep=heads_by_width"
# What `make train` and `make sweep` put before their ARGS: overrides are on top of the recipe,
# unless they have a model or a recipe of their own.
ADDED = {
    "": ([RECIPE], ["-m", SWEEP]),
    "max_steps=200 model.n_head=4 +seed=3": ([RECIPE], ["-m", SWEEP]),
    "hydra.run.dir=runs/model=1 resume=auto": ([RECIPE], ["-m", SWEEP]),
    "callbacks.samples.prompt='a model=x minutes=3'": ([RECIPE], ["-m", SWEEP]),
    "minutes=null init_from=null resume=null": ([RECIPE], ["-m", SWEEP]),
    "'model={n_head: 2}' --config-dir mine": ([RECIPE], ["-m", SWEEP]),
    "--cfg job": ([RECIPE], [SWEEP]),
    "-m model.n_head=1,2": ([RECIPE], ["-m", SWEEP]),
    "minutes=5": ([], ["-m", SWEEP]),
    "data=text ++minutes=5": ([], ["-m", SWEEP]),
    "model=baby": ([], ["-m", SWEEP]),
    "'model=baby' -m seed=1,2": ([], ["-m", SWEEP]),
    "resume=runs/latest max_steps=30": ([], ["-m", SWEEP]),
    "init_from=runs/latest": ([], ["-m", SWEEP]),
    "experiment=null": ([], ["-m", SWEEP]),
    "+experiment=best_cpu": ([], ["-m", SWEEP]),
    "~experiment": ([], ["-m", SWEEP]),
    "-m +sweep=search": ([], ["-m"]),
    "++sweep=search minutes=1": ([], ["-m"]),
    "--config-name mine seed=1,2": ([], ["-m"]),
    "--config-dir=mine -cn mine": ([], ["-m"]),
    "--config-path=mine": ([], ["-m"]),
    **dict.fromkeys(
        ("--help", "-h", "--hydra-help", "--version", "-i", "--info defaults", "-sc install=bash"),
        ([], []),
    ),
}


@pytest.mark.parametrize("target", ["train", "sweep"])
def test_make_adds_a_recipe_to_arguments_that_bring_none(tmp_path, target):
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").write_text(
        '#!/bin/sh\n[ "$1" = -c ] || for each; do echo "$each"; done\n'
    )
    (tmp_path / "venv/bin/python").chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt", "venv/.train"):
        (tmp_path / name).touch()
    settings = ["VENV=venv", "UV=", "PYTHON=none", "RECIPE=fast_cpu"]
    make = ["make", "-s", "-f", str(ROOT / "Makefile"), "-C", str(tmp_path), target, *settings]
    for given, added in ADDED.items():
        done = subprocess.run(
            [*make, f"ARGS={given}"], check=True, capture_output=True, encoding="utf-8"
        )
        before = added[target == "sweep"]
        assert done.stdout.splitlines() == ["scripts/train.py", *before, *shlex.split(given)], given
        assert done.stderr == ""


def test_every_extra_of_the_documents_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = re.findall(r'pip install -e "\.\[(\w+)\]"', TEXTS)
    assert {"serve", "data", "huggingface", "tensorboard"} <= {*named} <= {*extras}


@pytest.mark.parametrize("page", PAGES, ids=basename)
def test_every_code_block_runs_and_prints_the_output_that_follows(
    page, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    names = {}
    printed = None
    text = page.read_text(encoding="utf-8")
    for language, body in re.findall(r"(?ms)^```(\w+)\n(.*?)^```$", text):
        assert language in ("bash", "powershell", "text", "python")
        # The example of training.md is run below
        if language == "python" and page.name != "training.md":
            assert not printed, f"this output is not shown:\n{printed}"
            exec(compile(body, f"{page.name}: {body}", "exec"), names)
            printed = capsys.readouterr().out
        elif language == "text":
            assert body == printed
            printed = None
    assert not printed, f"this output is not shown:\n{printed}"


def test_the_python_example_runs(documents):
    (example,) = re.findall(r"```python\n(.*?)```", TRAINING, re.DOTALL)
    added = ["data.path=all.txt", *SHORT]  # no download
    example, n_trainings = re.subn(r"(= train\(\[.*)\]\)\n", r"\1, *added])\n", example)
    assert n_trainings == 1
    exec(example, {"added": added})
    assert Path("my.safetensors").exists()


@pytest.mark.parametrize(
    "document", [*PAGES, *map(ROOT.joinpath, ("CONTRIBUTING.md", "SECURITY.md"))], ids=basename
)
def test_every_file_that_a_document_names_exists(document):
    text = document.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        file = document.parent / target if target else document
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), anchor
    paths = re.findall(r"`((?:minigpt|scripts|configs|tests|docs|hydra_plugins)/[\w./]*)`", text)
    assert not [path for path in paths if not (ROOT / path).exists()]


def anchors(text):
    # The anchors of the headings of a page, as GitHub makes them
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Scripts in the place of uv and pip; those of uv and pip write down their arguments.
UV = f"""#!/bin/sh
[ "$1" = --version ] || echo "$@" >> uv.txt
[ "$1" != venv ] || {sys.executable} -m venv --without-pip .venv
"""
SUDO = 'sudo --preserve-env=CI env "PATH=$PATH" '  # of the workflow
PYTHON_WITH_PIP = '#!/bin/sh\n[ "$1" = -c ] || echo "$@" >> pip.txt\n'


def write_script(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    file.chmod(0o755)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
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


@pytest.mark.slow
@pytest.mark.ci
def test_a_wheel_holds_every_module_config_and_script(built):
    names = output("git", "ls-files", "minigpt", "hydra_plugins", "configs", "scripts/*.py").split()
    names = [name for name in names if not re.search("^scripts/bench/|README.md$", name)]
    inside = {re.sub("^(configs|scripts)/", r"minigpt/\1/", name) for name in names}
    (wheel,) = built.glob("*.whl")
    assert {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name} == inside
    assert "minigpt/configs/hydra/help/minigpt.yaml" in inside


@pytest.mark.slow
@pytest.mark.ci
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


NOTEBOOK = ROOT / "docs/minigpt.ipynb"
SMALL = "model.block_size=32 model.n_layer=1 model.n_head=2 schedule.warmup_steps=1 "
SMALL += "callbacks.originality=null trainer=cpu"
PARAMETERS = f"""
import matplotlib
TRAIN = "data.path=all.txt max_steps=20 eval_every=10 model.n_embd=16 {SMALL}".split()
SWEEP = "data.path=all.txt max_steps=2 eval_every=1 model.n_embd=8,16 {SMALL} hydra/launcher=basic"
"""
INTERRUPTED = """
import gc, os, signal, sys
from minigpt import GPT, train
from lightning.pytorch.callbacks import Callback

class Interrupt(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 12:
            print("curves of the first validation:", os.path.exists("stopped/curves.png"))
            signal.raise_signal(signal.SIGINT)  # as the button of Jupyter does

def state():
    gc.collect()
    models = [one for one in gc.get_objects() if type(one) is GPT and not one.wte.weight.is_meta]
    return [signal.getsignal(signal.SIGINT), sys.stderr, dict(os.environ), len(models)]

sys.modules["interrupt"] = sys.modules["__main__"]
before = state()
train([*TRAIN, "+callbacks.interrupt._target_=interrupt.Interrupt", "hydra.run.dir=stopped"])
"""
AFTER = """
assert before == state()
os.remove("stopped/curves.png")
os.mkdir("stopped/curves.png")
resumed = train([*TRAIN, "hydra.run.dir=stopped", "resume=auto"])
print(matplotlib.get_backend(), resumed["status"])
"""
REFUSED = 'train([*TRAIN, "model.n_head=7"])'


def read():
    return nbformat.read(NOTEBOOK, as_version=4)


def pictures(cell):
    data = [output.get("data", {}).get("image/png") for output in cell.outputs]
    return [b64decode(picture) for picture in data if picture]


def printed(cell):
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def test_the_notebook_is_short_and_stores_no_output_but_pictures_that_are_small():
    cells = read().cells
    assert len(cells) <= 40
    outputs = list(chain.from_iterable(cell.get("outputs", []) for cell in cells))
    assert len(outputs) == 3
    assert all({*output.data} == {"image/png"} for output in outputs)
    assert all(cell.get("execution_count") is None for cell in cells)
    assert NOTEBOOK.stat().st_size < 300_000


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tour")
    notebook = read()
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", []):
            cell.source = PARAMETERS
    return execute(notebook, folder)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    failing = {"metadata": {"tags": ["raises-exception"]}}
    cells = [new_code_cell(PARAMETERS), new_code_cell(INTERRUPTED, **failing), new_code_cell(AFTER)]
    cells.append(new_code_cell(REFUSED, **failing))
    return execute(new_notebook(cells=cells), tmp_path_factory.mktemp("trainings"))


def execute(notebook, folder):
    # Run a notebook in a folder with a text; return both, and a function that finds a cell
    (folder / "all.txt").write_text(f"{string.printable}\n" * 200, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    ).execute(env=environment)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]

    def find(beginning):
        return next(
            cell
            for cell in code
            if cell.source.strip().startswith(beginning) or beginning in cell.source
        )

    return SimpleNamespace(code=code, find=find, folder=folder)


@pytest.mark.slow
def test_every_cell_runs_without_warnings_and_shows_its_pictures(tour):
    for cell in tour.code:
        assert [output for output in cell.outputs if output.get("name") == "stderr"] == []
        assert "warning" not in printed(cell).lower()
    for beginning in ("run = train(TRAIN)", "sweep.png", "plot_maps("):
        (picture,) = pictures(tour.find(beginning))
        assert imread(BytesIO(picture)).std() > 0.01  # is not blank
    (answer,) = [
        output.data["text/markdown"]
        for output in tour.find("sweep.png").outputs
        if "text/markdown" in output.data
    ]
    assert "n_embd" in answer


@pytest.mark.slow
def test_a_training_shows_the_curves_of_its_end_once_and_a_bar_that_reaches_it(tour):
    cell = tour.find("run = train(TRAIN)")
    (folder,) = (tour.folder / "runs").glob("20*")
    assert pictures(cell) == [(folder / "curves.png").read_bytes()]
    (bar,) = [line for line in printed(cell).splitlines() if "/20 steps" in line]
    assert bar.startswith("20/20 steps")
    assert f"val {float(table(folder / 'metrics.csv')[-1]['val_loss']):.4f}" in bar


@pytest.mark.slow
def test_an_interrupt_saves_a_checkpoint_prints_how_to_resume_and_leaves_the_kernel_alone(
    trainings,
):
    cell = trainings.find(INTERRUPTED)
    after = trainings.find(AFTER)
    (error,) = [output for output in cell.outputs if output.output_type == "error"]
    assert error.traceback == ["interrupted by SIGINT"]
    assert (trainings.folder / "stopped/checkpoints/last.safetensors").exists()
    (line,) = [line for line in printed(cell).splitlines() if line.startswith("resume with: ")]
    assert line.endswith("'resume=auto'])")
    assert "curves of the first validation: True" in printed(cell)
    assert "training    8 steps" in printed(after)
    assert "warning: curves.png was not written: " in printed(after)
    assert "backend_inline completed" in printed(after)


@pytest.mark.slow
def test_an_error_of_the_user_is_one_line_instead_of_a_traceback(trainings):
    (error,) = trainings.find(REFUSED).outputs
    (line,) = error.traceback
    assert "model.n_head=7" in line
