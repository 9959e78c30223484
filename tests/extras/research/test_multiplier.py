"""The share of the compute is the one that runs were constructed with, or it is unknown."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from minigpt.extras.research.multiplier import compute_shares
from minigpt.sweeps.answer import answer
from minigpt.sweeps.ranking import ranked
from minigpt.sweeps.results import Point
from minigpt.sweeps.verdicts import verdicts

STEPS = (100, 200, 400)


def loss_after(steps):
    return 1.5 + (np.asarray(steps) / 100) ** -0.4


def sweep(share, *, steps=STEPS, seeds=3, noise=0.0, speed=1.0, rng=None, loss=loss_after):
    """`.` needs `share` of the compute of `main` for a loss, and `speed` of the time per step."""
    rng = rng or np.random.default_rng(0)
    points = []
    for code, of_compute, of_time in (("main", 1.0, 1.0), (".", share, speed)):
        for length in steps:
            for seed in range(seeds):
                at = np.linspace(length / 10, length, 10)
                curve = loss(at / of_compute) + noise * rng.normal()
                values = {"code": code, "max_steps": f"{length}", "seed": f"{seed}"}
                totals = {
                    "best_val_loss": curve.min(),
                    "best_val_bits_per_byte": curve.min() / 3,
                    "flops": 1e6 * length,
                    "seconds": 0.1 * length * of_time,
                    "tokens": 64.0 * length,
                }
                point = Point(Path(f"{len(points)}"), values, "completed", totals=totals)
                validations = [*zip((64 * at).astype(int).tolist(), curve.tolist(), strict=True)]
                points.append(replace(point, curve=validations))
    return points


def shares(points, baseline="main", value="."):
    return compute_shares(ranked(points), "code", baseline, value)


def sentence(points):
    (found,) = [each for each in answer(ranked(points)) if " code " in f" {each}"]
    return found


@pytest.mark.parametrize("share", [0.6, 0.8, 1.0, 1.3])
def test_ladders_of_losses_that_fall_with_the_logarithm_of_compute_give_the_share(share):
    found = shares(sweep(share, speed=0.5, loss=lambda steps: 5 - np.log(steps) / 3))
    assert found["flops"] == pytest.approx([share] * 3)
    assert found["seconds"] == pytest.approx([share / 2] * 3)


@pytest.mark.parametrize("share", [0.5, 0.8, 1.25])
def test_lengths_that_are_far_apart_give_the_share_of_curved_ladders(share):
    found = shares(sweep(share, steps=(100, 400, 1600)))
    assert found["flops"][0] == pytest.approx(share, rel=0.01)
    back = shares(sweep(share, steps=(100, 400, 1600)), ".", "main")
    assert back["flops"][0] == pytest.approx(1 / found["flops"][0])


def test_intervals_hold_the_true_share_in_95_percent_of_the_sweeps_and_are_not_wide():
    rng = np.random.default_rng(1)
    holds = []
    widths = []
    for share in (0.8, 1.0, 1.2) * 60:
        _, low, high = shares(sweep(share, noise=0.005, rng=rng))["flops"]
        holds.append(low <= share <= high)
        widths.append(np.log(high / low))
    assert 0.95 <= np.mean(holds) < 1
    assert np.median(widths) < 0.15


def test_a_curve_gives_the_share_where_it_first_reaches_the_loss_of_the_other():
    points = sweep(0.8, steps=(400,), seeds=2, speed=0.5)
    found = shares(points)
    # Between validations a curve is a line.
    at = np.linspace(40, 400, 10)
    target = loss_after(400)
    expected = np.exp(np.interp(-target, -loss_after(at / 0.8), np.log(at))) / 400
    assert found["flops"] == pytest.approx([expected] * 3)
    assert found["seconds"] == pytest.approx([expected / 2] * 3)
    # Never, in the other direction.
    assert shares(points, ".", "main") == {"flops": None, "seconds": None}
    # A loss that rises again counts no more.
    falls = [(tokens, loss - 2 * (i == 3)) for i, (tokens, loss) in enumerate(points[0].curve)]
    totals = points[0].totals | {"best_val_loss": falls[3][1]}
    overfitted = [replace(point, curve=falls, totals=totals) for point in points[:2]]
    same = [replace(point, curve=falls, totals=totals) for point in points[2:]]
    assert shares(overfitted + same)["flops"] == pytest.approx([1, 1, 1])


def test_the_best_losses_of_seeds_may_be_at_different_validations():
    points = sweep(1.0, steps=(400,), seeds=2)
    losses = [(3, 2, 1, 2), (3, 2.5, 2, 1), (4, 3, 2, 0.5), (4, 3, 2, 0.5)]
    for i, curve in enumerate(losses):
        best = {"best_val_loss": min(curve), "best_val_bits_per_byte": min(curve) / 3}
        totals = points[i].totals | best | {"tokens": 400}
        validations = [*zip((100, 200, 300, 400), curve, strict=True)]
        points[i] = replace(points[i], curve=validations, totals=totals)
    expected = np.exp(np.interp(1, (0, 1.5), np.log((300, 400)))) / 400  # 1 is between 2 and 0.5
    assert shares(points)["flops"][0] == pytest.approx(expected)


def test_runs_that_planned_other_numbers_of_steps_for_a_seed_have_the_same_share():
    points = sweep(0.8, steps=(400,), seeds=2)
    expected = shares(points)
    for i, point in enumerate(points):
        # Both runs of the second seed are longer: their validations are at other tokens.
        longer = 1.25 if point.seed == points[1].seed else 1
        totals = {
            **point.totals,
            "tokens": point.totals.get("tokens", 64 * 400) * longer,
            "flops": point.totals["flops"] * longer,
        }
        curve = [(int(tokens * longer), loss) for tokens, loss in point.curve]
        points[i] = replace(point, curve=curve, totals=totals)
    assert shares(points)["flops"] == pytest.approx(expected["flops"], rel=1e-3)


def test_curves_are_read_in_bits_per_byte_where_tokens_differ_in_length():
    points = sweep(0.8, steps=(400,))
    expected = shares(points)
    for i, point in enumerate(points[3:], 3):
        # The same run with tokens twice as long.
        curve = [(tokens // 2, 2 * loss) for tokens, loss in point.curve]
        totals = {
            **point.totals,
            "best_val_loss": 2 * point.totals["best_val_loss"],
            "tokens": point.totals["tokens"] / 2,
        }
        points[i] = replace(point, curve=curve, totals=totals)
    assert ranked(points).unit == "bits per byte"
    assert shares(points)["flops"] == pytest.approx(expected["flops"])


def test_an_end_of_an_interval_beyond_a_curve_is_unknown():
    rng = np.random.default_rng(1)
    share, low, high = shares(sweep(0.97, steps=(400,), noise=0.01, rng=rng))["flops"]
    assert low < share < 1
    assert high is None
    # Where both are, as of seconds that differ by far between seeds, the answer leaves it out.
    points = sweep(0.9, steps=(400,), noise=1e-4)
    for point in points:
        point.totals["seconds"] *= 4.0 ** int(point.seed)
    for point in points[:3]:
        point.totals["seconds"] = 40.0
    assert [end is None for end in shares(points)["seconds"]] == [False, True, True]
    assert "of the FLOPs, read from its validation curve" in sentence(points)


def test_what_ladders_do_not_reach_is_unknown_and_the_answer_says_why():
    points = sweep(0.2)
    assert shares(points) == {"flops": None, "seconds": None}
    assert sentence(points).endswith(
        "The compute at which it reaches main's loss is unknown: all its losses are below those "
        "of main; add smaller values of max_steps."
    )
    # The longer, the worse.
    rising = sweep(0.8, loss=lambda steps: 2 + steps[-1] / 1000 - 0 * steps)
    assert shares(rising) == {"flops": None, "seconds": None}
    assert "is unknown: losses do not fall with max_steps." in sentence(rising[::-1])


def test_lengths_that_overfit_do_not_count():
    points = sweep(0.8, loss=lambda steps: 5 - np.log(steps) / 3)
    longer = []
    for point in points:
        if point.written["max_steps"] == "400":
            totals = {**point.totals, "flops": 8e8, "best_val_loss": 5.0}
            written = point.overrides | {"max_steps": "800"}
            longer.append(replace(point, overrides=written, totals=totals))
    assert shares([*points, *longer])["flops"] == pytest.approx([0.8] * 3)


def test_the_answer_has_the_share_after_the_effect():
    text = sentence(sweep(0.8, noise=0.002))
    assert text.startswith("code matters: . is better than main by ")
    found = {each["setting"]: each for each in verdicts(ranked(sweep(0.8, noise=0.002)))}
    share, low, high = found["code"]["flops"]
    told = f"{share:.2f} ({low:.2f} to {high:.2f})"
    assert f". It reaches main's loss with {told} of the FLOPs and " in text
    assert text.endswith(" of the seconds.")
    # The worse value is the one that is compared with.
    assert "main is better than . by" in sentence(sweep(1.3, noise=0.002))
    assert "It reaches .'s loss with 0.7" in sentence(sweep(1.3, noise=0.002))
    # Without an effect there is nothing to say.
    assert "reaches" not in sentence(sweep(1.0, noise=0.002))
    one_length = sentence(sweep(0.8, steps=(400,), noise=0.002))
    assert "of the seconds, read from its validation curve at this one length: " in one_length


def test_rows_that_differ_otherwise_or_in_their_length_alone_give_no_share():
    unknown = {"flops": None, "seconds": None}
    points = sweep(0.8, noise=0.001)
    for lengths in (points, points[:9]):
        assert compute_shares(ranked(lengths), "max_steps", "100", "200") == unknown
    rates = [
        replace(point, overrides=point.overrides | {"lr": f"{i % 3}"})
        for i, point in enumerate(points)
    ]
    assert shares(rates) == unknown
    without = [
        replace(point, totals={"best_val_loss": point.loss("nats per token")}) for point in points
    ]
    assert shares(without) == unknown
    assert sentence(without).endswith("on average.")


def test_only_seeds_that_both_have_count_and_one_gives_no_interval():
    points = sweep(0.8, noise=0.01)
    first = [point for point in points if point.seed == "0"]
    others = [point for point in points if point.written["code"] == "main" and point.seed != "0"]
    share, low, high = shares([*first, *others])["flops"]
    assert (low, high) == (None, None)
    assert shares(first)["flops"] == [share, None, None]
