"""Search: choose the points of a sweep by the losses of earlier ones."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from omegaconf import OmegaConf

from minigpt.extras.packages import import_extra
from minigpt.extras.search.pruning import check_one_text, continuing, loss_at
from minigpt.sweeps.composition import values_of
from minigpt.sweeps.results import BITS, COMPLETED, PAUSED, SKIPPED, Point, refresh
from minigpt.sweeps.sweeper import Grid
from minigpt.utils.checks import POSITIVE_INT, as_integer
from minigpt.utils.errors import UserError, require
from minigpt.utils.terminal import warn

MAX_TRIES_PER_TRIAL = 20  # including points that are impossible or the same as another


class Search(Grid):
    """Search with optuna's TPE sampler, in memory.

    Each batch of points depends on the losses of the batches before. Settings are
    `interval(1e-4,1e-2)`, `tag(log,interval(1e-4,1e-2))` for a log-uniform distribution,
    `range(2,9)` or a choice, in Hydra's notation; an interval of a setting that takes integers, or
    `int(interval(2,8))`, is one of integers. A list of seeds is not searched: each trial has a run
    per seed, and their mean loss is its value. With the same seed and folder, an interrupted search
    resumes. Without `prune`, a pruned search completes its points.
    Source: Bergstra et al., 2011, https://papers.nips.cc/paper/4443

    Args:
        n_trials: number of trials.
        batch: trials at a time.
        of_grid: settings of a grid, over whose file that of a sweep may be merged.
    """

    compares_batches = True

    def __init__(
        self,
        params: Mapping[str, object],
        prune: bool,
        n_trials: int,
        batch: int,
        seed: int,
        **of_grid: Any,
    ) -> None:
        super().__init__(params, prune, **of_grid)
        self.n_trials, self.batch, self.seed = map(as_integer, (n_trials, batch, seed))
        require("hydra.sweeper.n_trials", self.n_trials, *POSITIVE_INT)
        require("hydra.sweeper.batch", self.batch, *POSITIVE_INT)

    def batches(self) -> Iterator[Sequence[Point]]:
        # Complete the points of a pruned search, and choose no others.
        paused = any(refresh(point).status == PAUSED for point in self.existing.values())
        if paused and not self.prune and self.cfg.pause_at is None:
            self.points += [
                self.in_job(self.check)(point.overrides) for point in self.existing.values()
            ]
            yield self.points
            return
        # Start a study of the settings that are searched.
        self.optuna = import_extra("optuna", "hydra/sweeper=optuna", "optuna")
        self.optuna.logging.set_verbosity(self.optuna.logging.WARNING)
        self.study = self.optuna.create_study(
            sampler=self.optuna.samplers.TPESampler(seed=self.seed, multivariate=True)
        )
        seeds = self._seeds()
        tries = MAX_TRIES_PER_TRIAL * self.n_trials
        possible = itertools.islice(self._possible_trials(tries, seeds), self.n_trials)
        while trials := list(itertools.islice(possible, self.batch)):
            # Run the trials of a batch, and report their losses to the study.
            first = len(self.points) - len(trials) * len(seeds)
            yield self.points[first:]
            starts = range(first, len(self.points), len(seeds))
            for start, trial in zip(starts, trials, strict=True):
                self._tell(trial, self.points[start : start + len(seeds)])
        # Report a search that found too few possible points.
        done = len(self.points) // len(seeds)
        if not done:
            raise UserError(f"no point of the search is possible: {self.reason}")
        if done < self.n_trials:
            warn(
                f"the search ends after {done} trials: {tries} tries found no other possible point"
            )

    def run(self, batch: Sequence[Point]) -> None:
        check_one_text(self, self.points)
        super().run(batch)

    def _possible_trials(self, tries: int, seeds: Sequence[dict[str, str]]) -> Iterator[Any]:
        """Yield trials whose points, one per seed, are all possible; add these points."""
        searched = [key for key in self.axes if key not in seeds[0]]
        for _ in range(tries):
            trial = self.study.ask()
            values = {key: self._suggest(trial, key) for key in searched}
            points = [self.in_job(self.check)(values | seed) for seed in seeds]
            reasons = [point.reason for point in points if point.status == SKIPPED]
            if reasons:
                self.reason = reasons[0]
                self.study.tell(trial, state=self.optuna.trial.TrialState.PRUNED)
            else:
                self.points += points
                yield trial

    def _tell(self, trial: Any, runs: Sequence[Point]) -> None:
        # The value of a trial is the mean loss of its runs, at a rung if they paused there.
        rung = _rung_of_pause(runs[0], self.points)  # as all runs of a trial
        # Bits per byte compare over all tokenizers and corpora; over one they order runs as the
        # loss does.
        losses: list[Any] = [
            point.loss(BITS) if rung is None else loss_at(point, rung) for point in runs
        ]
        if None in losses or not {point.status for point in runs} <= {COMPLETED, PAUSED}:
            self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
        elif rung is None:
            self.study.tell(trial, mean(losses))
        else:
            trial.report(mean(losses), rung)
            self.study.tell(trial, state=self.optuna.trial.TrialState.PRUNED)

    def _seeds(self) -> list[dict[str, str]]:
        """Return the override of the seed of each run of a trial.

        For one run with the seed of all trials, it is empty.
        """
        for key, override in self.axes.items():
            if key.lstrip("+") == "seed":
                if override.is_interval_sweep() or override.is_range_sweep():
                    raise UserError(
                        f"seed must be a list, such as seed=1,2,3, got {override.input_line}; "
                        "seeds are averaged, and not searched"
                    )
                return [{key: value} for value in dict.fromkeys(values_of(override))]
        return [{}]

    def _suggest(self, trial: Any, key: str) -> str:
        override = self.axes[key]
        if override.is_interval_sweep():
            interval: Any = override.value()
            low = interval.start
            high = interval.end
            log = "log" in interval.tags
            valid = low <= high and math.isfinite(high - low) and (low > 0 or not log)
            require(
                override.key_or_group,
                str(override.input_line).partition("=")[2],
                lambda _: valid,
                "interval(low,high) with finite low <= high, and low > 0 with log",
            )
            if isinstance(low, int) or self._is_of_integers(override.key_or_group, low, high):
                return str(trial.suggest_int(key, int(low), int(high), log=log))
            return short_text(trial.suggest_float(key, low, high, log=log), low, high, log=log)
        choices = [*values_of(override)]
        if override.is_range_sweep():  # an ordered distribution, in which neighbors are similar
            return choices[trial.suggest_int(key, 0, len(choices) - 1)]
        return str(trial.suggest_categorical(key, choices))

    def _is_of_integers(self, key: str, low: float, high: float) -> bool:
        # A setting is an integer, or null where it is not set, and the ends of its interval are.
        value = OmegaConf.select(self.cfg, key)
        may_be = type(value) is int or (value is None and low >= 1)
        return may_be and float(low).is_integer() and float(high).is_integer()


def _rung_of_pause(point: Point, points: Sequence[Point]) -> int | None:
    for rung in range(len(point.rungs)):
        if point not in continuing(points, rung):
            return rung if loss_at(point, rung) is not None else None
    return None


def short_text(value: float, low: float, high: float, *, log: bool) -> str:
    """Return a number of an interval as the shortest text of four digits or more that is near it.

    The text is in the interval, and within 1/2,000 of it from `value`. One of 17 digits is equal.
    Four digits, which older versions wrote, do for most intervals, so their searches resume.
    """
    error = 5e-4 * (value * math.log(high / low) if log else high - low)
    texts = [f"{value:.{digits}g}" for digits in range(4, 18)]
    near = [text for text in texts if abs(float(text) - value) <= error]
    return next(text for text in near if low <= float(text) <= high)
