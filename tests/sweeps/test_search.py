"""Searches: trials, their seeds, and the numbers that they draw."""

import math
import re
import statistics
from statistics import mean
from unittest.mock import patch

import numpy as np
import optuna
import pytest
from engine import Engine

from minigpt.extras.search.search import short_text
from minigpt.sweeps.ranking import ranked
from minigpt.sweeps.results import (
    BITS,
    read_sweep,
)
from minigpt.utils.errors import RunError, UserError


@pytest.mark.slow
def test_a_search_runs_n_trials_within_the_bounds_and_minimizes_bits_per_byte(plan):
    """By nats per token bytes would be best; characters are twice as long."""

    def valley(settings, _):
        miss = (
            abs(math.log10(float(settings["optimizer.lr"])) + 2)
            + abs(int(settings["model.n_layer"]) - 5) / 4
        )
        return (3 + miss) * {"byte": 1.0, "char": 1.5}[settings["tokenizer"]]

    line = [
        "optimizer.lr=tag(log,interval(1e-4,1e-1))",
        "model.n_layer=range(1,9,2)",
        "tokenizer=byte,char",
    ]
    line += ["hydra/sweeper=optuna", "hydra.sweeper.batch=3"]
    sweeper = plan(*line, "hydra.sweeper.n_trials=30", engine=Engine(valley))
    assert [len(batch) for batch in sweeper.engine.batches] == [3] * 10
    values = [point.overrides for point in sweeper.points]
    assert all(1e-4 <= float(value["optimizer.lr"]) <= 1e-1 for value in values)
    assert {value["model.n_layer"] for value in values} == {"1", "3", "5", "7"}
    assert [value["tokenizer"] for value in values][-10:].count("char") >= 8
    losses = [point.loss(BITS) for point in read_sweep(sweeper.folder)]
    assert statistics.mean(losses[-10:]) < statistics.mean(losses[:10]) - 0.3


LUCKY = {
    "1": (1.0, 9.0, 5.0),
    "2": (3.0, 3.5, 4.0),
    "3": (2.0, 9.0, math.nan),
    "4": (4.0, 4.0, 4.2),
}


def test_a_trial_of_a_search_is_all_its_seeds_and_their_mean_loss_is_its_value(plan, tmp_path):
    def loss(settings, _):
        return LUCKY[settings["model.n_layer"]][int(settings["seed"])]

    line = [
        "hydra/sweeper=optuna",
        "model.n_layer=range(1,5)",
        "hydra.sweeper.n_trials=4",
        "resume=auto",
    ]
    engine = Engine(loss)
    told = []
    tell = optuna.study.Study.tell

    def tell_and_record(study, trial, values=None, state=None):
        told.append((trial.params, values, state))
        return tell(study, trial, values, state=state)

    with (
        patch.object(optuna.study.Study, "tell", tell_and_record),
        pytest.raises(RunError, match="1 of 12 runs failed"),
    ):
        plan(*line, "seed=0,1,2", engine=engine)
    assert [len(batch) for batch in engine.batches] == [6, 6]  # two trials of three seeds at a time
    assert {tuple(params) for params, *_ in told} == {("model.n_layer",)}
    values = {
        str(params["model.n_layer"] + 1): value for params, value, state in told if state is None
    }
    # In bits per byte
    assert values == {name: pytest.approx(mean(LUCKY[name]) / math.log(2)) for name in "124"}
    failed = [
        params["model.n_layer"] + 1
        for params, _, state in told
        if state == optuna.trial.TrialState.FAIL
    ]
    assert failed == [3]
    rows = ranked(read_sweep(tmp_path / "sweep")).rows
    assert [(row.overrides["model.n_layer"], row.n_seeds) for row in rows] == [
        ("2", 3),
        ("4", 3),
        ("1", 3),
        ("3", 2),
    ]


def test_an_interrupted_search_with_seeds_resumes_with_the_same_points(plan, tmp_path):
    def loss(settings, _):
        return abs(math.log10(float(settings["optimizer.lr"])) + 2) + int(settings["seed"])

    line = [
        "hydra/sweeper=optuna",
        "optimizer.lr=tag(log,interval(1e-4,1e-1))",
        "seed=1,2",
        "hydra.sweeper.n_trials=3",
    ]
    whole = plan(*line, engine=Engine(loss)).points
    folder = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        plan(*line, engine=Engine(loss, 5), folder=folder)
    points = plan(*line, "resume=auto", engine=Engine(loss), folder=folder).points
    assert [(point.overrides, point.status) for point in points] == [
        (p.overrides, p.status) for p in whole
    ]
    assert [point.seed for point in whole] == ["1", "2"] * 3


def test_the_file_of_a_search_searches(plan):
    sweeper = plan("+sweep=search", "hydra.sweeper.n_trials=3")
    assert [len(batch) for batch in sweeper.engine.batches] == [2, 1]
    assert set(sweeper.points[0].overrides) == {"optimizer.lr", "model.n_layer", "model.n_embd"}


