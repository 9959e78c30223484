"""The report of a sweep: sentences and a table in the terminal, in files and on Weights & Biases.

It reads run folders only, so it also reports a sweep that is still running. Rich and Matplotlib are
imported when they are needed. Text from files is sanitized before it reaches a terminal.
"""

import csv
import os
import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from minigpt.checkpoints.find import follow_latest
from minigpt.runs.run_dir import short_path
from minigpt.sweeps.answer import answer
from minigpt.sweeps.point_settings import short_names
from minigpt.sweeps.ranking import Row, numbers, points_of, ranked
from minigpt.sweeps.results import BITS, COMPLETED, LOSS_NAMES, NATS, read_sweep
from minigpt.utils.errors import UserError
from minigpt.utils.files import atomic_write
from minigpt.utils.terminal import did_you_mean, sanitize_line

TEXT, TABLE, RUNS, PLOT = "sweep.md", "sweep.csv", "runs.csv", "sweep.png"
_COSTS = ("params", "flops", "tokens_per_second", "seconds")


def report(
    folders: Sequence[Path], *, out: Path | None = None, along: str | None = None
) -> list[str]:
    """Print the answer and the table of one or several sweeps, and write their files.

    Args:
        folders: sweeps, or folders with runs below them, or runs.
        out: folder to write to; by default that of the only sweep, and none for several.
        along: a numeric setting to plot the loss over, such as optimizer.lr, or its last part if
            that is unique.

    Returns:
        The sentences of the answer.

    Raises:
        UserError: a folder holds no runs, or `along` is not one numeric setting in which the runs
            differ.
    """
    # Read and rank the points; folders may overlap.
    folders = [Path(follow_latest(str(folder))) for folder in folders]
    points = chain.from_iterable(map(read_sweep, folders))
    rows = ranked(list({point.folder: point for point in points}.values()))
    along = along if along is None else _full_name(rows, along)
    # The report of one sweep is written to its folder, under its name.
    only = folders[0].resolve() if len(folders) == 1 else None
    out = out or only
    kind = "runs" if all((folder / ".hydra").is_dir() for folder in folders) else "sweeps"
    title = only.name if only else f"{len(folders)} {kind}"
    # Write the files, then print; a full disk does not hide the answer.
    sentences = [sanitize_line(sentence) for sentence in answer(rows)]
    try:
        if out:
            _write_files(out, rows, sentences, title, along)
    finally:
        print("\n".join([*sentences, ""]))
        print_table(rows)
    if out is None:
        print("set --out FOLDER to write the table and the plot of several folders")
    else:
        for name, file in (("answer", TEXT), ("table", TABLE), ("runs", RUNS), ("plot", PLOT)):
            print(f"{name:<8} {_display(out / file)}")
    return sentences


def _write_files(
    out: Path, rows: Sequence[Row], sentences: Sequence[str], title: str, along: str | None
) -> None:
    from minigpt.sweeps.sweep_plots import sweep_figure

    out.mkdir(parents=True, exist_ok=True)
    write_table(out / TABLE, rows)
    write_runs(out / RUNS, rows)
    _write_text(out / TEXT, title, sentences, rows)
    figure = sweep_figure(rows, title=title, along=along)
    with (
        atomic_write(out / PLOT) as partial,
        warnings.catch_warnings(action="ignore", category=UserWarning),
    ):
        figure.savefig(partial, dpi=120, format="png")  # warns of characters that the font lacks


def print_table(rows: Sequence[Row]) -> None:
    """Print the ranked table, why runs failed or were skipped, and the best row.

    A file or a pipe gets one line per row, however long; a terminal gets as many columns as fit;
    the files have all.
    """
    best = rows[0] if rows[0].rank else None
    folders = [point.folder.parent for point in points_of(rows)]
    print(f"runs in {_display(Path(os.path.commonpath(folders)))}\n")
    _print_fitting_columns(rows, best)
    print()
    for row in rows:
        if row.reason:
            print(sanitize_line(f"{row.label()}: {row.status}: {row.reason}"))
    if any(row.provisional and row.losses for row in rows):
        print(
            "* provisional, because not all runs completed; "
            "ranked after the rows whose runs all completed"
        )
    if best and best.unit == BITS:
        print("ranked by bits per byte, because the mean length of tokens differs between runs")
    if best:
        unit = " bits/byte" if best.unit == BITS else ""
        run = next(point for point in best.points if point.loss(best.unit) == min(best.losses))
        print(f"best     {_format_loss(best, best.unit)}{unit}: {sanitize_line(best.label())}")
        print(f"run      {_display(run.folder)}")


