"""The points of a sweep: `sweep.json`, which lists them, and the status and measurements of their runs.

Both are read from the files that each run writes into its own folder, so a sweep is read in the same way while it
runs, after it ended and after it crashed.
"""

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml  # a dependency of Hydra

from minigpt.runs.run_dir import METRICS, PLAN, SUMMARY, is_locked, read_metrics, read_summary
from minigpt.utils.checks import is_number
from minigpt.utils.errors import UserError
from minigpt.utils.files import read_json, write_json
from minigpt.utils.terminal import warn

COMPLETED, PAUSED, RUNNING, WAITING = "completed", "paused", "running", "waiting"
CRASHED, SKIPPED = "crashed", "skipped"
NATS, BITS = "nats per token", "bits per byte"  # units of a loss
LOSS_NAMES = {NATS: "best_val_loss", BITS: "best_val_bits_per_byte"}
_DICT = re.compile(r"(?<!\$)\{")  # in an override
TOTALS = ("params", "steps", "tokens", "flops", "seconds", "tokens_per_second", *LOSS_NAMES.values())


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its settings, its status and its measurements.

    Args:
        status: completed, paused (at `pause_at`), running, waiting, failed, interrupted, crashed (the process ended
            without a summary) or skipped (the configuration is impossible).
        totals: the `TOTALS` of `summary.json`, or, while it is missing, those of the training so far.
        curve: (tokens, validation loss in nats per token).
        default_seed: of the run, where it is not swept.
        corpus: checksum of the text.
        validated: the part of the validation split that the losses are of.
        bits: validation loss in bits per byte, by optimizer step.
        rungs: optimizer steps at which pruning may pause the run.
    """

    folder: Path
    overrides: Mapping[str, str]  # values of the swept settings, as they were written
    status: str = WAITING
    reason: str = ""
    identity: str = ""  # hash of the configuration
    planned_flops: float = 0.0  # of the whole training
    devices: object = 1  # `trainer.devices`
    totals: Mapping[str, float] = field(default_factory=dict)
    curve: Sequence[tuple[int, float]] = ()
    bits: Mapping[int, float] = field(default_factory=dict)
    rungs: Sequence[int] = ()
    default_seed: str = ""
    corpus: str = ""
    validated: str = ""

    @property
    def seed(self) -> str:
        """The seed of the run."""
        return self.overrides.get("seed", self.default_seed)

    @property
    def pending(self) -> bool:
        """Whether the run is still to be completed."""
        return self.status not in (COMPLETED, SKIPPED)

    @property
    def status_text(self) -> str:
        """The status, with the step at which a run paused."""
        return f"paused at step {self.totals.get('steps', 0):.0f}" if self.status == PAUSED else self.status

    def loss(self, unit: str) -> float | None:
        """Return the best validation loss in `NATS` or `BITS`; None if it is unknown."""
        return self.totals.get(LOSS_NAMES[unit])


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
        points = [Point(file.parents[1], _read_or_warn(_read_overrides, file, {})) for file in files]
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
        {"folder": point.folder.name, "overrides": dict(point.overrides)}
        | {name: getattr(point, name) for name in ("status", "reason", "identity")}
        | {name: point.totals.get(name) for name in TOTALS}
        for point in points
    ]
    write_json(folder / PLAN, {"fixed": list(fixed), "points": entries})


def by_name(overrides: Sequence[str]) -> dict[str, str]:
    """Map names to overrides, in order: the key, and `key#2` where a key acts again.

    Of two values the last acts. Hydra merges dicts, and a group takes a choice and dicts, so all of these stay.
    """
    acting: list[str] = []
    for override in overrides:
        key = override.partition("=")[0]
        if re.match(r"(\+\+)?[^+~]", key) and not _DICT.search(override):
            replaced = (key, key.removeprefix("++"))
            acting = [old for old in acting if _DICT.search(old) or old.partition("=")[0] not in replaced]
        acting.append(override)
    keys = [override.partition("=")[0] for override in acting]
    names = [key if (n := keys[: i + 1].count(key)) == 1 else f"{key}#{n}" for i, key in enumerate(keys)]
    return dict(zip(names, acting, strict=True))


def is_relevant(override: str) -> bool:
    """Return whether an override, or a group of settings, changes what a run computes."""
    return re.split("[./@=]", override.lstrip("+~"))[0] not in ("resume", "pause_at", "logger")


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Map dotted settings to their last part where that is unique."""
    leaves = [name.rpartition(".")[2] for name in names]
    return {name: leaf if leaves.count(leaf) == 1 else name for name, leaf in zip(names, leaves, strict=True)}


