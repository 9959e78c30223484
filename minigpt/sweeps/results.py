"""The points of a sweep: `sweep.json`, which lists them, and the state of their run folders.

Status and measurements are read from the files that each run writes into its own folder, so a sweep is read the same
way while it runs, after it ended and after it crashed.
"""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, log
from operator import itemgetter
from pathlib import Path
from typing import Any

from minigpt.runs.run_dir import METRICS, PLAN, SUMMARY, is_locked, read_metrics, read_summary
from minigpt.utils.checks import is_number
from minigpt.utils.errors import UserError
from minigpt.utils.files import read_json, write_json
from minigpt.utils.terminal import warn

COMPLETED, RUNNING, WAITING, CRASHED, SKIPPED = "completed", "running", "waiting", "crashed", "skipped"
NATS, BITS = "nats per token", "bits per byte"  # units of a loss
_IRRELEVANT_GROUPS = ("resume", "logger")  # settings that do not change what a run computes
MAX_NUMBER = 1e300  # of damaged files
_TOTALS = {"step": "steps", "val_loss": "best_val_loss"}  # field of a point → key of summary.json
_TOTALS |= {name: name for name in ("params", "tokens", "flops", "tokens_per_second", "seconds")}


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its settings, its status and its measurements.

    Args:
        overrides: the swept settings, as they were written.
        status: completed, running, waiting, failed, interrupted, crashed (the process ended without a summary) or
            skipped (the configuration is impossible).
        identity: hash of the configuration.
        planned_flops: of the whole training, from the configuration.
        flops: of the training so far.
        val_loss: best validation loss so far, nats per token.
        bytes_per_token: of the validation split.
        curve: (tokens, validation loss in nats per token).
    """

    folder: Path
    overrides: Mapping[str, str]
    status: str = WAITING
    reason: str = ""
    identity: str = ""
    params: int | None = None
    planned_flops: float = 0.0
    step: int = 0
    tokens: int = 0
    flops: float | None = None
    val_loss: float | None = None
    bytes_per_token: float | None = None
    tokens_per_second: float | None = None
    seconds: float = 0.0
    curve: Sequence[tuple[int, float]] = ()

    @property
    def pending(self) -> bool:
        """Whether the run is still to be completed."""
        return self.status not in (COMPLETED, SKIPPED)

    def in_unit(self, loss: float | None, unit: str) -> float | None:
        """Convert a loss from nats per token to `NATS` or `BITS`; None if it cannot be converted."""
        if loss is None or unit == NATS:
            return loss
        return loss / log(2) / self.bytes_per_token if self.bytes_per_token else None

    def loss(self, unit: str) -> float | None:
        """Return the best validation loss in a unit."""
        return self.in_unit(self.val_loss, unit)


def read_sweep(folder: Path) -> list[Point]:
    """Read the points of a sweep, with all settings; without a `sweep.json`, every run below the folder is a point.

    Raises:
        UserError: the folder does not exist or holds no runs.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder of a sweep, such as runs/sweeps/latest")
    folder = folder.resolve()
    if (folder / PLAN).exists():
        fixed, planned = read_plan(folder)
        shared = dict(override.partition("=")[::2] for override in fixed)
        points = [replace(point, overrides={**shared, **point.overrides}) for point in planned]
    else:
        files = sorted(folder.rglob(".hydra/overrides.yaml"))
        points = [Point(folder=file.parents[1], overrides=_read_overrides(file)) for file in files]
    if not points:
        raise UserError(f"{folder} holds no runs; give the folder of a sweep, such as runs/sweeps/latest")
    return [refresh(point) for point in points]


def read_plan(folder: Path) -> tuple[list[str], list[Point]]:
    """Read `sweep.json`: the overrides that all points share, and the points.

    Raises:
        UserError: the file is damaged.
    """
    try:
        plan = read_json(folder / PLAN)
        return [str(override) for override in plan["fixed"]], [_planned(folder, entry) for entry in plan["points"]]
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"{folder / PLAN} is damaged ({error}); remove it to read the runs one by one") from error


def write_plan(folder: Path, fixed: Sequence[str], points: Sequence[Point]) -> None:
    """Write `sweep.json`: the overrides that all points share, and the state of each point."""
    entries = [
        {"folder": point.folder.name, "overrides": dict(point.overrides), "val_bits_per_byte": point.loss(BITS)}
        | {name: getattr(point, name) for name in ("status", "reason", "identity", *_TOTALS)}
        for point in points
    ]
    write_json(folder / PLAN, {"fixed": list(fixed), "points": entries})


