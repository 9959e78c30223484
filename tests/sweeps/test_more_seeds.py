"""More seeds until it is clear: when a sweep ends, and that its intervals hold at all its looks."""

import json
import math
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from engine import Engine
from hydra.errors import InstantiationException
from scipy import stats
from sweep_folders import points_of, run_folder

from minigpt.extras.research.more_seeds import looks, unclear
from minigpt.sweeps.comparison import compare
from minigpt.sweeps.ranking import ranked
from minigpt.sweeps.report import report
from minigpt.sweeps.results import COMPLETED, SKIPPED, Point, read_looks, read_sweep, write_plan
from minigpt.sweeps.verdicts import verdicts
from minigpt.utils.cli import explain
from minigpt.utils.errors import RunError, UserError

NOISE = np.random.default_rng(1).normal(0, 0.01, (20, 3))  # of each seed and row
LOOKS = (3, 5, 8, 12)
FOUR = "seed=range(1,5)"
HEADS = ["model.n_head=2,4", "seed=range(1,13)"]


def losses_of(*effects):
    """The loss of each row, by n_head, with an effect of its own and noise."""

    def loss(settings, _):
        row = ("2", "4", "8").index(settings["model.n_head"])
        return 3 + effects[row] + NOISE[int(settings["seed"]) - 1, row]

    return loss


def margin_of_pairs(differences, n_looks):
    """Half of the interval of the mean of paired differences, at one of several looks."""
    n = len(differences)
    quantile = stats.t.ppf(1 - 0.01 / n_looks / 2, n - 1)
    return quantile * np.std(differences, ddof=1) / math.sqrt(n)


def expected_look(effect, width):
    differences = effect + NOISE[:, 1] - NOISE[:, 0]
    for look in LOOKS:
        margin = margin_of_pairs(differences[:look], len(LOOKS))
        if margin < max(abs(differences[:look].mean()), width):
            break
    return look


def seeds_of(sweeper):
    return sorted({int(point.seed) for point in read_sweep(sweeper.folder)})


@pytest.mark.parametrize(
    ("effect", "width", "seeds"), [(0.04, 1e-6, 5), (-0.02, 1e-6, 12), (0, 0.02, 8), (0, 1e-6, 12)]
)
def test_a_sweep_adds_seeds_until_each_difference_is_clear_or_known_well_enough(
    plan, capsys, effect, width, seeds
):
    engine = Engine(losses_of(0, effect))
    sweeper = plan(*HEADS, f"hydra.sweeper.seeds_until={width}", engine=engine)
    assert expected_look(effect, width) == seeds
    # No other seed is a point, in a list or in a count
    assert seeds_of(sweeper) == [*range(1, seeds + 1)]
    assert len(sweeper.points) == len(list(sweeper.folder.glob("*seed*"))) == 2 * seeds
    assert [point.status for point in sweeper.points] == [COMPLETED] * 2 * seeds
    assert [len(batch) for batch in engine.batches] == [
        2 * (look - before) for before, look in pairwise((0, *LOOKS)) if look <= seeds
    ]
    last = [line for line in capsys.readouterr().err.splitlines() if " seeds" in line][-1]
    if (effect, width) == (0, 1e-6):
        assert last == "12 of 12 seeds: differences from the first row are not clear: n_head=4"
    else:
        listed = ", ".join(map(str, range(1, seeds + 1)))
        assert last == f"{seeds} of 12 seeds were enough: {listed}"
    # The final table has the intervals of all looks
    table = ranked(read_sweep(sweeper.folder), read_looks(sweeper.folder))
    differences = (NOISE[:, 1] - NOISE[:, 0])[:seeds]
    assert table.rows[1].margin == pytest.approx(margin_of_pairs(differences, len(LOOKS)))


def test_looks_are_few_and_end_at_the_number_of_values():
    assert looks(4) == [3, 4]
    assert looks(12) == [3, 5, 8, 12]
    assert looks(20) == [3, 5, 8, 12, 18, 20]
    assert len(looks(100)) == 10


