"""Every command of the README runs; training runs are cut short."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHORT = ["max_steps=2", "eval_every=2", "model.n_layer=2", "compile=false", "callbacks.samples.max_new_tokens=5"]


def commands() -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    return [words for line in "".join(blocks).splitlines() if (words := shlex.split(line, comments=True))]


def test_every_script_command_runs(text: Path, tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_bytes(text.read_bytes())
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    env |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    ran = 0
    for i, command in enumerate(words for words in commands() if words[0] == "python"):
        script, *arguments = command[1:]
        if script == "scripts/train.py" and "--help" not in arguments:
            arguments += [*SHORT, f"hydra.run.dir=runs/{i}"]
            arguments += ["trainer.accelerator=cpu"] if "trainer.devices=2" in arguments else []
            # What the command itself sets stands; only what it leaves open is made small.
            arguments += ["model.block_size=32"] if "data.path=my.txt" in arguments else []
        if script == "scripts/bench.py":
            own = [f"data.path={text}", f"data.folder={tmp_path}/data", "model.block_size=32", "log_every=1"]
            arguments += ["--rounds", "1", "--overrides", *SHORT, *own]
        done = subprocess.run(
            [sys.executable, str(ROOT / script), *arguments],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"
        assert done.stdout.strip()
        ran += 1
    assert ran >= 10


def test_every_make_target_exists() -> None:
    targets = {words[1] for words in commands() if words[0] == "make"}
    assert {"train", "test"} <= targets
    for target in targets:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_what_the_readme_installs_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra in re.findall(r'pip install -e "\.\[(\w+)\]"', README):
        assert extra in extras
    assert (ROOT / "constraints.txt").read_text(encoding="utf-8").count("\ntorch==2.13.0\n") == 1


def test_the_python_example_runs(text: Path, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    train = [sys.executable, str(ROOT / "scripts" / "train.py"), f"data.path={text}", *SHORT, "model.block_size=32"]
    subprocess.run(train, cwd=tmp_path, check=True, capture_output=True)
    subprocess.run([sys.executable, "-c", example], cwd=tmp_path, check=True, capture_output=True)


def test_every_file_that_the_documents_point_to_exists() -> None:
    for document in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / document).read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), target