def is_relevant(override: str) -> bool:
    """Return whether an override, or a group of settings, changes what a run computes."""
    return re.split("[.@=]", override.lstrip("+~"))[0] not in _IRRELEVANT_GROUPS


def refresh(point: Point) -> Point:
    """Return the point with the present status and measurements of its run folder."""
    if point.status == SKIPPED:
        return point
    summary, found = dict[str, Any](), dict[str, Any]()
    try:
        summary = read_summary(point.folder)
    except (OSError, ValueError) as error:
        warn(f"{point.folder / SUMMARY} is not readable ({error}); the run counts as crashed")
    status = str(summary.get("status") or (CRASHED if (point.folder / ".hydra").exists() else WAITING))
    if status != COMPLETED and is_locked(point.folder):
        status = RUNNING
    reasons = [str(summary.get("reason") or "")]
    try:
        found = _measurements(point.folder / METRICS)
    except (OSError, ValueError, ArithmeticError, csv.Error) as error:
        warn(f"{point.folder / METRICS} is not readable ({error}); its curve is left out")
        reasons.append(f"{METRICS} is not readable")
    totals = {name: _finite(summary.get(key)) for name, key in _TOTALS.items()}
    totals["bytes_per_token"] = _bytes_per_token(totals["val_loss"], _finite(summary.get("best_val_bits_per_byte")))
    found |= {name: value for name, value in totals.items() if value}
    return replace(point, status=status, reason="; ".join(filter(None, reasons)), **found)


def _measurements(file: Path) -> dict[str, Any]:
    """Return what `metrics.csv` holds of a point, also while its run has no summary."""
    columns = read_metrics(file) if file.exists() else {}
    losses = [(step, loss) for step, loss in columns.get("val_loss", ()) if isfinite(loss)]
    best_step, best = min(losses, key=itemgetter(1), default=(0, None))
    step, tokens = columns["tokens"][-1] if "tokens" in columns else (1, 0.0)
    last_step = max((column[-1][0] for column in columns.values()), default=0)
    last = {name: column[-1][1] for name, column in columns.items()}
    speed, flops = last.get("tokens_per_second"), last.get("flops_per_second")
    return {
        "step": last_step,
        "tokens": round(last_step * tokens / step),
        "flops": _finite(flops / speed * last_step * tokens / step) if flops and speed else None,
        "tokens_per_second": speed,
        "seconds": last.get("seconds", 0.0),
        "val_loss": best,
        "bytes_per_token": _bytes_per_token(best, dict(columns.get("val_bits_per_byte", ())).get(best_step)),
        "curve": [(round(at * tokens / step), loss) for at, loss in losses],
    }


def _bytes_per_token(nats_per_token: float | None, bits_per_byte: float | None) -> float | None:
    length = nats_per_token and bits_per_byte and _finite(nats_per_token / log(2) / bits_per_byte)
    return length if length and length > 0 else None


def _finite(value: Any) -> Any:
    """Return the value if it is a finite number, else None."""
    return value if is_number(value) and abs(value) < MAX_NUMBER else None


def _planned(folder: Path, entry: dict[str, Any]) -> Point:
    name = entry["folder"]
    if Path(name).name != name or len(name) > 255:
        raise ValueError("a folder is not a file name")
    overrides = {key: str(value) for key, value in entry["overrides"].items()}
    status, reason, identity = (str(entry[field]) for field in ("status", "reason", "identity"))
    return Point(folder / name, overrides, status, reason, identity, _finite(entry["params"]))


def _read_overrides(file: Path) -> dict[str, str]:
    import yaml  # a dependency of Hydra

    try:
        # The loader without C code raises an error where nesting would overflow the stack of the other.
        overrides = yaml.load(file.read_text(encoding="utf-8"), yaml.BaseLoader) or []
        if not isinstance(overrides, list):
            raise ValueError("it must be a list")
        return {key: value for key, _, value in (text.partition("=") for text in overrides) if is_relevant(key)}
    except (OSError, ValueError, AttributeError, RecursionError, yaml.YAMLError) as error:
        warn(f"{file} is not readable ({error}); it is left out")
        return {}
