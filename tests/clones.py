"""A clone of the project in a temporary folder, with a git history of its own."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from small_runs import ROOT

from minigpt.extras.research import code_trees
from minigpt.runs import code_version
from minigpt.runs.code_version import code_in_place

FOLDERS = ("minigpt", "scripts", "configs", "hydra_plugins")


class Clone:
    """Commits of the project; `edit` changes what a training computes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in FOLDERS:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
        (root / ".gitignore").write_text("/runs/\n*.secret\n__pycache__/\n", encoding="utf-8")
        self.git("init", "-q", "-b", "main")
        self.commit("first")

    def git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", *identity, *arguments]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        return subprocess.run(
            command,
            cwd=self.root,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            check=True,
        ).stdout.strip()

    def commit(self, tag: str) -> str:
        self.git("add", "--all")
        self.git("commit", "-q", "--allow-empty", "-m", tag)
        self.git("tag", tag)
        code_in_place.cache_clear()
        return self.git("rev-parse", "HEAD")

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.root / file
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        code_in_place.cache_clear()

    def script(self, *lines: str) -> None:
        """Replace the script that trains: `folder` is that of the run."""
        last = "folder = Path(sys.argv[-1].partition('=')[2].strip(chr(39)))"
        head = ["import json, os, signal, sys, time", "from pathlib import Path", last]
        text = "\n".join([*head, *lines, ""])
        (self.root / "scripts/train.py").write_text(text, encoding="utf-8")


def take_code_from(root: Path) -> None:
    """Make a clone that of this process: an argument `prepare` of `Script`."""
    code_version.ROOT = root
    code_trees.ROOT = root


def clone_in(root: Path, monkeypatch: Any) -> Clone:
    """Return a clone from which this process takes code for the rest of the test."""
    made = Clone(root)
    for module in ("minigpt.runs.code_version", "minigpt.extras.research.code_trees"):
        monkeypatch.setattr(f"{module}.ROOT", made.root)
    return made
