"""The sentences of a sweep: each where it holds, and not where it does not."""

import itertools
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from minigpt.sweeps.answer import answer
from minigpt.sweeps.ranking import ranked
from minigpt.sweeps.results import Point

NOISE = 0.01
GRID = {"model.n_embd": ("64", "128", "256"), "model.n_head": ("2", "4", "8")}


def sweep(loss, axes=GRID, *, seeds="123", noise=NOISE, rng=0, folder=Path("sweep"), flops=lambda *_: 0.0):
    """Points of a grid; `loss` and `flops` are functions of the values as numbers."""
    normal, points = np.random.default_rng(rng).normal, []
    for values in itertools.product(*axes.values()):
        numbers = [float(value) if value[:1].isdigit() else value for value in values]
        for seed in seeds:
            found = loss(*numbers) + noise * normal()
            overrides = {**dict(zip(axes, values, strict=True)), "seed": seed}
            totals = {"best_val_loss": found, "best_val_bits_per_byte": found, "flops": flops(*numbers)}
            curve = [(t, found + (1 - t / 300)) for t in (100, 200, 300)]
            points.append(Point(folder / str(len(points)), overrides, "completed", totals=totals, curve=curve))
    return points


def told(points):
    return "\n".join(answer(ranked(points)))


def by_width(width, heads):
    return {64: 2.2, 128: 2.1, 256: 2.0}[width]


def test_a_setting_matters_or_does_not():
    text = told(sweep(by_width))
    found = re.search(r"n_embd matters, \d+ % of the variance \(.*\): 256 is better than 128 by ([\d.]+)", text)
    assert float(found[1]) == pytest.approx(0.1, abs=0.02)
    assert "n_head does not matter beyond the noise" in text
    assert " but at " not in text


def test_of_200_sweeps_without_an_effect_at_most_5_percent_claim_that_something_matters():
    claims = [" matters" in (text := told(sweep(lambda *_: 2.0, rng=i))) or "is worse than" in text for i in range(200)]
    assert sum(claims) <= 0.05 * len(claims)


def test_an_effect_in_a_part_of_the_grid_is_an_exception():
    text = told(sweep(lambda width, heads: by_width(width, 0) + 0.06 * ((width, heads) == (64, 8))))
    place = r"at n_embd=64, 8 is worse than [24] by 0\.0\d+ ± 0\.0\d+; elsewhere its values are tied"
    assert re.search(rf"\nn_head matters in places.*: {place}", text)
    assert "at n_embd=128" not in text
    crossed = told(sweep(lambda width, heads: 2 + 0.1 * abs((width > 100) - (heads > 3))))
    assert re.search(r"at n_embd=64, [48] is worse than 2 by", crossed)
    assert re.search(r"n_head matters, .*: [48] is better than 2 by .*; but at n_embd=64", crossed)


def test_the_best_row_and_what_is_tied_with_it():
    text = told(sweep(by_width, flops=lambda *_: 1e9))
    best = r"(?:1\.99|2\.00)\d\d ± 0\.0\d+ nats per token: n_embd=256, n_head=\d \(3 seeds\)\."
    assert re.search(rf"The lowest loss is {best}", text)
    assert "2 of the 8 other rows are tied." in text
    text = told(sweep(lambda *_: 2.0, flops=lambda width, heads: width * heads))
    assert re.search(r"8 of the 8 other rows are tied; with \d+ % of the FLOPs: n_embd=64, n_head=2\.", text)
    text = told(sweep(lambda width, heads: 2 + width / 100 + heads))
    assert "All other rows are worse by more than the noise." in text


def test_the_best_value_is_at_the_edge_or_on_a_plateau():
    assert "it is the largest value, so the best may lie beyond" in told(sweep(by_width))
    assert "it is the smallest value" in told(sweep(lambda width, heads: 2 + width / 1000))
    inside = told(sweep(lambda width, heads: 2 + 0.1 * (width != 128)))
    assert "may lie beyond" not in inside
    plateau = told(sweep(lambda width, heads: 2 + 0.1 * (width == 64)))
    assert "128 and 256 are tied" in plateau
    assert "may lie beyond" not in plateau
    zero = told(sweep(lambda dropout: 2 + dropout, {"model.dropout": ("0", "0.1", "0.2")}))
    assert "may lie beyond" not in zero


def test_the_noise_and_the_interaction_have_their_shares():
    crossed = told(sweep(lambda width, heads: 2 + 0.05 * ((width == 64) == (heads == 2))))
    assert re.search(r"interaction of settings is [3-9]\d % of the variance", crossed)
    (least,) = re.findall(r"differences of rows below (0\.\d+) are within the noise", crossed)
    assert 4 * NOISE / 3**0.5 < float(least) < 8 * NOISE / 3**0.5


def test_a_row_that_fell_faster_at_its_end_may_win_a_longer_run():
    def falling(fall):
        points = sweep(by_width)
        for i, point in enumerate(points[:9]):  # of width 64
            points[i] = replace(point, curve=[(t, loss + fall * (300 - t) / 100) for t, loss in point.curve])
        return told(points)

    assert re.search(r"n_embd=64, n_head=\d was still falling faster: by 1\.\d+ in the last third", falling(1.0))
    assert "falling" not in falling(0.05)


