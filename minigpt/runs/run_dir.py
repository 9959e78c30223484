"""A run folder: its name, its lock, `runs/latest`, its logs, its summary and what is printed of it.

The functions stand in the order of a run. A run changes and removes only files that it wrote.
"""

import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf

from minigpt.checkpoints.find import BEST, LAST
from minigpt.distributed.process_group import RESTARTS, gather_objects
from minigpt.runs.code_version import PATCH, TREES
from minigpt.runs.metrics_csv import truncate_metrics
from minigpt.utils.errors import UserError
from minigpt.utils.files import PARTIAL, atomic_write, read_json, write_json
from minigpt.utils.ranks import is_rank_zero
from minigpt.utils.scripts import INSTALLED, ROOT, shell_join, usage
from minigpt.utils.terminal import escape_control_chars, sanitize_line

METRICS = "metrics.csv"
CURVES = "curves.png"
SAMPLES = "samples.txt"
SUMMARY = "summary.json"
LOG = "log.txt"
PLAN = "sweep.json"  # in the folder of a sweep, which holds its run folders
LOCK = ".lock"
_WRITTEN = {  # by a run
    ".hydra",
    "checkpoints",
    METRICS,
    SUMMARY,
    CURVES,
    SAMPLES,
    LOG,
    PATCH,
    "plan.json",  # of the planner
    "attention",
    "wandb",
}
_missing: list[Path] = []  # folders that were, each before its parents
END_HEADER = r"── [a-z]+ ──"  # of what a callback adds to the samples at the end of a run
# That, the header of a sample, or one that a full disk cut off
_HEADER = re.compile(
    rf"(?m)^(?:── step (\d{{1,18}})\d*, validation loss .*\n|{END_HEADER}\n|─.*\Z)"
)
Summary = dict[str, Any]  # of `summary.json`


def make_folder(settings: DictConfig) -> Path:
    """Return the folder of a run or a sweep; rank 0 makes one that is named by the time, for all.

    If another run has that name, the folder gets a suffix; but not if it is named by the day or so,
    which its user chose to resume it.

    Args:
        settings: `hydra.run` or `hydra.sweep`, whose `dir` is set to the folder.
    """
    folder = named = Path(str(settings.dir))
    _missing[:] = [each for each in (named, *named.parents) if not each.exists()]
    pattern = str(OmegaConf.to_container(settings))
    if "${now:" in pattern:
        with suppress(OSError):  # it is raised again where the folder is used
            for n in count(2) if is_rank_zero() else ():
                with suppress(FileExistsError):
                    folder.mkdir(parents=True, exist_ok="%S" not in pattern)
                    break
                folder = named.with_name(f"{named.name}-{n}")
        folder = gather_objects(folder)[0]
        _missing[:0] = {folder} - {named}
        settings.dir = str(folder)
    return folder


@contextmanager
def remove_unused_folders() -> Iterator[None]:
    """Remove the folders that were missing before `make_folder` if they are empty at the end."""
    try:
        yield
    finally:
        while _missing:
            with suppress(OSError):  # it is not empty, or it was never made
                _missing.pop(0).rmdir()


