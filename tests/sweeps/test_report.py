"""A report: the printed table, its files and its plots."""

import itertools
import json
import math
import re
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from scipy import stats
from small_runs import table
from sweep_folders import FILES, TOKENS, panels_of, points_of, run_folder

from minigpt.sweeps.ranking import ranked
from minigpt.sweeps.report import report, table_of_rows, table_of_runs, write_csv
from minigpt.sweeps.results import Point, read_sweep, write_plan
from minigpt.sweeps.sweep_plots import highest_converged, pareto_front, sweep_figure
from minigpt.utils.errors import UserError


def grid(folder):
    losses = [2.0, 2.2, 2.5, 2.7, 1.5, 1.9, 3.0, 4.0]
    for i, (size, rate, seed) in enumerate(itertools.product((32, 64), ("1e-3", "1e-2"), (1, 2))):
        overrides = (f"model.n_embd={size}", f"optimizer.lr={rate}", f"seed={seed}", "max_steps=20")
        known = {
            "losses": (5.0, losses[i]),
            "params": 100 * size,
            "bytes_per_token": 2 / math.log(2),
        }
        run_folder(folder / f"{i}", *overrides, **known)
    return folder


def intervals(losses):
    """Half of the interval of a mean over seeds, and of a difference; losses (rows, seeds)."""
    (rows, seeds) = losses.shape
    of_row = losses.mean(1, keepdims=True)
    of_seed = losses.mean(0)
    noise = np.sum((losses - of_row - of_seed + losses.mean()) ** 2) / ((rows - 1) * (seeds - 1))
    parts = np.array([of_seed.var(ddof=1), (rows - 1) * noise / rows])
    freedom = parts.sum() ** 2 / np.sum(parts**2 / [seeds - 1, (rows - 1) * (seeds - 1)])
    margin = (
        stats.studentized_range.ppf(0.99, rows, (rows - 1) * (seeds - 1)) * (noise / seeds) ** 0.5
    )
    return stats.t.ppf(0.975, max(freedom, 1)) * (parts.sum() / seeds) ** 0.5, margin


def test_table_and_csv_rank_rows_by_the_mean_over_seeds(tmp_path, printed):
    failed = ("model.n_embd=96", "optimizer.lr=1e-2", "max_steps=20")
    run_folder(
        grid(tmp_path) / "8", *failed, losses=(), status="failed", reason='out of\n"memory", c'
    )
    output = printed(read_sweep(tmp_path))
    header, _, *lines = [" ".join(line.split()) for line in output.splitlines()[2:9]]
    # max_steps is shared
    assert header == "# n_embd lr val loss from the best bits/byte params status"
    means = (1.7, 2.1, 2.6, 3.5)
    interval, margin = intervals(np.array([(1.5, 1.9), (2.0, 2.2), (2.5, 2.7), (3, 4)]))
    texts = [f"{mean:.4f} ± {interval:.4f} (2 runs)" for mean in means]
    differences = [f"+{mean - 1.7:.4f} ± {margin:.4f}" for mean in means]
    assert lines == [
        f"1 64 1e-3 {texts[0]} – 0.8500 6,400 completed",
        f"2 32 1e-3 {texts[1]} {differences[1]}, tied 1.0500 3,200 completed",
        f"3 32 1e-2 {texts[2]} {differences[2]}, tied 1.3000 3,200 completed",
        f"4 64 1e-2 {texts[3]} {differences[3]}, tied 1.7500 6,400 completed",
        "96 1e-2 – – – 1,000 failed",
    ]
    assert '\nn_embd=96, lr=1e-2: failed: out of "memory", c\n' in output
    assert f"best     {texts[0]}: n_embd=64, lr=1e-3\n" in output

    write_csv(tmp_path / "table.csv", *table_of_rows(ranked(read_sweep(tmp_path))))
    *rows, last = table(tmp_path / "table.csv")
    settings = [
        (row["rank"], row["model.n_embd"], row["optimizer.lr"], row["seeds"]) for row in rows
    ]
    assert settings[:2] == [("1", "64", "1e-3", "2"), ("2", "32", "1e-3", "2")]
    expected = {
        "val_loss": means,
        "val_bits_per_byte": np.divide(means, 2),
        "interval": [interval] * 4,
    }
    expected |= {"difference": np.subtract(means, 1.7), "difference_interval": [0, *[margin] * 3]}
    for name, values in expected.items():
        assert [float(row[name]) for row in rows] == pytest.approx(values)
    assert float(rows[0]["flops"]) == pytest.approx(6 * 6400 * 20 * TOKENS)
    assert (last["rank"], last["val_loss"], last["reason"]) == ("", "", 'out of\n"memory", c')


