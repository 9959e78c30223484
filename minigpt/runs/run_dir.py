"""A run folder: its lock, `runs/latest`, logs, metrics and summary."""

import csv
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from minigpt.utils.errors import UserError
from minigpt.utils.files import atomic_write, read_json
from minigpt.utils.ranks import is_rank_zero
from minigpt.utils.terminal import escape_control_chars, sanitize_line, warn

METRICS, CURVES, SAMPLES, SUMMARY, LOG = "metrics.csv", "curves.png", "samples.txt", "summary.json", "log.txt"
LATEST = "latest"  # link to the newest run, beside the run folders
PLAN = "sweep.json"  # in the folder of a sweep, which holds its run folders
_LOCK = ".lock"
_SAMPLE_HEADER = re.compile(r"(?m)^(?=── step \d+, validation loss)")


@contextmanager
def lock_run_dir(folder: Path, *, resume: bool = False) -> Iterator[None]:
    """Lock a run folder and point `latest` at it; remove it if the run wrote nothing.

    Args:
        resume: the folder may hold a run, which continues.

    Raises:
        UserError: another process uses the folder, it holds a run, or it cannot be written.
    """
    if not is_rank_zero():
        yield
        return
    try:
        lock = FileLock(folder / _LOCK).acquire(timeout=2)  # is_locked holds it for a moment
    except Timeout as error:
        raise UserError(f"another run uses {folder}; choose another folder with hydra.run.dir=…") from error
    with lock:
        if not resume and ((folder / METRICS).exists() or (folder / SUMMARY).exists()):
            raise UserError(
                f"{folder} already holds a run; resume it with resume=auto, choose another folder with "
                "hydra.run.dir=…, or remove it"
            )
        for pattern in (".*.partial", "checkpoints/.*.partial", "checkpoints/.tmp*"):  # of killed runs
            for partial in folder.glob(pattern):
                partial.unlink(missing_ok=True)
        real = folder.resolve()  # it may be the link `latest` itself
        in_sweep = (real.parent / PLAN).exists()  # whose jobs print to log.txt
        previous = None if in_sweep else update_latest_link(real)
        try:
            yield
        finally:
            if {entry.name for entry in folder.iterdir()} <= {".hydra", _LOCK, *([] if in_sweep else [LOG])}:
                shutil.rmtree(real)
                latest = real.parent / LATEST
                if latest.is_symlink() and latest.readlink() == Path(real.name):  # no newer run moved it
                    _set_link(latest, previous)


def is_locked(folder: Path) -> bool:
    """Whether a run uses a folder at this moment."""
    if not (folder / _LOCK).exists():
        return False
    try:
        with FileLock(folder / _LOCK, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # a read-only disk
        return False


def update_latest_link(folder: Path) -> Path | None:
    """Point `latest`, beside a folder, at it; return its previous target."""
    folder = folder.resolve()
    latest = folder.parent / LATEST
    previous = latest.readlink() if latest.is_symlink() else None
    _set_link(latest, Path(folder.name))
    return previous


def _set_link(link: Path, target: Path | None) -> None:
    with suppress(OSError):  # some file systems have no links
        link.unlink(missing_ok=True)
        if target is not None:
            link.symlink_to(target, target_is_directory=True)


def append_log(folder: Path, line: str, *, show: bool = True) -> None:
    """Append a line to `log.txt`, and print it to stderr."""
    if show:
        print(line, file=sys.stderr, flush=True)
    with suppress(OSError), open(folder / LOG, "a", encoding="utf-8") as file:
        if not (show and os.path.samestat(os.fstat(file.fileno()), os.fstat(2))):  # stderr of a sweep's job is log.txt
            file.write(f"{line}\n")


def truncate_logs(folder: Path, step: int) -> None:
    """Remove metrics and samples after `step`, from which the run resumes, and the summary; 0 removes all."""
    if not is_rank_zero():
        return
    (folder / SUMMARY).unlink(missing_ok=True)
    metrics, samples = folder / METRICS, folder / SAMPLES
    if metrics.exists():
        header, *rows = metrics.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) or [""]
        rows = [row for row in rows if row.endswith("\n")]  # a killed run may have cut the last one
        valid = [row for row in rows if _is_valid_row(row, header)]
        if len(valid) < len(rows):
            warn(f"{metrics} is damaged; {len(rows) - len(valid)} of its rows are dropped")
        kept = [row for row in valid if int(row.partition(",")[0]) <= step]
        _replace(metrics, [header, *kept] if kept else [])
    if samples.exists():
        sections = _SAMPLE_HEADER.split(samples.read_text(encoding="utf-8", errors="replace"))[1:]
        _replace(samples, [section for section in sections if int(section.split()[2].rstrip(",")) <= step])


