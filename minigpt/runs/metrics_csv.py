"""The file `metrics.csv` of a run: one row per measurement.

A row is on disk at once, so that a killed run keeps its metrics.
"""

import csv
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from minigpt.utils.files import atomic_write
from minigpt.utils.terminal import warn

_COLUMNS = (
    *("step", "tokens", "seconds", "train_loss", "val_loss", "val_bits_per_byte"),
    *("learning_rate", "grad_norm", "tokens_per_second", "flops_per_second", "mfu"),
)


def append_metrics(file: Path, metrics: Mapping[str, float], step: int | None) -> None:
    """Append a row; a metric outside `_COLUMNS`, of a callback, gets a column when it is new."""
    row = {"step": step, **metrics}
    if not file.exists():
        _write_rows(file, _COLUMNS, [])
    with open(file, newline="", encoding="utf-8") as opened:
        names = next(csv.reader(opened))
    if metrics.keys() <= {*names}:
        with open(file, "a", newline="", encoding="utf-8") as opened:
            csv.DictWriter(opened, names).writerow(row)
    else:
        _write_rows(file, dict.fromkeys([*names, *metrics]), [*_read_rows(file)[1], row])


def read_metrics(file: Path) -> dict[str, list[tuple[int, float]]]:
    """Read the columns of `metrics.csv`, each a list of (step, value).

    Raises:
        ValueError: a row is damaged.
    """
    columns: dict[str, list[tuple[int, float]]] = {}
    for row in _read_rows(file)[1]:
        metrics = _parse(row)
        if not metrics:
            raise ValueError(f"a row is not a measurement: {','.join(map(str, row.values()))}")
        for name, value in metrics.items():
            columns.setdefault(name, []).append((int(row["step"]), value))
    return columns


def truncate_metrics(file: Path, step: int) -> None:
    """Remove damaged rows and those after `step`; a file without rows is removed."""
    names, rows = _read_rows(file)
    valid = [row for row in rows if _parse(row)]
    if len(valid) < len(rows):
        warn(f"{file} is damaged; {len(rows) - len(valid)} of its rows are dropped")
    kept = [row for row in valid if int(row["step"]) <= step]
    if kept:
        _write_rows(file, names, kept)
    else:
        file.unlink()


def _read_rows(file: Path) -> tuple[list[str], list[dict[str, str]]]:
    # The column names and the rows; an incomplete last line, of a killed run, is ignored.
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


def _parse(row: dict[str, str]) -> dict[str, float]:
    # The metrics of a row; none if it is damaged: one that is too short or too long has None as a
    # value or a name.
    try:
        int(row["step"])
        return {name: float(each) for name, each in row.items() if name != "step" and each != ""}
    except (KeyError, TypeError, ValueError):
        return {}