def test_an_interval_of_integers_draws_them(plan):
    line = [
        "model.n_layer=interval(1,3)",
        "model.n_inner=tag(log,int(interval(16,64)))",
        "model.n_kv_head=interval(1,4)",
    ]
    line += [
        "model.dropout=interval(0,0.9)",
        "optimizer.weight_decay=int(interval(0,3))",
        "optimizer.lr=interval(1,3)",
    ]
    sweeper = plan("hydra/sweeper=optuna", *line, "hydra.sweeper.n_trials=8")
    assert len(sweeper.points) == 8
    drawn = {name: {point.overrides[name] for point in sweeper.points} for name in sweeper.axes}
    assert drawn["model.n_layer"] <= {"1", "2", "3"}
    assert drawn["model.n_kv_head"] <= {"1", "2", "4"}
    assert drawn["optimizer.weight_decay"] <= {"0", "1", "2", "3"}
    assert all(16 <= int(value) <= 64 for value in drawn["model.n_inner"])
    assert all("." in value for value in drawn["model.dropout"] | drawn["optimizer.lr"])


@pytest.mark.parametrize(
    ("low", "high", "log", "most_digits"),
    [
        (0.999, 0.99999, False, 7),
        (0.999, 0.99999, True, 7),
        (1e-4, 1e-1, True, 4),
        (0.0, 1.0, False, 4),
        (-1.0, 1.0, False, 5),
        (0.1, 0.2, False, 5),
        (100.0, 101.0, False, 7),
        (1e-12, 1.001e-12, False, 8),
        (5e-324, 1e-320, True, 16),
        (1e-300, 1e300, True, 4),
        (1e15, 1e15 + 64, False, 17),
        (-1.2345678, -1.2345677, False, 17),
    ],
)
def test_numbers_of_a_search_have_the_digits_of_their_interval_and_never_leave_it(
    low, high, log, most_digits
):
    rng = np.random.default_rng(0)
    ends = np.log((low, high)) if log else (low, high)
    drawn = np.exp(rng.uniform(*ends, 200)) if log else rng.uniform(*ends, 200)
    drawn = [low, high, *np.clip(drawn, low, high).tolist()]
    texts = [short_text(value, low, high, log=log) for value in drawn]
    assert all(low <= float(text) <= high for text in texts)
    width = [value * math.log(high / low) if log else high - low for value in drawn]
    drawn_as = zip(texts, drawn, width, strict=True)
    assert all(abs(float(text) - value) <= 5e-4 * w for text, value, w in drawn_as)
    assert len({*texts}) >= 0.8 * len({*drawn})
    digits = [len(text.partition("e")[0].lstrip("-0.").replace(".", "")) for text in texts]
    assert max(digits[2:]) <= most_digits


@pytest.mark.parametrize(
    ("low", "high", "log"),
    [
        (3e-4, 3e-3, True),
        (1e-4, 1e-2, True),
        (0.1, 0.2, False),
        (0.0, 0.3, False),
        (0.8, 0.99, False),
        (10.0, 300.0, False),
    ],
)
def test_numbers_of_most_searches_have_four_digits_as_those_of_older_versions(low, high, log):
    rng = np.random.default_rng(0)
    ends = np.log((low, high)) if log else (low, high)
    drawn = (np.exp(rng.uniform(*ends, 1000)) if log else rng.uniform(*ends, 1000)).tolist()
    assert [short_text(value, low, high, log=log) for value in drawn] == [f"{v:.4g}" for v in drawn]


def test_a_search_over_a_narrow_interval_has_all_its_trials(plan):
    search = ["hydra/sweeper=optuna", "hydra.sweeper.batch=15", "hydra.sweeper.n_trials=15"]
    points = plan(*search, "ema_decay=interval(0.999,0.99999)").points
    used = [point.settings["ema_decay"] for point in points]
    assert len({*used}) == 15
    assert all(0.999 <= value <= 0.99999 for value in used)
    assert used == [float(point.overrides["ema_decay"]) for point in points]


@pytest.mark.parametrize(
    "bad", ["interval(2,1)", "tag(log,interval(0,1))", "interval(0,inf)", "interval(-1e308,1e308)"]
)
def test_an_interval_without_numbers_is_refused(plan, bad):
    expected = (
        "optimizer.lr must be interval(low,high) with finite low <= high, and low > 0 with log, "
        f"got {bad}"
    )
    with pytest.raises(UserError, match=re.escape(expected)):
        plan("hydra/sweeper=optuna", f"optimizer.lr={bad}")


def test_a_search_does_not_count_impossible_points(plan, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("minigpt.extras.search.search.MAX_TRIES_PER_TRIAL", 4)
    search = ["hydra/sweeper=optuna", "hydra.sweeper.batch=2"]
    sweeper = plan(
        *search,
        "model.n_head=range(1,9)",
        "optimizer.lr=interval(0.1,0.2)",
        "hydra.sweeper.n_trials=3",
    )
    assert [len(batch) for batch in sweeper.engine.batches] == [2, 1]
    # They divide n_embd
    assert {point.overrides["model.n_head"] for point in sweeper.points} <= set("1248")
    with pytest.raises(
        UserError, match=r"no point of the search is possible: .* must be divisible"
    ):
        plan(*search, "model.n_head=3,5", "hydra.sweeper.n_trials=1", folder=tmp_path / "none")
    plan(*search, "model.n_head=2,3", "hydra.sweeper.n_trials=2", folder=tmp_path / "fewer")
    assert (
        "the search ends after 1 trials: 8 tries found no other possible point"
        in capsys.readouterr().err
    )