@contextmanager
def lock_run_dir(folder: Path, *, resume: bool = False) -> Iterator[None]:
    """Lock a run folder; remove what the run wrote if it has no result.

    Args:
        resume: the folder may hold a run, which continues.

    Raises:
        UserError: another process uses the folder, it holds a run or files that a run would
            overwrite, or it cannot be written.
    """
    # is_locked holds it for a moment; the rank 0 of a lost host, until its collectives time out
    with _locked(folder, "run", 120 if RESTARTS else 2) as was_locked:
        # What is there before the run, which stays
        real = folder.resolve()  # the folder may be given as the link `latest`
        before = {entry.name for entry in real.iterdir() if was_locked or entry.name != LOCK}
        try:
            # Refuse the files of a run that is not to resume, and those that a run would overwrite.
            # Other programs with Hydra write hydra.yaml too; the jobs of a sweep print to log.txt
            # before they are runs.
            own = {LOCK} if (real / ".hydra/hydra.yaml").exists() else {LOCK, ".hydra"}
            is_run = (real / LAST).exists() or (real / BEST).exists() or bool(before & own)
            in_sweep = (real.parent / PLAN).exists()
            held = sorted(before & ({METRICS, SUMMARY} if in_sweep else _WRITTEN))
            if held and not (resume and is_run):
                what = "a run; resume it with resume=auto," if is_run else f"{held[0]};"
                raise UserError(
                    f"{folder} already holds {what} choose another folder with hydra.run.dir=…, "
                    "or remove it"
                )
            # What killed runs were writing; safetensors names the last ones
            for partial in (
                *real.glob(f".*.{PARTIAL}"),
                *real.glob(f"checkpoints/**/.*.{PARTIAL}"),
                *real.glob("checkpoints/**/.tmp??????"),
            ):
                partial.unlink(missing_ok=True)
            yield
        finally:
            written = {entry.name for entry in real.iterdir()} - before
            # A snapshot of step 0 is no result
            has_result = "checkpoints" in written and any(real.glob("checkpoints/*.safetensors"))
            of_start = {".hydra", LOCK, "plan.json", LOG, PATCH, "checkpoints"}
            if written <= of_start and not has_result:
                for path in (real / name for name in written):
                    with suppress(OSError):  # Windows keeps a file that is open
                        if path.is_dir():
                            shutil.rmtree(path)
                        else:
                            path.unlink()


@contextmanager
def lock_sweep_dir(folder: Path) -> Iterator[None]:
    """Make and lock the folder of a sweep; raise UserError if another sweep uses it."""
    folder.mkdir(parents=True, exist_ok=True)
    had_code = (folder / TREES).exists()
    with _locked(folder, "sweep", 0) as was_locked:  # by a run, whose lock file stays
        try:
            yield
        finally:
            if not (folder / PLAN).exists():  # it did not begin
                if not had_code:
                    shutil.rmtree(folder / TREES, ignore_errors=True)
                with suppress(OSError):  # Windows keeps a file that is open
                    if not was_locked:
                        (folder / LOCK).unlink()


@contextmanager
def _locked(folder: Path, kind: str, seconds: float) -> Iterator[bool]:
    was_locked = (folder / LOCK).exists()  # the file stays after a run
    try:
        lock = FileLock(folder / LOCK).acquire(timeout=seconds)
    except Timeout as error:
        raise UserError(
            f"another {kind} uses {folder}; wait for it, "
            f"or choose another folder with hydra.{kind}.dir=…"
        ) from error
    except OSError as error:
        error.filename = error.filename or str(folder / LOCK)  # a disk without locks names none
        raise
    with lock:
        yield was_locked


def is_locked(folder: Path) -> bool:
    """Return whether a run uses a folder at this moment."""
    if not (folder / LOCK).exists():
        return False
    try:
        with FileLock(folder / LOCK, timeout=0):
            return False
    except OSError as error:  # or the disk is read-only
        return isinstance(error, Timeout)


def update_latest_link(folder: Path) -> None:
    """Point `latest`, beside a folder, at it; the runs of a sweep have no such link."""
    folder = folder.resolve()
    latest = folder.parent / "latest"
    if not (folder.parent / PLAN).exists():
        with suppress(OSError):  # some file systems have no links
            is_ours = any((latest / name).exists() for name in (LOCK, ".hydra", PLAN))
            if latest.is_symlink() and (is_ours or not latest.exists()):
                latest.unlink()
            latest.symlink_to(folder.name, target_is_directory=True)


def append_log(folder: Path, line: str, *, show: bool = True) -> None:
    """Append a line to `log.txt`, and print it to stderr."""
    if show:
        print(line, file=sys.stderr, flush=True)
    with suppress(OSError), open(folder / LOG, "a", encoding="utf-8") as file:
        # stderr of a sweep's job is log.txt
        if not (show and os.path.samestat(os.fstat(file.fileno()), os.fstat(2))):
            file.write(f"{line}\n")


