"""Searches and pruning: trials, their seeds, their numbers, and which points continue."""

import math
import re
from collections import defaultdict
from statistics import mean
from unittest.mock import patch

import numpy as np
import optuna
import pytest
import torch
from engine import Engine
from refusals import refused
from small_runs import rows

from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.format import read
from minigpt.extras.search.search import short_text
from minigpt.sweeps.ranking import ranked
from minigpt.sweeps.report import print_table
from minigpt.sweeps.results import (
    BITS,
    COMPLETED,
    read_sweep,
)
from minigpt.utils.errors import RunError

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


@pytest.mark.slow
def test_a_search_runs_n_trials_within_the_bounds_and_minimizes_bits_per_byte(plan):
    # By nats per token bytes would be best; characters are twice as long
    def valley(settings, _):
        of_rate = abs(math.log10(float(settings["optimizer.lr"])) + 2)
        of_depth = abs(int(settings["model.n_layer"]) - 5) / 4
        scale = {"byte": 1.0, "char": 1.5}[settings["tokenizer"]]
        return (3 + of_rate + of_depth) * scale

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
    assert mean(losses[-10:]) < mean(losses[:10]) - 0.3


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
    drawn = defaultdict(set)
    for point in sweeper.points:
        for name, value in point.overrides.items():
            drawn[name].add(value)
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
    drawn = rng.uniform(*ends, 1000)
    if log:
        drawn = np.exp(drawn)
    texts = [short_text(value, low, high, log=log) for value in drawn.tolist()]
    assert texts == [f"{value:.4g}" for value in drawn]


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
    expected = "interval(low,high) with finite low <= high, and low > 0 with log, got " + bad
    message = re.escape(f"optimizer.lr must be {expected}")
    refused(message, plan, "hydra/sweeper=optuna", f"optimizer.lr={bad}")


