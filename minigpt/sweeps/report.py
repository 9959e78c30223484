"""The report of a sweep: sentences and a table in the terminal, in files and on Weights & Biases.

It reads run folders only, so it also reports a sweep that is still running. Rich and Matplotlib are
imported when they are needed. Text from files is sanitized before it reaches a terminal.
"""

import csv
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from minigpt.checkpoints.find import follow_latest
from minigpt.runs.code_version import code_label
from minigpt.runs.run_dir import short_path
from minigpt.sweeps.answer import answer
from minigpt.sweeps.point_settings import short_names
from minigpt.sweeps.ranking import COSTS, Row, Table, loss_text, numbers, points_of, ranked
from minigpt.sweeps.results import BITS, COMPLETED, LOSS_NAMES, NATS, read_looks, read_sweep
from minigpt.utils.errors import UserError
from minigpt.utils.extras import from_extras
from minigpt.utils.files import atomic_write
from minigpt.utils.terminal import did_you_mean, sanitize_line

TEXT, TABLE, RUNS, PLOT = "sweep.md", "sweep.csv", "runs.csv", "sweep.png"
PlainTable = tuple[list[str | int], list[list[object]]]  # a header and rows


def report(
    folders: Sequence[Path],
    *,
    out: Path | None = None,
    along: str | None = None,
) -> Table:
    """Print the answer and the table of one or several sweeps, and write their files.

    The last line is JSON for scripts.

    Args:
        folders: sweeps, or folders with runs below them, or runs.
        out: folder to write to; by default that of the only sweep, and none for several.
        along: a numeric setting to plot the loss over, such as optimizer.lr, or its last part if
            that is unique.

    Raises:
        UserError: a folder holds no runs, or `along` is not one numeric setting in which the runs
            differ.
    """
    # Read and rank the points; folders may overlap.
    folders = [Path(follow_latest(str(folder))) for folder in folders]
    found = {point.folder: point for folder in folders for point in read_sweep(folder)}
    looks = max(map(read_looks, {folder.parent for folder in found}))
    table = ranked([*found.values()], looks)
    if along is not None:
        along = _full_name(table, along)
    # The report of one sweep is written to its folder, under its name.
    only = folders[0].resolve() if len(folders) == 1 else None
    out = out or only
    kind = "runs" if all((folder / ".hydra").is_dir() for folder in folders) else "sweeps"
    title = only.name if only else f"{len(folders)} {kind}"
    # Write the files, then print; a full disk does not hide the answer.
    sentences = answer(table)
    files = ["set --out FOLDER to write the table and the plot of several folders"]
    try:
        if out:
            files = []
            _write_files(out, table, sentences, title, along)
            for name, file in (("answer", TEXT), ("table", TABLE), ("runs", RUNS), ("plot", PLOT)):
                files.append(f"{name:<8} {_display(out / file)}")
    finally:
        print("\n".join([*sentences, ""]))
        print_table(table)
        print("\n".join([*files, from_extras("last_line")(only, table)]))
    return table


def _write_files(
    out: Path, table: Table, sentences: Sequence[str], title: str, along: str | None
) -> None:
    from minigpt.sweeps.sweep_plots import sweep_figure

    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / TABLE, *table_of_rows(table))
    write_csv(out / RUNS, *table_of_runs(table))
    header, *cells = _cells(table)
    lines = [
        f"| {' | '.join(map(_escape, line))} |" for line in (header, ["---"] * len(header), *cells)
    ]
    text = [
        f"# {_escape(sanitize_line(title))}",
        "",
        *(f"- {_escape(sentence)}" for sentence in sentences),
        "",
        f"![the runs of the sweep]({PLOT})",
        "",
        *lines,
        "",
    ]
    with atomic_write(out / TEXT) as partial:
        partial.write_text("\n".join(text), encoding="utf-8", errors="backslashreplace")
    figure = sweep_figure(table, title=title, along=along)
    with (
        atomic_write(out / PLOT) as partial,
        warnings.catch_warnings(action="ignore", category=UserWarning),
    ):
        figure.savefig(partial, dpi=120, format="png")  # warns of characters that the font lacks


