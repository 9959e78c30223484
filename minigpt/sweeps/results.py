"""The points of a sweep: `sweep.json`, which lists them, and the state of their runs.

Status and measurements are read from the files that each run writes into its own folder, so a
sweep is read in the same way while it runs, after it ended and after it crashed.
"""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp, expm1, isfinite, log, sqrt
from pathlib import Path
from statistics import median
from typing import Any

import yaml  # a dependency of Hydra

from minigpt.runs.code_version import STAMP, code_label
from minigpt.runs.metrics_csv import read_metrics
from minigpt.runs.run_config import OUTSIDE
from minigpt.runs.run_dir import METRICS, PLAN, SUMMARY, is_locked, read_summary
from minigpt.sweeps.point_settings import MAX_NAME_BYTES, by_name, is_relevant, relevant_settings
from minigpt.utils.checks import is_number
from minigpt.utils.errors import UserError
from minigpt.utils.files import read_json, sha256_json, write_json
from minigpt.utils.terminal import warn

COMPLETED, PAUSED, RUNNING, WAITING = "completed", "paused", "running", "waiting"
CRASHED, SKIPPED = "crashed", "skipped"
NATS, BITS = "nats per token", "bits per byte"  # units of a loss
LOSS_NAMES = {NATS: "best_val_loss", BITS: "best_val_bits_per_byte"}
CODE = ("code", "commit", "dirty", "code_sha256")  # what `summary.json` holds of it
DIVERGED = 1.2  # times the best validation loss, of the run or of the sweep
TOTALS = (
    "params",
    "steps",
    "tokens",
    "flops",
    "seconds",
    "tokens_per_second",
    *LOSS_NAMES.values(),
)
Values = dict[str, Any]  # of a file in JSON or YAML


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its settings, its status and its measurements.

    Args:
        status: completed, paused (at `pause_at`), running, waiting, failed, interrupted, crashed
            (the process ended without a summary) or skipped (the configuration is impossible).
        settings: the whole configuration by dotted key, which identifies the point:
            `relevant_settings`.
        totals: the `TOTALS` of `summary.json`, or, while it is missing, those of the training so
            far.
        curve: (tokens, validation loss in nats per token).
        diverged: the training loss rose and stayed there: `has_diverged`.
        provenance_checksum: of the text and of the weights that the run started from.
        code: the version of the code, as in `summary.json`; empty if it is unknown.
        validated: the text that the losses are of, as in `Corpus.validated_part`.
        validated_in_part: whether `eval_batches` limited the validation.
        bits: validation loss in bits per byte, by optimizer step.
        rungs: optimizer steps at which pruning may pause the run.

    Properties:
        written: the swept settings by key, as they were written.
        row: what the point shares with those that differ from it in their seed alone.
        identity: what no other point has.
        unrecorded: settings whose values were in the environment; only runs of older versions have
            some.
        pending: whether the run is still to be completed.
        status_text: the status, with the step at which a run paused.

    Methods:
        value: a setting of the configuration, or, for a group, the choice that was given; of
            `code` with the checksum of what it named.
        text: a setting as it was written, or its value; None for a group that was not given.
        loss: best validation loss in `NATS` or `BITS`; None if it is unknown.
    """

    folder: Path
    overrides: Mapping[str, str]  # values of the swept settings, as they were written
    status: str = WAITING
    reason: str = ""
    settings: Values = field(default_factory=dict)
    planned_flops: float = 0.0  # of the whole training
    totals: Mapping[str, float] = field(default_factory=dict)
    curve: Sequence[tuple[int, float]] = ()
    bits: Mapping[int, float] = field(default_factory=dict)
    rungs: Sequence[int] = ()
    diverged: bool = False
    provenance_checksum: str = ""
    validated: str = ""
    validated_in_part: bool = False
    code: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def written(self) -> dict[str, str]:
        return {name.lstrip("+"): value for name, value in self.overrides.items()}

    @property
    def seed(self) -> str:
        return str(self.settings.get("seed", self.written.get("seed", "")))

    @property
    def identity(self) -> str:
        return f"{self.row} {self.seed}"

    @cached_property
    def row(self) -> str:
        own = self.settings or self.written
        settings = {k: v for k, v in own.items() if k not in ("seed", "code")}
        settings["code"] = self.value("code")
        # A reference is what it refers to; a reference to the seed stays.
        referred = {f"${{{name}}}": value for name, value in settings.items()}
        values = sorted((name, referred.get(str(value), value)) for name, value in settings.items())
        return repr([self.folder, *values] if self.unrecorded else values)

    @cached_property
    def unrecorded(self) -> list[str]:
        return [name for name, value in self.settings.items() if OUTSIDE.match(f"{name}={value}")]

    @property
    def _named_code(self) -> object:
        return self.settings.get("code", self.written.get("code"))

    def value(self, name: str) -> object:
        if name == "code":
            return self._named_code, self.code.get("code_sha256")
        return self.settings.get(name, self.written.get(name))

    def text(self, name: str) -> str | None:
        if name == "code":
            return str(self._named_code or code_label(self.code))
        written = self.written.get(name)
        if name not in self.settings or (written is not None and "${" not in written):
            return written
        value = self.settings[name]
        return value if isinstance(value, str) else json.dumps(value, default=str)

    @property
    def pending(self) -> bool:
        return self.status not in (COMPLETED, SKIPPED)

    @property
    def status_text(self) -> str:
        at_step = f" at step {self.totals.get('steps', 0):.0f}"
        return self.status + (at_step if self.status == PAUSED else "")

    def loss(self, unit: str) -> float | None:
        return self.totals.get(LOSS_NAMES[unit])


def read_sweep(folder: Path) -> list[Point]:
    """Read the points of a sweep, with all settings.

    Without a `sweep.json`, every run below the folder is a point.

    Raises:
        UserError: the folder does not exist or holds no runs.
    """
    advice = "give the folder of a sweep, such as runs/sweeps/latest"
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; {advice}")
    folder = folder.resolve()
    if (folder / PLAN).exists():
        fixed, planned = read_plan(folder)
        shared = dict(override.partition("=")[::2] for override in fixed)
        points = [replace(point, overrides={**shared, **point.overrides}) for point in planned]
    else:
        points = [
            Point(
                file.parents[1],
                _read_or_warn(_read_overrides, file),
                settings=_read_or_warn(_read_settings, file.with_name("config.yaml")),
            )
            for file in sorted(folder.rglob(".hydra/overrides.yaml"))
        ]
    if not points:
        raise UserError(f"{folder} holds no runs; {advice}")
    for point in points:
        if point.unrecorded:
            warn(
                f"{point.folder} holds no value of {', '.join(point.unrecorded)}, "
                "so it is a row of its own"
            )
    return [refresh(point) for point in points]


def read_plan(folder: Path) -> tuple[list[str], list[Point]]:
    """Read `sweep.json`: the overrides that all points share, and the points.

    Raises:
        UserError: the file is damaged.
    """
    try:
        plan = read_json(folder / PLAN)
        points = [_planned(folder, plan["settings"], entry) for entry in plan["points"]]
        return [*map(str, plan["fixed"])], points
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise UserError(
            f"{folder / PLAN} is damaged ({error}); remove it to read the runs one by one"
        ) from error


def read_looks(folder: Path) -> int:
    """Return how often a sweep may look at its losses before it ends; 1 if it does not say so."""
    file = folder / PLAN
    plan = _read_or_warn(_read_numbers, file) if file.exists() else {}
    return max(1, plan.get("looks", 1))


def write_plan(
    folder: Path,
    fixed: Sequence[str],
    points: Sequence[Point],
    looks: int = 1,
    answer: Sequence[Mapping[str, object]] | None = None,
) -> None:
    """Write `sweep.json`: the overrides and settings that all points share, and each point.

    Args:
        looks: how often the sweep may look at its losses before it ends.
        answer: what the sweep shows: `verdicts`; None until it reports.
    """
    composed = [point.settings for point in points if point.settings]
    shared = composed[0] if composed else {}
    for settings in composed[1:]:
        shared = {k: v for k, v in shared.items() if repr(settings.get(k, ...)) == repr(v)}
    entries = []
    for point in points:
        own = {k: v for k, v in point.settings.items() if k not in shared}
        entries.append(
            {
                "folder": point.folder.name,
                "overrides": dict(point.overrides),
                "settings": own if point.settings else None,
                "code": dict(point.code),
                "status": point.status,
                "reason": point.reason,
                **{name: point.totals.get(name) for name in TOTALS},
            }
        )
    plan = {"fixed": list(fixed), "looks": looks, "answer": answer}
    write_json(folder / PLAN, {**plan, "settings": shared, "points": entries})


def refresh(point: Point) -> Point:
    """Return the point with the present status and measurements of its run folder."""
    if point.status == SKIPPED:
        return point
    folder = point.folder
    summary = _read_or_warn(lambda file: read_summary(file.parent), folder / SUMMARY)
    status = str(summary.get("status") or (CRASHED if (folder / ".hydra").exists() else WAITING))
    if status != COMPLETED and is_locked(folder):
        status = RUNNING
    measured = _read_or_warn(_measure, folder / METRICS)
    corpus = summary.get("corpus_sha256")
    weights = (summary.get("init_from") or {}).get("sha256") if corpus else None
    # A new point, because nothing that an earlier attempt measured holds.
    return Point(
        folder,
        point.overrides,
        status,
        str(summary.get("reason") or ""),
        point.settings,
        point.planned_flops,
        {
            **_finite({"params": point.totals.get("params")}),
            **measured.pop("totals", {}),
            **_finite(summary),
        },
        rungs=point.rungs,
        provenance_checksum=provenance_checksum(corpus, weights, summary.get("resumed_from")),
        validated=str(summary.get("validated") or ""),
        validated_in_part=summary.get("eval_batches") is not None,
        code=_code_of(point, summary),
        **measured,
    )


def _code_of(point: Point, summary: Values) -> Values:
    # As the run recorded it at its end, or at its beginning; until it has begun, as planned. Runs
    # of older versions recorded no checksum.
    began = point.folder / ".hydra" / STAMP
    recorded: Mapping[str, Any] = summary
    if "commit" not in summary:
        recorded = _read_or_warn(read_json, began) if began.exists() else point.code
    known = "code_sha256" in recorded
    return {name: recorded[name] for name in CODE if known and name in recorded}


def provenance_checksum(
    corpus: str | None, weights: Mapping[str, str] | None, resumed_from: str | None = None
) -> str:
    """Return a checksum of what a run was trained on and from; empty if it is unknown.

    Args:
        corpus: checksum of the text.
        weights: checksums of the files of `init_from`.
        resumed_from: the checkpoint of `resume`.
    """
    return sha256_json([corpus, weights, resumed_from]) if corpus else ""


def _measure(file: Path) -> Values:
    # The fields of a `Point` that are in `metrics.csv`.
    columns = read_metrics(file) if file.exists() else {}
    last = {name: column[-1][1] for name, column in columns.items()}
    # The tokens of all steps, at as many per step as in the last row that has them.
    steps = max((column[-1][0] for column in columns.values()), default=0)
    step, tokens = columns.get("tokens", [(1, 0.0)])[-1]
    total_tokens = round(steps * tokens / step)
    # The best validation, in both units.
    losses = [(at, loss) for at, loss in columns.get("val_loss", ()) if isfinite(loss)]
    bits = {at: loss for at, loss in columns.get("val_bits_per_byte", ()) if isfinite(loss)}
    best_step, best = min(losses, key=lambda at_loss: at_loss[1], default=(0, None))
    totals: Values = {
        **last,  # has seconds and tokens/s
        LOSS_NAMES[NATS]: best,
        LOSS_NAMES[BITS]: bits.get(best_step),
        "steps": steps,
        "tokens": total_tokens,
    }
    if last.get("flops_per_second") and last.get("tokens_per_second"):
        totals["flops"] = last["flops_per_second"] / last["tokens_per_second"] * total_tokens
    # A NaN, which stays to the end of a run, becomes a large loss: min(1e9, nan) is 1e9.
    trained = [max(1e-3, min(1e9, loss)) for _, loss in columns.get("train_loss", ())]
    validated = [min(1e9, loss) for _, loss in columns.get("val_loss", ())]
    return {
        "totals": _finite(totals),
        "curve": [(round(at * tokens / step), loss) for at, loss in losses],
        "bits": bits,
        "diverged": has_diverged(trained, validated),
    }


def has_diverged(trained: Sequence[float], validated: Sequence[float]) -> bool:
    """Return whether the losses of a run rose by 20 % of its best validation loss and stayed there.

    A row of the training loss has the noise of its batch: 10 % for one window of 32 tokens. So the
    rise must be one of the validation loss too, which has none, or one of medians over a twentieth
    of the rows, by ten times their noise. A validation loss that rises while the training loss
    falls is overfitting.
    """
    # Both losses rose: the last tenth of the training loss, and the last validation loss, if any.
    best = min(validated, default=0.0)
    tail = trained[-max(1, len(trained) // 10) :] or [0.0]
    if min([median(tail), *validated[-1:]]) > DIVERGED * best > 0:
        return True
    # The levels of the training loss: medians over windows, counted from the end, the last first.
    # In logarithms the noise of a loss of 500 is that of a loss of 5.
    n = max(5, len(trained) // 20)
    logs = [log(loss) for loss in trained]
    # If there is no other than the last, the rise is 0.
    levels = [median(logs[end - n : end]) for end in range(len(logs), n - 1, -n)] or [0.0]
    lowest = exp(min(levels))
    # The noise of a level, from that between two rows: a rise has to be ten times as large.
    changes = [abs(logs[i] - logs[i - 1]) for i in range(1, len(logs))] or [0.0]
    noise = median(changes) / sqrt(n)
    least_rise = max((DIVERGED - 1) * (best or lowest), lowest * expm1(10 * noise))
    return min([exp(levels[0]), *validated[-1:]]) > lowest + least_rise


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: values[name]
        for name in TOTALS
        if is_number(values.get(name)) and abs(values[name]) < 1e300
    }


def _planned(folder: Path, shared: Values, entry: Values) -> Point:
    name = entry["folder"]
    if Path(name).name != name:
        raise ValueError("a folder is not a file name")
    # Older versions chose names that are too long for a file system.
    if len(name.encode()) > MAX_NAME_BYTES:
        name = sha256_json(name)
    point = Point(
        folder / name,
        {key: str(value) for key, value in entry["overrides"].items()},
        str(entry["status"]),
        str(entry["reason"]),
        totals=_finite({"params": entry["params"]}),
        code=entry.get("code") or {},
    )
    # A point without settings did not compose.
    own = point.written if entry["settings"] is None else entry["settings"]
    return replace(point, settings=relevant_settings({**shared, **own}))


def _read_numbers(file: Path) -> Values:
    return {"looks": int(read_json(file).get("looks", 1))}


def _read_settings(file: Path) -> Values:
    if not file.exists():
        return {}
    text = file.read_text(encoding="utf-8")
    # The loader without C code raises an error where nesting would overflow the stack of the other.
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
        raise ValueError("it has aliases, which can expand without end")
    return relevant_settings(yaml.load(text, yaml.SafeLoader))


def _read_overrides(file: Path) -> dict[str, str]:
    overrides = yaml.load(file.read_text(encoding="utf-8"), yaml.BaseLoader) or []
    if not isinstance(overrides, list):
        raise ValueError("it must be a list")
    return {
        name: text.partition("=")[2]
        for name, text in by_name(list(filter(is_relevant, overrides))).items()
    }


def _read_or_warn(read: Callable[[Path], Values], file: Path) -> Values:
    try:
        return read(file)
    except (
        OSError,
        ValueError,
        ArithmeticError,
        AttributeError,
        TypeError,
        RecursionError,
        csv.Error,
        yaml.YAMLError,
    ) as error:
        warn(f"{file} is not readable ({error}); it is left out")
        return {}