def test_rows_of_unequal_seeds_rank_alike_in_both_units_and_every_run_has_a_line(tmp_path):
    # b has not the seed of the highest losses
    losses = {
        "a0": 1.0,
        "a1": 3.0,
        "a2": 5.0,
        "b0": 1.1,
        "b1": 3.1,
        "c0": 1.2,
        "c1": 3.2,
        "c2": 5.2,
    }
    for name, loss in losses.items():
        known = {"losses": (loss,), "bytes_per_token": 2, "best_val_bits_per_byte": loss / 2}
        run_folder(tmp_path / name, f"x={name[0]}", f"seed={name[1]}", **known)
    ranking = ranked(read_sweep(tmp_path))
    write_csv(tmp_path / "table.csv", *table_of_rows(ranking))
    write_csv(tmp_path / "runs.csv", *table_of_runs(ranking))
    lines = table(tmp_path / "table.csv")
    assert [(line["x"], line["seeds"]) for line in lines] == [("a", "3"), ("b", "2"), ("c", "3")]
    assert [float(line["val_bits_per_byte"]) for line in lines] == pytest.approx([1.5, 1.55, 1.6])
    runs = table(tmp_path / "runs.csv")
    assert {line["x"] + line["seed"]: float(line["val_loss"]) for line in runs} == losses
    assert [Path(line["folder"]).name for line in runs] == [*losses]


@pytest.mark.usefixtures("no_plot")
def test_a_sweep_over_tokenizers_is_ranked_by_bits_per_byte_everywhere(tmp_path, capsys):
    runs = {"bpe": (3.0, (4.0, 3.3, 3.6)), "char": (1.0, (1.9, 1.6)), "byte": (1.25, (2.5, 2.1))}
    for name, (bytes_per_token, losses) in runs.items():
        run_folder(
            tmp_path / name, f"tokenizer={name}", losses=losses, bytes_per_token=bytes_per_token
        )
    report([tmp_path])
    output = capsys.readouterr().out
    lines = [line.split()[:4] for line in output.splitlines() if "completed" in line]
    bits = [f"{min(losses) / math.log(2) / size:.4f}" for size, losses in runs.values()]
    assert [(name, loss) for _, name, *loss in lines] == [
        ("bpe", ["3.3000", bits[0]]),
        ("char", ["1.6000", bits[1]]),
        ("byte", ["2.1000", bits[2]]),
    ]
    _, curves, params, _ = panels_of(read_sweep(tmp_path))
    assert params.get_ylabel() == "best validation loss (bits per byte)"
    np.testing.assert_allclose(
        curves.lines[0].get_ydata(), np.array([4.0, 3.3, 3.6]) / math.log(2) / 3.0
    )


@pytest.mark.usefixtures("no_plot")
def test_files_of_a_report_are_written_before_anything_is_printed(tmp_path, monkeypatch):
    run_folder(tmp_path / "0", "seed=1")
    closed = StringIO()
    closed.close()
    monkeypatch.setattr("sys.stdout", closed)
    with pytest.raises(ValueError, match="closed file"):
        report([tmp_path])
    assert {file.name for file in tmp_path.glob("*.*")} == FILES


@pytest.mark.usefixtures("no_plot")
def test_the_answer_is_printed_also_where_files_cannot_be_written(tmp_path, capsys):
    run_folder(tmp_path / "0", "seed=1")
    with pytest.raises(NotADirectoryError):
        report([tmp_path], out=tmp_path / "0/summary.json/out")
    assert "\nbest     2.0000: " in capsys.readouterr().out


@pytest.mark.usefixtures("no_plot")
def test_losses_over_different_parts_of_the_validation_split_are_not_ranked(tmp_path, capsys):
    parts = [
        f"{part} of text {text}"
        for part in ("4 of 80 windows", "all 400 bytes")
        for text in ("ab", "cd")
    ]
    for n, part in enumerate(parts):
        run_folder(tmp_path / f"{n}", f"n={n}", validated=part, eval_batches=[4, 4, None, None][n])
    report([tmp_path])
    output = capsys.readouterr().out
    found = "; ".join(f"{n}: {part}" for n, part in enumerate(parts))
    assert (
        f"different texts ({found}), so their losses are not comparable; eval_batches=null val"
        in output
    )
    assert "best " not in output
    assert [(row["rank"], row["val_loss"]) for row in table(tmp_path / "sweep.csv")] == [
        ("", "2.0")
    ] * 4