def print_table(table: Table) -> None:
    """Print the ranked table, why runs failed or were skipped, and the best row.

    A file or a pipe gets one line per row, however long; a terminal gets as many columns as fit;
    the files have all.
    """
    folders = [point.folder.parent for point in points_of(table.rows)]
    print(f"runs in {_display(Path(os.path.commonpath(folders)))}\n")
    _print_fitting_columns(table)
    print()
    for row in table.rows:
        if row.reason:
            print(sanitize_line(f"{row.label()}: {row.status}: {row.reason}"))
    if any(row.provisional and row.losses for row in table.rows):
        print(
            "* provisional, because not all runs completed; "
            "ranked after the rows whose runs all completed"
        )
    best = table.rows[0]
    if not best.rank:
        return
    unit = ""
    if table.unit == BITS:
        print("ranked by bits per byte, because the mean length of tokens differs between runs")
        unit = " bits/byte"
    run = next(point for point in best.points if point.loss(table.unit) == min(best.losses))
    loss = _format_loss(best, table.unit, table.unit)
    print(f"best     {loss}{unit}: {sanitize_line(best.label())}")
    print(f"run      {_display(run.folder)}")


def _print_fitting_columns(table: Table) -> None:
    from rich import box, console
    from rich.table import Table as Grid

    # A file or a pipe is as wide as any row.
    header, *cells = _cells(table)
    page = console.Console(
        width=None if sys.stdout.isatty() else 100_000,
        markup=False,
        highlight=False,
        emoji=False,
    )
    # What a reader misses least is left out first; a status that all rows have, before that.
    completed = all(row.status == COMPLETED for row in table.rows)
    shown = dict.fromkeys(header)
    for unneeded in ("", "status" if completed else "", "params", "bits/byte"):
        shown.pop(unneeded, None)
        grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
        for name in shown:
            grid.add_column(
                name,
                justify="right" if name == "params" else "left",
                overflow="fold",
                min_width=min(len(name), 16),
            )
        for row, line in zip(table.rows, cells, strict=True):
            style = "bold" if row.rank == "1" else None
            grid.add_row(
                *(cell for name, cell in zip(header, line, strict=True) if name in shown),
                style=style if row.losses else "dim",
            )
        if page.measure(grid, options=page.options.update(width=100_000)).maximum <= page.width:
            break
    page.print(grid)


def _cells(table: Table) -> list[list[str]]:
    # The header and the rows as texts for a reader.
    compared = any(row.margin for row in table.rows)
    losses = ["val loss", "from the best", "bits/byte"] if compared else ["val loss", "bits/byte"]
    lines = [["#", *table.short_names.values(), *losses, "params", "status"]]
    for row in table.rows:
        params = row.costs["params"]
        lines.append(
            [
                f"{row.rank}*" if row.rank and row.provisional else row.rank,
                *(_format_value(row, name) for name in table.short_names),
                _format_loss(row, NATS, table.unit),
                *([_format_difference(row)] if compared else []),
                _format_loss(row, BITS, table.unit),
                "–" if params is None else f"{params:,.0f}",
                row.status,
            ]
        )
    return [[*map(sanitize_line, line)] for line in lines]


def _escape(text: str) -> str:
    # The characters that start HTML, links, images, code and cells in Markdown.
    return text.translate({ord(each): f"\\{each}" for each in r"\`[]<>|"})


def table_of_rows(table: Table) -> PlainTable:
    """Return what `sweep.csv` holds: the rows, with intervals and differences in their unit."""
    header: list[str | int] = [
        "rank",
        *table.short_names,
        "val_loss",
        "val_bits_per_byte",
        "interval",
        "difference",
        "difference_interval",
        "tied",
        "seeds",
        *COSTS,
        "status",
        "reason",
        "commit",
    ]
    return header, [
        [
            row.rank,
            *map(row.overrides.get, table.short_names),
            *row.means.values(),
            row.interval,
            row.difference,
            row.margin,
            None if row.margin is None else row.tied,
            row.n_seeds,
            *row.costs.values(),
            row.status,
            row.reason,
            row.points[0].code.get("commit"),
        ]
        for row in table.rows
    ]