def refresh(point: Point) -> Point:
    """Return the point with the present status and measurements of its run folder."""
    if point.status == SKIPPED:
        return point
    folder = point.folder
    summary = _read_or_warn(lambda file: read_summary(file.parent), folder / SUMMARY, {})
    status = str(summary.get("status") or (CRASHED if (folder / ".hydra").exists() else WAITING))
    if status != COMPLETED and is_locked(folder):
        status = RUNNING
    last, curve, bits = _read_or_warn(_measure, folder / METRICS, ({}, [], {}))
    totals = {**point.totals, **last, **_finite(summary)}
    names = ("reason", "seed", "corpus_sha256", "validated")
    reason, seed, corpus, validated = (str(summary.get(name) or "") for name in names)
    if not validated and (n := summary.get("eval_batches")):
        validated = f"eval_batches={n}"
    measured = {"totals": totals, "curve": curve, "bits": bits, "default_seed": seed, "corpus": corpus}
    return replace(point, status=status, reason=reason, validated=validated or point.validated, **measured)


def _measure(file: Path) -> tuple[dict[str, float], list[tuple[int, float]], dict[int, float]]:
    """Return the totals and the validation curves that `metrics.csv` holds, also while its run has no summary."""
    columns = read_metrics(file) if file.exists() else {}
    last = {name: column[-1][1] for name, column in columns.items()}
    steps = max((column[-1][0] for column in columns.values()), default=0)
    step, tokens = columns.get("tokens", [(1, 0.0)])[-1]
    losses = [(at, loss) for at, loss in columns.get("val_loss", ()) if isfinite(loss)]
    best_step, best = min(losses, key=itemgetter(1), default=(0, None))
    bits = {at: loss for at, loss in columns.get("val_bits_per_byte", ()) if isfinite(loss)}
    totals: dict[str, Any] = {**last, LOSS_NAMES[NATS]: best}  # last has seconds and tokens/s
    totals |= {LOSS_NAMES[BITS]: bits.get(best_step), "steps": steps, "tokens": round(steps * tokens / step)}
    if last.get("flops_per_second") and last.get("tokens_per_second"):
        totals["flops"] = last["flops_per_second"] / last["tokens_per_second"] * totals["tokens"]
    return _finite(totals), [(round(at * tokens / step), loss) for at, loss in losses], bits


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Return those of the `TOTALS` that are finite numbers."""
    found: dict[str, Any] = {name: values.get(name) for name in TOTALS}
    return {name: value for name, value in found.items() if is_number(value) and abs(value) < 1e300}


def _planned(folder: Path, entry: dict[str, Any]) -> Point:
    name = entry["folder"]
    if Path(name).name != name or len(name) > 255:
        raise ValueError("a folder is not a file name")
    overrides = {key: str(value) for key, value in entry["overrides"].items()}
    status, reason, identity = (str(entry[name]) for name in ("status", "reason", "identity"))
    return Point(folder / name, overrides, status, reason, identity, totals=_finite({"params": entry["params"]}))


def _read_overrides(file: Path) -> dict[str, str]:
    # The loader without C code raises an error where nesting would overflow the stack of the other.
    overrides = yaml.load(file.read_text(encoding="utf-8"), yaml.BaseLoader) or []
    if not isinstance(overrides, list):
        raise ValueError("it must be a list")
    named = by_name([text for text in overrides if is_relevant(text)])
    return {name: text.partition("=")[2] for name, text in named.items()}


def _read_or_warn(read: Callable[[Path], Any], file: Path, default: Any) -> Any:
    """Read a file of a run; warn and return a default if it is damaged."""
    try:
        return read(file)
    except (OSError, ValueError, ArithmeticError, AttributeError, RecursionError, csv.Error, yaml.YAMLError) as error:
        warn(f"{file} is not readable ({error}); it is left out")
        return default
