"""Verdicts on a sweep are those of paired t-tests, and those of the answer."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from minigpt.sweeps.answer import answer
from minigpt.sweeps.comparison import FAMILY_ERROR
from minigpt.sweeps.ranking import ranked
from minigpt.sweeps.results import Point
from minigpt.sweeps.verdicts import verdicts


def sweep(losses):
    """A sweep: by the values of its settings, such as `code=main lr=1`, the loss of each seed."""
    points = []
    for text, of_seeds in losses.items():
        for seed, loss in enumerate(of_seeds, 1):
            values = dict(pair.split("=") for pair in text.split()) | {"seed": f"{seed}"}
            known = {"totals": {"best_val_loss": loss}} if loss else {"status": "failed"}
            known = {"status": "completed"} | known
            points.append(Point(Path(f"sweep/{len(points)}"), values, **known))
    return points


def of(points):
    found = verdicts(ranked(points))
    assert json.loads(json.dumps(found)) == found
    return found


def test_a_value_is_compared_with_the_first_one_as_by_a_paired_t_test():
    main = [2.01, 2.04, 2.03, 2.0]
    change = [1.96, 2.0, 1.97, 1.955]
    (found,) = of(sweep({"code=main": main, "code=.": change}))
    test = stats.ttest_rel(change, main).confidence_interval(1 - FAMILY_ERROR)
    ends = (found["difference"] - found["interval"], found["difference"] + found["interval"])
    assert ends == pytest.approx(tuple(test), rel=1e-6)
    expected = {"setting": "code", "baseline": "main", "value": ".", "verdict": "better"}
    expected |= {"unit": "nats per token", "seeds": 4, "flops": None, "seconds": None}
    assert expected.items() <= found.items()
    # As the first that was typed is the baseline, and not the best.
    (found,) = of(sweep({"code=.": change, "code=main": main}))
    assert (found["baseline"], found["value"], found["verdict"]) == (".", "main", "worse")
    (found,) = of(sweep({"code=main": main, "code=.": [2.0, 2.05, 2.03, 2.01]}))
    assert found["verdict"] == "unclear"


def grid(effect=0.1):
    noise = np.random.default_rng(0).normal(size=(2, 3, 3)) * 0.01
    losses = {}
    for i, code in enumerate(("main", ".")):
        for j, rate in enumerate(("0.2", "0.1", "0.4")):
            row = 2 - effect * i + 0.2 * j + noise[i, j]
            losses[f"code={code} lr={rate}"] = [*map(float, row)]
    return losses


def test_the_effect_of_a_setting_in_a_grid_is_its_mean_over_the_others():
    losses = grid()
    found = of(sweep(losses))
    pairs = [(each["setting"], each["baseline"], each["value"]) for each in found]
    assert sorted(pairs) == [("code", "main", "."), ("lr", "0.2", "0.1"), ("lr", "0.2", "0.4")]
    by_value = {each["value"]: each for each in found}
    means = {}
    for value in ("0.2", "0.4"):
        means[value] = np.mean([row for name, row in losses.items() if name.endswith(value)])
    difference = by_value["0.4"]["difference"]
    assert difference == pytest.approx(means["0.4"] - means["0.2"], abs=1e-8)
    assert [by_value[value]["verdict"] for value in (".", "0.1", "0.4")] == [
        "better",
        "worse",
        "worse",
    ]
    # In the words of the answer.
    (sentence,) = [each for each in answer(ranked(sweep(losses))) if "code matters" in each]
    by = f"by {-by_value['.']['difference']:.4f} ± {by_value['.']['interval']:.4f} on average"
    assert by in sentence


def test_rows_of_an_incomplete_grid_are_compared_with_the_first_row():
    losses = grid()
    del losses["code=. lr=0.4"]
    losses["code=. lr=0.1"] = [None, 1.0, 1.0]  # not compared
    found = of(sweep(losses))
    assert {(each["setting"], each["baseline"]) for each in found} == {("", "code=main, lr=0.2")}
    verdict = {each["value"]: each["verdict"] for each in found}
    assert verdict == {
        "code=., lr=0.2": "better",
        "code=main, lr=0.1": "worse",
        "code=main, lr=0.4": "worse",
    }


def test_what_cannot_be_told_is_unclear_or_left_out():
    (found,) = of(sweep({"code=main": [2.0], "code=.": [1.5]}))
    assert (found["difference"], found["interval"]) == (-0.5, None)
    assert (found["verdict"], found["seeds"]) == ("unclear", 1)
    # A baseline that failed, and losses of different texts.
    assert of(sweep({"code=main": [None, 2.0], "code=.": [1.5, 1.6], "code=a": [1, 1]})) == []
    points = sweep({"code=main": [2.0, 2.1], "code=.": [1.5, 1.6]})
    assert len(of(points)) == 1
    assert of([*points[:3], replace(points[3], validated="other text")]) != []
    parts = [replace(point, validated=f"part {i % 2}") for i, point in enumerate(points)]
    assert of(parts) == []


@pytest.mark.filterwarnings("error")
def test_the_same_code_twice_has_equal_losses():
    losses = [2.3456789123, 2.4012345678, 2.3]
    points = sweep({"code=main": losses, "code=.": losses})
    (found,) = of(points)
    assert (found["difference"], found["verdict"]) == (0, "unclear")
    text = "\n".join(answer(ranked(points)))
    assert "No effect of code is found: main and . have equal losses." in text
    assert "0.0000" not in text


def test_of_300_comparisons_without_an_effect_at_most_5_percent_claim_one():
    rng = np.random.default_rng(0)
    claims = []
    for _ in range(300):
        of_seed = 0.01 * rng.normal(size=3)
        rows = 2 + of_seed + rng.normal(size=(2, 3)) * [[0.01], [0.03]]
        names = ("code=main", "code=.")
        table = ranked(sweep(dict(zip(names, rows.tolist(), strict=True))))
        claims.append(verdicts(table)[0]["verdict"] != "unclear")
    assert np.mean(claims) <= 0.05