RUNS = {  # by learning rate: the status and the best loss of each seed
    "completed": [("completed", 3.0), ("completed", 3.2), ("completed", 3.1)],
    "failed": [("completed", 2.0), ("completed", 2.1), ("failed", None)],
    "running": [
        ("completed", 1.9),
        ("running", 1.7),
        ("completed", 1.8),
    ],  # validated, but not at its end
    "unknown": [("completed", 2.7), ("completed", None), ("completed", 2.7)],
    "repeated": [("completed", 4.0), ("skipped", None)],  # never to run
    "diverged": [("failed", None), ("failed", None), ("failed", None)],
}


def test_a_row_whose_runs_did_not_all_complete_is_marked_and_does_not_win(printed):
    points = [
        Point(
            Path(f"{rate}{seed}"),
            {"lr": rate, "seed": str(seed)},
            status,
            totals={"best_val_loss": loss},
        )
        for rate, runs in RUNS.items()
        for seed, (status, loss) in enumerate(runs)
    ]
    output = printed(points)
    assert [" ".join(line.split()).split(" –")[0] for line in output.splitlines()[4:11]] == [
        "1 completed 3.1000 (3 runs)",
        "2 repeated 4.0000",
        "3* running 1.8000 (3 runs)",
        "4* failed 2.0500 (2 of 3 runs)",
        "5* unknown 2.7000 (2 of 3 runs)",
        "repeated",
        "diverged",
    ]
    assert "best     3.1000 (3 runs): lr=completed\n" in output
    assert "provisional" not in printed(points[:3])
    # Also where no row has completed
    assert "\n1* 2.0500" in re.sub(" +", " ", printed(points[3:6]))


@pytest.mark.usefixtures("no_plot")
def test_text_of_a_file_reaches_no_terminal_as_an_escape_sequence_and_markdown_as_text(
    tmp_path, capsys
):
    evil = "\x1b[31m\x07\x9b1m\u202e<img src=x>![a](b)|`c`"
    for name, reason in (("0", evil), ("1\x1b[2J", "")):
        run_folder(
            tmp_path / name,
            f"text={evil}{name}",
            f"{evil}=1{name}",
            status=f"failed{evil}",
            reason=reason,
        )
    (tmp_path / "1\x1b[2J/metrics.csv").write_text(f"step,val_loss\n1,{evil}\n", encoding="utf-8")
    code = f"!!python/object/apply:os.system [touch {tmp_path}/canary]"
    (run_folder(tmp_path / "2") / ".hydra/overrides.yaml").write_text(code, encoding="utf-8")
    report([tmp_path])
    with pytest.raises(UserError) as raised:
        report([tmp_path], along=evil)
    out, err = capsys.readouterr()
    assert r"\x1b[31m\x07\x9b1m\u202e" in out
    text = (tmp_path / "sweep.md").read_text(encoding="utf-8")
    for output in (out, err, str(raised.value), text):
        assert [c for c in output if not c.isprintable() and c != "\n"] == []
    assert r"\<img src=x\>!\[a\](b)\|\`c\`0" in text
    assert not re.search(r"(?<!\\)[<`]|(?<!\\)\[a", text)
    assert not (tmp_path / "canary").exists()
    # A file keeps what it is
    assert f"{evil}0" in {row["text"] for row in table(tmp_path / "sweep.csv")}


