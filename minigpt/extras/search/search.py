"""Search: choose the points of a sweep by the losses of earlier ones."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from minigpt.sweeps.pruning import loss_at, paused_at
from minigpt.sweeps.results import BITS, COMPLETED, PAUSED, SKIPPED, Point, refresh
from minigpt.sweeps.sweeper import Sweeper, values_of
from minigpt.utils.checks import POSITIVE_INT, as_integer
from minigpt.utils.errors import UserError, require
from minigpt.utils.scripts import import_extra
from minigpt.utils.terminal import warn

MAX_TRIES_PER_TRIAL = 20  # including points that are impossible or the same as another


class Search(Sweeper):
    """Search with optuna's TPE sampler (Bergstra et al., 2011, https://papers.nips.cc/paper/4443), in memory.

    Each batch of points depends on the losses of the batches before. Settings are `interval(1e-4,1e-2)`,
    `tag(log,interval(1e-4,1e-2))` for a log-uniform distribution, `range(2,9)` or a choice, in Hydra's notation; an
    interval of a setting that takes integers, or `int(interval(2,8))`, is one of integers. With the same seed and
    folder, an interrupted search resumes. Without `prune`, a pruned search completes its points.

    Args:
        n_trials: number of runs.
        batch: runs at a time.
    """

    compares_batches = True

    def __init__(self, params: Mapping[str, Any], prune: bool, n_trials: int, batch: int, seed: int) -> None:
        super().__init__(params, prune)
        self.n_trials, self.batch, self.seed = map(as_integer, (n_trials, batch, seed))
        require("hydra.sweeper.n_trials", self.n_trials, *POSITIVE_INT)
        require("hydra.sweeper.batch", self.batch, *POSITIVE_INT)

    def batches(self) -> Iterator[Sequence[Point]]:
        paused = any(refresh(point).status == PAUSED for point in self.existing.values())
        if paused and not self.prune and self.cfg.pause_at is None:  # complete them, and choose no others
            self.points += [self.check(point.overrides) for point in self.existing.values()]
            yield self.points
            return
        optuna = import_extra("optuna", "hydra/sweeper=optuna", "optuna")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self.seed, multivariate=True))
        tries, reason = MAX_TRIES_PER_TRIAL * self.n_trials, ""

        def possible_trials() -> Iterator[Any]:
            nonlocal reason
            for _ in range(tries):
                trial = study.ask()
                point = self.check({key: self._suggest(trial, key) for key in self.axes})
                if point.status == SKIPPED:
                    reason = point.reason
                    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                else:
                    self.points.append(point)
                    yield trial

        possible = possible_trials()
        while trials := list(itertools.islice(possible, min(self.batch, self.n_trials - len(self.points)))):
            yield self.points[-len(trials) :]
            for trial, point in zip(trials, self.points[-len(trials) :], strict=True):
                # Bits per byte compare over all tokenizers and corpora; over one they order runs as the loss does.
                loss = point.loss(BITS) if point.status in (COMPLETED, PAUSED) else None
                state = None if loss is not None else optuna.trial.TrialState.FAIL
                if (rung := paused_at(point, self.points)) is not None:
                    trial.report(loss_at(point, rung), rung)
                    loss, state = None, optuna.trial.TrialState.PRUNED
                study.tell(trial, loss, state=state)
        if not self.points:
            raise UserError(f"no point of the search is possible: {reason}")
        if len(self.points) < self.n_trials:
            warn(f"the search ends after {len(self.points)} runs: {tries} tries found no other possible point")

    def _suggest(self, trial: Any, key: str) -> str:
        override = self.axes[key]
        value: Any = override.value()
        if override.is_interval_sweep():
            low, high, log = value.start, value.end, "log" in value.tags
            if isinstance(low, int) or self._is_of_integers(override.key_or_group, low, high):
                return str(trial.suggest_int(key, int(low), int(high), log=log))
            return f"{trial.suggest_float(key, low, high, log=log):.4g}"
        choices = values_of(override)
        if override.is_range_sweep():  # an ordered distribution, in which neighbors are similar
            return choices[trial.suggest_int(key, 0, len(choices) - 1)]
        return str(trial.suggest_categorical(key, choices))

    def _is_of_integers(self, key: str, low: float, high: float) -> bool:
        """Return whether a setting is an integer, or null where it is not set, and the ends of its interval are."""
        value = OmegaConf.select(self.cfg, key)
        may_be = type(value) is int or (value is None and low >= 1)
        return may_be and float(low).is_integer() and float(high).is_integer()