def _print_fitting_columns(rows: Sequence[Row], best: Row | None) -> None:
    from rich import box, console, table

    # A file or a pipe is as wide as any row.
    header, cells = _table(rows)
    page = console.Console(
        width=None if sys.stdout.isatty() else 100_000,
        markup=False,
        highlight=False,
        emoji=False,
    )
    # What a reader misses least is left out first; a status that all rows have, before that.
    completed = all(row.status == COMPLETED for row in rows)
    shown = dict.fromkeys(header)
    for unneeded in ("", "status" if completed else "", "params", "bits/byte"):
        shown.pop(unneeded, None)
        grid = table.Table(
            box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0)
        )
        for name in shown:
            grid.add_column(
                name,
                justify="right" if name == "params" else "left",
                overflow="fold",
                min_width=min(len(name), 16),
            )
        for row, line in zip(rows, cells, strict=True):
            style = "bold" if row is best else None
            grid.add_row(
                *(cell for name, cell in zip(header, line, strict=True) if name in shown),
                style=style if row.losses else "dim",
            )
        if page.measure(grid, options=page.options.update(width=100_000)).maximum <= page.width:
            break
    page.print(grid)


def _table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    compared = any(row.margin for row in rows)
    differences = ["from the best"] if compared else []
    header = [
        "#",
        *rows[0].short_names.values(),
        "val loss",
        *differences,
        "bits/byte",
        "params",
        "status",
    ]
    cells = []
    for row in rows:
        params = row.mean_of("params")
        line = [
            f"{row.rank}*" if row.rank and row.provisional else row.rank,
            *map(row.value, row.short_names),
            _format_loss(row, NATS),
            *([_format_difference(row)] if compared else []),
            _format_loss(row, BITS),
            "–" if params is None else f"{params:,.0f}",
            row.status,
        ]
        cells.append([sanitize_line(cell) for cell in line])
    return [sanitize_line(name) for name in header], cells


def _write_text(file: Path, title: str, sentences: Sequence[str], rows: Sequence[Row]) -> None:
    header, cells = _table(rows)
    table = [
        f"| {' | '.join(map(_escape, line))} |" for line in (header, ["---"] * len(header), *cells)
    ]
    text = [
        f"# {_escape(sanitize_line(title))}",
        "",
        *(f"- {_escape(sentence)}" for sentence in sentences),
        "",
        f"![the runs of the sweep]({PLOT})",
        "",
        *table,
        "",
    ]
    with atomic_write(file) as partial:
        partial.write_text("\n".join(text), encoding="utf-8", errors="backslashreplace")


def _escape(text: str) -> str:
    # The characters that start HTML, links, images, code and cells in Markdown.
    return re.sub(r"[\\`\[\]<>|]", r"\\\g<0>", text)


def write_table(file: Path, rows: Sequence[Row]) -> None:
    """Write `sweep.csv`: the ranked rows, with intervals and differences in the ranking's unit."""
    header = [
        "rank",
        *rows[0].short_names,
        "val_loss",
        "val_bits_per_byte",
        "interval",
        "difference",
        "difference_interval",
        "tied",
        "seeds",
        *_COSTS,
        "status",
        "reason",
    ]
    _write_csv(
        file,
        header,
        [
            [
                row.rank,
                *map(row.overrides.get, row.short_names),
                row.in_unit(NATS).loss,
                row.in_unit(BITS).loss,
                row.interval,
                row.difference,
                row.margin,
                "" if row.margin is None else row.tied,
                row.n_seeds,
                *map(row.mean_of, _COSTS),
                row.status,
                row.reason,
            ]
            for row in rows
        ],
    )


