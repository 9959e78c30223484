"""Successive halving: which points continue after a rung."""

import math
import re

import pytest
import torch
from engine import Engine
from small_runs import rows

from minigpt.checkpoints.find import LAST
from minigpt.checkpoints.format import read
from minigpt.sweeps.ranking import ranked
from minigpt.sweeps.report import print_table
from minigpt.sweeps.results import COMPLETED, read_sweep
from minigpt.utils.errors import RunError, UserError

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
    both = {rate: {f"lr={rate},seed={seed}" for seed in (0, 1)} for rate in ("0.2", "0.3")}
    continued = [{*launch} for launch in engine.launches[1:]]
    assert continued == [both["0.2"] | both["0.3"], both["0.2"], both["0.2"]]
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
    with pytest.raises(UserError, match=message):
        plan(THREE, *PRUNED, *line)


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
    with pytest.raises(
        UserError, match="eval_every must let all points validate at the same fractions"
    ):
        plan("eval_every=3", *PRUNED[:2], "resume=auto")


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
