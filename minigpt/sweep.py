"""A sweep folder: what its points are, what came of each so far, and the table of it.

The folder is all there is to know: what a running sweep shows, what its end reports and what a later report says
is read from the files that every run leaves in its own folder, wherever it ran.
"""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from minigpt.errors import UserError, clean, warn
from minigpt.files import read_json, whole
from minigpt.run import METRICS, PLAN, SUMMARY, is_taken, read_metrics, told

TABLE, PICTURE = "sweep.csv", "sweep.png"
COMPLETED, RUNNING, WAITING, BROKEN_OFF, SKIPPED = "completed", "running", "waiting", "broken off", "skipped"
SEED = "seed"
_BRACKETS = 4096  # of a file of YAML: the time that it takes grows as their square where they lie in each other


@dataclass(frozen=True)
class Point:
    """One run of a sweep: what distinguishes it, and what came of it.

    Args:
        overrides: by setting, as they were written.
        status: completed, running, waiting, failed, interrupted, broken off (its process ended without a word) or
            skipped (it cannot be). reason: of what went wrong.
        flops: floating-point operations of its training so far.
        val_loss: the best so far, nats per token.
        curve: (tokens, validation loss).
    """

    folder: Path
    overrides: Mapping[str, str]
    status: str = WAITING
    reason: str = ""
    identity: str = ""
    params: int | None = None
    max_steps: int | None = None
    step: int = 0
    tokens: int = 0
    flops: float | None = None
    val_loss: float | None = None
    tokens_per_second: float | None = None
    seconds: float = 0.0
    seconds_expected: float | None = None  # on one thread of a CPU
    curve: Sequence[tuple[int, float]] = field(default=())


@dataclass(frozen=True)
class Row:
    """The points that differ in their seed alone: a line of the table."""

    overrides: Mapping[str, str]  # without the seed
    points: Sequence[Point]

    @property
    def losses(self) -> list[float]:
        return [point.val_loss for point in self.points if point.val_loss is not None]

    @property
    def val_loss(self) -> float | None:
        """The mean of the best losses over seeds."""
        return mean(self.losses) if self.losses else None

    @property
    def spread(self) -> float | None:
        """Their standard deviation; None for one seed."""
        return stdev(self.losses) if len(self.losses) > 1 else None

    @property
    def status(self) -> str:
        kinds = sorted({point.status for point in self.points})
        if len(kinds) == 1:
            return kinds[0]
        return ", ".join(f"{sum(point.status == kind for point in self.points)} {kind}" for kind in kinds)

    @property
    def reason(self) -> str:
        return "; ".join(dict.fromkeys(point.reason for point in self.points if point.reason))

    def over_seeds(self, name: str) -> float | None:
        """The mean of a figure of the points that have it."""
        known = [value for point in self.points if (value := getattr(point, name))]
        return mean(known) if known else None