def write_runs(file: Path, rows: Sequence[Row]) -> None:
    """Write `runs.csv`: every run, in the order of the rows."""
    table: list[list[object]] = []
    for row in rows:
        table += [
            [
                *map(row.overrides.get, row.short_names),
                point.seed,
                *map(point.totals.get, (*LOSS_NAMES.values(), "steps", *_COSTS)),
                point.status,
                point.reason,
                point.folder,
            ]
            for point in row.points
        ]
    _write_csv(
        file,
        [
            *rows[0].short_names,
            "seed",
            "val_loss",
            "val_bits_per_byte",
            "steps",
            *_COSTS,
            "status",
            "reason",
            "folder",
        ],
        table,
    )


def _write_csv(file: Path, header: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
    # File names and JSON may hold lone surrogates, which UTF-8 cannot encode.
    with (
        atomic_write(file) as partial,
        open(partial, "w", newline="", encoding="utf-8", errors="backslashreplace") as opened,
    ):
        csv.writer(opened).writerows([header, *lines])


def publish(folder: Path, sentences: Sequence[str], wandb_config: DictConfig) -> None:
    """Log the report of a sweep to a run of its own in the sweep's W&B group, by `logger.wandb`."""
    from minigpt.runs.trainer import instantiate_group  # imports Lightning, as the logger

    with open_dict(wandb_config):
        settings = OmegaConf.merge(
            wandb_config,
            {"folder": str(folder), "name": f"{folder.name} summary", "resume": "allow"},
        )
    # Resolved once: a `${…}` that is left is a text.
    resolved = {"wandb": OmegaConf.to_container(settings, resolve=True)}
    for logger in instantiate_group("logger", resolved):  # on rank 0
        import wandb

        logger.log_metrics(
            {
                "sweep": wandb.Table(*_read_table(folder / TABLE)),
                "runs": wandb.Table(*_read_table(folder / RUNS)),
                "plot": wandb.Image(str(folder / PLOT)),
            }
        )
        logger.finish({"answer": "\n".join(sentences)})


def _read_table(file: Path) -> tuple[list[str | int], list[list[object]]]:
    # A column of numbers has numbers, and None where a cell is empty.
    with open(file, newline="", encoding="utf-8") as opened:
        names, *lines = csv.reader(opened)
    columns: list[Sequence[object]] = list(zip(*lines, strict=True))
    for i, column in enumerate(zip(*lines, strict=True)):
        with suppress(ValueError):
            columns[i] = [float(cell) if cell else None for cell in column]
    return [*names], [[*line] for line in zip(*columns, strict=True)]


def _full_name(rows: Sequence[Row], along: str) -> str:
    # `--along` names a numeric setting in full or by its last part.
    numeric = [name for name in rows[0].short_names if len(numbers(rows, name)) > 1]
    for name, short in short_names(numeric).items():
        if along in (name, short):
            return name
    raise UserError(
        sanitize_line(
            f"--along={along} must be one numeric setting in which the runs differ"
            f"{did_you_mean(along, numeric)}; use one of: {', '.join(numeric) or 'none'}"
        )
    )


def _format_loss(row: Row, unit: str) -> str:
    # In the unit of the ranking, the mean loss has its interval and the number of runs.
    text = row.in_unit(unit).loss_text
    if unit != row.unit or not row.losses or len(row.points) == 1:
        return text
    of_all = "" if len(row.losses) == len(row.points) else f" of {len(row.points)}"
    return f"{text} ({len(row.losses)}{of_all} runs)"


def _format_difference(row: Row) -> str:
    if not row.margin:  # of the best row, and of rows that are not compared
        return "–"
    return f"{row.difference:+.4f} ± {row.margin:.4f}{', tied' if row.tied else ''}"


def _display(path: Path) -> str:
    return sanitize_line(str(short_path(Path.cwd() / path)))
