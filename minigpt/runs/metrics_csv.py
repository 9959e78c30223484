"""The file `metrics.csv` of a run: one row per measurement, on disk at once, so that a killed run keeps its metrics."""

import csv
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from minigpt.utils.files import atomic_write
from minigpt.utils.terminal import warn

_COLUMNS = (
    *("step", "tokens", "seconds", "train_loss", "val_loss", "val_bits_per_byte"),
    *("learning_rate", "grad_norm", "tokens_per_second", "flops_per_second", "mfu"),
)


def append_metrics(file: Path, metrics: Mapping[str, float], step: int | None) -> None:
    """Append a row; a metric of another callback, outside `_COLUMNS`, gets a column when it first appears."""
    row = {"step": step, **metrics}
    if not file.exists():
        _write_rows(file, dict.fromkeys([*_COLUMNS, *metrics]), [row])
        return
    with open(file, "r+", newline="", encoding="utf-8") as opened:
        names = next(csv.reader(opened))
        if metrics.keys() <= {*names}:
            opened.seek(0, os.SEEK_END)
            csv.DictWriter(opened, names).writerow(row)
            return
    _write_rows(file, dict.fromkeys([*names, *metrics]), [*_read_rows(file)[1], row])


def read_metrics(file: Path) -> dict[str, list[tuple[int, float]]]:
    """Read the columns of `metrics.csv`, each a list of (step, value).

    Raises:
        ValueError: a row is damaged.
    """
    columns: dict[str, list[tuple[int, float]]] = {}
    for row in _read_rows(file)[1]:
        if (parsed := _parse(row)) is None:
            raise ValueError(f"a row is not a measurement: {','.join(map(str, row.values()))}")
        for name, value in parsed[1].items():
            columns.setdefault(name, []).append((parsed[0], value))
    return columns


def truncate_metrics(file: Path, step: int) -> None:
    """Remove damaged rows and those after `step`; a file without rows is removed."""
    names, rows = _read_rows(file)
    valid = [row for row in rows if _parse(row)]
    if len(valid) < len(rows):
        warn(f"{file} is damaged; {len(rows) - len(valid)} of its rows are dropped")
    if kept := [row for row in valid if int(row["step"]) <= step]:
        _write_rows(file, names, kept)
    else:
        file.unlink()


def _read_rows(file: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Read the column names and the rows of `metrics.csv`; an incomplete last line, of a killed run, is ignored."""
    with open(file, newline="\n", encoding="utf-8", errors="replace") as opened:
        lines = (line for line in opened if line.endswith("\n"))
        names = next(csv.reader(lines), [])
        # Numbers have no quotes: one in a damaged row would swallow the rows after it.
        return names, list(csv.DictReader(lines, names, quoting=csv.QUOTE_NONE))


def _write_rows(file: Path, names: Collection[str], rows: Iterable[Mapping[str, object]]) -> None:
    with atomic_write(file) as partial, open(partial, "w", newline="", encoding="utf-8") as output:
        writer = csv.DictWriter(output, names)
        writer.writeheader()
        writer.writerows(rows)


def _parse(row: Mapping[str, str]) -> tuple[int, dict[str, float]] | None:
    """Return the step and the metrics of a row; None if the row is damaged."""
    try:
        metrics = {
            name: float(value) for name, value in row.items() if name != "step" and value != ""
        }
        return (int(row["step"]), metrics) if metrics else None
    except (
        KeyError,
        TypeError,
        ValueError,
    ):  # a row that is too short or too long has None as a value or a name
        return None
