"""The sentences of a sweep are true, and the comparisons behind them those of t-tests."""

import itertools
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from minigpt.sweeps.answer import answer
from minigpt.sweeps.comparison import FAMILY_ERROR, compare
from minigpt.sweeps.ranking import ranked
from minigpt.sweeps.results import Point

NOISE = 0.01
GRID = {"model.n_embd": ("64", "128", "256"), "model.n_head": ("2", "4", "8")}


def sweep(
    loss, axes=GRID, *, seeds="123", noise=NOISE, rng=0, folder=Path("sweep"), flops=lambda *_: 0.0
):
    # Points of a grid; `loss` and `flops` are functions of the values as numbers
    normal = np.random.default_rng(rng).normal
    points = []
    for values in itertools.product(*axes.values()):
        numbers = [float(value) if value[:1].isdigit() else value for value in values]
        for seed in seeds:
            found = loss(*numbers) + noise * normal()
            overrides = {**dict(zip(axes, values, strict=True)), "seed": seed}
            totals = {
                "best_val_loss": found,
                "best_val_bits_per_byte": found,
                "flops": flops(*numbers),
            }
            curve = [(t, found + (1 - t / 300)) for t in (100, 200, 300)]
            points.append(
                Point(folder / str(len(points)), overrides, "completed", totals=totals, curve=curve)
            )
    return points


def told(points):
    return "\n".join(answer(ranked(points)))


def by_width(width, heads):
    return {64: 2.2, 128: 2.1, 256: 2.0}[width]


def test_a_setting_matters_or_does_not():
    text = told(sweep(by_width))
    found = re.search(
        r"n_embd matters: 256 is better than 128 by ([\d.]+) ± [\d.]+ on average", text
    )
    assert float(found[1]) == pytest.approx(0.1, abs=0.02)
    (bound,) = re.findall(
        r"No effect of n_head is found: 2, 4 and 8 differ by less than (0\.\d+) on average; more",
        text,
    )
    assert float(bound) < 0.04
    assert " but at " not in text


def test_an_effect_that_depends_on_other_settings_has_exceptions():
    crossed = told(sweep(lambda width, heads: 2 + 0.1 * abs((width > 100) - (heads > 3))))
    assert re.search(
        r"n_head matters: [48] is better than 2 by .* on average; but at n_embd=64, [48] is worse",
        crossed,
    )
    part = told(sweep(lambda width, heads: by_width(width, 0) + 0.06 * ((width, heads) == (64, 8))))
    assert re.search(
        r"n_head matters: [24] is better than 8 by 0\.0\d+ ± 0\.0\d+ on average\.", part
    )


def test_the_best_row_and_what_is_tied_with_it():
    text = told(sweep(by_width, flops=lambda *_: 1e9))
    best = r"(?:1\.99|2\.00)\d\d nats per token: n_embd=256, n_head=\d \(3 seeds\)\."
    assert re.search(rf"The lowest mean loss is {best}", text)
    assert (
        "6 of the 8 other rows are worse; the differences of the rest are within the noise." in text
    )
    text = told(sweep(lambda *_: 2.0, flops=lambda width, heads: width * heads))
    cheaper = r"n_embd=64, n_head=2 is one with \d+ % of the FLOPs\."
    expected = f"of the other rows are within the noise; {cheaper}"
    assert re.search(expected, text)
    text = told(sweep(lambda width, heads: 2 + width / 100 + heads))
    assert "All other rows are worse." in text


def test_the_best_value_is_at_the_edge_or_on_a_plateau():
    assert "it is the largest value, so the best may lie beyond" in told(sweep(by_width))
    assert "it is the smallest value" in told(sweep(lambda width, heads: 2 + width / 1000))
    inside = told(sweep(lambda width, heads: 2 + 0.1 * (width != 128)))
    assert "may lie beyond" not in inside
    plateau = told(sweep(lambda width, heads: 2 + 0.1 * (width == 64)))
    assert "n_embd matters: " in plateau
    assert "may lie beyond" not in plateau
    for name, values in (
        ("model.dropout", ("0", "0.1", "0.2")),
        ("model.n_layer", ("1", "2", "3")),
    ):
        # There is no smaller one
        assert "may lie beyond" not in told(sweep(lambda value: 2 + value, {name: values}))