def test_every_row_is_compared_with_that_of_the_first_values(plan, capsys):
    # The second and the third row differ from the first, but not from each other
    engine = Engine(losses_of(0, 0.3, 0.3001))
    line = ["model.n_head=2,4,8", FOUR, "hydra.sweeper.seeds_until=1e-6"]
    assert seeds_of(plan(*line, engine=engine)) == [1, 2, 3]
    assert "3 of 4 seeds were enough" in capsys.readouterr().err


@pytest.mark.parametrize("swept", [["seed=5,3,4,1,2,6", "+model.n_inner=64"], ["++seed=1,2,1,3,4"]])
def test_seeds_run_in_the_order_of_their_values_in_any_notation(plan, swept):
    sweeper = plan(*swept, HEADS[0], "hydra.sweeper.seeds_until=1")
    (launch,) = sweeper.engine.batches
    assert {point.seed for point in sweeper.points} == (
        {"5", "3", "4"} if len(swept) == 2 else {"1", "2", "3"}
    )
    assert len(launch) == 6


@pytest.mark.parametrize("jobs", [1, 8, 14])
def test_an_interrupted_sweep_resumes_to_the_same_seeds(plan, jobs):
    line = [*HEADS, "hydra.sweeper.seeds_until=0.02"]
    with pytest.raises(KeyboardInterrupt):
        plan(*line, engine=Engine(losses_of(0, 0), jobs=jobs))
    rest = Engine(losses_of(0, 0))
    sweeper = plan(*line, "resume=auto", engine=rest)
    assert seeds_of(sweeper) == [*range(1, 9)]
    assert sum(map(len, rest.batches)) in (16 - jobs, 17 - jobs)  # the killed one may be complete
    if jobs == 1:
        again = plan(*line, "resume=auto")
        assert (again.engine.batches, seeds_of(again)) == ([], [*range(1, 9)])


def test_a_sweep_resumes_with_more_seeds_and_other_widths_and_never_lists_those_that_did_not_run(
    plan, capsys
):
    line = ["model.n_head=2,4", "hydra.sweeper.seeds_until=1e-6"]
    engine = Engine(losses_of(0, -0.02))
    assert seeds_of(plan(*line, "seed=1,2,3,4", engine=engine)) == [1, 2, 3, 4]
    assert read_looks(engine.points[0].folder.parent) == 2
    sweeper = plan(*line, HEADS[1], "resume=auto", engine=engine)
    assert (seeds_of(sweeper), read_looks(sweeper.folder)) == ([*range(1, 13)], 4)
    # Fewer looks than those of the folder would make its intervals narrower
    plan("model.n_head=2,4", "seed=1,2,3,4", "resume=auto", engine=engine)
    assert read_looks(sweeper.folder) == 4
    # A sweep of all seeds that was interrupted
    folder = sweeper.folder.with_name("all")
    with pytest.raises(KeyboardInterrupt):
        plan(*HEADS, folder=folder, engine=Engine(losses_of(0, 0.3), jobs=4))
    assert len(read_sweep(folder)) == 24
    capsys.readouterr()
    line = [HEADS[0], "seed=range(1,11)", "hydra.sweeper.seeds_until=1", "resume=auto"]
    few = plan(*line, folder=folder, engine=Engine(losses_of(0, 0.3)))
    assert {point.status for point in read_sweep(few.folder)} == {COMPLETED}
    assert f"{len(seeds_of(few))} of 10 seeds were enough: 1, 2, 3" in capsys.readouterr().err
    assert len(seeds_of(few)) <= 5


def test_rows_that_share_no_seeds_yet_are_not_clear():
    # As of an old sweep, whose runs are of unknown code, and of the seeds that it adds
    shape = {"model.n_head": "24", "seed": "1234"}
    points = points_of(shape, lambda head, seed: 3 + int(head) / 10 + int(seed) / 100)
    apart = [point for i, point in enumerate(points) if (i < 4) == (point.seed in "12")]
    table = ranked(apart)
    assert (len(apart), table.comparison) == (4, None)
    rows = {point.row for point in apart}
    assert [row.label() for row in unclear(table, 1.0, rows)] == ["n_head=4"]


