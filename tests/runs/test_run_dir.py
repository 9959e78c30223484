"""The run folder: its lock, the link to the newest run, metrics, curves and summary."""

import csv
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import setup_globals
from matplotlib import image
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from small_runs import one_line

import minigpt
from minigpt.runs import run_dir
from minigpt.runs.callbacks.progress_bar import Progress
from minigpt.runs.curves import plot_curves
from minigpt.runs.metrics_csv import append_metrics, read_metrics, truncate_metrics
from minigpt.runs.overrides import complete_overrides
from minigpt.sweeps.sweeper import Grid
from minigpt.training.language_model import LanguageModel
from minigpt.utils.errors import UserError
from minigpt.utils.files import atomic_write


def finished_run(runs, name, *, val_losses=(2.55, 2.6)):
    """A run with ten training losses that fall from 3.8 to 2, and validation losses."""
    folder = runs / name
    with run_dir.lock_run_dir(folder):
        run_dir.update_latest_link(folder)
        for step in range(10, 110, 10):
            append_metrics(
                folder / "metrics.csv",
                {"train_loss": 4 - step / 50, "learning_rate": 1e-3 * step},
                step,
            )
        for step, loss in zip((50, 100), val_losses, strict=False):
            append_metrics(folder / "metrics.csv", {"val_loss": loss}, step)
    return folder


def test_what_a_killed_run_was_writing_is_removed_when_it_resumes(tmp_path):
    folder = finished_run(tmp_path, "first")
    (folder / "checkpoints/snapshots").mkdir(parents=True)
    for name in (
        ".notes.partial",
        ".mine.txt.7.partial",
        "checkpoints/.tmp",
        "checkpoints/snapshots/step-1",
    ):
        (folder / name).touch()  # of the user
    before = set(folder.rglob("*"))
    with ExitStack() as killed:
        for name in (
            "metrics.csv",
            "checkpoints/last.safetensors",
            "checkpoints/snapshots/step-2.safetensors",
        ):
            killed.enter_context(atomic_write(folder / name)).touch()
        (folder / "checkpoints/.tmpkCZie0").touch()  # of safetensors
        assert len(set(folder.rglob("*")) - before) == 4
        with run_dir.lock_run_dir(folder, resume=True):
            assert set(folder.rglob("*")) == before
        killed.pop_all()
    with run_dir.lock_run_dir(folder, resume=True):
        assert set(folder.rglob("*")) == before


def files(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


OTHERS = ["log.txt", "samples.txt", "metrics.csv", "plan.json", "attention/step-1.png"]
HYDRA = [".hydra/config.yaml", ".hydra/hydra.yaml", "metrics.csv"]  # of another program


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("names", "held"),
    [*(([name], name.partition("/")[0]) for name in OTHERS), (HYDRA, ".hydra")],
)
def test_a_run_does_not_begin_in_a_folder_with_files_that_it_would_change(
    tmp_path, names, held, resume
):
    for name in ["notes.txt", *names]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("precious")
    before = files(tmp_path)
    error = f"already holds {held}; .*hydra.run.dir="
    with pytest.raises(UserError, match=error), run_dir.lock_run_dir(tmp_path, resume=resume):
        run_dir.truncate_logs(tmp_path, 0)
    assert files(tmp_path) == before


@pytest.mark.parametrize("file", ["metrics.csv", "summary.json"])
def test_a_folder_that_holds_a_run_is_rejected_and_left_unchanged(tmp_path, file):
    folder = finished_run(tmp_path, "first")
    (folder / file).write_text("precious")
    with (
        pytest.raises(UserError, match=r"first already holds a run.*hydra\.run\.dir"),
        run_dir.lock_run_dir(folder),
    ):
        (folder / file).write_text("overwritten")
    assert (folder / file).read_text(encoding="utf-8") == "precious"


def test_latest_points_at_the_newest_run_and_survives_a_move_of_all_runs(tmp_path):
    for name in ("first", "second", "third"):
        folder = finished_run(tmp_path / "runs", name)
        assert (tmp_path / "runs/latest").resolve() == folder
    (tmp_path / "runs").rename(tmp_path / "archive")
    assert (tmp_path / "archive/latest").resolve() == tmp_path / "archive/third"
    (tmp_path / "latest").mkdir()  # a folder of the user stays
    (tmp_path / "archive/latest").unlink()
    (tmp_path / "archive/latest").write_text("a file of the user")
    (tmp_path / "own/release").mkdir(parents=True)
    (tmp_path / "own/latest").symlink_to("release")  # a link of the user
    finished_run(tmp_path, "run")
    finished_run(tmp_path / "archive", "fourth")
    finished_run(tmp_path / "own", "run")
    assert not (tmp_path / "latest").is_symlink()
    assert (tmp_path / "own/latest").resolve() == tmp_path / "own/release"
    assert (tmp_path / "archive/latest").read_text(encoding="utf-8") == "a file of the user"


