"""Which code a run trains with: the commit, a checksum of the package, uncommitted changes.

A folder written for `code=` is not a clone: its version is in `code.json`, recorded when the folder
was written.
"""

import hashlib
import itertools
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from minigpt.utils.files import read_json, sha256_json
from minigpt.utils.scripts import ROOT

STAMP = "code.json"
PATCH = "code.diff"
TREES = "code"  # in the folder of a run or a sweep: the versions that it trains with
WORKING_TREE = "."
MAX_PATCH_BYTES = 1_000_000
# What git does not track yet is code if it is one of these; not the lock files of an editor
_UNTRACKED = (
    *("*.py", "*.yaml", "minigpt", "scripts", "configs", "hydra_plugins"),
    ":(exclude,glob)**/.#*",
)
# Of the repository of a hook or a shell, which may be another one than the clone
_OTHER_REPOSITORY = {
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_COMMON_DIR",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_NAMESPACE",
    "GIT_PREFIX",
    "GIT_SHALLOW_FILE",
    "GIT_LITERAL_PATHSPECS",
}
# Settings of the user that would write into the clone, refuse ends of lines, or take time
_SETTINGS = ("splitIndex=false", "fsmonitor=false", "safecrlf=false", "looseCompression=0")

_TEXT = ("utf-8", "surrogateescape")  # of git, with file names and contents of any encoding

Version = dict[str, Any]  # the revision of `code=`, commit, dirty and code_sha256
Git = Callable[..., str]  # takes arguments, returns what git prints


@lru_cache
def code_in_place() -> tuple[Version, str]:
    """Return the version of the code that this process runs, and its uncommitted changes.

    Without git, the commit and whether there are changes are None.
    """
    if (ROOT / ".git").exists():
        with suppress(OSError, subprocess.SubprocessError), index_of(ROOT, WORKING_TREE) as git:
            return describe(git, ROOT, None)
    elif (ROOT / STAMP).exists():
        return read_json(ROOT / STAMP), (ROOT / PATCH).read_bytes().decode(*_TEXT)
    return {"code": None, "commit": None, "dirty": None, "code_sha256": code_sha256(ROOT)}, ""


def describe(
    git: Git, root: Path, revision: str | None, commit: str = "HEAD"
) -> tuple[Version, str]:
    """Return the version that the index of `git` holds, and its changes against a commit.

    Args:
        root: where its files are.
        revision: what `code=` names.
    """
    # Not of `git diff`, whose format is that of the user
    changes = ("diff-index", "--cached", "--no-ext-diff", "--no-textconv", "--no-color", commit)
    patch = git(*changes, "--binary", "--find-renames")
    if len(patch) > MAX_PATCH_BYTES:
        patch = git(*changes, "--stat")[:MAX_PATCH_BYTES]
    version = {
        "code": revision,
        "commit": git("rev-parse", "--verify", f"{commit}^{{commit}}").strip(),
        "dirty": patch != "",
        "code_sha256": code_sha256(root),
    }
    return version, patch


def code_sha256(root: Path) -> str:
    """Return the checksum of the Python files of the package; a wheel has scripts inside.

    Hidden ones are left out, which editors write.
    """
    package = root if (root / "__init__.py").exists() else root / "minigpt"
    files = {file.relative_to(package).as_posix(): file for file in package.rglob("*.py")}
    return sha256_json(
        {
            name: hashlib.sha256(file.read_bytes().replace(b"\r\n", b"\n")).hexdigest()
            for name, file in files.items()
            if not name.startswith("scripts/") and "/." not in f"/{name}" and file.is_file()
        }
    )


@contextmanager
def index_of(root: Path, revision: str) -> Iterator[Git]:
    """Yield git with an index of its own, which holds a revision or the working tree of a clone.

    Nothing is written into the clone. Files that git ignores are left out.

    Raises:
        OSError, subprocess.SubprocessError: git is missing, or fails.
    """
    with TemporaryDirectory() as folder:
        environment = {"GIT_INDEX_FILE": str(Path(folder, "index"))}

        def git(*arguments: str, given: str = "") -> str:
            return run_git(root, *arguments, given=given, **environment)

        git("read-tree", "HEAD" if revision == WORKING_TREE else revision)
        if revision == WORKING_TREE:
            # What is added becomes objects, in a folder that is removed. Quoted, because colons
            # separate folders.
            objects = root / git("rev-parse", "--git-path", "objects").removesuffix("\n")
            environment |= {
                "GIT_OBJECT_DIRECTORY": folder,
                "GIT_ALTERNATE_OBJECT_DIRECTORIES": json.dumps(
                    objects.as_posix(), ensure_ascii=False
                ),
            }
            git("add", "--update")
            listed = git("ls-files", "-z", "--others", "--exclude-standard", "--", *_UNTRACKED)
            added = "\0".join(_without_runs(listed.split("\0")))
            if added:
                from_input = ("--pathspec-from-file=-", "--pathspec-file-nul")
                git("--literal-pathspecs", "add", *from_input, given=added)
        yield git


def run_git(root: Path, *arguments: str, given: str = "", **environment: str) -> str:
    """Return what git prints in a clone.

    Raises:
        OSError, subprocess.SubprocessError: git is missing, or fails.
    """
    own = {name: value for name, value in os.environ.items() if name not in _OTHER_REPOSITORY}
    settings = itertools.chain.from_iterable(("-c", f"core.{setting}") for setting in _SETTINGS)
    ended = subprocess.run(
        ["git", *settings, *arguments],
        cwd=root,
        env=own | environment,
        input=os.fsencode(given),
        capture_output=True,
        check=True,
        timeout=60,
    )
    return ended.stdout.decode(*_TEXT)  # with the ends of lines


def _without_runs(files: Sequence[str]) -> list[str]:
    # Run folders, which hold `.hydra`, are not code.
    runs = {file.partition("/.hydra/")[0] for file in files if "/.hydra/" in file}
    return [
        file
        for file in files
        if file
        and not file.startswith(".hydra/")
        and runs.isdisjoint(map(str, PurePosixPath(file).parents))
    ]


def write_patch(folder: Path, patch: str) -> None:
    """Write the uncommitted changes into a folder."""
    (folder / PATCH).write_bytes(patch.encode(*_TEXT))


def is_other_code(code: object) -> bool:
    """Return whether the setting `code` names another version than this process runs."""
    return code is not None and code != code_in_place()[0]["code"]


def code_label(version: Mapping[str, Any]) -> str:
    """Return what a table calls a version: its short commit, with a checksum of changes."""
    checksum = str(version.get("code_sha256") or "")
    if not checksum:
        return "unknown"
    commit = str(version.get("commit") or "")[:8]
    if version.get("dirty"):
        return f"{commit}+{checksum[:6]}"
    return commit or checksum[:8]
