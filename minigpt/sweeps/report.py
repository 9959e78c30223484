"""The report of a sweep: a ranked table in the terminal, `sweep.csv`, `sweep.png`, and both on Weights & Biases.

It reads run folders only, so it also reports a sweep that is still running. Rich and Matplotlib are imported when they
are needed. Text from files is sanitized before it reaches a terminal.
"""

import csv
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from minigpt.runs.run_dir import PLAN, short_path
from minigpt.sweeps.plots import plot_sweep
from minigpt.sweeps.ranking import SEED, Row, as_number, axes, ranked, with_effective_settings
from minigpt.sweeps.results import BITS, NATS, Point, read_plan, read_sweep, write_plan
from minigpt.utils.errors import UserError
from minigpt.utils.files import atomic_write
from minigpt.utils.terminal import did_you_mean, sanitize_line

TABLE, PLOT = "sweep.csv", "sweep.png"
_FIGURES = ("params", "flops", "tokens_per_second", "seconds")


def report(folders: Sequence[Path], *, out: Path | None = None, along: str | None = None) -> None:
    """Print the table of one or several sweeps, and write `sweep.csv` and `sweep.png`.

    Args:
        folders: sweeps, or folders with runs below them.
        out: folder to write to. By default that of the only sweep, whose `sweep.json` is then updated too, or the
            current folder for several sweeps.
        along: a numeric setting to plot the loss over, such as optimizer.lr, or its last part if that is unique.

    Raises:
        UserError: a folder holds no runs, or `along` is not one numeric setting in which the runs differ.
    """
    points = _read(folders)
    along = along if along is None else _full_name(points, along)
    folder = folders[0].resolve() if len(folders) == 1 else Path.cwd()
    out = out or folder
    if out.exists() and not out.is_dir():
        raise UserError(f"--out must be a folder, got the file {out}")
    out.mkdir(parents=True, exist_ok=True)
    if len(folders) == 1 and out.resolve() == folder and (folder / PLAN).exists():
        write_plan(folder, read_plan(folder)[0], points)
    write_table(out / TABLE, points)
    print_table(points)
    title = folder.name if len(folders) == 1 else f"{len(folders)} sweeps"
    plot_sweep(out / PLOT, points, title=title, along=along)
    print(f"table    {_display(out / TABLE)}\nplot     {_display(out / PLOT)}")