def test_a_run_that_fails_in_its_first_step_leaves_no_folder_and_latest_as_it_was(
    train, tmp_path, monkeypatch
):
    first = finished_run(tmp_path / "runs", "first")
    monkeypatch.setattr(LanguageModel, "training_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train("max_steps=2", folder=tmp_path / "runs/second")
    assert not (tmp_path / "runs/second").exists()
    assert (tmp_path / "runs/latest").resolve() == first


def test_a_refused_start_leaves_a_folder_of_the_user_as_it_was(call, tmp_path):
    missing = "data.path=missing.txt"
    for held, error in {
        "": missing,
        "notes.txt": missing,
        "checkpoints/a.ckpt": "mine already holds checkp",
    }.items():
        folder = tmp_path / f"{held[:5]}mine"
        folder.mkdir()
        if held:
            (folder / held).parent.mkdir(exist_ok=True)
            (folder / held).write_text("precious")
        before = files(folder)
        assert error in one_line(call("train.py", f"hydra.run.dir={folder.name}", missing))
        assert files(folder) == before
    with pytest.raises(UserError, match=missing):
        minigpt.train(["hydra.run.dir=new/folders", missing, "data=text"])  # those of the run go
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_that_is_named_by_the_day_is_resumed_and_kept(tmp_path):
    setup_globals()  # the resolver `now`
    settings = [OmegaConf.create({"dir": f"{tmp_path}/${{now:%Y}}"}) for _ in range(2)]
    with run_dir.remove_unused_folders():
        folder = run_dir.make_folder(settings[0])
    assert not folder.exists()  # this command made it
    folder.mkdir()
    with run_dir.remove_unused_folders():
        assert run_dir.make_folder(settings[1]) == folder
    assert folder.exists()


def test_runs_and_sweeps_that_start_in_one_second_have_folders_of_their_own(
    call, small, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "hydra.core.utils.datetime", SimpleNamespace(now=lambda: datetime(2026, 1, 2, 3, 4, 5))
    )
    name = "2026-01-02_03-04-05"
    for folder in (f"runs/{name}", f"runs/{name}-2", f"runs/sweeps/{name}"):  # of others
        (tmp_path / folder).mkdir(parents=True)
    assert f"run folder       runs/{name}-3\n" in call("train.py", "max_steps=1").stdout
    assert (tmp_path / f"runs/{name}-3/checkpoints/best.safetensors").exists()
    assert (tmp_path / "runs/latest").resolve().name == f"{name}-3"
    assert minigpt.train([*small, "max_steps=1"])["folder"] == f"{tmp_path}/runs/{name}-4"
    monkeypatch.setattr(Grid, "launch", lambda sweeper, _: (sweeper.folder / "mine").touch())
    monkeypatch.setattr(Grid, "_report", lambda _: None)
    call("train.py", "-m", "seed=1,2")
    assert (tmp_path / f"runs/sweeps/{name}-2/mine").exists()
    assert {path.name for path in (tmp_path / "runs").iterdir() if not any(path.iterdir())} == {
        name,
        f"{name}-2",
    }


def test_processes_that_choose_a_folder_at_once_choose_different_ones(tmp_path):
    setup_globals()  # the resolver `now`
    settings = [OmegaConf.create({"dir": f"{tmp_path}/${{now:%S one}}"}) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert len({*pool.map(run_dir.make_folder, settings)}) == 8
    assert {str(path) for path in tmp_path.iterdir()} == {each.dir for each in settings}


def test_a_link_to_resume_from_is_resolved_before_a_newer_run_moves_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = finished_run(tmp_path / "runs", "it's first")
    arguments = complete_overrides(["resume=runs/latest", "seed=2"])
    finished_run(tmp_path / "runs", "second")
    override = OverridesParser.create().parse_override(arguments[0])
    assert (override.key_or_group, override.value()) == ("resume", str(first))
    assert complete_overrides(["resume=auto", "resume=runs/second"]) == [
        "resume=auto",
        "resume=runs/second",
    ]


LINES = ("two\nlines", "two\r\nlines", "mac\rline")


@pytest.mark.parametrize("name", ["acc,top5", 'a"b', '"quoted"', " spaced", "é", *LINES])
def test_a_metric_of_any_name_is_read_by_every_reader_of_csv(tmp_path, name):
    file = tmp_path / "metrics.csv"
    expected = {"train_loss": [], name: [], "val_loss": []}
    for step in (1, 2, 3):
        for metrics in ({"train_loss": 1 / step}, {name: 0.5 * step, "val_loss": 1e-17}):
            append_metrics(file, metrics, step)
            for metric, value in metrics.items():
                expected[metric].append((step, value))
        assert read_metrics(file) == expected  # on disk as soon as it is measured
    with open(file, newline="", encoding="utf-8") as opened:
        column = [row[name] for row in csv.DictReader(opened, strict=True)]
    assert [float(value) for value in column if value] == [0.5, 1.0, 1.5]
    assert pandas.read_csv(file)[name].dropna().tolist() == [0.5, 1.0, 1.5]
    with open(file, "a", encoding="utf-8") as opened:
        opened.write('3,"')  # of a killed run
    assert read_metrics(file) == expected
    truncate_metrics(file, 2)
    assert read_metrics(file) == {column: points[:2] for column, points in expected.items()}
    append_metrics(file, {name: 7.0, "tokens": 768}, 4)
    assert read_metrics(file)[name] == [(1, 0.5), (2, 1.0), (4, 7.0)]
    assert read_metrics(file)["tokens"] == [(4, 768)]  # a column that appears later


def test_a_quote_in_a_damaged_row_swallows_no_other(tmp_path, capsys):
    file = tmp_path / "metrics.csv"
    file.write_text('step,"acc,top5",val_loss\n1,0.5,3.0\n2,"0.5,2.0\n3,0.25,1.0\n')
    with pytest.raises(ValueError, match="a row is not a measurement"):
        read_metrics(file)
    truncate_metrics(file, 3)
    assert "1 of its rows are dropped" in capsys.readouterr().err
    assert read_metrics(file) == {
        "acc,top5": [(1, 0.5), (3, 0.25)],
        "val_loss": [(1, 3.0), (3, 1.0)],
    }


def test_the_curves_show_the_training_loss_and_every_validation_loss(tmp_path):
    pictures = []
    for losses in ((2.55, 2.6), (2.55, 3.2), ()):
        folder = finished_run(tmp_path, str(losses), val_losses=losses)
        plot_curves(folder, {"best_val_loss": 2.55, "best_step": 50} if losses else {})
        pictures.append(image.imread(folder / "curves.png"))
    assert not np.array_equal(*pictures[:2])
    orange = np.array([255, 127, 14]) / 255  # the validation curve, in matplotlib's colors
    pixels = [(np.abs(picture[..., :3] - orange).max(axis=-1) < 0.01).sum() for picture in pictures]
    assert pixels[0] > 100 > pixels[2] == 0


def test_a_short_run_has_its_best_loss_in_the_legend_where_no_frame_cuts_it(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: drawn.append(figure))
    (tmp_path / "metrics.csv").write_text("step,val_loss\n1,2.5\n")
    plot_curves(tmp_path, {"best_val_loss": 2.5, "best_step": 1})
    losses = drawn[0].axes[0]
    texts = [text.get_text() for text in losses.get_legend().get_texts()]
    assert texts == ["validation", "best 2.5000"]
    assert not losses.texts


def test_the_summary_is_written_as_json(tmp_path):
    summary = {"best_val_loss": 2.55, "best_step": 50, "status": "completed", "checkpoint": None}
    run_dir.write_summary(tmp_path, summary)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8")) == summary
    assert run_dir.completed_summary(tmp_path, 100, 100) == summary
    assert run_dir.completed_summary(tmp_path, 99, 100) is None
    run_dir.write_failure(tmp_path, "lost")
    assert run_dir.completed_summary(tmp_path, 100, 100) is None
    # As a run does that resumes: a crash must not leave the old status
    run_dir.truncate_logs(tmp_path, 50)
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_a_line_per_validation_elsewhere(
    tmp_path, monkeypatch, capsys, terminal
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    progress = Progress(20, tmp_path, step=5)  # of a run that resumed
    progress.bar.mininterval = progress.bar.delay = (
        0  # seconds between two drawings, and before the first
    )
    progress.log({"train_loss": 3.0, "tokens_per_second": 12_345.6}, 10)
    progress.log_validation(3, 7)
    drawn = capsys.readouterr().err
    assert ("10/20" in drawn, "validating 3/7" in drawn) == (terminal, terminal)
    progress.log({"val_loss": 3.2}, 10)
    out, drawn = capsys.readouterr()
    assert "loss 3.000, val 3.2000, 12,346 tokens/s" in drawn
    line = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert line == "step 10/20  loss 3.000, val 3.2000, 12,346 tokens/s\n"
    assert (out, line in drawn) == ("", not terminal)
    progress.bar.close()
