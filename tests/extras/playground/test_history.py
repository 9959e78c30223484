"""The history of a run, as the page of the server shows it."""

import json

import pytest

from minigpt.extras.playground.history import read_history


def test_the_history_of_a_run_has_its_losses_and_samples(finished):
    history = read_history(finished.folder)
    assert history is not None
    assert [step for step, _ in history["train_loss"]] == [5, 10, 15, 20]
    assert (
        [step for step, _ in history["val_loss"]]
        == [sample["step"] for sample in history["samples"]]
        == [10, 20]
    )
    assert history["val_loss"][-1][1] == pytest.approx(finished.summary["best_val_loss"], abs=1e-4)
    text = (finished.folder / "samples.txt").read_text(encoding="utf-8")
    assert all(
        sample["text"] in text and "──" not in sample["text"] for sample in history["samples"]
    )


def test_a_long_curve_is_thinned_and_keeps_its_end(tmp_path):
    rows = [f"{step},{'nan' if step == 7 else 1 / step}" for step in range(1, 12_346)]
    # A killed run
    (tmp_path / "metrics.csv").write_text(
        "step,train_loss\n" + "\n".join(rows) + "\n123", encoding="utf-8"
    )
    history = read_history(tmp_path)
    assert history is not None
    curve = history["train_loss"]
    assert 400 < len(curve) <= 500
    assert curve[-1] == [12_345, 1 / 12_345]
    assert (history["val_loss"], history["samples"]) == ([], [])
    assert "NaN" not in json.dumps(history)


def test_a_folder_without_metrics_has_no_history(tmp_path):
    assert read_history(tmp_path) is None
    assert read_history(tmp_path / "none") is None
    for damaged in ("step,train_loss\nx,y\n", f'step,train_loss\n1,"{"1" * 200_000}"\n'):
        (tmp_path / "metrics.csv").write_text(damaged, encoding="utf-8")
        assert read_history(tmp_path) is None