def print_table(points: Sequence[Point]) -> None:
    """Print the ranked table, why runs failed or were skipped, and the best row.

    A file or a pipe gets one line per row, however long.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = ranked(points)
    names = rows[0].short_names
    parent = Path(os.path.commonpath([point.folder.parent for point in points]))
    header = ["#", *names.values(), "val loss", "bits/byte", "params", "status", "folder"]
    cells = [
        [
            str(rank) if row.losses else "",
            *(row.overrides.get(name, "default") for name in names),
            *(_format_loss(row, unit) for unit in (NATS, BITS)),
            "–" if (params := row.mean_of("params")) is None else f"{params:,.0f}",
            row.status,
            " ".join(str(point.folder.relative_to(parent)) for point in row.points),
        ]
        for rank, row in enumerate(rows, 1)
    ]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name, column in zip(header, zip(*cells, strict=True), strict=True):
        numeric = all(as_number(cell.replace(",", "")) is not None or cell in ("", "–") for cell in column)
        table.add_column(sanitize_line(name), justify="right" if numeric else "left", overflow="fold")
    for row, line in zip(rows, cells, strict=True):
        style = "dim" if not row.losses else "bold" if row is rows[0] else None
        table.add_row(*map(sanitize_line, line), style=style)
    width = None if sys.stdout.isatty() else 100_000
    print(f"runs in {_display(parent)}\n")
    Console(width=width, markup=False, highlight=False, emoji=False).print(table)
    print()
    for row in rows:
        if row.reason:
            print(sanitize_line(f"{row.label()}: {row.status}: {row.reason}"))
    best, unit = rows[0], rows[0].unit
    if unit == BITS:
        print("ranked by bits per byte, because the mean length of tokens differs between runs")
    if best.losses:
        loss = _format_loss(best, unit) + (" bits/byte" if unit == BITS else "")
        run = min(best.points, key=lambda point: inf if (loss := point.loss(unit)) is None else loss)
        print(f"best     {loss}: {sanitize_line(best.label())}\nrun      {_display(run.folder)}")


def write_table(file: Path, points: Sequence[Point]) -> None:
    """Write `sweep.csv`: the ranked table, with losses in both units and their standard deviations over seeds."""
    rows = ranked(points)
    names = list(rows[0].short_names)
    losses = ["val_loss", "spread", "val_bits_per_byte", "val_bits_per_byte_spread"]
    # File names and JSON may hold lone surrogates, which UTF-8 cannot encode.
    encoding: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
    with atomic_write(file) as partial, open(partial, "w", newline="", **encoding) as opened:
        table = csv.writer(opened)
        table.writerow(["rank", *names, *losses, "seeds", *_FIGURES, "status", "reason", "folder"])
        for rank, row in enumerate(rows, 1):
            nats, bits = (replace(row, unit=unit) for unit in (NATS, BITS))
            table.writerow(
                [
                    rank if row.losses else "",
                    *(row.overrides.get(name, "") for name in names),
                    *(nats.loss, nats.spread, bits.loss, bits.spread, len(row.losses)),
                    *map(row.mean_of, _FIGURES),
                    *(row.status, row.reason, " ".join(str(point.folder) for point in row.points)),
                ]
            )


def publish(folder: Path, wandb_config: Any) -> None:
    """Log the table and the plot of a sweep as a run of its own in the sweep's W&B group.

    Args:
        wandb_config: `logger.wandb` of the sweep's configuration.
    """
    from minigpt.runs.wandb_logger import Wandb, wandb_logger

    names: dict[str, Any] = {"name": f"{folder.name} summary", "group": wandb_config.group or folder.name}
    options: dict[str, Any] = {key: wandb_config[key] for key in ("project", "entity", "timeout")}
    logger = wandb_logger(folder=folder, tags=[*wandb_config.tags, "sweep", "summary"], **names, **options)
    if not isinstance(logger, Wandb):
        return
    import wandb

    with open(folder / TABLE, newline="", encoding="utf-8") as file:
        header, *rows = list[list[Any]](csv.reader(file))
    with logger.ignore_lost_client():
        table = wandb.Table(columns=header, data=rows)
        logger.experiment.log({"sweep": table, "plot": wandb.Image(str(folder / PLOT))})
    logger.finish({})


def _read(folders: Sequence[Path]) -> list[Point]:
    """Read the points of all folders, each run once, with settings that compare across sweeps."""
    points: dict[Path, Point] = {}
    for folder in folders:
        is_sweep = (folder / PLAN).exists()
        # What all points of one sweep share may differ from what those of another share.
        fixed = read_plan(folder)[0] if is_sweep and len(folders) > 1 else []
        shared = dict(override.partition("=")[::2] for override in fixed)
        for point in read_sweep(folder.resolve() if folder.is_dir() else folder):
            points.setdefault(point.folder.resolve(), replace(point, overrides={**shared, **point.overrides}))
    found = list(points.values())
    return found if len(folders) == 1 and is_sweep else with_effective_settings(found)


def _full_name(points: Sequence[Point], along: str) -> str:
    """Return the numeric setting that `--along` names, in full or by its last part."""
    values = {name: {as_number(point.overrides.get(name)) for point in points} - {None} for name in axes(points)}
    numeric = [name for name in values if name != SEED and len(values[name]) > 1]
    matches = [name for name in numeric if along in (name, name.rpartition(".")[2])]
    if len(matches) == 1 or along in matches:
        return along if along in matches else matches[0]
    choices = ", ".join(matches or numeric) or "none"
    expected = f"must be one numeric setting in which the runs differ{did_you_mean(along, numeric)}"
    raise UserError(sanitize_line(f"--along={along} {expected}; use one of: {choices}"))


def _format_loss(row: Row, unit: str) -> str:
    """Format the mean loss, its standard deviation and, in the ranking unit, the number of runs."""
    ranks, row = unit == row.unit, replace(row, unit=unit)
    if row.loss is None:
        return "–"
    known, runs = len(row.losses), len(row.points)
    spread = "" if row.spread is None else f" ± {row.spread:.4f}"
    seeds = "seeds" if len({point.overrides.get(SEED) for point in row.points}) == runs else "runs"
    count = f" ({known} {seeds})" if known == runs else f" ({known} of {runs} {seeds})"
    return f"{row.loss:.4f}{spread}{count if runs > 1 and ranks else ''}"


def _display(path: Path) -> str:
    return sanitize_line(str(short_path(Path.cwd() / path)))