def test_a_larger_value_that_ran_and_failed_or_diverged_is_not_beyond():
    points = sweep(lambda rate: 2 - rate, {"optimizer.lr": ("0.1", "0.2", "0.4", "0.8")})
    assert re.search("0.8 is better than 0.4 .* may lie beyond", told(points))
    for change in (
        {"status": "failed", "totals": {}},
        {"diverged": True, "totals": {"best_val_loss": 9.0}},
    ):
        text = told(
            [
                replace(point, **change) if "0.8" in point.written.values() else point
                for point in points
            ]
        )
        assert "0.4 is better than 0.2" in text
        assert "may lie beyond" not in text


def test_what_is_within_the_noise():
    (least,) = re.findall(
        r"Differences from the best row below (0\.\d+) are within the noise", told(sweep(by_width))
    )
    assert 4 * NOISE / 3**0.5 < float(least) < 10 * NOISE / 3**0.5
    assert "With fewer than 3 seeds of a row" in told(sweep(by_width, seeds="12"))


def falling(curves):
    """What is said of rows with these validation losses after 100, 200 and 300 tokens."""
    points = sweep(lambda lr: 0.0, {"lr": curves})
    for i, point in enumerate(points):
        curve = [
            (t, loss + i % 3 * 1e-3)
            for t, loss in zip((100, 200, 300), curves[point.written["lr"]], strict=True)
        ]
        points[i] = replace(
            point, curve=curve, totals={"best_val_loss": min(loss for _, loss in curve)}
        )
    return told(points)


def test_a_row_that_fell_faster_at_its_end_may_win_a_longer_run():
    assert (
        "lr=2 would be at 1.9010 after another third, and the best row at 2.0010: "
        "longer runs may rank it" in falling({"1": (2.2, 2.1, 2.05), "2": (2.5, 2.3, 2.1)})
    )
    assert "longer runs" not in falling({"1": (2.2, 2.1, 2.05), "2": (2.2, 2.15, 2.1)})
    # A row that overfits keeps its best loss, and so does the best row.
    assert "longer runs" not in falling({"1": (2.0, 2.1, 2.3), "2": (2.2, 2.15, 2.1)})
    assert "longer runs" not in falling({"1": (2.2, 2.1, 2.0), "2": (2.1, 2.5, 2.3)})


def test_with_one_seed_it_says_so_and_gives_the_command_that_adds_two(tmp_path):
    points = sweep(by_width, seeds=("7",), folder=tmp_path)
    points = [replace(point, overrides={**point.overrides, "max_steps": "300"}) for point in points]
    (tmp_path / "sweep.json").write_text("{}")
    text = told(points)
    assert "Every row has one seed, so noise and effects cannot be told apart." in text
    assert "matters" not in text
    ((runs, command),) = re.findall(r"Add two seeds to the best rows \((\d+) runs\): (.*)", text)
    words = shlex.split(command)
    assert {"-m", "max_steps=300", "seed=7,8,9", f"hydra.sweep.dir={tmp_path}", "resume=auto"} <= {
        *words
    }
    pairs = [word.split("=") for word in words if word.partition("=")[0] in GRID]
    given = {name: values.split(",") for name, values in pairs}
    best = ranked(points).rows[0].overrides
    assert all(best[name] in values for name, values in given.items())
    rows = len(given["model.n_embd"]) * len(given["model.n_head"])
    assert int(runs) == 2 * rows
    assert 1 <= rows <= 4


