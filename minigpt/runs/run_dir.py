"""A run folder and the story it tells: curves, samples, summary, and which run is the newest."""

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

METRICS, CURVES, SAMPLES, SUMMARY = "metrics.csv", "curves.png", "samples.txt", "summary.json"
LOG = "log.txt"
LATEST = "latest"
PLAN = "sweep.json"  # in the folder that holds the folders of a sweep's runs
_LOCK = ".lock"
_SECTION = re.compile(r"(?m)^(?=── step \d+, validation loss)")


@contextmanager
def lock_run_dir(folder: Path, *, again: bool = False) -> Iterator[Path]:
    """Take a run folder; give it back if nothing of the run came to stand in it.

    Args:
        again: it may hold a run already, which goes on.

    Raises:
        UserError: another run works in it, or it holds a run already, or cannot be written.
    """
    if not is_rank_zero():
        yield folder
        return
    with _lock(folder):
        if not again and ((folder / METRICS).exists() or (folder / SUMMARY).exists()):
            raise UserError(
                f"{folder} holds a run already; go on with it by resume=auto, choose another folder with "
                f"hydra.run.dir=…, or remove it"
            )
        _sweep_out(folder)
        real = folder.resolve()  # it may be `latest` itself
        in_sweep = (real.parent / PLAN).exists()  # whose jobs print to the log file
        before = None if in_sweep else update_latest_link(real)
        try:
            yield folder
        finally:
            if all(entry.name in (".hydra", _LOCK, *([] if in_sweep else [LOG])) for entry in folder.iterdir()):
                shutil.rmtree(real)
                latest = real.parent / LATEST
                if latest.is_symlink() and latest.readlink() == Path(real.name):  # no newer run took it
                    _link(latest, before)


def _sweep_out(folder: Path) -> None:
    """Remove what runs that were killed had written of a file; nobody else works here."""
    for place in (folder, folder / "checkpoints"):
        for partial in (*place.glob(".*.partial"), *place.glob(".tmp*")):  # the latter of safetensors
            partial.unlink(missing_ok=True)


def update_latest_link(folder: Path) -> Path | None:
    """Make a folder the `latest` of those beside it, and say which was before."""
    folder = folder.resolve()
    latest = folder.parent / LATEST
    before = latest.readlink() if latest.is_symlink() else None
    _link(latest, Path(folder.name))
    return before


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=2)  # who looks whether it is taken holds it for a moment
    except Timeout as error:
        raise UserError(f"another run works in {folder}; choose another folder with hydra.run.dir=…") from error
    try:
        yield
    finally:
        lock.release()


def is_locked(folder: Path) -> bool:
    """Whether a run works in a folder at this moment."""
    if not (folder / _LOCK).exists():
        return False
    try:
        with FileLock(folder / _LOCK, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # on a disk that cannot be written nothing runs
        return False


def append_log(folder: Path, line: str, *, show: bool = True) -> None:
    """Append a line to the log file of a run folder, and print it to stderr."""
    if show:
        print(line, file=sys.stderr, flush=True)
    with suppress(OSError), open(folder / LOG, "a", encoding="utf-8") as file:  # a log is no reason to lose a run
        if not (show and os.path.samestat(os.fstat(file.fileno()), os.fstat(2))):  # where a sweep's job prints to
            file.write(f"{line}\n")


def finished_message(folder: Path, step: int, max_steps: int) -> tuple[str, float | None] | None:
    """One line on a run that has nothing left to do, and its best validation loss; None where training resumes.

    Args:
        step: of its last checkpoint.
    """
    summary = read_summary_or_empty(folder)
    early = summary.get("stopped_early") is True
    if summary.get("status") != "completed" or not (early or step >= max_steps):
        return None
    loss = summary.get("best_val_loss")
    best = f", best validation loss {loss:.4f}" if isinstance(loss, float) else ""
    how = "stopped early at" if early else "is complete at"
    return f"{short_path(folder)} {how} step {step} of {max_steps}{best}; nothing to do", loss


def truncate_logs(folder: Path, step: int) -> None:
    """Take back what a run folder tells of the steps after `step`, from which the run goes on; 0 takes back all."""
    if not is_rank_zero():
        return
    (folder / SUMMARY).unlink(missing_ok=True)
    curves, samples = folder / METRICS, folder / SAMPLES
    if curves.exists():
        header, *rows = curves.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) or [""]
        whole_rows = [row for row in rows if row.endswith("\n")]  # of a killed run the last may be cut short
        good = [row for row in whole_rows if _is_measurement(row, header)]
        if len(good) < len(whole_rows):
            warn(f"{curves} is damaged; {len(whole_rows) - len(good)} of its rows are left out")
        rows = [row for row in good if int(row.partition(",")[0]) <= step]
        _replace(curves, [header, *rows] if rows else [])
    if samples.exists():
        sections = _SECTION.split(samples.read_text(encoding="utf-8", errors="replace"))
        _replace(samples, [section for section in sections[1:] if int(section.split()[2].rstrip(",")) <= step])


