"""What a sweep came to: a ranked table in the terminal, and `sweep.png`.

Both are made of the points that `sweep` reads, so they tell of a sweep that still runs, too. Rich and Matplotlib are
imported where something is shown. Text of files goes through `clean` on its way to a terminal, and `_plain` to a
picture.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TextIO

from minigpt.runs.run_dir import PLAN
from minigpt.sweeps.plots import plot_sweep
from minigpt.sweeps.results import (
    BITS,
    NATS,
    PICTURE,
    SEED,
    TABLE,
    Point,
    Row,
    as_number,
    axes,
    name_of,
    ranked,
    read_plan,
    read_sweep,
    resolved,
    short_names,
    write_plan,
    write_table,
)
from minigpt.utils.errors import UserError
from minigpt.utils.terminal import did_you_mean, sanitize_line

_COLUMNS = {NATS: "best val loss", BITS: "bits/byte"}


def report(
    folders: Sequence[Path], *, out: Path | None = None, along: str | None = None, file: TextIO | None = None
) -> None:
    """Print the table of one or several sweeps, write `sweep.csv` and `sweep.png`, and say where they are.

    Args:
        folders: of sweeps, or any folders that runs lie below.
        out: where to write. By default one sweep's files go into its own folder, whose `sweep.json`, where there is
            one, is brought up to date; those of several sweeps together go into the current folder.
        along: a setting to plot lines over, such as optimizer.lr, or its last part where no other has it.
        file: to print to; None is stdout.

    Raises:
        UserError: a folder holds no sweep, or `along` is none of its settings with numbers, or several.
    """
    file = file or sys.stdout
    points = _read(folders)
    if along is not None:
        along = _full_name(points, along)
    folder = folders[0].resolve() if len(folders) == 1 else Path.cwd()
    out = out or folder
    if out.exists() and not out.is_dir():
        raise UserError(f"--out={out} is a file; give a folder")
    out.mkdir(parents=True, exist_ok=True)
    if len(folders) == 1 and out.resolve() == folder and (folder / PLAN).exists():
        write_plan(folder, read_plan(folder)["fixed"], points)
    write_table(out / TABLE, points)
    print_table(points, file=file)
    title = folder.name if len(folders) == 1 else f"{len(folders)} sweeps"
    plot_sweep(out / PICTURE, points, title=title, along=along)
    print(f"table    {_near(out / TABLE)}\npicture  {_near(out / PICTURE)}", file=file)


def _read(folders: Sequence[Path]) -> list[Point]:
    """The points of all folders, each run once; runs that are no one sweep with the settings that they came to."""
    points: dict[Path, Point] = {}
    for given in folders:
        found = read_sweep(given if not given.is_dir() else given.resolve())
        # What all points of one sweep share may be what tells them from those of another.
        plan = len(folders) > 1 and (given / PLAN).exists()
        fixed = dict(override.partition("=")[::2] for override in read_plan(given)["fixed"]) if plan else {}
        for point in found:
            points.setdefault(point.folder.resolve(), replace(point, overrides={**fixed, **point.overrides}))
    one_sweep = len(folders) == 1 and (folders[0] / PLAN).exists()
    return list(points.values()) if one_sweep else resolved(list(points.values()))


def _full_name(points: Sequence[Point], along: str) -> str:
    """The setting with numbers that `--along` names, in full or by its last part."""
    known = [name for name in axes(points) if name != SEED]
    meant = [along] if along in known else [name for name in known if name.rpartition(".")[2] == along]
    if len(meant) > 1:
        raise UserError(
            sanitize_line(f"--along={along} must name one setting, got {len(meant)}; use {' or '.join(meant)}")
        )
    along = meant[0] if meant else along
    if not meant:
        names = ", ".join(known) or "none but the seed"
        raise UserError(
            sanitize_line(f"--along={along} is not what the runs differ in{did_you_mean(along, known)}: {names}")
        )
    if len({number for point in points if (number := as_number(point.overrides.get(along))) is not None}) < 2:
        values = ", ".join(sorted({point.overrides.get(along, "default") for point in points}))
        raise UserError(
            sanitize_line(f"--along={along} needs two numbers to draw a line over; its values are {values}")
        )
    return along


def print_table(points: Sequence[Point], *, file: TextIO | None = None) -> None:
    """Print the ranked table, why runs failed or were skipped, and the best row.

    A terminal that is too narrow gets fewer columns; a file or a pipe gets all of them, a row a line.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table

    file = file or sys.stdout
    rows = ranked(points)
    shared = Path(os.path.commonpath([point.folder.parent for point in points]))
    terminal = file.isatty()
    console = Console(
        file=file, width=None if terminal else 100_000, markup=False, highlight=False, emoji=False, soft_wrap=True
    )
    names = list(dict.fromkeys(name for row in rows for name in row.overrides))
    short = short_names(names)
    columns = {
        "rank": [str(rank) if row.losses else "" for rank, row in enumerate(rows, 1)],
        **{short[name]: [row.overrides.get(name, "default") for row in rows] for name in names},
        **{_COLUMNS[unit]: [_loss(row, unit) for row in rows] for unit in (NATS, BITS)},
        "params": [_count(row, "params") for row in rows],
        "tokens/s": [_count(row, "tokens_per_second") for row in rows],
        "seconds": [_count(row, "seconds") for row in rows],
        "status": [row.status for row in rows],
        "folder": [" ".join(str(point.folder.relative_to(shared)) for point in row.points) for row in rows],
    }
    columns = {name: [sanitize_line(cell) for cell in cells] for name, cells in columns.items()}
    other = NATS if rows[0].unit == BITS else BITS
    # By a narrow terminal, the first first.
    given_up = ["seconds", "tokens/s", "folder", "params", "status", _COLUMNS[other]]
    while given_up and sum(3 + max(map(cell_len, [name, *cells])) for name, cells in columns.items()) > console.width:
        del columns[given_up.pop(0)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name, cells in columns.items():
        right = name in ("rank", "params", "tokens/s", "seconds") or all(as_number(cell) is not None for cell in cells)
        table.add_column(
            sanitize_line(name), justify="right" if right else "left", overflow="fold", no_wrap=name == "rank"
        )
    for rank, row in enumerate(rows):
        style = "dim" if not row.losses else "bold" if rank == 0 else None
        table.add_row(*(cells[rank] for cells in columns.values()), style=style)
    if "folder" in columns:
        print(f"runs in {_near(shared)}\n", file=file)
    console.print(table, soft_wrap=False)
    print(file=file)
    for row in rows:
        if row.reason:
            print(sanitize_line(f"{name_of(row, short)}: {row.status}: {row.reason}"), file=file)
    if (unit := rows[0].unit) == BITS:
        print("ranked by bits per byte, as the runs differ in tokenizer or corpus", file=file)
    if rows[0].losses:
        run = min(rows[0].points, key=lambda point: inf if (loss := point.loss(unit)) is None else loss)
        best = _loss(rows[0], unit) + (" bits/byte" if unit == BITS else "")
        print(f"best     {best}: {sanitize_line(name_of(rows[0], short))}\nrun      {_near(run.folder)}", file=file)


def _loss(row: Row, unit: str) -> str:
    """The mean loss in a unit, its spread and, in the unit that ranks, of how many runs."""
    ranks, row = unit == row.unit, replace(row, unit=unit)
    if row.loss is None:
        return "–"
    known, runs = len(row.losses), len(row.points)
    spread = "" if row.spread is None else f" ± {row.spread:.4f}"
    seeds = "seeds" if len({point.overrides.get(SEED) for point in row.points}) == runs else "runs"
    said = f" ({known} {seeds})" if known == runs else f" ({known} of {runs} {seeds})"
    return f"{row.loss:.4f}{spread}{said if runs > 1 and ranks else ''}"


def _count(row: Row, figure: str) -> str:
    value = row.over_seeds(figure)
    return "–" if value is None else f"{value:,.1f}" if figure == "seconds" else f"{value:,.0f}"


def _near(path: Path) -> str:
    """A path as short as it can be said from here."""
    path = Path.cwd() / path
    return sanitize_line(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))