def read_sweep(folder: Path) -> list[Point]:
    """The points of a sweep folder, whatever state it is in.

    Of a folder that no plan lies in, every run below it is a point.

    Raises:
        UserError: there is no such folder, or no run in it.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder of a sweep, such as runs/sweeps/latest")
    if (folder / PLAN).exists():
        points = read_plan(folder)["points"]
    else:
        points = [
            Point(folder=file.parents[1], overrides=_overrides_of(file))
            for file in sorted(folder.rglob(".hydra/overrides.yaml"))
        ]
    if not points:
        raise UserError(f"{folder} holds no runs; give the folder of a sweep, such as runs/sweeps/latest")
    return [look(point) for point in points]


def read_plan(folder: Path) -> dict[str, Any]:
    """What `write_plan` wrote, its points as `Point`.

    Raises:
        UserError: it is not a plan of this version.
    """
    try:
        plan = read_json(folder / PLAN)
        points = [
            Point(
                folder=folder / _below(folder, values["folder"]),
                overrides={key: str(value) for key, value in values["overrides"].items()},
                status=clean(str(values["status"])),
                reason=clean(str(values["reason"])),
                identity=str(values["identity"]),
                params=_finite(values["params"]),
                max_steps=_finite(values["max_steps"]),
            )
            for values in plan["points"]
        ]
        return {**plan, "fixed": [str(override) for override in plan["fixed"]], "points": points}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"{folder / PLAN} is damaged ({error}); remove it, and its runs are read one by one") from error


def _below(folder: Path, name: str) -> str:
    """The name, if it can be that of something in a folder.

    Raises:
        ValueError, OSError: it cannot.
    """
    (folder / name).exists()
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{name} is not in it")
    return name


def write_plan(folder: Path, fixed: Sequence[str], points: Sequence[Point]) -> None:
    """Write `sweep.json`: what all points share, and what is known of each."""
    plan = {
        "fixed": list(fixed),
        "points": [
            {
                "folder": point.folder.relative_to(folder).as_posix(),
                "overrides": dict(point.overrides),
                "status": point.status,
                "reason": point.reason,
                "val_loss": point.val_loss,
                "params": point.params,
                "flops": point.flops,
                "step": point.step,
                "max_steps": point.max_steps,
                "tokens": point.tokens,
                "tokens_per_second": point.tokens_per_second,
                "seconds": point.seconds,
                "identity": point.identity,
            }
            for point in points
        ],
    }
    with whole(folder / PLAN) as partial:
        partial.write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")


def look(point: Point) -> Point:
    """The point as its folder tells it now."""
    if point.status == SKIPPED:
        return point
    summary: dict[str, Any] = {}
    try:
        summary = told(point.folder)
    except (OSError, ValueError) as error:
        warn(f"{point.folder / SUMMARY} is not readable ({error}); the run counts as broken off")
    status = str(summary.get("status") or (BROKEN_OFF if (point.folder / ".hydra").exists() else WAITING))
    if status != COMPLETED and is_taken(point.folder):
        status = RUNNING
    point = replace(point, status=clean(status), reason=clean(str(summary.get("reason") or "")))
    try:
        point = _measured(point, read_metrics(point.folder / METRICS))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, ArithmeticError, csv.Error) as error:
        warn(f"{point.folder / METRICS} is not readable ({error}); its curve is left out")
        point = replace(point, reason="; ".join(filter(None, (point.reason, f"{METRICS} is not readable"))))
    # One of the two files may be damaged, or know less.
    losses = [loss for loss in (_finite(summary.get("best_val_loss")), point.val_loss) if loss is not None]
    return replace(
        point,
        params=_finite(summary.get("params")) or point.params,
        val_loss=min(losses, default=None),
        step=_finite(summary.get("steps")) or point.step,
        tokens=_finite(summary.get("tokens")) or point.tokens,
        flops=_finite(summary.get("flops")) or point.flops,
        tokens_per_second=_finite(summary.get("tokens_per_second")) or point.tokens_per_second,
        seconds=_finite(summary.get("seconds")) or point.seconds,
    )


def _finite(value: Any) -> Any:
    """The value if it is a finite number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number and isfinite(value) else None


def _measured(point: Point, columns: Mapping[str, Sequence[tuple[int, float]]]) -> Point:
    """The point with what its `metrics.csv` tells."""
    losses = [(at, loss) for at, loss in columns.get("val_loss", ()) if isfinite(loss)]
    tokens = columns.get("tokens", ())
    step = max((column[-1][0] for column in columns.values()), default=0)
    per_step = tokens[-1][1] / tokens[-1][0] if tokens else 0.0
    flops = None
    if (speeds := columns.get("tokens_per_second")) and (operations := columns.get("flops_per_second")):
        flops = operations[-1][1] / speeds[-1][1] * step * per_step
    return replace(
        point,
        step=step,
        tokens=round(step * per_step),
        flops=_finite(flops),
        val_loss=min((loss for _, loss in losses), default=None),
        tokens_per_second=speeds[-1][1] if speeds else None,
        seconds=columns["seconds"][-1][1] if "seconds" in columns else 0.0,
        curve=[(round(at * per_step), loss) for at, loss in losses],
    )


