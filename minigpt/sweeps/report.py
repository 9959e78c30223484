"""The report of a sweep: a ranked table in the terminal, `sweep.csv`, `sweep.png`, `sweep.html`, and Weights & Biases.

It reads run folders only, so it also reports a sweep that is still running. Rich, Matplotlib and Altair are imported
when they are needed. Text from files is sanitized before it reaches a terminal.
"""

import csv
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from minigpt.runs.run_dir import short_path
from minigpt.sweeps.ranking import Row, numbers, ranked, short_names
from minigpt.sweeps.results import BITS, NATS, Point, read_sweep
from minigpt.utils.errors import UserError
from minigpt.utils.files import atomic_write
from minigpt.utils.scripts import import_extra
from minigpt.utils.terminal import did_you_mean, sanitize_line

TABLE, PLOT, PAGE = "sweep.csv", "sweep.png", "sweep.html"
_COSTS = ("params", "flops", "tokens_per_second", "seconds")


def report(folders: Sequence[Path], *, out: Path | None = None, along: str | None = None) -> None:
    """Print the table of one or several sweeps, and write `sweep.csv`, `sweep.png` and, with Altair, `sweep.html`.

    Args:
        folders: sweeps, or folders with runs below them.
        out: folder to write to; by default that of the only sweep, or the current folder for several.
        along: a numeric setting to plot the loss over, such as optimizer.lr, or its last part if that is unique.

    Raises:
        UserError: a folder holds no runs, or `along` is not one numeric setting in which the runs differ.
    """
    points = list({point.folder: point for folder in folders for point in read_sweep(folder)}.values())
    along = along if along is None else _full_name(points, along)
    only = folders[0].resolve() if len(folders) == 1 else None
    out = out or only or Path.cwd()
    out.mkdir(parents=True, exist_ok=True)
    write_table(out / TABLE, points)
    print_table(points)
    from minigpt.sweeps.sweep_plots import sweep_figure

    title = only.name if only else f"{len(folders)} sweeps"
    figure = sweep_figure(points, title=title, along=along)
    with atomic_write(out / PLOT) as partial, warnings.catch_warnings(action="ignore", category=UserWarning):
        figure.savefig(partial, dpi=120, format="png")  # warns of characters that the font lacks
    print(f"table    {_display(out / TABLE)}\nplot     {_display(out / PLOT)}")
    try:
        write_page(out / PAGE, points, title=title)
        print(f"page     {_display(out / PAGE)}")
    except UserError as error:  # a package is not installed
        print(f"page     {error}")


def print_table(points: Sequence[Point]) -> None:
    """Print the ranked table, why runs failed or were skipped, and the best row.

    A file or a pipe gets one line per row, however long.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = ranked(points)
    best, names = rows[0], rows[0].short_names
    parent = Path(os.path.commonpath([point.folder.parent for point in points]))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name in ("#", *names.values(), "val loss", "bits/byte", "params", "status", "folder"):
        table.add_column(sanitize_line(name), justify="right" if name == "params" else "left", overflow="fold")
    for rank, row in enumerate(rows, 1):
        place, params = f"{rank}*" if row.provisional else str(rank), row.mean_of("params")
        cells = [place if row.losses else "", *(row.overrides.get(name, "default") for name in names)]
        cells += [_format_loss(row, NATS), _format_loss(row, BITS), "–" if params is None else f"{params:,.0f}"]
        cells += [row.status, " ".join(str(point.folder.relative_to(parent)) for point in row.points)]
        table.add_row(*map(sanitize_line, cells), style="dim" if not row.losses else "bold" if row is best else None)
    print(f"runs in {_display(parent)}\n")
    width = None if sys.stdout.isatty() else 100_000
    Console(width=width, markup=False, highlight=False, emoji=False).print(table)
    print()
    for row in rows:
        if row.reason:
            print(sanitize_line(f"{row.label()}: {row.status}: {row.reason}"))
    if any(row.provisional and row.losses for row in rows):
        print("* provisional, because not all runs completed; ranked after the rows whose runs all completed")
    if best.unit == BITS:
        print("ranked by bits per byte, because the mean length of tokens differs between runs")
    if best.losses:
        loss = _format_loss(best, best.unit) + (" bits/byte" if best.unit == BITS else "")
        run = min(best.points, key=lambda point: inf if (loss := point.loss(best.unit)) is None else loss)
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
        table.writerow(["rank", *names, *losses, "seeds", *_COSTS, "status", "reason", "folder"])
        for rank, row in enumerate(rows, 1):
            nats, bits = (replace(row, unit=unit) for unit in (NATS, BITS))
            cells: list[Any] = [rank if row.losses else "", *(row.overrides.get(name, "") for name in names)]
            cells += [nats.loss, nats.spread, bits.loss, bits.spread, len(row.losses), *map(row.mean_of, _COSTS)]
            cells += [row.status, row.reason, " ".join(str(point.folder) for point in row.points)]
            table.writerow(cells)


def write_page(file: Path, points: Sequence[Point], *, title: str) -> None:
    """Write `sweep.html`; raise UserError if Altair or vl-convert is not installed."""
    for package in ("altair", "vl_convert"):
        import_extra(package, PAGE, "sweep")
    from minigpt.sweeps.sweep_page import sweep_page

    with atomic_write(file) as partial:
        partial.write_text(sweep_page(points, title=title), encoding="utf-8", newline="\n")


def publish(folder: Path, wandb_config: Any) -> None:
    """Log table, plot and page of a sweep, with its `logger.wandb`, as a run of its own in the sweep's W&B group."""
    from minigpt.runs.wandb_logger import wandb_logger

    options: dict[str, Any] = {key: wandb_config[key] for key in ("project", "entity", "timeout")}
    options |= {"name": f"{folder.name} summary", "group": wandb_config.group or folder.name}
    logger = wandb_logger(folder=folder, tags=[*wandb_config.tags, "sweep", "summary"], **options)
    with open(folder / TABLE, newline="", encoding="utf-8") as file:
        header, *rows = list[list[Any]](csv.reader(file))
    if logger:  # on rank 0
        import wandb

        page = {"page": wandb.Html(str(folder / PAGE), inject=False)} if (folder / PAGE).exists() else {}
        plot = wandb.Image(str(folder / PLOT))
        logger.log_metrics({"sweep": wandb.Table(header, rows), "plot": plot, **page})
        logger.finish({})


def _full_name(points: Sequence[Point], along: str) -> str:
    """Return the numeric setting that `--along` names, in full or by its last part."""
    rows = ranked(points)
    numeric = [name for name in rows[0].short_names if len(numbers(rows, name)) > 1]
    for name, short in short_names(numeric).items():
        if along in (name, short):
            return name
    expected = f"must be one numeric setting in which the runs differ{did_you_mean(along, numeric)}"
    raise UserError(sanitize_line(f"--along={along} {expected}; use one of: {', '.join(numeric) or 'none'}"))


def _format_loss(row: Row, unit: str) -> str:
    """Format the mean loss, its standard deviation and, in the ranking unit, the number of runs."""
    text, known, runs = replace(row, unit=unit).loss_text, len(row.losses), len(row.points)
    if unit != row.unit or known == 0 or runs == 1:
        return text
    return f"{text} ({known} runs)" if known == runs else f"{text} ({known} of {runs} runs)"


def _display(path: Path) -> str:
    return sanitize_line(str(short_path(Path.cwd() / path)))