@pytest.mark.usefixtures("no_plot")
def test_several_sweeps_are_ranked_together_by_all_settings_that_differ(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name, layers, loss in (("a", "2", 2.0), ("b", "4", 1.0)):
        fixed = [f"n_layer={layers}", "max_steps=20", "+note="]
        folder = run_folder(tmp_path / name / "0", "lr=1", *fixed, losses=(loss,)).parent
        settings = {"lr": 1, "n_layer": int(layers), "max_steps": 20, "note": ""}
        write_plan(folder, fixed, [Point(folder / "0", {"lr": "1"}, settings=settings)])
    run_folder(
        tmp_path / "c/0",
        "dropout=0.1",
        "max_steps=20",
        "+note=",
        "logger=wandb",
        "resume=auto",
        losses=(1.5,),
    )
    folders = [
        tmp_path / "a",
        tmp_path / "b",
        tmp_path / "c",
        tmp_path / "a/0",
    ]  # a run of them twice
    report(folders)
    assert list(Path.cwd().iterdir()) == []
    output = capsys.readouterr().out
    advice, line = output.splitlines()[-2:]
    assert advice == "set --out FOLDER to write the table and the plot of several folders"
    assert json.loads(line)["folder"] is None
    assert [line.split()[:5] for line in output.splitlines() if "completed" in line] == [
        ["1", "1", "4", "default", "1.0000"],
        ["2", "default", "default", "0.1", "1.5000"],
        ["3", "1", "2", "default", "2.0000"],
    ]
    report(folders, out=Path("out"))
    assert {path.name for path in Path("out").iterdir()} == FILES
    assert [Path(row["folder"]).parts[-2:] for row in table("out/runs.csv")] == [
        ("b", "0"),
        ("c", "0"),
        ("a", "0"),
    ]
    assert Path("out/sweep.md").read_text(encoding="utf-8").startswith("# 4 sweeps\n")
    report([tmp_path / "a/0", tmp_path / "c/0"], out=Path("runs"))
    assert Path("runs/sweep.md").read_text(encoding="utf-8").startswith("# 2 runs\n")


@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_of_80_columns_has_a_line_per_row(columns, monkeypatch, printed):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    shape = {"model.n_head": "248", "model.n_embd": ["64", "128", "256"], "seed": "123"}
    points = points_of(
        shape, lambda head, embd, seed: 1.5 + int(head) / 100 - int(embd) / 1000 + int(seed) / 500
    )
    header, _, *lines = re.sub(r"\x1b\[[\d;]*m", "", printed(points)).split("\n\n")[1].splitlines()
    assert len(lines) == 9
    assert max(map(len, [header, *lines])) <= columns
    assert re.split("  +", header.strip())[:5] == [
        "#",
        "n_head",
        "n_embd",
        "val loss",
        "from the best",
    ]
    assert ("status" in header) == (columns == 200)


def test_a_report_along_a_setting_to_another_folder_does_not_change_the_sweep(
    tmp_path, monkeypatch
):
    plotted = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, path, **_: (path.touch(), plotted.append(figure))
    )
    grid(tmp_path / "sweep")
    write_plan(tmp_path / "sweep", [], read_sweep(tmp_path / "sweep"))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "sweep").iterdir()}
    report([tmp_path / "sweep"], out=tmp_path / "a/b", along="n_embd")
    assert {path.name for path in (tmp_path / "a/b").iterdir()} == FILES
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "sweep").iterdir()} == before
    assert plotted[0].axes[0].get_xlabel() == "model.n_embd"
    for rate in ("1", "2"):
        run_folder(tmp_path / "two" / rate, f"optimizer.lr={rate}", f"other.lr={rate}")
    for name, meant in (("lr", ""), ("optimizer.lt", r" \(did you mean optimizer\.lr\?\)")):
        with pytest.raises(UserError, match=rf"{meant}; use one of: optimizer\.lr, other\.lr"):
            report([tmp_path / "two"], along=name)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=12))
def test_the_pareto_front_holds_all_points_that_none_dominates(points):
    dominated = {a for a in points for b in points if a != b and a[0] >= b[0] and a[1] >= b[1]}
    assert pareto_front(points) == sorted({*points} - dominated)


def test_a_plot_shows_the_losses_near_the_median_and_all_if_most_are_equal():
    assert highest_converged([2.0, 2.1, 2.2, 2.4, 9.0]) == 2.4
    assert highest_converged([2.0, 2.0, 2.3]) == 2.3


def test_two_numeric_settings_are_a_heat_map_with_the_best_cell_in_bold():
    losses = {
        ("4", "1e-2"): None,
        ("2", "1e-2"): 1.2,
        ("4", "1e-3"): 0.4,
        ("2", "1e-3"): 0.2,
        ("10", "1e-3"): 1.0,
    }
    shape = {"n_layer": ["4", "2", "10"], "lr": ["1e-2", "1e-3"]}
    panel = panels_of(
        points_of(shape, lambda *at: losses.get(at, 2.0), status=lambda *at: f"{at[0]} layers")
    )[0]
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("n_layer", "lr")
    np.testing.assert_allclose(
        panel.images[0].get_array().filled(np.nan), [[0.2, 0.4, 1.0], [1.2, np.nan, 2.0]]
    )
    assert [text.get_text() for text in panel.texts if text.get_weight() == "bold"] == [
        "0.2000\n2 layers"
    ]


