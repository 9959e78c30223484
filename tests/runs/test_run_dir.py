"""The run folder: its lock, the link to the newest run, metrics, curves and summary."""

import json
import sys

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from matplotlib import image
from matplotlib.figure import Figure

from minigpt.language_model import LanguageModel
from minigpt.runs import run_dir
from minigpt.runs.callbacks.progress_bar import Progress
from minigpt.runs.curves import plot_curves
from minigpt.runs.metrics_csv import append_metrics, read_metrics
from minigpt.runs.overrides import complete_overrides
from minigpt.utils.errors import UserError


def new_folder(runs, name):
    """A run folder as Hydra creates it."""
    (runs / name / ".hydra").mkdir(parents=True)
    (runs / name / ".hydra/config.yaml").write_text("seed: 1\n")
    return runs / name


def finished_run(runs, name, *, val_losses=(2.55, 2.6)):
    """A run with ten training losses that fall from 3.8 to 2, and validation losses."""
    folder = new_folder(runs, name)
    with run_dir.lock_run_dir(folder):
        run_dir.update_latest_link(folder)
        for step in range(10, 110, 10):
            append_metrics(folder / "metrics.csv", {"train_loss": 4 - step / 50, "learning_rate": 1e-3 * step}, step)
        for step, loss in zip((50, 100), val_losses, strict=False):
            append_metrics(folder / "metrics.csv", {"val_loss": loss}, step)
    return folder


def test_what_a_killed_run_was_writing_is_removed_when_it_resumes(tmp_path):
    folder = finished_run(tmp_path, "first")
    (folder / "checkpoints/snapshots").mkdir(parents=True)
    unfinished = [".metrics.csv.7.partial", "checkpoints/.last.7.partial", "checkpoints/snapshots/.step-2.7.partial"]
    for name in (*unfinished, "checkpoints/snapshots/step-1.safetensors"):
        (folder / name).touch()
    before = {file for file in folder.rglob("*") if not file.name.endswith(".partial")}
    with run_dir.lock_run_dir(folder, resume=True):
        assert set(folder.rglob("*")) == before


@pytest.mark.parametrize("file", ["metrics.csv", "summary.json"])
def test_a_folder_that_holds_a_run_is_rejected_and_left_unchanged(tmp_path, file):
    folder = new_folder(tmp_path, "first")
    (folder / file).write_text("precious")
    with pytest.raises(UserError, match=r"first already holds a run.*hydra\.run\.dir"), run_dir.lock_run_dir(folder):
        (folder / file).write_text("overwritten")
    assert (folder / file).read_text() == "precious"


def test_latest_points_at_the_newest_run_and_survives_a_move_of_all_runs(tmp_path):
    for name in ("first", "second", "third"):
        folder = finished_run(tmp_path / "runs", name)
        assert (tmp_path / "runs/latest").resolve() == folder
    (tmp_path / "runs").rename(tmp_path / "archive")
    assert (tmp_path / "archive/latest").resolve() == tmp_path / "archive/third"
    (tmp_path / "latest").mkdir()  # a folder of the user stays
    finished_run(tmp_path, "run")
    assert not (tmp_path / "latest").is_symlink()


def test_a_run_that_fails_in_its_first_step_leaves_no_folder_and_latest_as_it_was(train, tmp_path, monkeypatch):
    first = finished_run(tmp_path / "runs", "first")
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
    assert complete_overrides(["resume=auto", "resume=runs/second"]) == ["resume=auto", "resume=runs/second"]


def test_metrics_are_read_as_they_were_written(tmp_path):
    file, expected = tmp_path / "metrics.csv", {}
    rows = [
        (1, {"train_loss": 0.1 + 0.2, "tokens": 768}),
        (1, {"val_loss": 1e-17}),
        (2, {"train_loss": 3.25, "tokens": 1536, "learning_rate": 6e-4}),
        (2, {"lr-AdamW": 0.1, "val_loss": 2.0}),  # of another callback: a column that appears later
        (3, {"train_loss": 1.0, "epoch": 0}),
    ]
    for step, metrics in rows:
        append_metrics(file, metrics, step)
        for name, value in metrics.items():
            expected.setdefault(name, []).append((step, value))
        assert read_metrics(file) == expected  # on disk as soon as it is measured
    assert len(file.read_text().splitlines()) == 6  # one header


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
    (losses, _) = drawn[0].axes
    assert [text.get_text() for text in losses.get_legend().get_texts()] == ["validation", "best 2.5000"]
    assert not losses.texts


def test_the_summary_is_written_as_json(tmp_path):
    summary = {"best_val_loss": 2.55, "best_step": 50, "status": "completed", "checkpoint": None}
    run_dir.write_summary(tmp_path, summary)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert run_dir.completed_summary(tmp_path, 100, 100) == summary
    assert run_dir.completed_summary(tmp_path, 99, 100) is None
    run_dir.write_failure(tmp_path, "lost")
    assert run_dir.completed_summary(tmp_path, 100, 100) is None
    run_dir.truncate_logs(tmp_path, 50)  # as a run does that resumes: a crash must not leave the old status
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_a_line_per_validation_elsewhere(tmp_path, monkeypatch, capsys, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    progress = Progress(20, tmp_path, step=5)  # of a run that resumed
    progress.bar.mininterval = progress.bar.delay = 0  # seconds between two drawings, and before the first
    progress.log({"train_loss": 3.0, "tokens_per_second": 12_345.6}, 10)
    progress.log_validation(3, 7)
    drawn = capsys.readouterr().err
    assert ("10/20" in drawn, "validating 3/7" in drawn) == (terminal, terminal)
    progress.log({"val_loss": 3.2}, 10)
    out, drawn = capsys.readouterr()
    assert "loss 3.000, val 3.2000, 12,346 tokens/s" in drawn
    line = (tmp_path / "log.txt").read_text()
    assert line == "step 10/20  loss 3.000, val 3.2000, 12,346 tokens/s\n"
    assert (out, line in drawn) == ("", not terminal)
    progress.bar.close()
