"""Names of checkpoint files, and the search for the file that a path or a run folder refers to."""

import os
from contextlib import suppress
from pathlib import Path

from minigpt.utils.errors import UserError
from minigpt.utils.files import read_json
from minigpt.utils.scripts import usage

BEST = "checkpoints/best.safetensors"
LAST = "checkpoints/last.safetensors"
PREVIOUS = "checkpoints/previous.safetensors"
SNAPSHOTS = "checkpoints/snapshots"


def find_checkpoint(
    path: str | Path | None, *, last: bool = False, step: int | None = None
) -> Path:
    """Find a checkpoint file; raise UserError if there is none.

    Args:
        path: a file, a run folder (its best checkpoint), a sweep (the best checkpoint of its run
            with the lowest loss), or None: the newest run below runs/, or the sweep that it is of.
        last: prefer the last checkpoint of a run folder, from which training resumes.
        step: of a snapshot of the run, instead of its best checkpoint.
    """
    # The newest run, or the best one of its sweep
    if path is None:
        files = sorted(Path("runs").rglob(BEST), key=lambda file: file.stat().st_mtime)
        if not files:
            raise UserError(f"no run with a checkpoint in runs/; train one with {usage('train')}")
        sweep = files[-1].parents[2]
        path = sweep if (sweep / "sweep.json").exists() else files[-1]
    path = Path(follow_latest(str(path)))
    if (path / "sweep.json").exists() and not last:
        path = min(path.glob(f"*/{BEST}"), key=_rank, default=path)
    # A snapshot
    if step is not None:
        folder = run_folder(path) if path.is_file() else path
        snapshots = find_snapshots(folder)
        if step not in snapshots:
            raise UserError(
                f"{folder} has no snapshot of step {step}; "
                f"it has those of {', '.join(map(str, snapshots)) or 'none'}"
            )
        return snapshots[step]
    # The file itself, or one of a run folder
    names = (LAST, BEST) if last else (BEST, LAST)
    files = [path] if path.is_file() else checkpoints_of(path, names)
    if not last:  # the newest of a run before its first validation
        files += reversed(find_snapshots(path).values())
    if files:
        return files[0]
    problem = f"holds no {BEST}" if path.is_dir() else "does not exist"
    raise UserError(f"{path} {problem}; give a run folder or a checkpoint file")


def checkpoints_of(folder: Path, names: tuple[str, ...] = (LAST, PREVIOUS, BEST)) -> list[Path]:
    """Return the checkpoints of a run folder that exist, by default the newest first."""
    return [folder / name for name in names if (folder / name).is_file()]


def follow_latest(path: str) -> str:
    """Return a path, or the newest run or sweep beside it if it is a missing `latest`.

    Some systems refuse links.
    """
    latest = Path(os.path.expanduser(path))
    folder = latest.parent
    # A sweep has no link to a job.
    if latest.name != "latest" or os.path.lexists(latest) or (folder / "sweep.json").exists():
        return path
    files = [*folder.glob("*/.hydra/overrides.yaml"), *folder.glob("*/sweep.json")]
    newest = max(files, key=lambda file: file.stat().st_mtime, default=None)
    return str(folder / newest.relative_to(folder).parts[0]) if newest else path


def _rank(best: Path) -> tuple[float, float]:
    """Return the loss of a run's best checkpoint, infinity if it is unknown, and its age."""
    loss = float("inf")
    with suppress(OSError, ValueError, LookupError, TypeError):  # it still trains, or is damaged
        loss = float(read_json(best.parents[1] / "summary.json")["best_val_bits_per_byte"])
    return loss, -best.stat().st_mtime


def find_snapshots(folder: str | Path) -> dict[int, Path]:
    """Return the snapshots of a run folder by step, in their order.

    A file such as step-old.safetensors is none.
    """
    paths = Path(folder, SNAPSHOTS).glob("step-*.safetensors")
    files = {file.stem.removeprefix("step-"): file for file in paths}
    return dict(sorted((int(step), file) for step, file in files.items() if step.isdecimal()))


def run_folder(checkpoint: Path) -> Path:
    """Return the run folder of a checkpoint file, or its parent folder if it belongs to no run."""
    folder = checkpoint.parent.parent
    if checkpoint.parent.name == Path(SNAPSHOTS).name:
        folder = folder.parent
    is_run = any((folder / name).exists() for name in (BEST, LAST, SNAPSHOTS))
    return folder if is_run else checkpoint.parent