def test_a_search_does_not_count_impossible_points(plan, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("minigpt.extras.search.search.MAX_TRIES_PER_TRIAL", 4)
    search = ["hydra/sweeper=optuna", "hydra.sweeper.batch=2"]
    drawn = ["model.n_head=range(1,9)", "optimizer.lr=interval(0.1,0.2)"]
    sweeper = plan(*search, *drawn, "hydra.sweeper.n_trials=3")
    assert [len(batch) for batch in sweeper.engine.batches] == [2, 1]
    # They divide n_embd
    assert {point.overrides["model.n_head"] for point in sweeper.points} <= set("1248")
    none = r"no point of the search is possible: .* must be divisible"
    refused(none, plan, *search, "model.n_head=3,5", folder=tmp_path / "none")
    plan(*search, "model.n_head=2,3", "hydra.sweeper.n_trials=2", folder=tmp_path / "fewer")
    fewer = "the search ends after 1 trials: 8 tries found no other possible point"
    assert fewer in capsys.readouterr().err


PRUNED = ["hydra.sweeper.prune=true", "max_steps=40", "eval_every=5"]  # rungs at steps 5, 10 and 20
RATES = ["0.001", "0.002", "0.004", "0.008", "0.016", "0.032", "0.064", "0.128", "0.256"]
NINE = f"optimizer.lr={','.join(RATES)}"
THREE = f"optimizer.lr={','.join(RATES[:3])}"


def crossing(settings, step):
    """The higher the rate, the faster the loss falls; the second best is lowest at step 15."""
    lucky = settings["optimizer.lr"] == "0.128" and step == 15
    return 1.0 if lucky else 5 - 0.01 * RATES.index(settings["optimizer.lr"]) * step


def names(*rates):
    return {f"lr={rate}" for rate in rates}


def ends(folder):
    return {
        point.folder.name: (point.status, point.totals["steps"]) for point in read_sweep(folder)
    }


def test_the_best_two_fifths_continue_after_each_rung_and_without_pruning_all_complete(
    plan, capsys
):
    engine = Engine(crossing)
    sweeper = plan(NINE, *PRUNED, engine=engine)
    expected = [
        (names(*RATES), 5),
        (names(*RATES[-4:]), 10),
        (names(*RATES[-2:]), 20),
        (names(RATES[-1]), 40),
    ]
    assert engine.launches == [dict.fromkeys(points, step) for points, step in expected]
    lines = capsys.readouterr().err.splitlines()
    rungs = [f"rung at step {step} continue" for step in ("5: 4 of 9", "10: 2 of 4", "20: 1 of 2")]
    assert [line for line in lines if "rung" in line] == rungs
    assert re.fullmatch(
        r"8 of 9 runs paused; to complete them, .* hydra\.sweeper\.prune=false .*", lines[-1]
    )
    print_table(ranked(read_sweep(sweeper.folder)))
    out = capsys.readouterr().out
    assert re.search(
        r"1 +0\.256 +1\.8000 .* completed .*\n2\* +0\.128 +1\.0000 .* paused at step 20 *\n", out
    )
    rest = Engine(crossing)
    plan(NINE, *PRUNED, "hydra.sweeper.prune=false", "resume=auto", engine=rest)
    assert rest.launches == [dict.fromkeys(names(*RATES[:-1]), 40)]
    assert {status for status, _ in ends(sweeper.folder).values()} == {"completed"}


SEARCH = ["hydra/sweeper=optuna", "hydra.sweeper.batch=3", "hydra.sweeper.n_trials=3"]


def of_seeds(losses):
    """An engine whose losses are those of each rate and seed, at every step."""
    return Engine(lambda settings, _: losses[settings["optimizer.lr"]][int(settings["seed"])])


@pytest.mark.parametrize("search", [[], SEARCH], ids=["grid", "search"])
def test_seeds_of_a_setting_continue_together_by_their_mean_loss(plan, search):
    # The lowest loss has not the lowest mean
    engine = of_seeds({"0.1": (1.0, 5.2), "0.2": (2.0, 2.2), "0.3": (3.0, 3.0)})
    sweeper = plan(*search, "optimizer.lr=0.1,0.2,0.3", "seed=0,1", *PRUNED, engine=engine)
    both = {"lr=0.2,seed=0", "lr=0.2,seed=1"}
    continued = [{*launch} for launch in engine.launches[1:]]
    assert continued == [both | {"lr=0.3,seed=0", "lr=0.3,seed=1"}, both, both]
    ended = {point.written["optimizer.lr"]: point.totals["steps"] for point in sweeper.points}
    assert ended == {"0.1": 5, "0.2": 40, "0.3": 10}


def test_a_seed_that_is_added_continues_by_the_mean_of_its_row_and_waits_for_no_other(plan):
    engine = of_seeds({"0.1": (1.0, 9.0), "0.2": (2.0, 2.0), "0.3": (2.5,)})
    plan("optimizer.lr=0.1,0.2,0.3", "seed=0", *PRUNED, engine=engine)  # 0.2 pauses at step 10
    assert [*engine.launches[1]] == ["lr=0.1", "lr=0.2"]
    engine.launches.clear()
    plan("optimizer.lr=0.1,0.2", "seed=choice(1)", *PRUNED, "resume=auto", engine=engine)
    assert {*engine.launches[1]} == {"lr=0.2,seed=1"}
    assert engine.launches[-1] == {"lr=0.2,seed=1": 40}


def test_a_failed_point_takes_no_place(plan):
    engine = Engine(
        lambda settings, step: (
            math.nan if settings["optimizer.lr"] > "0.1" else crossing(settings, step)
        )
    )
    with pytest.raises(RunError, match="2 of 9 runs failed"):
        plan(NINE, *PRUNED, engine=engine)
    expected = [names("0.016", "0.032", "0.064"), names("0.032", "0.064"), names("0.064")]
    assert [launch.keys() for launch in engine.launches[1:]] == expected


def test_points_are_compared_at_a_fraction_of_their_steps_in_bits_per_byte(plan):
    engine = Engine(
        lambda settings, step: 3.0 if settings["tokenizer"] == "char" else 2 + step / 1000
    )
    # A character has two bytes
    sweeper = plan("tokenizer=byte,char", "max_steps=40,80", *PRUNED[::2], engine=engine)
    steps = {name: step for name, (_, step) in ends(sweeper.folder).items() if "byte" in name}
    assert steps == {"tokenizer=byte,max_steps=40": 5, "tokenizer=byte,max_steps=80": 10}
    assert all("char" in name for name in engine.launches[1])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            ["eval_every=5,9"],
            "eval_every must let all points validate at the same fractions of max_steps",
        ),
        (["minutes=1"], "minutes must be null with hydra.sweeper.prune=true, got 1"),
    ],
)
def test_points_that_cannot_be_compared_at_a_rung_are_refused(plan, line, message):
    refused(message, plan, THREE, *PRUNED, *line)