def test_with_one_seed_it_says_so_and_gives_the_command_that_adds_two(tmp_path):
    points = sweep(by_width, seeds=("7",), folder=tmp_path)
    points = [replace(point, overrides={**point.overrides, "max_steps": "300"}) for point in points]
    (tmp_path / "sweep.json").write_text("{}")
    text = told(points)
    assert "Every row has one seed, so noise and effects cannot be told apart." in text
    assert "matters" not in text
    ((runs, command),) = re.findall(r"Add two seeds to the best rows \((\d+) runs\): (.*)", text)
    words = shlex.split(command)
    assert {"-m", "max_steps=300", "seed=7,8,9", f"hydra.sweep.dir={tmp_path}", "resume=auto"} <= {*words}
    given = {name: values.split(",") for name, _, values in (word.partition("=") for word in words) if name in GRID}
    assert all(value in given[name] for name, value in ranked(points)[0].overrides.items() if name in GRID)
    rows = len(given["model.n_embd"]) * len(given["model.n_head"])
    assert int(runs) == 2 * rows
    assert 1 <= rows <= 4


def test_what_cannot_be_told_is_said():
    points = sweep(by_width)
    *others, last = points
    assert told([replace(point, totals={}) for point in points]).startswith("No run has completed with a loss")
    text = told([*others, replace(last, status="failed", totals={})])
    assert "Of 27 runs, 1 failed: rows without all their runs are not compared." in text
    assert "The grid is incomplete" in text
    pruned = told([*points[:3], *(replace(point, status="paused") for point in points[3:])])
    assert "24 of 27 runs are paused" in pruned
    assert "There is no other row to compare it with." in pruned
    assert "1 completed run has no finite loss." in told([*others, replace(last, totals={})])
    assert "different corpora" in told([replace(point, corpus=point.overrides["seed"]) for point in points])
    again = [*points, replace(points[0], status="skipped", totals={}, reason="same configuration as another point")]
    assert told(again) == told(points)
    apart = [point for i, point in enumerate(points) if (i // 3 < 4) == (point.overrides["seed"] == "1")]
    assert "Too few rows share seeds" in told(apart)


def test_losses_on_different_texts_are_not_compared():
    points, parts = sweep(by_width), ["all 1,000 bytes", "20 of 80 windows of 16 tokens in 1,000 bytes"]
    rows = ranked([replace(point, validated=parts[i % 2]) for i, point in enumerate(points)])
    (sentence,) = answer(rows)
    assert sentence.startswith("The runs were validated on different texts (")
    assert sentence.endswith("so their losses are not comparable; eval_batches=null validates on the whole split.")
    assert {row.margin for row in rows} == {None}  # nor is any row tied with another
    assert told([replace(point, validated=parts[1]) for point in points]) == told(points)


def test_a_diverged_row_does_not_hide_the_other_effects():
    axes = {"optimizer.lr": ("1e-3", "2e-3", "4e-3", "8e-3", "16e-3")}
    losses = {0.001: 2.4, 0.002: 2.3, 0.004: 2.2, 0.008: 2.15, 0.016: 5.0}
    points = sweep(losses.__getitem__, axes)
    text = told(points)
    assert "8e-3 is better than 4e-3" in text
    assert "1 row diverged; the comparison leaves them out." in text
    for worst, diverged in ((2.3, False), (2.5, True)):  # of rows that are close to each other, one 20 % above the best
        close = {0.001: 2.01, 0.002: 2.0, 0.004: 2.005, 0.008: 2.01, 0.016: worst}
        assert ("1 row diverged" in told(sweep(close.__getitem__, axes, noise=1e-3))) == diverged


def test_rows_are_ranked_as_if_all_had_all_seeds():
    # Seeds 1 and 2 are easier than 3: a row with these two alone has the lowest mean.
    losses = {"2": (1.001, 1.002), "4": (0.95, 0.951, 1.5), "8": (1.2, 1.2015, 1.75)}
    points = [
        Point(Path(heads, f"{i}"), {"model.n_head": heads, "seed": f"{i}"}, "completed", totals={"best_val_loss": loss})
        for heads, found in losses.items()
        for i, loss in enumerate(found)
    ]
    assert [row.overrides["model.n_head"] for row in ranked(points)] == ["4", "2", "8"]
    assert re.search(r"n_head=4 \(3 seeds\)\. All other rows are worse", told(points))


def test_a_crossover_matters_but_not_on_average():
    axes = {"optimizer": ("adamw", "muon"), "optimizer.lr": ("0.01", "0.02")}
    text = told(sweep(lambda name, rate: 2 + 0.1 * ((name == "muon") == (rate == 0.02)), axes))
    assert re.search(r"lr matters, .*, but not on average: at optimizer=(adamw|muon), 0\.0\d is worse than", text)


@pytest.mark.filterwarnings("error")
def test_equal_losses_have_no_effects():
    assert "nan" not in (text := told(sweep(lambda *_: 2.0, noise=0.0)))
    assert "n_embd does not matter" in text