def axes(points: Iterable[Point]) -> list[str]:
    """The settings in which points differ, in the order in which they were given; of equal points, all."""
    values: dict[str, set[str | None]] = {}
    points = list(points)
    for point in points:
        for key in point.overrides:
            values.setdefault(key, set())
    for key, seen in values.items():
        seen |= {point.overrides.get(key) for point in points}
    return [key for key, seen in values.items() if len(seen) > 1] or list(values)


def ranked(points: Sequence[Point]) -> list[Row]:
    """The points by their settings without the seed, the lowest mean loss first, those without one last."""
    names = [name for name in axes(points) if name != SEED]
    groups: dict[tuple[str | None, ...], list[Point]] = {}
    for point in points:
        groups.setdefault(tuple(point.overrides.get(name) for name in names), []).append(point)
    rows = [
        Row({name: value for name, value in zip(names, key, strict=True) if value is not None}, group)
        for key, group in groups.items()
    ]
    return sorted(rows, key=lambda row: inf if row.val_loss is None else row.val_loss)


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Settings by their last part, where that is enough to tell them apart and from the columns of figures."""
    leaves = [name.rpartition(".")[2] for name in names]
    taken = {"rank", "best val loss", "params", "tokens/s", "seconds", "status", "folder"}
    return {
        name: leaf if leaf and leaves.count(leaf) == 1 and leaf not in taken else name
        for name, leaf in zip(names, leaves, strict=True)
    }


def name_of(row: Row, short: Mapping[str, str], without: str | None = None) -> str:
    """What a row is called: its overrides, or if it has none its folder."""
    values = [f"{short[name]}={value}" for name, value in row.overrides.items() if name != without]
    return ", ".join(values) or ("all" if without or len(row.points) > 1 else row.points[0].folder.name)


def as_number(text: str | None) -> float | None:
    """The number that an override sets, if it is one."""
    try:
        value = float(text) if text is not None else inf
    except ValueError:
        return None
    return value if isfinite(value) else None


def write_table(file: Path, points: Sequence[Point]) -> None:
    """Write `sweep.csv`: the ranked table."""
    rows = ranked(points)
    names = list(dict.fromkeys(name for row in rows for name in row.overrides))
    figures = ["val_loss", "spread", "seeds", "params", "flops", "tokens_per_second", "seconds"]
    # JSON can spell halves of characters, and a name of a file may be no text.
    with whole(file) as partial, open(partial, "w", newline="", encoding="utf-8", errors="backslashreplace") as opened:
        table = csv.writer(opened)
        table.writerow(["rank", *names, *figures, "status", "reason", "folder"])
        for rank, row in enumerate(rows, 1):
            table.writerow(
                [
                    rank if row.losses else "",
                    *(row.overrides.get(name, "") for name in names),
                    row.val_loss,
                    row.spread,
                    len(row.losses),
                    *(row.over_seeds(name) for name in ("params", "flops", "tokens_per_second", "seconds")),
                    row.status,
                    row.reason,
                    " ".join(str(point.folder) for point in row.points),
                ]
            )


def _overrides_of(file: Path) -> dict[str, str]:
    import yaml  # a dependency of Hydra

    try:
        text = file.read_text(encoding="utf-8")
        if text.count("[") + text.count("{") > _BRACKETS:
            raise ValueError("it has too many brackets")
        # Event by event: what builds lists in lists dies of deep ones.
        events = list(yaml.parse(text, yaml.CSafeLoader))
        overrides = [event.value for event in events if isinstance(event, yaml.ScalarEvent)]
        lists = sum(isinstance(event, yaml.SequenceStartEvent) for event in events)
        if lists > 1 or (overrides and not lists) or any(isinstance(event, yaml.MappingStartEvent) for event in events):
            raise ValueError("it is not a list of texts")
    except (OSError, ValueError, yaml.YAMLError) as error:
        warn(f"{file} is not readable ({error}); the run counts as one without overrides")
        overrides = []
    return {key: value for key, _, value in (override.partition("=") for override in overrides)}