def test_an_interrupted_sweep_resumes_to_the_same_result_and_a_larger_one_continues_more(
    plan, tmp_path
):
    whole = Engine(crossing)
    expected = ends(plan(THREE, *PRUNED, engine=whole, folder=tmp_path / "whole").folder)
    assert sum(map(len, whole.launches)) == 7
    for jobs in (1, 3, 5):  # in each way, and before the end of each rung
        folder = tmp_path / f"{jobs}"
        with pytest.raises(KeyboardInterrupt):
            plan(THREE, *PRUNED, engine=Engine(crossing, jobs), folder=folder)
        plan(THREE, *PRUNED, "resume=auto", engine=Engine(crossing), folder=folder)
        assert ends(folder) == expected, jobs
    larger = Engine(crossing)
    plan(NINE, *PRUNED, "resume=auto", engine=larger, folder=folder)
    assert [launch.keys() for launch in larger.launches[:2]] == [
        names(*RATES[3:]),
        names(*RATES[-4:]),
    ]


def test_points_that_are_added_are_compared_with_all_points_of_the_folder(plan):
    slopes = {"0.1": 0.01, "0.2": 0.02, "0.3": 0.03, "0.4": 0.015, "0.5": 0.09}
    engine = Engine(lambda settings, step: 5 - slopes[settings["optimizer.lr"]] * step)
    plan("optimizer.lr=0.1,0.2,0.3", *PRUNED, engine=engine)
    engine.launches.clear()
    # Of five, the best two continue
    plan("optimizer.lr=0.4,0.5", *PRUNED, "resume=auto", engine=engine)
    assert engine.launches == [
        dict.fromkeys(names("0.4", "0.5"), 5),
        *({"lr=0.5": step} for step in (10, 20, 40)),
    ]


def test_points_that_are_added_to_a_sweep_without_pruning_are_compared_with_its_completed_ones(
    plan,
):
    plan("optimizer.lr=0.1,0.2", "max_steps=40", "eval_every=5", engine=Engine(lambda *_: 1.0))
    later = Engine(lambda *_: 2.0)
    plan("optimizer.lr=0.3", *PRUNED, "resume=auto", engine=later)
    assert later.launches == [{"lr=0.3": 5}]


def test_points_that_are_added_are_refused_where_the_others_have_no_validation_at_their_rungs(plan):
    plan("eval_every=5,9", "max_steps=40")
    message = "eval_every must let all points validate at the same fractions"
    refused(message, plan, "eval_every=3", *PRUNED[:2], "resume=auto")


def test_a_search_prunes_by_all_trials_so_far_and_resumes(plan, tmp_path):
    search = ["hydra/sweeper=optuna", "optimizer.lr=tag(log,interval(1e-4,1e-1))", *PRUNED]
    search += ["hydra.sweeper.batch=3", "hydra.sweeper.n_trials=9"]

    def valley(settings, step):
        return 2 + abs(math.log10(float(settings["optimizer.lr"])) + 2) * step

    points = plan(*search, engine=Engine(valley)).points
    losses = [valley(point.overrides, 5) for point in points]
    for at, point in enumerate(points):
        so_far = sorted(losses[: at // 3 * 3 + 3])
        assert (point.totals["steps"] > 5) == (so_far.index(losses[at]) < 0.4 * len(so_far)), (
            point.folder.name
        )
    assert sum(losses[-3:]) < sum(losses[:3])  # the sampler learned, also from points that paused
    expected = ends(tmp_path / "sweep")
    with pytest.raises(KeyboardInterrupt):
        plan(*search, engine=Engine(valley, 8), folder=tmp_path / "killed")
    plan(*search, "resume=auto", engine=Engine(valley), folder=tmp_path / "killed")
    assert ends(tmp_path / "killed") == expected
    plan(*search, "hydra.sweeper.prune=false", "resume=auto", engine=Engine(valley))
    assert ends(tmp_path / "sweep") == dict.fromkeys(expected, ("completed", 40))


@pytest.mark.slow
def test_a_pruned_run_equals_one_that_did_not_pause(launch, tmp_path, train):
    line = ["hydra.mode=MULTIRUN", "hydra.sweep.dir=sweep", "hydra.sweeper.prune=true"]
    steps = ["max_steps=56", "eval_every=7", "ema_decay=0.9"]
    done = launch("train.py", *line, "optimizer.lr=1e-4,1e-3,1e-2,2e-2", *steps, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(ends(tmp_path / "sweep").values()) == [
        ("completed", 56),
        *[("paused", 7)] * 2,
        ("paused", 14),
    ]
    (best,) = (point for point in read_sweep(tmp_path / "sweep") if point.status == COMPLETED)
    alone = train(f"optimizer.lr={best.overrides['optimizer.lr']}", *steps)
    assert rows(best.folder) == rows(alone.folder)
    weights, same_weights = (
        read(folder / LAST)["state_dict"] for folder in (best.folder, alone.folder)
    )
    torch.testing.assert_close(weights, same_weights, rtol=0, atol=0)
