"""A sweep folder: what its points are, what came of each so far, and the table of it.

The folder is all there is to know: what a running sweep shows, what its end reports and what a later report says
is read from the files that every run leaves in its own folder, wherever it ran.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, log
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from minigpt.runs.run_dir import METRICS, PLAN, SUMMARY, is_locked, read_metrics, read_summary
from minigpt.utils.errors import UserError
from minigpt.utils.files import atomic_write, read_json
from minigpt.utils.terminal import sanitize_line, warn

TABLE, PICTURE = "sweep.csv", "sweep.png"
COMPLETED, RUNNING, WAITING, CRASHED, SKIPPED = "completed", "running", "waiting", "broken off", "skipped"
SEED = "seed"
NATS, BITS = "nats per token", "bits per byte"  # units of a loss
IRRELEVANT = ("resume", "logger")  # to what a run learns
# Settings of data that leave the validation text as it is.
_NOT_TEXT = ("folder", "shard_tokens", "processes", "batch_size", "eval_batch_size", "overfit_batches")
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
        bytes_per_token: of the validation split.
        curve: (tokens, validation loss in nats per token).
        config: the composed configuration, text by dotted name; empty where the folder has none.
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
    bytes_per_token: float | None = None
    tokens_per_second: float | None = None
    seconds: float = 0.0
    seconds_expected: float | None = None  # on one thread of a CPU
    curve: Sequence[tuple[int, float]] = field(default=())
    config: Mapping[str, str] = field(default_factory=dict)
    corpus_sha256: str = ""

    def scale(self, unit: str) -> float | None:
        """The factor from nats per token to a unit, `NATS` or `BITS`; None where it is not known."""
        return 1.0 if unit == NATS else self.bytes_per_token and 1 / log(2) / self.bytes_per_token

    def curve_in(self, unit: str) -> Sequence[tuple[int, float]]:
        """(tokens, validation loss in a unit)."""
        scale = self.scale(unit)
        return [(at, loss * scale) for at, loss in self.curve] if scale is not None else ()

    def loss(self, unit: str) -> float | None:
        """The best validation loss in a unit."""
        scale = self.scale(unit)
        return None if self.val_loss is None or scale is None else self.val_loss * scale


@dataclass(frozen=True)
class Row:
    """The points that differ in their seed alone: a line of the table.

    Args:
        overrides: without the seed.
        unit: of its losses, `NATS` or `BITS`.
    """

    overrides: Mapping[str, str]
    points: Sequence[Point]
    unit: str = NATS

    @property
    def losses(self) -> list[float]:
        return [loss for point in self.points if (loss := point.loss(self.unit)) is not None]

    @property
    def loss(self) -> float | None:
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
    return [replace(refresh(point), config=_leaves(point.folder / ".hydra/config.yaml")) for point in points]


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
                status=sanitize_line(str(values["status"])),
                reason=sanitize_line(str(values["reason"])),
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
                "val_bits_per_byte": point.loss(BITS),
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
    with atomic_write(folder / PLAN) as partial:
        partial.write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")


def refresh(point: Point) -> Point:
    """The point as its folder tells it now."""
    if point.status == SKIPPED:
        return point
    summary: dict[str, Any] = {}
    try:
        summary = read_summary(point.folder)
    except (OSError, ValueError) as error:
        warn(f"{point.folder / SUMMARY} is not readable ({error}); the run counts as broken off")
    status = str(summary.get("status") or (CRASHED if (point.folder / ".hydra").exists() else WAITING))
    if status != COMPLETED and is_locked(point.folder):
        status = RUNNING
    point = replace(point, status=sanitize_line(status), reason=sanitize_line(str(summary.get("reason") or "")))
    try:
        point = _measured(point, read_metrics(point.folder / METRICS))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, ArithmeticError, csv.Error) as error:
        warn(f"{point.folder / METRICS} is not readable ({error}); its curve is left out")
        point = replace(point, reason="; ".join(filter(None, (point.reason, f"{METRICS} is not readable"))))
    # One of the two files may be damaged, or know less.
    best = _finite(summary.get("best_val_loss"))
    losses = [loss for loss in (best, point.val_loss) if loss is not None]
    told_bytes = _bytes_per_token(best, _finite(summary.get("best_val_bits_per_byte")))
    return replace(
        point,
        params=_finite(summary.get("params")) or point.params,
        val_loss=min(losses, default=None),
        bytes_per_token=point.bytes_per_token or told_bytes,
        corpus_sha256=str(summary.get("corpus_sha256") or ""),
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


def _bytes_per_token(nats_per_token: float | None, bits_per_byte: float | None) -> float | None:
    """The bytes per token of a validation split, from one loss in both units."""
    known = nats_per_token and bits_per_byte and _finite(nats_per_token / log(2) / bits_per_byte)
    return known if known and known > 0 else None


def _measured(point: Point, columns: Mapping[str, Sequence[tuple[int, float]]]) -> Point:
    """The point with what its `metrics.csv` tells."""
    losses = [(at, loss) for at, loss in columns.get("val_loss", ()) if isfinite(loss)]
    bits = dict(columns.get("val_bits_per_byte", ()))
    scales = (_bytes_per_token(loss, bits.get(at)) for at, loss in sorted(losses, key=lambda row: row[1]))
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
        bytes_per_token=next(filter(None, scales), None),
        tokens_per_second=speeds[-1][1] if speeds else None,
        seconds=columns["seconds"][-1][1] if "seconds" in columns else 0.0,
        curve=[(round(at * per_step), loss) for at, loss in losses],
    )


def axes(points: Iterable[Point]) -> list[str]:
    """The settings in which points differ, in the order in which they were given; of equal points, all."""
    points = list(points)
    return _differing(points) or list(dict.fromkeys(key for point in points for key in point.overrides))


def _differing(points: Sequence[Point]) -> list[str]:
    names = dict.fromkeys(key for point in points for key in point.overrides)
    return [name for name in names if len({point.overrides.get(name) for point in points}) > 1]


def unit_of(points: Sequence[Point]) -> str:
    """The unit in which losses compare: bits per byte where tokenizer or corpus differ, else nats per token."""

    def is_text(name: str) -> bool:
        group, _, leaf = name.lstrip("+~").partition(".")
        return group in ("tokenizer", "data") and leaf not in _NOT_TEXT

    texts = {frozenset(item for item in point.config.items() if is_text(item[0])) for point in points if point.config}
    checksums = {point.corpus_sha256 for point in points if point.corpus_sha256}
    return BITS if len(texts) > 1 or len(checksums) > 1 or any(map(is_text, _differing(points))) else NATS


def ranked(points: Sequence[Point]) -> list[Row]:
    """The points by their settings without the seed, the lowest mean loss first, those without one last.

    Losses are in the unit in which those of all points compare.
    """
    unit, names = unit_of(points), [name for name in axes(points) if name != SEED]
    groups: dict[tuple[str | None, ...], list[Point]] = {}
    for point in points:
        groups.setdefault(tuple(point.overrides.get(name) for name in names), []).append(point)
    rows = [
        Row({name: value for name, value in zip(names, key, strict=True) if value is not None}, group, unit)
        for key, group in groups.items()
    ]
    return sorted(rows, key=lambda row: inf if row.loss is None else row.loss)


def resolved(points: Sequence[Point]) -> list[Point]:
    """Points of several origins, which name only what differs from the defaults, by what their settings came to.

    A setting that any of them names has for every point the value of its composed configuration, and one text for
    equal values.
    """
    choices = {point.folder: _leaves(point.folder / ".hydra/hydra.yaml") for point in points}
    texts: dict[Path, dict[str, str]] = {point.folder: {} for point in points}
    for name in dict.fromkeys(key for point in points for key in point.overrides):
        bare, written = name.lstrip("+"), dict[str, str]()
        values: dict[Path, str | None] = {}
        for point in points:
            chosen = choices[point.folder].get(f"hydra.runtime.choices.{bare}", point.overrides.get(name))
            value = values[point.folder] = point.config.get(bare, chosen)
            if value is not None and name in point.overrides:
                written.setdefault(value, point.overrides[name])
        for folder, value in values.items():
            if value is not None:
                texts[folder][name] = written.get(value, value)
    return [replace(point, overrides=texts[point.folder]) for point in points]


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Settings by their last part, where that is enough to tell them apart and from the columns of figures."""
    leaves = [name.rpartition(".")[2] for name in names]
    taken = {"rank", "best val loss", "bits/byte", "params", "tokens/s", "seconds", "status", "folder"}
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
    figures = ["val_loss", "spread", "val_bits_per_byte", "val_bits_per_byte_spread", "seeds"]
    figures += ["params", "flops", "tokens_per_second", "seconds"]
    # JSON can spell halves of characters, and a name of a file may be no text.
    with (
        atomic_write(file) as partial,
        open(partial, "w", newline="", encoding="utf-8", errors="backslashreplace") as opened,
    ):
        table = csv.writer(opened)
        table.writerow(["rank", *names, *figures, "status", "reason", "folder"])
        for rank, row in enumerate(rows, 1):
            nats, bits = (replace(row, unit=unit) for unit in (NATS, BITS))
            table.writerow(
                [
                    rank if row.losses else "",
                    *(row.overrides.get(name, "") for name in names),
                    *(nats.loss, nats.spread, bits.loss, bits.spread),
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
        events = list(_events(file))
        overrides = [event.value for event in events if isinstance(event, yaml.ScalarEvent)]
        lists = sum(isinstance(event, yaml.SequenceStartEvent) for event in events)
        if lists > 1 or (overrides and not lists) or any(isinstance(event, yaml.MappingStartEvent) for event in events):
            raise ValueError("it is not a list of texts")
    except (OSError, ValueError, yaml.YAMLError) as error:
        warn(f"{file} is not readable ({error}); the run counts as one without overrides")
        overrides = []
    settings = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    return {key: value for key, value in settings.items() if key.lstrip("+~").partition(".")[0] not in IRRELEVANT}


def _leaves(file: Path) -> dict[str, str]:
    """The values of a file of YAML by dotted name, a list as an override writes it; empty where there is none."""
    import yaml

    leaves: dict[str, str] = {}
    path: list[str] = []  # the key of every mapping that is open, empty where one is to come
    items: list[str] = []  # of the list that is open
    depth = 0  # of lists, and of all that they hold
    try:
        for event in _events(file):
            if isinstance(event, yaml.SequenceStartEvent) or (depth and isinstance(event, yaml.MappingStartEvent)):
                items, depth = [] if not depth else items, depth + 1
            elif depth and isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
                if not depth:
                    leaves[".".join(path)], path[-1] = f"[{','.join(items)}]", ""
            elif isinstance(event, yaml.MappingStartEvent):
                path.append("")
            elif isinstance(event, yaml.MappingEndEvent):
                path.pop()
                path[-1:] = [""] if path else []
            elif isinstance(event, yaml.ScalarEvent):
                if depth:
                    items.append(event.value)
                elif path[-1]:
                    leaves[".".join(path)], path[-1] = event.value, ""
                else:
                    path[-1] = event.value
    except FileNotFoundError:
        pass
    except (OSError, ValueError, LookupError, yaml.YAMLError) as error:
        warn(f"{file} is not readable ({error}); it is left out")
        return {}
    return leaves


def _events(file: Path) -> Iterator[Any]:
    """A file of YAML event by event: what builds lists in lists dies of deep ones."""
    import yaml

    text = file.read_text(encoding="utf-8")
    if text.count("[") + text.count("{") > _BRACKETS:
        raise ValueError("it has too many brackets")
    yield from yaml.parse(text, yaml.CSafeLoader)
