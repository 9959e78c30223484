"""The points of a sweep: `sweep.json`, which lists them, and the state of their run folders.

Status and measurements are read from the files that each run writes into its own folder, so a sweep is read the same
way while it runs, after it ended and after it crashed.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, log
from pathlib import Path
from typing import Any, TypeVar

from minigpt.runs.run_dir import METRICS, PLAN, SUMMARY, is_locked, read_metrics, read_summary
from minigpt.utils.checks import is_number
from minigpt.utils.errors import UserError
from minigpt.utils.files import atomic_write, read_json
from minigpt.utils.terminal import warn

COMPLETED, RUNNING, WAITING, CRASHED, SKIPPED = "completed", "running", "waiting", "crashed", "skipped"
NATS, BITS = "nats per token", "bits per byte"  # units of a loss
IRRELEVANT_GROUPS = ("resume", "logger")  # settings that do not change what a run computes
MAX_YAML_DEPTH, MAX_NUMBER = 50, 1e300  # of damaged files
T = TypeVar("T")
_TOTALS = ("params", "steps", "tokens", "flops", "tokens_per_second", "seconds")
_PLAN_FIELDS = (
    *("status", "reason", "identity", "params", "max_steps", "step", "tokens", "flops", "val_loss"),
    *("tokens_per_second", "seconds"),
)


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its settings, its status and its measurements.

    Args:
        folder: its run folder.
        overrides: the swept settings, as they were written.
        status: completed, running, waiting, failed, interrupted, crashed (the process ended without a summary) or
            skipped (the configuration is impossible).
        reason: why it failed or was skipped.
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
    max_steps: int | None = None
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
    """Read the points of a sweep folder; without a `sweep.json`, every run below the folder is a point.

    Raises:
        UserError: the folder does not exist or holds no runs.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder of a sweep, such as runs/sweeps/latest")
    if (folder / PLAN).exists():
        _, points = read_plan(folder)
    else:
        files = sorted(folder.rglob(".hydra/overrides.yaml"))
        points = [Point(folder=file.parents[1], overrides=_read_overrides(file)) for file in files]
    if not points:
        raise UserError(f"{folder} holds no runs; give the folder of a sweep, such as runs/sweeps/latest")
    return [refresh(point) for point in points]


def read_plan(folder: Path) -> tuple[list[str], list[Point]]:
    """Read `sweep.json`.

    Returns:
        The overrides that all points share, and the points.

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
        | {name: getattr(point, name) for name in _PLAN_FIELDS}
        for point in points
    ]
    with atomic_write(folder / PLAN) as partial:
        partial.write_text(json.dumps({"fixed": list(fixed), "points": entries}, indent=1) + "\n", encoding="utf-8")


def refresh(point: Point) -> Point:
    """Return the point with the present status and measurements of its run folder."""
    if point.status == SKIPPED:
        return point
    summary, curve = dict[str, Any](), dict[str, Any]()
    try:
        summary = read_summary(point.folder)
    except (OSError, ValueError) as error:
        warn(f"{point.folder / SUMMARY} is not readable ({error}); the run counts as crashed")
    status = str(summary.get("status") or (CRASHED if (point.folder / ".hydra").exists() else WAITING))
    if status != COMPLETED and is_locked(point.folder):
        status = RUNNING
    reasons = [str(summary.get("reason") or "")]
    try:
        curve = _measurements(read_metrics(point.folder / METRICS)) if (point.folder / METRICS).exists() else {}
    except (OSError, ValueError, ArithmeticError, csv.Error) as error:
        warn(f"{point.folder / METRICS} is not readable ({error}); its curve is left out")
        reasons.append(f"{METRICS} is not readable")
    # Totals come from the summary. The best loss comes from the curve, which covers all parts of a resumed run.
    numbers = {name: _finite(value) for name, value in summary.items()}
    loss, bits = numbers.get("best_val_loss"), numbers.get("best_val_bits_per_byte")
    best = {"val_loss": loss, "bytes_per_token": _bytes_per_token(loss, bits)}
    totals = {"step" if name == "steps" else name: numbers.get(name) for name in _TOTALS}
    found: dict[str, Any] = {name: value for part in (best, curve, totals) for name, value in part.items() if value}
    return replace(point, status=status, reason="; ".join(filter(None, reasons)), **found)


def read_yaml(file: Path, kind: type[T]) -> T:
    """Read a YAML file into dicts, lists and strings.

    Args:
        kind: expected type of the content; an empty one is returned, with a warning, for a damaged file.
    """
    import yaml  # a dependency of Hydra

    try:
        text, depth = file.read_text(encoding="utf-8"), 0
        for event in yaml.parse(text, yaml.CBaseLoader):  # aliases can expand exponentially, nesting exhaust the stack
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_YAML_DEPTH or isinstance(event, yaml.AliasEvent):
                raise ValueError("it has aliases or is nested too deeply")
        if isinstance(content := yaml.load(text, yaml.CBaseLoader) or kind(), kind):
            return content
        raise ValueError(f"it must be a {kind.__name__}")
    except FileNotFoundError:
        return kind()
    except (OSError, ValueError, yaml.YAMLError) as error:
        warn(f"{file} is not readable ({error}); it is left out")
        return kind()


def _planned(folder: Path, entry: dict[str, Any]) -> Point:
    name = entry["folder"]
    if Path(name).name != name or len(name) > 255:
        raise ValueError("a folder is not a file name")
    overrides = {key: str(value) for key, value in entry["overrides"].items()}
    status, reason, identity = (str(entry[field]) for field in ("status", "reason", "identity"))
    params, max_steps = _finite(entry["params"]), _finite(entry["max_steps"])
    return Point(folder / name, overrides, status, reason, identity, params, max_steps)


def _measurements(columns: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, Any]:
    """Compute the fields of a point from the columns of `metrics.csv`."""
    last = {name: column[-1][1] for name, column in columns.items()}
    losses = [(step, loss) for step, loss in columns.get("val_loss", ()) if isfinite(loss)]
    bits = dict(columns.get("val_bits_per_byte", ()))
    step = max((column[-1][0] for column in columns.values()), default=0)
    per_step = last["tokens"] / columns["tokens"][-1][0] if "tokens" in last else 0.0
    speed, flops = last.get("tokens_per_second"), last.get("flops_per_second")
    return {
        "step": step,
        "tokens": round(step * per_step),
        "flops": _finite(flops / speed * step * per_step) if flops and speed else None,
        "val_loss": min((loss for _, loss in losses), default=None),
        "bytes_per_token": next(filter(None, (_bytes_per_token(loss, bits.get(at)) for at, loss in losses)), None),
        "tokens_per_second": speed,
        "seconds": last.get("seconds", 0.0),
        "curve": [(round(at * per_step), loss) for at, loss in losses],
    }


def _bytes_per_token(nats_per_token: float | None, bits_per_byte: float | None) -> float | None:
    length = nats_per_token and bits_per_byte and _finite(nats_per_token / log(2) / bits_per_byte)
    return length if length and length > 0 else None


def _finite(value: Any) -> Any:
    """Return the value if it is a finite number, else None."""
    return value if is_number(value) and abs(value) < MAX_NUMBER else None


def _read_overrides(file: Path) -> dict[str, str]:
    overrides = [override.partition("=") for override in read_yaml(file, list) if isinstance(override, str)]
    return {key: value for key, _, value in overrides if key.lstrip("+~").partition(".")[0] not in IRRELEVANT_GROUPS}