def _is_valid_row(row: str, header: str) -> bool:
    names, values = header.strip().split(","), row.strip().split(",")
    try:
        numbers = [float(value) for value in values if value]
    except ValueError:
        return False
    return names[0] == "step" and len(names) == len(values) and values[0].isdecimal() and len(numbers) > 1


def _replace(file: Path, lines: list[str]) -> None:
    if not lines:
        file.unlink()
        return
    with atomic_write(file) as partial:
        partial.write_text("".join(lines), encoding="utf-8", newline="")


def read_metrics(file: Path) -> dict[str, list[tuple[int, float]]]:
    """Read the columns of `metrics.csv`, each a list of (step, value).

    Raises:
        ValueError: a row is damaged; an incomplete last line is ignored.
    """
    columns: dict[str, list[tuple[int, float]]] = {}
    with open(file, newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(line for line in lines if line.endswith("\n")):
            try:
                step = int(row.pop("step"))
                for name, value in row.items():
                    if value:
                        columns.setdefault(name, []).append((step, float(value)))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"a row is not a measurement: {error}") from error
    return columns


def read_summary(folder: Path) -> dict[str, Any]:
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


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / SUMMARY) as partial:
        partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def write_failure(folder: Path, reason: str) -> None:
    """Record why a crashed run failed."""
    write_summary(folder, {"status": "failed", "reason": reason})


def completed_summary(folder: Path, step: int, max_steps: int) -> dict[str, Any] | None:
    """Return the summary of a completed run whose last checkpoint is of `step`; None if it can resume."""
    try:
        summary = read_summary(folder)
    except ValueError:
        return None
    done = step >= max_steps or summary.get("stopped_early") is True
    return summary if done and summary.get("status") == "completed" else None


def print_results(folder: Path, sample: str, summary: Mapping[str, Any], *, sample_script: Path) -> None:
    """Print the sample, the best loss, and the paths of the results."""
    sample = escape_control_chars(sample) if sys.stdout.isatty() else sample
    print(f"{sample.strip()}\n")
    if summary["stopped_early"]:
        print(sanitize_line(summary["reason"]))
    if summary["best_val_loss"] is not None:
        part = "" if summary["eval_batches"] is None else f", on {summary['eval_batches']} batches of the split"
        print(f"validation loss  {summary['best_val_loss']:.4f} at step {summary['best_step']}{part}")
    print(f"time             {summary['wall_seconds']:,.1f} s, training {summary['seconds']:,.1f} s")
    run, python, script = (sanitize_line(str(short_path(path))) for path in (folder, sys.executable, sample_script))
    print(f"run folder       {run}")
    print(f"curves           {run}/{CURVES}")
    if summary["checkpoint"]:  # callbacks.checkpoint=null saves none
        print(f"best checkpoint  {run}/{summary['checkpoint']}")
        print(f"sample again     {python} {script} {run} --seed 1")


def short_path(path: str | Path) -> Path:
    """Return a path relative to the working directory if it lies below it."""
    path = Path(path)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