@pytest.mark.parametrize("row", ["2", "4"])
def test_rows_of_failed_runs_need_no_more_seeds(plan, capsys, row):
    def loss(settings, step):
        failed = (settings["model.n_head"], settings["seed"]) == (row, "2")
        return math.nan if failed else losses_of(0, 0)(settings, step)

    with pytest.raises(RunError, match="1 of 6 runs failed"):
        plan(HEADS[0], FOUR, "hydra.sweeper.seeds_until=1e-6", engine=Engine(loss))
    text = "3 of 4 seeds: no row is compared with the first, so more seeds would not help\n"
    assert text in capsys.readouterr().err


def test_rows_that_diverged_or_are_impossible_need_no_more_seeds(plan, capsys):
    def loss(settings, step):
        diverged = settings["model.n_head"] == "4"
        return 3 + step / 2 if diverged else losses_of(0, 0, 0.3)(settings, step)

    line = ["model.n_head=2,3,4,8", FOUR, "max_steps=9", "hydra.sweeper.seeds_until=1e-6"]
    sweeper = plan(*line, engine=Engine(loss))
    points = read_sweep(sweeper.folder)
    assert sorted(point.status for point in points) == [COMPLETED] * 9 + [SKIPPED] * 3
    assert "\n3 of 4 seeds were enough: 1, 2, 3\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "seed=1,2,3 model.n_head=2,4",
            r"error: seed must be at least 4 values with hydra\.sweeper\.seeds_until, such as "
            r"'seed=range\(1,21\)', got 1,2,3$",
        ),
        ("seed=1,2,3,2,1.0 model.n_head=2,4", r"seed must be at least 4 values .*, got 1,2,3$"),
        ("model.n_head=2,4", r"seed must be at least 4 values with .* got 1337$"),
        ("seed=1,2,3,4", "seeds_until compares rows; give another setting several values"),
        ("seed=1,2,3,4 model.n_head=3,2,4", r"first values .* impossible: .*model\.n_head"),
        (
            "seed=1,2,3,4 model.n_head=2,4 pause_at=250",
            r"pause_at must be null with hydra\.sweeper\.seeds_until, got 250$",
        ),
        (
            "seed=1,2,3,4 model.n_head=2,4 hydra.sweeper.prune=true",
            r"hydra\.sweeper\.seeds_until must be null in a search and with "
            r"hydra\.sweeper\.prune=true, got 0\.1$",
        ),
        (
            "seed=1,2,3,4 hydra/sweeper=optuna",
            r"hydra\.sweeper\.seeds_until must be null in a search .*, got 0\.1$",
        ),
        ("hydra.sweeper.seeds_until=0", r"must be a finite number > 0, or null, got 0$"),
        ("hydra.sweeper.seeds_until=-1", r"must be a finite number > 0, or null, got -1$"),
        ("hydra.sweeper.seeds_until=inf", r"must be a finite number > 0, or null, got inf$"),
        ("hydra.sweeper.seeds_until=true", r"must be a finite number > 0, or null, got True$"),
        ("hydra.sweeper.seeds_until=few", r"must be a finite number > 0, or null, got few$"),
    ],
)
def test_what_has_no_looks_is_refused(plan, tmp_path, line, message):
    with pytest.raises((UserError, InstantiationException)) as raised:
        plan("hydra.sweeper.seeds_until=0.1", *line.split())
    text, code = explain(raised.value)
    assert (bool(re.search(message, text)), text.count("\n"), code) == (True, 0, 2), text
    assert not (tmp_path / "sweep/sweep.json").exists()