def table_of_runs(table: Table) -> PlainTable:
    """Return what `runs.csv` holds: every run, in the order of the rows."""
    header: list[str | int] = [
        *table.short_names,
        "seed",
        "val_loss",
        "val_bits_per_byte",
        "steps",
        *COSTS,
        "status",
        "reason",
        "folder",
        "commit",
    ]
    runs = [(row, point) for row in table.rows for point in row.points]
    return header, [
        [
            *map(row.overrides.get, table.short_names),
            point.seed,
            *map(point.totals.get, (*LOSS_NAMES.values(), "steps", *COSTS)),
            point.status,
            point.reason,
            point.folder,
            point.code.get("commit"),
        ]
        for row, point in runs
    ]


def write_csv(file: Path, header: Sequence[object], lines: Sequence[Sequence[object]]) -> None:
    """Write a header and rows; None is an empty cell."""
    # File names and JSON may hold lone surrogates, which UTF-8 cannot encode.
    with (
        atomic_write(file) as partial,
        open(partial, "w", newline="", encoding="utf-8", errors="backslashreplace") as opened,
    ):
        csv.writer(opened).writerows([header, *lines])


def publish(folder: Path, table: Table, wandb_config: DictConfig) -> None:
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
                "sweep": wandb.Table(*_with_numbers(*table_of_rows(table))),
                "runs": wandb.Table(*_with_numbers(*table_of_runs(table))),
                "plot": wandb.Image(str(folder / PLOT)),
            }
        )
        logger.finish({"answer": "\n".join(answer(table))})


def _with_numbers(header: list[str | int], lines: Sequence[Sequence[object]]) -> PlainTable:
    # A column of numbers has numbers, and None where a cell is empty; others have texts.
    columns = map(_numbers_or_texts, zip(*lines, strict=True))
    return header, [[*line] for line in zip(*columns, strict=True)]


def _numbers_or_texts(column: Sequence[object]) -> Sequence[object]:
    texts = ["" if cell is None else str(cell) for cell in column]
    try:
        return [float(text) if text else None for text in texts]
    except ValueError:
        return [text.encode(errors="backslashreplace").decode() for text in texts]


def _full_name(table: Table, along: str) -> str:
    # `--along` names a numeric setting in full or by its last part.
    numeric = [name for name in table.short_names if len(numbers(table.rows, name)) > 1]
    for name, short in short_names(numeric).items():
        if along in (name, short):
            return name
    raise UserError(
        sanitize_line(
            f"--along={along} must be one numeric setting in which the runs differ"
            f"{did_you_mean(along, numeric)}; use one of: {', '.join(numeric) or 'none'}"
        )
    )


def _format_value(row: Row, name: str) -> str:
    # A revision has its short commit.
    value = row.value(name)
    commit = code_label(row.points[0].code)
    return f"{value} ({commit})" if name == "code" and not value.startswith(commit) else value


def _format_loss(row: Row, unit: str, unit_of_table: str) -> str:
    # In the unit of the table, the mean loss has its interval and the number of runs.
    if unit != unit_of_table:
        return loss_text(row.means[unit], None)
    text = loss_text(row.loss, row.interval)
    if not row.losses or len(row.points) == 1:
        return text
    of_all = "" if len(row.losses) == len(row.points) else f" of {len(row.points)}"
    return f"{text} ({len(row.losses)}{of_all} runs)"


def _format_difference(row: Row) -> str:
    if not row.margin:  # of the best row, and of rows that are not compared
        return "–"
    return f"{row.difference:+.4f} ± {row.margin:.4f}{', tied' if row.tied else ''}"


def _display(path: Path) -> str:
    return sanitize_line(str(short_path(Path.cwd() / path)))