def test_one_numeric_setting_is_a_line_with_the_interval_over_seeds():
    def loss(rate, seed):
        return 1 + abs(math.log10(float(rate)) + 3) + int(seed) / 10

    shape = {"optimizer.lr": ["1e-2", "1e-4", "1e-3"], "seed": ["1", "2", "3"]}
    panel, *_ = panels_of(points_of(shape, loss))
    assert panel.get_xscale() == "log"
    assert panel.get_title() == "best validation loss, mean and 95 % interval over seeds"
    line, _, (bars,) = panel.containers[0]
    np.testing.assert_allclose(line.get_xydata(), [[1e-4, 2.2], [1e-3, 1.2], [1e-2, 2.2]])
    interval = stats.t.ppf(0.975, 2) * 0.1 / 3**0.5  # rows differ by their settings alone
    np.testing.assert_allclose([np.ptp(bar[:, 1]) for bar in bars.get_segments()], 2 * interval)


def test_along_a_setting_there_is_a_line_per_combination_of_the_others_best_first():
    def loss(width, rate):
        return 4 - math.log10(int(width)) + abs(math.log2(float(rate) * int(width) / 0.064))

    shape = {"model.n_embd": ["32", "128", "64"], "optimizer.lr": ["5e-4", "1e-3", "2e-3", "4e-3"]}
    panel = panels_of(points_of(shape, loss), along="optimizer.lr")[0]
    assert [text.get_text() for text in panel.get_legend().get_texts()] == [
        "n_embd=128",
        "n_embd=64",
        "n_embd=32",
    ]
    for (line, *_), (width, best) in zip(
        panel.containers, [("128", 5e-4), ("64", 1e-3), ("32", 2e-3)], strict=True
    ):
        assert line.get_xdata()[np.argmin(line.get_ydata())] == best
        assert min(line.get_ydata()) == loss(width, best)


def test_other_sweeps_are_the_best_rows_by_name():
    points = points_of(
        {"act": ["relu", "gelu"], "n": "ab"}, lambda act, n: len(act) + (n == "b") / 2
    )
    panel = panels_of(points)[0]
    assert panel.get_xlabel() == "best validation loss (nats per token)"
    shown = zip(panel.texts, panel.get_yticklabels(), strict=True)
    names = [(name.get_text(), loss.get_text()) for name, loss in shown]
    assert names[:2] == [("act=relu, n=a", "4.0000"), ("act=gelu, n=a", "4.0000")]


def test_a_single_point_of_which_nothing_is_known_can_be_plotted_and_printed(printed):
    known = {"params": None, "flops": None, "status": "waiting", "tokens_per_second": None}
    points = points_of({"max_steps": ["5"]}, lambda steps: None, **known)
    assert not any(panel.get_ylabel() for panel in panels_of(points))
    assert "best" not in printed(points).partition("\n\n")[2]


def test_text_of_a_user_is_not_read_as_a_formula(tmp_path, recwarn):
    for i, path in enumerate(("$x^$", r"$\foo", "日本\n")):
        run_folder(tmp_path / "$1 $2" / f"{i}", f"data.path={path}")
    report([tmp_path / "$1 $2"])
    assert (tmp_path / "$1 $2" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert not recwarn  # of characters that the font lacks


def test_the_plots_of_mixed_runs_have_room_for_their_titles_and_no_legend_without_a_line():
    many = dict.fromkeys(
        ("model.activation", "model.norm_position", "optimizer", "tokenizer", "schedule"), "ab"
    )
    figure = sweep_figure(
        ranked(points_of(many, lambda *values: 2 + values.count("a"), params=10)), title="mixed"
    )
    figure.draw_without_rendering()
    swept, curves, params, _ = figure.axes
    left, right = (panel.title.get_window_extent() for panel in (swept, curves))
    assert left.x1 < right.x0
    # The front is one point
    assert [text.get_text() for text in params.get_legend().get_texts()] == ["best 2.0000"]


@pytest.mark.parametrize("unit", ["nats", "bits"])
def test_a_loss_of_0_is_plotted(unit: str) -> None:  # of a text of one character
    points = points_of({"model.n_head": (1, 2, 3)}, lambda n_head: float(n_head - 1))
    starts = [1.0, 2.0, 3.0]  # each curve begins 1 nat higher
    if unit == "bits":  # which are compared where tokens differ in length
        for point, bits in zip(points, (0.0, 0.5, 3.0), strict=True):
            point.totals["best_val_bits_per_byte"] = bits
        starts = [math.nan, 1.0, 4.5]  # how many bits the first are is unknown
    _, curves, params, _ = panels_of(points)
    assert [line.get_ydata()[0] for line in curves.lines] == pytest.approx(starts, nan_ok=True)
    assert [text.get_text() for text in params.get_legend().get_texts()][-1] == "best 0.0000"