def _is_measurement(row: str, header: str) -> bool:
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


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a run that has ended; empty while there is none.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        summary = read_json(folder / SUMMARY)
    except FileNotFoundError:
        return {}
    if not isinstance(summary, dict):
        raise ValueError("it holds no summary")
    return summary


def read_summary_or_empty(folder: Path) -> dict[str, Any]:
    """The same; empty where the file is damaged, too."""
    try:
        return read_summary(folder)
    except ValueError:
        return {}


def write_failure(folder: Path, reason: str) -> None:
    """Write of a run that ended without a word what it died of."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / SUMMARY) as partial:
        partial.write_text(json.dumps({"status": "failed", "reason": reason}) + "\n", encoding="utf-8")


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write the end of the story: `curves.png` and `summary.json`. Of a run that never began there is none."""
    measured = (folder / METRICS).exists()
    if not measured and not summary.get("steps"):
        return
    if measured:
        plot_curves(folder)
    with atomic_write(folder / SUMMARY) as partial:
        partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def print_results(folder: Path, sample: str, summary: Mapping[str, Any], *, sampler: Path) -> None:
    """Print the sample, and where things are."""
    sample = escape_control_chars(sample) if sys.stdout.isatty() else sample
    folder, python, sampler = (
        Path(sanitize_line(str(short_path(path)))) for path in (folder, Path(sys.executable), sampler)
    )
    print(f"{sample.strip()}\n")
    if summary["stopped_early"]:
        print(sanitize_line(summary["reason"]))
    if summary["best_val_loss"] is not None:
        part = "" if summary["eval_batches"] is None else f", on {summary['eval_batches']} batches of the split"
        print(f"validation loss  {summary['best_val_loss']:.4f} at step {summary['best_step']}{part}")
    print(f"time             {summary['wall_seconds']:,.1f} s, {summary['seconds']:,.1f} s of them training")
    print(f"run folder       {folder}")
    print(f"curves           {folder / CURVES}")
    if summary["checkpoint"]:  # a run may be told to keep none
        print(f"best checkpoint  {folder / summary['checkpoint']}")
        print(f"sample again     {python} {sampler} {folder} --seed 1")


def short_path(path: Path) -> Path:
    """A path relative to the current folder, where it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _link(link: Path, target: Path | None) -> None:
    """Point a link somewhere, or remove it; where links cannot be made there is none."""
    with suppress(OSError):
        link.unlink(missing_ok=True)
        if target is not None:
            link.symlink_to(target, target_is_directory=True)


def read_metrics(file: Path) -> dict[str, list[tuple[int, float]]]:
    """The columns of `metrics.csv`, each a list of (step, value) where it has one.

    Raises:
        ValueError: it holds something else. A last line that was cut short is left out.
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
                raise ValueError(f"a row of it is no measurement: {error}") from error
    return columns


def plot_curves(folder: Path) -> None:
    """Draw `curves.png` from `metrics.csv`: losses and learning rate over optimizer steps."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    columns = read_metrics(folder / METRICS)
    figure, (losses, rates) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1))
    figure.subplots_adjust(left=0.11, right=0.98, bottom=0.08, top=0.94, hspace=0.08)
    if train := columns.get("train_loss"):
        losses.plot(*zip(*train, strict=True), color="tab:blue", alpha=0.6, linewidth=1, label="train")
    if validation := columns.get("val_loss"):
        best_step, best = min(validation, key=lambda point: point[1])
        losses.plot(*zip(*validation, strict=True), color="tab:orange", marker="o", markersize=4, label="validation")
        losses.annotate(
            f"best {best:.4f}",
            (best_step, best),
            xytext=(0, 14),
            textcoords="offset points",
            ha="right",
            color="tab:orange",
        )
    losses.set(ylabel="loss (nats per token)", title=f"{folder.resolve().name}: loss and learning rate")
    losses.legend()
    if rate := columns.get("learning_rate"):
        rates.plot(*zip(*rate, strict=True), color="tab:green", linewidth=1)
        rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    rates.set(ylabel="learning rate", xlabel="optimizer step")
    rates.set_ylim(bottom=0)
    for axes in (losses, rates):
        axes.grid(alpha=0.3)
    figure.savefig(folder / CURVES, dpi=120)
    plt.close(figure)