def test_what_cannot_be_told_is_said():
    points = sweep(by_width)
    *others, last = points
    assert told([replace(point, totals={}) for point in points]).startswith(
        "No run has completed with a loss"
    )
    text = told([*others, replace(last, status="failed", totals={})])
    assert "Of 27 runs, 1 failed: rows without all their runs are not compared." in text
    assert "The grid is incomplete" in text
    pruned = told([*points[:3], *(replace(point, status="paused") for point in points[3:])])
    assert "24 of 27 runs are paused" in pruned
    assert "There is no other row to compare it with." in pruned
    early = replace(last, reason="stopped early at step 7 of 20: ended by a callback: Timer")
    assert "1 of 27 runs stopped early: rows may differ" in told([*others, early])
    assert "stopped early" not in told([*others, last])
    assert "1 completed run has no finite loss." in told([*others, replace(last, totals={})])
    timed = [replace(point, settings={**point.written, "minutes": 5}) for point in points]
    assert "planned" not in told(timed)  # of damaged files the steps are unknown
    timed[0].totals["steps"] = 20
    assert "minutes= planned 20 steps: rows are compared at equal time." in told(timed)
    timed[0].settings["minutes"] = 10
    assert "20 steps: rows of equal minutes are compared at equal time." in told(timed)
    del timed[0].totals["steps"]
    again = [
        *points,
        replace(
            points[0], status="skipped", totals={}, reason="same configuration as another point"
        ),
    ]
    assert told(again) == told(points)
    apart = [
        point for i, point in enumerate(points) if (i // 3 < 4) == (point.overrides["seed"] == "1")
    ]
    assert "Too few rows share seeds" in told(apart)


def test_losses_on_different_texts_are_not_compared():
    points = sweep(by_width)
    parts = ["all 1,000 bytes", "20 of 80 windows of 16 tokens in 1,000 bytes"]
    table = ranked(
        [
            replace(point, validated=parts[i % 2], validated_in_part=i % 2 == 1)
            for i, point in enumerate(points)
        ]
    )
    (sentence,) = answer(table)
    assert sentence.startswith("The runs were validated on different texts (")
    assert sentence.endswith(
        "so their losses are not comparable; eval_batches=null validates on the whole split."
    )
    assert {row.margin for row in table.rows} == {None}  # nor is any row tied with another
    assert told([replace(point, validated=parts[1]) for point in points]) == told(points)


def test_a_diverged_row_does_not_hide_the_other_effects():
    axes = {"optimizer.lr": ("1e-3", "2e-3", "4e-3", "8e-3", "16e-3")}
    losses = {0.001: 2.4, 0.002: 2.3, 0.004: 2.2, 0.008: 2.15, 0.016: 5.0}
    points = sweep(losses.__getitem__, axes)
    assert "diverged" not in told(points)  # it fell, but slowly
    points = [replace(point, diverged=point.written["optimizer.lr"] == "16e-3") for point in points]
    text = told(points)
    assert "8e-3 is better than 4e-3" in text
    assert "1 row diverged: not compared." in text
    spread = {
        0.001: 4.0,
        0.002: 3.8,
        0.004: 3.3,
        0.008: 3.27,
        0.016: 5.5,
    }  # no farther from the others than these are
    points = [
        replace(point, diverged=point.written["optimizer.lr"] == "16e-3")
        for point in sweep(spread.get, axes)
    ]
    assert "1 row diverged: not compared." in told(points)
    close = {
        0.001: 2.01,
        0.002: 2.0,
        0.004: 2.005,
        0.008: 2.01,
        0.016: 2.3,
    }  # less than 20 % above the best
    assert "diverged" not in told(
        [replace(point, diverged=True) for point in sweep(close.__getitem__, axes)]
    )


def test_rows_are_ranked_as_if_all_had_all_seeds():
    # Seeds 1 and 2 are easier than 3: a row with these two alone has the lowest mean.
    losses = {"2": (1.001, 1.002), "4": (0.95, 0.951, 1.5), "8": (1.2, 1.2015, 1.75)}
    points = [
        Point(
            Path(heads, f"{i}"),
            {"model.n_head": heads, "seed": f"{i}"},
            "completed",
            totals={"best_val_loss": loss},
        )
        for heads, found in losses.items()
        for i, loss in enumerate(found)
    ]
    assert [row.overrides["model.n_head"] for row in ranked(points).rows] == ["4", "2", "8"]
    assert re.search(r"n_head=4 \(3 seeds\)\. ", told(points))


def test_a_crossover_matters_but_not_on_average():
    axes = {"optimizer": ("adamw", "muon"), "optimizer.lr": ("0.01", "0.02")}
    text = told(sweep(lambda name, rate: 2 + 0.1 * ((name == "muon") == (rate == 0.02)), axes))
    place = r"at optimizer=(adamw|muon), 0\.0\d is worse than"
    assert re.search(rf"lr matters, but no effect on average is found: {place}", text)


@pytest.mark.filterwarnings("error")
def test_equal_losses_have_no_effects():
    text = told(sweep(lambda *_: 2.0, noise=0.0))
    assert "nan" not in text
    assert "No effect of n_embd is found" in text


SHAPES = (
    {"n_embd": ("64", "128", "256"), "n_head": ("2", "4", "8")},
    {"lr": ("0.0001", "0.001", "0.01", "0.1")},
    {"n_layer": ("1", "2"), "act": ("gelu", "relu"), "dropout": ("0", "0.1")},
)
KINDS = ("no effect", "additive", "interaction", "one noisy row", "missing runs", "diverged rows")
NUMBER = r"(\d+\.\d+)"
PLACE = rf"at (.+?), (\S+) is worse than (\S+) by {NUMBER} ± {NUMBER}"


class Constructed:
    """A random sweep: the true mean loss of each row, and the runs that were drawn."""

    def __init__(self, kind, rng):
        self.axes = SHAPES[rng.integers(len(SHAPES))]
        levels = [len(values) for values in self.axes.values()]
        none = kind in ("no effect", "one noisy row")
        effects = [np.zeros(n) if none else size(rng) * rng.normal(size=n) for n in levels]
        self.true = 2 + sum(np.ix_(*effects))
        self.true = self.true + (
            size(rng) * rng.normal(size=levels) if kind == "interaction" else np.zeros(levels)
        )
        noise = np.full(levels, NOISE)
        odd = tuple(map(rng.integers, levels))
        noise[odd] *= 5 if kind == "one noisy row" else 1
        self.diverged = odd if kind == "diverged rows" else None
        of_seed = size(rng) * rng.normal(size=3)
        points = []
        for place in np.ndindex(*levels):
            for seed in range(3):
                missing = kind == "missing runs" and rng.random() < 0.1
                if missing and rng.random() < 0.5:
                    continue  # the row has fewer seeds
                apart = abs(rng.normal()) + 1 if place == self.diverged else 0
                loss = self.true[place] + of_seed[seed] + noise[place] * rng.normal() + apart
                falls = np.cumsum([0, *abs(rng.normal(size=2))]) * 5 * NOISE
                losses = loss + (falls if rng.random() < 0.2 else falls[::-1])  # a few overfit
                known = {
                    "curve": [*zip((100, 200, 300), losses, strict=True)],
                    "totals": {"best_val_loss": loss},
                }
                known = (
                    {"status": "failed"}
                    if missing
                    else known | {"status": "completed", "diverged": apart > 0}
                )
                values = [values[i] for values, i in zip(self.axes.values(), place, strict=True)]
                overrides = dict(zip(self.axes, values, strict=True)) | {"seed": f"{seed}"}
                points.append(Point(Path(f"{len(points)}"), overrides, **known))
        self.table = ranked(points)
        self.rows = self.table.rows
        self.compared = [row for row in self.rows if row.margin is not None]

    def mean(self, label=""):
        """The true mean of the compared rows with some values, such as `n_embd=64, n_head=2`."""
        wanted = set(label.split(", ")) - {""}
        rows = [row for row in self.compared if wanted <= set(row.label().split(", "))]
        return np.mean([self.true_of(row) for row in rows])

    def true_of(self, row):
        return self.true[tuple(self.axes[name].index(v) for name, v in row.overrides.items())]

    def check(self, sentence):
        for pattern, holds in self.checks.items():
            if found := re.fullmatch(pattern, sentence):
                return holds(self, *found.groups())
        raise AssertionError(f"a sentence without a check: {sentence}")

    def lowest(self, of, loss, label, seeds, rest):
        best = self.rows[0]
        provisional = [row for row in self.rows if row.provisional and row.losses]
        assert (best.label(), len(best.losses)) == (label, int(seeds))
        assert (f"{best.loss:.4f}", of == "The") == (loss, not provisional)
        worse = [row for row in self.compared[1:] if not row.tied]
        numbers = {
            "The differences": 0,
            "The difference": 0,
            "There is": 0,
            "Too few": 0,
            "The other": 1,
        }
        first, second = rest.split()[:2]
        said = len(self.compared) - 1 if first == "All" else numbers.get(f"{first} {second}", first)
        assert len(worse) == int(said)
        return all(self.mean(row.label()) > self.mean(label) for row in worse)

    def matters(self, name, best, near, worse_by, margin, end, places):
        true = self.mean(f"{name}={near}") - self.mean(f"{name}={best}")
        ends = {"smallest": self.axes[name][0], "largest": self.axes[name][-1], None: best}
        assert ends[end] == best  # a fact, without noise
        assert end is None or (name, best) not in (("n_layer", "1"), ("dropout", "0"))
        there = places is None or self.at_places(name, places)
        return abs(true - float(worse_by)) <= float(margin) and true > 0 and there

    def at_places(self, name, text):
        differences = [
            (
                float(by),
                float(margin),
                self.mean(f"{where}, {name}={worse}") - self.mean(f"{where}, {name}={better}"),
            )
            for where, worse, better, by, margin in re.findall(PLACE, text)
        ]
        return len(differences) > 0 and all(
            abs(true - by) <= margin and true > 0 for by, margin, true in differences
        )

    def no_effect(self, name, values, bound):
        means = [self.mean(f"{name}={value}") for value in re.split(", | and ", values)]
        return max(means) - min(means) < float(bound)

    def within_noise(self, least):
        return all(row.tied for row in self.compared[1:] if row.difference < float(least) - 1e-4)

    def falling(self, label, end, best_end):
        ends = {}
        for row in self.compared:
            curves = np.array([point.curve for point in row.points])[..., 1]  # (seeds, 3)
            ends[row.label()] = np.minimum(curves.min(1), 2 * curves[:, 2] - curves[:, 1]).mean()
        assert (f"{ends[label]:.4f}", f"{ends[self.compared[0].label()]:.4f}") == (end, best_end)
        return ends[label] == min(ends.values())

    def counts(self, n, failed):
        statuses = [point.status for row in self.rows for point in row.points]
        return (int(n), int(failed)) == (len(statuses), statuses.count("failed"))

    def incomplete(self):
        return len(self.compared) < self.true.size

    checks = {
        r"(The|Of the rows whose runs all completed, the) lowest mean loss is "
        rf"{NUMBER} nats per token: (.*) "
        r"\((\d) seeds?\)\. (.*)": lowest,
        rf"(\w+) matters: (\S+) is better than (\S+) by {NUMBER} ± {NUMBER}(?: on average)?"
        r"(?:; it is the (\w+) value, so the best may lie beyond)?(?:; but (.*))?\.": matters,
        r"(\w+) matters, but no effect on average is found: (.*)\.": at_places,
        rf"No effect of (\w+) is found: (.*) differ by less than {NUMBER}(?: on average)?; "
        r"more seeds .*": no_effect,
        rf"Differences from the best row below {NUMBER} are within the noise\.": within_noise,
        rf"If losses fell on as in the last third of the training, (.*) would be at {NUMBER} "
        r"after another third, "
        rf"and the best row at {NUMBER}: longer runs may rank it first\.": falling,
        r"1 row diverged: not compared\.": lambda self: self.diverged is not None,
        r"Of (\d+) runs, (\d+) failed: rows without all their runs are not compared\.": counts,
        r"The grid is incomplete, .*": incomplete,
        r"With fewer than 3 seeds of a row, .*": lambda self: (
            min(len(row.losses) for row in self.compared) < 3
        ),
    }


def size(rng):
    return rng.choice([0, 1, 3, 10]) * NOISE


def false_claims(kind, n, seed=0):
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    found = 0
    for _ in range(n):
        sweep = Constructed(kind, rng)
        found += not all(map(sweep.check, answer(sweep.table)))
    return found / n


@pytest.mark.parametrize("kind", KINDS)
def test_at_most_5_percent_of_sweeps_have_a_false_sentence(kind):
    assert false_claims(kind, 40) <= 0.05


def synthetic(rng, means, *, seeds=3, of_seed=NOISE):
    """Losses of a grid: means, an effect of each seed, and noise.  (*means.shape, seeds)"""
    effects = rng.normal(size=seeds) * of_seed
    return 2 + means[..., None] + effects + rng.normal(size=(*means.shape, seeds)) * NOISE


def test_two_rows_are_compared_as_by_a_paired_t_test():
    losses = synthetic(np.random.default_rng(0), np.array([0.0, 0.02]), seeds=5)
    difference, margin = compare(losses).against(0)
    expected = stats.ttest_rel(losses[1], losses[0]).confidence_interval(1 - FAMILY_ERROR)
    assert (difference[1] - margin[1], difference[1] + margin[1]) == pytest.approx(
        tuple(expected), rel=1e-6
    )
    assert (difference[0], margin[0]) == (0, 0)


def test_the_interval_of_one_row_is_that_of_a_t_test():
    losses = np.array([[2.0, 2.1, 2.4]])
    low, high = stats.ttest_1samp(losses[0], 0).confidence_interval(0.95)
    assert (compare(losses).means[0], compare(losses).interval[0]) == pytest.approx(
        (losses.mean(), (high - low) / 2)
    )


@pytest.mark.parametrize(
    ("of_seed", "complete"), [(3 * NOISE, 9), (NOISE, 4)]
)  # rows with all seeds
def test_of_500_sweeps_without_an_effect_at_most_5_percent_claim_a_difference(of_seed, complete):
    rng = np.random.default_rng(1)
    found = []
    for _ in range(500):
        losses = synthetic(rng, np.zeros(9), of_seed=of_seed)
        losses[complete:, 1:] = np.nan
        comparison = compare(losses)
        difference, margin = comparison.against(int(np.argmin(comparison.means)))
        found.append((difference > margin).any())
    assert 0.003 < np.mean(found) <= 0.05


def test_without_an_estimate_of_the_noise_there_is_no_comparison():
    one_seed = [[2.0], [2.1]]
    no_common_seed = [[2.0, 2.1, np.nan, np.nan], [np.nan, np.nan, 2.0, 2.2]]
    nothing_left = [[2.0, 2.1], [2.2, np.nan]]
    assert {compare(np.array(losses)) for losses in (one_seed, no_common_seed, nothing_left)} == {
        None
    }


def test_a_noisy_row_has_the_interval_of_its_own_noise():
    losses = 2 + np.random.default_rng(2).normal(size=(9, 5)) * NOISE
    losses[0] = [2.0, 2.3, 1.8, 2.2, 1.7]
    margin = compare(losses).against(8)[1]
    own = losses[0] - losses[1:].mean(0)  # the other rows have hardly any noise
    expected = stats.ttest_1samp(own, 0).confidence_interval(1 - 2 * FAMILY_ERROR)
    assert margin[0] == pytest.approx((expected.high - expected.low) / 2, rel=0.1)
    assert margin[0] > 1.5 * margin[1:].max()


def test_a_difference_of_7_times_the_noise_between_seeds_is_found_in_95_percent():
    rng = np.random.default_rng(3)
    found = []
    means = np.zeros(9)
    means[0] = -7 * NOISE
    for _ in range(200):
        difference, margin = compare(synthetic(rng, means)).against(0)
        found.append(difference[1] > margin[1])
    assert np.mean(found) >= 0.95