def truncate_logs(folder: Path, step: int) -> None:
    """Remove metrics and samples after `step`, from which the run resumes; 0 removes all.

    What is written at the end of a run is removed too.
    """
    (folder / SUMMARY).unlink(missing_ok=True)
    if (folder / METRICS).exists():
        truncate_metrics(folder / METRICS, step)
    samples = folder / SAMPLES
    if samples.exists():
        text = samples.read_text(encoding="utf-8", errors="replace")
        later = (
            header.start()
            for header in _HEADER.finditer(text)
            if header[1] is None or int(header[1]) > step
        )
        with atomic_write(samples) as partial:
            partial.write_text(text[: next(later, None)], encoding="utf-8", newline="")


def read_summary(folder: Path) -> Summary:
    """Read `summary.json`; empty while it is missing.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        summary = read_json(folder / SUMMARY)
    except FileNotFoundError:
        return {}
    if not isinstance(summary, dict):
        raise ValueError("it is not a JSON object")
    return summary


def previous_summary(folder: Path) -> Summary:
    """Return the summary of what a run reached before; empty if it is missing or damaged."""
    with suppress(ValueError):
        return read_summary(folder)
    return {}


def write_summary(folder: Path, summary: Mapping[str, object]) -> None:
    """Write `summary.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SUMMARY, summary)


def write_failure(folder: Path, reason: str) -> None:
    """Record why a crashed run failed, beside what it had reached."""
    write_summary(folder, {**previous_summary(folder), "status": "failed", "reason": reason})


def completed_summary(
    folder: Path, step: int, max_steps: int, *, changed: bool = False
) -> Summary | None:
    """Return the summary of a completed run whose last checkpoint is of `step`; else None.

    A run that stopped early can resume if its settings are `changed`.
    """
    summary = previous_summary(folder)
    done = step >= max_steps or (summary.get("stopped_early") is True and not changed)
    return summary if done and summary.get("status") == "completed" else None


def print_results(
    folder: Path,
    sample: str,
    summary: Summary,
    lines: Sequence[tuple[str, str]],
    flags: Sequence[str],
) -> None:
    """Print the sample, or that the run paused, the best loss, and the paths of the results.

    Args:
        lines: labels and texts to print below a loss.
        flags: of sample.py, to sample again.
    """
    # A paused run has no sample
    if summary["status"] == "paused":
        sample = (
            f"paused at step {summary['steps']}; to continue, run the same command with "
            "resume=auto pause_at=null and this run folder as hydra.run.dir"
        )
    elif sys.stdout.isatty():
        sample = escape_control_chars(sample)
    print(f"{sample.strip()}\n")
    # What it reached
    if summary["stopped_early"]:
        print(sanitize_line(summary["reason"]))
    loss = summary["best_val_loss"]
    if loss is not None:
        n = summary["eval_batches"]
        part = "" if n is None else f", on {n} batches of the split"
        print(f"validation loss  {loss:.4f} at step {summary['best_step']}{part}")
        for label, text in lines:
            print(f"{label:17}{text}")
    # Where it is
    run = sanitize_line(str(short_path(folder)))
    print(
        f"time             {summary['wall_seconds']:,.1f} s, training {summary['seconds']:,.1f} s\n"
        f"run folder       {run}\n"
        f"curves           {run}/{CURVES}"
    )
    if summary["checkpoint"]:  # callbacks.checkpoint=null saves none
        again = command("sample", str(short_path(folder)), *flags)
        print(
            f"best checkpoint  {run}/{summary['checkpoint']}\n"
            f"sample again     {sanitize_line(again)}"
        )


def short_path(path: Path) -> Path:
    """Return a path relative to the working directory if it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def command(script: str, *arguments: str) -> str:
    """Return the command line of a script of this installation, to be copied into a shell."""
    python = str(short_path(Path(sys.executable)))
    if not INSTALLED:
        scripts = Path(os.environ.get("MINIGPT_SCRIPTS", ROOT / "scripts"))  # of the code in place
        return shell_join(python, str(short_path(scripts / f"{script}.py")), *arguments)
    on_path = Path(shutil.which("minigpt") or "").parent == Path(sysconfig.get_path("scripts"))
    prefix = [] if on_path else [python, "-m"]
    return shell_join(*prefix, *usage(script).split(), *arguments)
