"""Every sentence about a sweep is checked against the truth from which it was constructed."""

import re
from pathlib import Path

import numpy as np
import pytest

from minigpt.sweeps.answer import answer
from minigpt.sweeps.ranking import ranked
from minigpt.sweeps.results import Point

NOISE = 0.01
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
        at = [
            [self.axes[name].index(value) for name, value in row.overrides.items()] for row in rows
        ]
        return np.mean([self.true[tuple(place)] for place in at])

    def check(self, sentence):
        """Return whether a sentence is true."""
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
            # (seeds, 3)
            curves = np.array([[loss for _, loss in point.curve] for point in row.points])
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
    """The share of n random sweeps with a false sentence."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    found = 0
    for _ in range(n):
        sweep = Constructed(kind, rng)
        found += not all(map(sweep.check, answer(sweep.table)))
    return found / n


@pytest.mark.parametrize("kind", KINDS)
def test_at_most_5_percent_of_sweeps_have_a_false_sentence(kind):
    assert false_claims(kind, 60) <= 0.05
