"""Rank the points of a sweep: average over seeds, in a unit that makes the losses comparable."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import mean, stdev

from minigpt.sweeps.results import BITS, NATS, SKIPPED, Point


@dataclass(frozen=True)
class Row:
    """Points that differ only in their seed: one row of the table.

    Args:
        overrides: settings that the points share, without the seed.
        unit: unit of the losses, `NATS` or `BITS`.
        short_names: short name of each setting in which rows differ.
    """

    overrides: Mapping[str, str]
    points: Sequence[Point]
    unit: str
    short_names: Mapping[str, str]

    @property
    def losses(self) -> list[float]:
        """Best validation loss of each point that has one."""
        return [loss for point in self.points if (loss := point.loss(self.unit)) is not None]

    @property
    def loss(self) -> float | None:
        """Mean of the best losses over seeds."""
        return mean(self.losses) if self.losses else None

    @property
    def spread(self) -> float | None:
        """Standard deviation of the best losses; None for one seed."""
        return stdev(self.losses) if len(self.losses) > 1 else None

    @property
    def loss_text(self) -> str:
        """The mean and the standard deviation, such as `1.7000 ± 0.2828`."""
        spread = "" if self.spread is None else f" ± {self.spread:.4f}"
        return "–" if self.loss is None else f"{self.loss:.4f}{spread}"

    @property
    def provisional(self) -> bool:
        """Whether a run has not completed or has no loss, so that the mean is not that of all seeds."""
        return any(point.pending or point.loss(self.unit) is None for point in self.points if point.status != SKIPPED)

    @property
    def status(self) -> str:
        """Status of the points, with counts if they differ."""
        counts = Counter(point.status_text for point in self.points)
        return self.points[0].status_text if len(counts) == 1 else count_text(counts)

    @property
    def reason(self) -> str:
        """Why points failed or were skipped."""
        return "; ".join(dict.fromkeys(point.reason for point in self.points if point.reason))

    def mean_of(self, total: str) -> float | None:
        """Return the mean of one of the `TOTALS` over the points that have it."""
        values = [value for point in self.points if (value := point.totals.get(total))]
        return mean(values) if values else None

    def number(self, name: str) -> float | None:
        """Return the value of a setting if it is a finite number."""
        try:
            value = float(self.overrides.get(name, inf))
        except ValueError:
            return None
        return value if isfinite(value) else None

    def label(self, without: str | None = None) -> str:
        """Return the overrides by short name, except `without`; the folder's name if there are none."""
        values = [f"{self.short_names[name]}={value}" for name, value in self.overrides.items() if name != without]
        return ", ".join(values) or ("all" if without or len(self.points) > 1 else self.points[0].folder.name)


def ranked(points: Sequence[Point]) -> list[Row]:
    """Group points by their settings without the seed; return the lowest mean loss first.

    Rows with runs that did not complete come after all others, and rows without a loss last.
    """
    keys = dict.fromkeys(key for point in points for key in point.overrides)
    axes = [key for key in keys if len({point.overrides.get(key) for point in points}) > 1]
    names = [name for name in axes or keys if name != "seed"]  # all settings if the points are equal
    losses = [(nats, bits) for point in points if (nats := point.loss(NATS)) and (bits := point.loss(BITS))]
    lengths = [nats / bits for nats, bits in losses]  # proportional to the bytes per token
    # Losses per token do not compare if tokens differ in their mean length, as over tokenizers and corpora.
    unit = BITS if lengths and max(lengths) > 1.001 * min(lengths) else NATS
    short = short_names(names)
    groups: dict[tuple[tuple[str, str], ...], list[Point]] = {}
    for point in points:
        values = tuple((name, point.overrides[name]) for name in names if name in point.overrides)
        groups.setdefault(values, []).append(point)
    rows = [Row(dict(values), group, unit, short) for values, group in groups.items()]
    return sorted(rows, key=lambda row: (row.loss is None, row.provisional, row.loss or 0.0))


def numbers(rows: Iterable[Row], name: str) -> list[float]:
    """Return the numbers that a setting takes, in order."""
    return sorted({value for row in rows if (value := row.number(name)) is not None})


def count_text(counts: Mapping[str, int]) -> str:
    """Return counts as text, such as `2 completed, 1 failed`."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Map dotted settings to their last part where that is unique."""
    leaves = [name.rpartition(".")[2] for name in names]
    return {name: leaf if leaves.count(leaf) == 1 else name for name, leaf in zip(names, leaves, strict=True)}
