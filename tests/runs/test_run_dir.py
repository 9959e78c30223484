"""The run folder: its lock, the link to the newest run, metrics, curves and summary."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from matplotlib import image

from minigpt.runs.history import plot_curves
from minigpt.runs.loggers import MetricsCSV, Progress
from minigpt.runs.processes import complete_overrides
from minigpt.runs.run_dir import lock_run_dir, print_results, read_metrics, update_latest_link, write_summary
from minigpt.training import LanguageModel
from minigpt.utils.errors import UserError

ORANGE = (255, 127, 14)  # the validation curve, in matplotlib's tab:orange


@pytest.fixture(autouse=True)
def first_process(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def new_folder(runs, name):
    """A run folder as Hydra creates it."""
    (runs / name / ".hydra").mkdir(parents=True)
    (runs / name / ".hydra/config.yaml").write_text("seed: 1\n")
    return runs / name


def finished_run(runs, name):
    folder = new_folder(runs, name)
    with lock_run_dir(folder):
        start(folder)
    return folder


def start(folder):
    """Write what a run writes."""
    update_latest_link(folder)
    measure(folder)


def measure(folder, *, validated=True, last=2.6):
    """Ten training losses that fall from 3.8 to 2, and two validation losses, the first of them the best."""
    logger = MetricsCSV(folder / "metrics.csv")
    for step in range(10, 110, 10):
        logger.log_metrics({"train_loss": 4 - step / 50, "learning_rate": 1e-3 * step, "tokens": 64 * step}, step)
        if validated and step in (50, 100):
            logger.log_metrics({"val_loss": 2.55 if step == 50 else last, "val_bits_per_byte": 3.5}, step)


# The lock.


@pytest.mark.parametrize("file", ["metrics.csv", "summary.json"])
def test_a_folder_that_holds_a_run_is_rejected_and_left_unchanged(tmp_path, file):
    folder = new_folder(tmp_path, "first")
    (folder / file).write_text("precious")
    with pytest.raises(UserError, match=r"first already holds a run.*hydra\.run\.dir"), lock_run_dir(folder):
        (folder / file).write_text("overwritten")
    assert (folder / file).read_text() == "precious"


@pytest.mark.parametrize("error", [None, UserError("a bad setting"), KeyboardInterrupt()], ids=repr)
def test_a_folder_that_stayed_empty_is_removed(tmp_path, error):
    folder = new_folder(tmp_path, "run")
    if error is None:
        with lock_run_dir(folder):
            pass
    else:
        with pytest.raises(type(error)) as raised, lock_run_dir(folder):
            raise error
        assert raised.value is error
    assert not folder.exists()


@pytest.mark.parametrize("error", [None, RuntimeError("lost")], ids=repr)
def test_a_folder_with_files_of_the_run_is_kept(tmp_path, error):
    folder = new_folder(tmp_path, "run")
    try:
        with lock_run_dir(folder):
            (folder / "samples.txt").write_text("To be")
            if error:
                raise error
    except RuntimeError:
        pass
    assert (folder / "samples.txt").read_text() == "To be"
    assert (folder / ".hydra/config.yaml").exists()


def test_only_rank_zero_locks_the_folder(tmp_path, monkeypatch):
    folder = finished_run(tmp_path, "run")
    empty = new_folder(tmp_path, "empty")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with lock_run_dir(folder), lock_run_dir(empty):
        pass
    assert empty.exists()
    assert (tmp_path / "latest").resolve() == folder


# The newest run.


def test_latest_points_at_the_newest_run_during_and_after_it(tmp_path):
    for name in ("first", "second", "third"):
        folder = new_folder(tmp_path, name)
        with lock_run_dir(folder):
            start(folder)
            assert (tmp_path / "latest").resolve() == folder
        assert (tmp_path / "latest").resolve() == folder


def test_latest_survives_a_move_of_all_runs(tmp_path):
    finished_run(tmp_path / "runs", "first")
    (tmp_path / "runs").rename(tmp_path / "archive")
    assert (tmp_path / "archive/latest/metrics.csv").exists()


def test_a_run_that_never_started_leaves_latest_at_the_run_before_it(tmp_path):
    before = finished_run(tmp_path, "before")
    with pytest.raises(UserError), lock_run_dir(new_folder(tmp_path, "mistyped")):
        raise UserError("a bad setting")
    assert (tmp_path / "latest").resolve() == before


def test_a_run_that_never_started_does_not_take_latest_from_a_newer_run(tmp_path):
    with lock_run_dir(new_folder(tmp_path, "first")):
        second = finished_run(tmp_path, "second")
    assert (tmp_path / "latest").resolve() == second


def test_a_run_that_fails_in_its_first_step_leaves_no_folder_and_latest_as_it_was(train, tmp_path, monkeypatch):
    first = train("max_steps=2", folder=tmp_path / "runs/first").folder
    monkeypatch.setattr(LanguageModel, "training_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train("max_steps=2", folder=tmp_path / "runs/second")
    assert not (tmp_path / "runs/second").exists()
    assert (tmp_path / "runs/latest").resolve() == first


def test_a_link_to_resume_from_is_resolved_before_a_newer_run_moves_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = finished_run(tmp_path / "runs", "it's first")
    arguments = complete_overrides(["resume=runs/latest", "seed=2"])
    finished_run(tmp_path / "runs", "second")
    override = OverridesParser.create().parse_override(arguments[0])
    assert (override.key_or_group, override.value()) == ("resume", str(first))
    unchanged = ["seed=2", "resume=auto", "resume=runs/second"]
    assert [*arguments[1:], *complete_overrides(unchanged[1:])] == unchanged


def test_a_first_run_that_never_started_leaves_no_broken_link(tmp_path):
    with lock_run_dir(new_folder(tmp_path, "mistyped")):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_users_folder_named_latest_is_left_unchanged(tmp_path):
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest/notes.txt").write_text("mine")
    finished_run(tmp_path, "run")
    assert (tmp_path / "latest/notes.txt").read_text() == "mine"


# Metrics and curves.


def test_metrics_are_read_as_they_were_written(tmp_path):
    logger = MetricsCSV(tmp_path / "metrics.csv")
    logger.log_metrics({"train_loss": 0.1 + 0.2, "tokens": 768}, 1)
    logger.log_metrics({"val_loss": 1e-17}, 1)
    logger.log_metrics({"train_loss": 3.25, "tokens": 1536, "learning_rate": 6e-4}, 2)
    assert read_metrics(tmp_path / "metrics.csv") == {
        "train_loss": [(1, 0.1 + 0.2), (2, 3.25)],
        "tokens": [(1, 768), (2, 1536)],
        "val_loss": [(1, 1e-17)],
        "learning_rate": [(2, 6e-4)],
    }


def test_a_resumed_run_appends_to_its_metrics(tmp_path):
    for step in (1, 2):
        MetricsCSV(tmp_path / "metrics.csv").log_metrics({"train_loss": 4.0 - step}, step)
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert len(rows) == 3  # one header
    assert read_metrics(tmp_path / "metrics.csv") == {"train_loss": [(1, 3.0), (2, 2.0)]}


def test_a_measurement_is_on_disk_as_soon_as_it_is_made(tmp_path):
    logger = MetricsCSV(tmp_path / "metrics.csv")
    for step in (1, 2, 3):
        logger.log_metrics({"val_loss": float(step)}, step)
        assert read_metrics(tmp_path / "metrics.csv")["val_loss"][-1] == (step, step)


def pixels_of(picture, color):
    return int((np.abs(picture[..., :3] * 255 - np.array(color)).max(axis=-1) < 2).sum())


def test_the_curves_show_both_losses(tmp_path):
    measure(tmp_path)
    plot_curves(tmp_path)
    picture = image.imread(tmp_path / "curves.png")
    assert picture.shape[:2] == (720, 960)
    assert picture[..., :3].std() > 0.02  # not blank
    assert pixels_of(picture, ORANGE) > 100


def test_every_validation_loss_shows_in_the_curves(tmp_path):
    pictures = []
    for name, last in (("first", 2.6), ("second", 2.6), ("third", 3.2)):
        (tmp_path / name / "run").mkdir(parents=True)
        measure(tmp_path / name / "run", last=last)
        plot_curves(tmp_path / name / "run")
        pictures.append(image.imread(tmp_path / name / "run/curves.png"))
    assert np.array_equal(pictures[0], pictures[1])
    assert not np.array_equal(pictures[0], pictures[2])


def test_without_validation_there_is_no_validation_curve(tmp_path):
    measure(tmp_path, validated=False)
    plot_curves(tmp_path)
    picture = image.imread(tmp_path / "curves.png")
    assert picture[..., :3].std() > 0.02
    assert pixels_of(picture, ORANGE) == 0


# The summary.


def test_the_summary_is_written_as_json(tmp_path):
    summary = {"best_val_loss": 2.55, "best_step": 50, "status": "completed", "checkpoint": None}
    write_summary(tmp_path, summary)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_run_ends_by_printing_its_sample_and_the_paths_of_its_results(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    summary = {
        "best_val_loss": 1.46974,
        "best_step": 1750,
        "checkpoint": "checkpoints/best.safetensors",
        "stopped_early": True,
        "reason": "stopped early at step 2000 of 5000",
        "eval_batches": 7,
        "wall_seconds": 1234.56,
        "seconds": 1200.01,
    }
    print_results(tmp_path / "runs/a", "\nTo be\n", summary)
    output = capsys.readouterr().out
    assert output.startswith("To be\n")
    for part in (
        "1.4697 at step 1750, on 7 batches",
        "\nstopped early at step 2000 of 5000\n",
        " 1,234.6 s, training 1,200.0 s\n",
    ):
        assert part in output
    for part in (" runs/a/checkpoints/best.safetensors\n", " runs/a/curves.png\n"):
        assert part in output
    assert str(tmp_path) not in output  # the shortest path from here


def test_the_bar_of_a_terminal_moves_during_validation(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = Progress(20, tmp_path / "log.txt")
    progress.log_metrics({"train_loss": 3.0, "tokens_per_second": 12_345.6}, 10)
    progress.show_validation(3, 7)
    assert "10/20" in (drawn := capsys.readouterr().err)
    assert "validating 3/7" in drawn
    progress.log_metrics({"val_loss": 3.2}, 10)
    progress.finalize("success")
    assert "validating" not in capsys.readouterr().err.rpartition("\r")[2]


def test_log_lines_are_written_once_if_stderr_is_the_log_file(tmp_path):
    program = "import pathlib, sys; from minigpt.runs.run_dir import append_log\n"
    program += "append_log(pathlib.Path(sys.argv[1]), 'once')"
    with open(tmp_path / "log.txt", "ab") as file:
        subprocess.run([sys.executable, "-c", program, tmp_path], stderr=file, check=True)
    assert (tmp_path / "log.txt").read_text() == "once\n"


def test_a_metric_that_appears_later_gets_a_column(tmp_path):
    logger = MetricsCSV(tmp_path / "metrics.csv")
    logger.log_metrics({"train_loss": 3.0}, 5)
    logger.log_metrics({"lr-AdamW": 0.1, "val_loss": 2.0}, 10)
    MetricsCSV(tmp_path / "metrics.csv").log_metrics({"train_loss": 1.0, "epoch": 0}, 15)  # of a resumed run
    columns = read_metrics(tmp_path / "metrics.csv")
    expected = {
        "train_loss": [(5, 3.0), (15, 1.0)],
        "val_loss": [(10, 2.0)],
        "lr-AdamW": [(10, 0.1)],
        "epoch": [(15, 0)],
    }
    assert columns == expected


def test_a_line_per_validation_is_printed_away_from_a_terminal_and_logged(tmp_path, capsys):
    progress = Progress(20, tmp_path / "log.txt")
    for step in (5, 10, 15, 20):
        progress.log_metrics({"train_loss": 4 - step / 10, "tokens_per_second": 12_345.6}, step)
        if step % 10 == 0:
            progress.log_metrics({"val_loss": 4.5 - step / 10}, step)
    progress.finalize("success")
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert (tmp_path / "log.txt").read_text() == err
    assert [part in first for part in ("10/20", "loss 3.000", "val 3.5000", "12,346 tokens/s")] == [True] * 4
    assert [part in second for part in ("20/20", "loss 2.000", "val 2.5000", "12,346 tokens/s")] == [True] * 4
