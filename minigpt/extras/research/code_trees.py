"""Train with another version of the code: `code=` names a git revision, or `.`, the working tree.

A version is written once into the folder of the run or the sweep, by `git checkout-index`, so that
edits change nothing. A process with the same interpreter trains with it: Hydra composes there what
the overrides mean in that version, whose settings may be fewer.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from minigpt.runs.code_version import (
    PATCH,
    STAMP,
    TREES,
    WORKING_TREE,
    Version,
    describe,
    index_of,
    run_git,
    write_patch,
)
from minigpt.runs.overrides import quote_override
from minigpt.runs.run_config import RUN_RULES
from minigpt.runs.run_dir import LOG, previous_summary, write_summary
from minigpt.utils.errors import RunError, UserError, require
from minigpt.utils.files import read_json, sha256_json, write_json
from minigpt.utils.ranks import rank_variables
from minigpt.utils.scripts import INSTALLED, ROOT
from minigpt.utils.signals import END_SIGNALS, Interrupted, handle_signals

OF_CODE_IN_PLACE = "MINIGPT_SCRIPTS"  # its scripts, for a process of another version
IGNORE = ".gitignore"
IGNORED = "*\n"
# Starts a command; where it can, so that it ends with the process that waits for it
_START = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def code_tree(revision: str, folder: Path) -> Path:
    """Return the folder of a version of the code, which is written once into `folder`/code.

    Raises:
        UserError: the code in place is not a clone, git does not know the revision, or the name of
            the folder cannot be in PYTHONPATH.
    """
    tree = folder / TREES / _tree_name(revision)
    if os.pathsep in str(tree.absolute()):
        raise UserError(
            f"code={revision} needs a folder without {os.pathsep} in its name, got {folder}; "
            "choose another with hydra.run.dir=… or hydra.sweep.dir=…"
        )
    if not (tree / STAMP).exists():
        commit = _commit_of(revision)
        if not tree.parent.exists():  # else it is the user's
            tree.parent.mkdir(parents=True)
            # So that git does not take it for files of the working tree
            (tree.parent / IGNORE).write_text(IGNORED, encoding="utf-8")
        with TemporaryDirectory(dir=tree.parent) as partial:
            _write_version(revision, commit, Path(partial))
            Path(partial).rename(tree)
    return tree


def _tree_name(revision: str) -> str:
    slug = "working-tree" if revision == WORKING_TREE else re.sub(r"[^\w.-]+", "-", revision)[:60]
    return f"{slug}-{sha256_json(revision)[:6]}"


def written_version(revision: str, folder: Path) -> Version:
    """Return the version that a revision names, after writing it into `folder`/code."""
    return version_of(code_tree(str(revision), folder))


def version_of(tree: Path) -> Version:
    """Return the version that `code_tree` has written: revision, commit, dirty and checksum."""
    version: Version = read_json(tree / STAMP)
    return version


def _commit_of(revision: str) -> str:
    if INSTALLED or not (ROOT / ".git").exists():
        raise UserError(
            f"code={revision} needs a clone of the repository with its git history, and {ROOT} is "
            "none; leave code out, or clone it and pip install -e it"
        )
    name = "HEAD" if revision == WORKING_TREE else revision
    try:
        arguments = ("rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}")
        return run_git(ROOT, *arguments).strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"code={revision} needs git, which does not start: {error}") from error
    except subprocess.CalledProcessError as error:
        is_shallow = (ROOT / ".git/shallow").exists()
        advice = "; this clone is shallow, git fetch --unshallow gets the rest" * is_shallow
        reason = os.fsdecode(error.stderr).strip().partition("\n")[0]
        known = "" if "Needed a single revision" in reason else f" ({reason})"
        raise UserError(
            f"code must be a revision of git in {ROOT}, or . for the working tree, got {revision}"
            f"{known}{advice}"
        ) from error


def _write_version(revision: str, commit: str, tree: Path) -> None:
    try:
        with index_of(ROOT, revision if revision == WORKING_TREE else commit) as git:
            git("checkout-index", "--all", "--force", f"--prefix={tree.absolute()}/")
            version, patch = describe(git, tree, revision, commit)
    except (OSError, subprocess.SubprocessError) as error:
        stderr = getattr(error, "stderr", None) or b""
        raise UserError(
            f"code={revision} could not be written: {os.fsdecode(stderr).strip() or error}"
        ) from error
    write_patch(tree, patch)
    write_json(tree / STAMP, version)


def train_with_code(folder: Path, cfg: DictConfig) -> float | None:
    """Train a run in a process with the code of `cfg.code`; return its best validation loss.

    Args:
        folder: of the run. In a sweep the code is in the folder of the sweep.

    Raises:
        RunError: the process failed, with its exit code.
        Interrupted: a signal ended it.
    """
    require("code", cfg.code, *RUN_RULES["code"])
    if rank_variables():
        raise UserError(f"code must be null in a process of torchrun or srun, got {cfg.code}")
    if OF_CODE_IN_PLACE in os.environ:  # and this process has not imported another
        raise RunError(f"code={cfg.code} is not what its process imports, which is {ROOT}")
    hydra = HydraConfig.get()
    in_sweep = hydra.mode == RunMode.MULTIRUN
    before = previous_summary(folder)
    began = _began(folder)
    kept = {file.name for file in (folder / TREES).glob("*")} - {IGNORE}
    if began is None and _tree_name(cfg.code) in kept and not in_sweep:
        # Of a process that was killed before its run
        _remove(folder / TREES / _tree_name(cfg.code))
        kept.remove(_tree_name(cfg.code))
    tree = code_tree(cfg.code, Path(str(hydra.sweep.dir)) if in_sweep else folder)
    try:
        ended = _wait_for(_command(tree, folder), tree)
    finally:
        # A run that the process refused, or that is complete, stays as it was
        if _began(folder) not in (None, began):
            resumed = cfg.resume == "auto" and began is not None and not in_sweep
            earlier = before.get("code_sha256", "" if kept == {tree.name} else "unknown")
            _complete_summary(folder, tree, earlier if resumed else "")
        elif not in_sweep and tree.name not in kept:
            _remove(tree)
    for signum in END_SIGNALS:
        if ended in (-signum, Interrupted(signum).exit_code):
            raise Interrupted(signum)
    if ended:
        error = RunError(f"code={cfg.code}: {_reason(folder, ended, in_sweep=in_sweep)}")
        error.exit_code = max(ended, 1)  # it was killed
        raise error
    return previous_summary(folder).get("best_val_loss")


def _began(folder: Path) -> int | None:
    # When the last training in a folder began; each writes its configuration.
    with suppress(OSError):
        return (folder / ".hydra/config.yaml").stat().st_mtime_ns
    return None


def _remove(tree: Path) -> None:
    shutil.rmtree(tree, ignore_errors=True)
    ignore = tree.parent / IGNORE
    if [*tree.parent.iterdir()] == [ignore] and ignore.read_text("utf-8") == IGNORED:
        shutil.rmtree(tree.parent, ignore_errors=True)


def _command(tree: Path, folder: Path) -> list[str | Path]:
    # The overrides of the run, without those of the sweep, and the folders of the user's configs.
    hydra = HydraConfig.get()
    task = [
        override
        for override in hydra.overrides.task
        if not re.match(r"[+~]*(code|sweep)=", override)
    ]
    own = [source.path for source in hydra.runtime.config_sources if "command" in source.provider]
    # An earlier version has no such setting, but keeps it, and so tells versions apart
    added = [
        f"++code={quote_override(version_of(tree)['code'])}",
        f"hydra.run.dir={quote_override(folder.absolute())}",
    ]
    if own:
        added.append(f"hydra.searchpath=[{','.join(map(quote_override, own))}]")
    script = tree / "scripts/train.py"
    return [sys.executable, script, f"--config-name={hydra.job.config_name}", *task, *added]


def _wait_for(command: Sequence[str | Path], tree: Path) -> int:
    path = os.pathsep.join(filter(None, [str(tree.absolute()), os.environ.get("PYTHONPATH")]))
    # The signals that end a sweep go to the process group of its worker, or to all processes of a
    # job of SLURM. Any other run is in a group of its own, and gets each signal once: from here.
    hydra = HydraConfig.get()
    worker = hydra.launcher["_target_"].removeprefix("hydra_plugins.minigpt_sweeps.")
    in_worker = hydra.mode == RunMode.MULTIRUN and worker in ("Joblib", "Submitit")
    to_group = in_worker and hydra.launcher.get("cluster") != "local"
    own_group = not to_group and sys.platform != "win32"
    started = None

    def forward(signum: int, _: object) -> None:
        if own_group and started:
            with suppress(OSError):
                started.send_signal(signum)

    if sys.platform != "win32":
        command = [sys.executable, "-ISc", _START, str(os.getpid()), *command]
    # submitit handles SIGUSR1
    handled = [signal.SIGINT, signal.SIGTERM] if in_worker else END_SIGNALS
    with handle_signals(handled, forward):
        started = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path, OF_CODE_IN_PLACE: str(ROOT / "scripts")},
            process_group=0 if own_group else None,
        )
        try:
            return started.wait()
        except BaseException:  # submitit ends a job that starts again
            started.terminate()
            started.wait()
            raise


def _complete_summary(folder: Path, tree: Path, earlier: str) -> None:
    # An earlier version does not write its code. Steps of several versions are those of none.
    summary = previous_summary(folder)
    if summary and "code_sha256" not in summary:
        version = version_of(tree)
        checksums = dict.fromkeys([*earlier.split(), version["code_sha256"]])
        write_summary(folder, {**summary, **version, "code_sha256": " ".join(checksums)})
        if version["dirty"]:
            shutil.copy(tree / PATCH, folder)


def _reason(folder: Path, exit_code: int, *, in_sweep: bool) -> str:
    # The last line that the process wrote, which a terminal shows already.
    log = folder / LOG
    if exit_code < 0:
        return f"its process was killed ({signal.Signals(-exit_code).name}), possibly out of memory"
    if in_sweep and log.exists():
        written = log.read_text(encoding="utf-8", errors="replace").strip()
        if written:
            return written.rpartition("\n")[2].strip().removeprefix("error: ")
    return f"its process ended with exit code {exit_code}"