def test_intervals_hold_at_all_looks_together():
    # Of 200 sweeps without an effect; with intervals of one look, more than 5 % have a false claim
    rng = np.random.default_rng(0)
    claims = {1: 0, 4: 0}
    for _ in range(200):
        losses = rng.standard_normal((2, 12))
        comparisons = [compare(losses[:, :look]) for look in LOOKS]
        for n_looks in claims:
            claims[n_looks] += any(is_claim(replace(each, looks=n_looks)) for each in comparisons)
    assert claims[4] <= 0.05 * 200 < claims[1]


def is_claim(comparison):
    margin = comparison.margin(np.array([[1.0, -1.0]]), 2, 0.05)[0]
    return abs(comparison.means[0] - comparison.means[1]) > margin


def test_the_interval_of_a_mean_holds_at_all_looks_too():
    points = points_of({"seed": ["1", "2", "3", "4", "5"]}, lambda seed: float(seed))
    deviation = np.std([1, 2, 3, 4, 5], ddof=1) / math.sqrt(5)
    for n_looks in (1, 6):
        (row,) = ranked(points, n_looks).rows
        assert row.interval == pytest.approx(stats.t.ppf(1 - 0.025 / n_looks, 4) * deviation)


@pytest.mark.usefixtures("no_plot")
def test_reports_read_the_looks_of_all_sweeps_that_they_are_of(tmp_path):
    for name, n_looks in (("a", 6), ("b", 1)):
        points = []
        for rate, seed in ((rate, seed) for rate in (1, 2) for seed in (1, 2, 3)):
            overrides = {"lr": str(rate), "seed": str(seed)}
            given = [f"{key}={value}" for key, value in overrides.items()]
            loss = 2 + rate / 10 + seed + rate * seed / 100
            folder = run_folder(tmp_path / name / f"{rate}{seed}", *given, losses=(loss,))
            points.append(Point(folder, overrides, settings={"lr": rate, "seed": seed}))
        write_plan(tmp_path / name, [], points, n_looks)
    a, b, out = tmp_path / "a", tmp_path / "b", tmp_path / "out"
    wide = report([a]).rows[1].margin
    narrow = report([b]).rows[1].margin
    assert wide > 2 * narrow
    assert report([tmp_path], out=out).comparison.looks == 6  # all runs below the folder
    assert report([b, a], out=out).comparison.looks == 6
    runs = [folder for folder in a.iterdir() if folder.is_dir()]
    assert report(runs, out=out).rows[1].margin == pytest.approx(wide)
    # Plans of older versions, and damaged ones
    plan = json.loads((a / "sweep.json").read_text(encoding="utf-8"))
    del plan["looks"], plan["answer"]
    (a / "sweep.json").write_text(json.dumps(plan), encoding="utf-8")
    assert report([a]).rows[1].margin == pytest.approx(narrow)
    (a / "sweep.json").write_text('{"looks": "many"}', encoding="utf-8")
    assert report([tmp_path], out=out).comparison.looks == 1


def test_the_interval_of_a_share_of_the_compute_holds_at_all_looks_too():
    # Losses fall with the logarithm of the length
    noise = np.random.default_rng(2).normal(0, 0.01, (2, 2, 4))
    shape = {"x": ["a", "b"], "max_steps": ["100", "200"], "seed": ["1", "2", "3", "4"]}

    def loss(x, steps, seed):
        row = noise[int(x == "b"), int(steps == "200"), int(seed) - 1]
        return 4 - math.log(int(steps)) / 3 - 0.05 * (x == "b") + row

    points = points_of(shape, loss, flops=lambda _, steps, __: 1e6 * int(steps))
    widths = {}
    for n_looks in (1, 6):
        (found,) = [each for each in verdicts(ranked(points, n_looks)) if each["setting"] == "x"]
        _, low, high = found["flops"]
        widths[n_looks] = math.log(high / low)
    ratio = stats.t.ppf(1 - 0.02 / 6, 3) / stats.t.ppf(1 - 0.02, 3)
    assert widths[6] / widths[1] == pytest.approx(ratio)
