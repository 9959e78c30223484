"""Search for the best settings with optuna: each batch of points depends on the losses of the batches before."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override

from minigpt.sweeps.results import BITS, COMPLETED, SKIPPED, Point, refresh
from minigpt.sweeps.sweeper import Sweeper
from minigpt.utils.checks import POSITIVE_INT
from minigpt.utils.errors import UserError, require
from minigpt.utils.scripts import import_extra
from minigpt.utils.terminal import warn

MAX_TRIES_PER_TRIAL = 20  # including points that are impossible or the same as another


class Search(Sweeper):
    """Search with optuna's TPE sampler (Bergstra et al., 2011, https://papers.nips.cc/paper/4443), in memory.

    Settings are `interval(1e-4,1e-2)`, `tag(log,interval(1e-4,1e-2))` for a log-uniform distribution, `range(2,9)` or
    a choice, in Hydra's notation. With the same seed and folder, an interrupted search resumes.

    Args:
        n_trials: number of runs.
        batch: runs at a time.
    """

    def __init__(self, params: Mapping[str, Any], n_trials: int, batch: int, seed: int) -> None:
        super().__init__(params)
        require("hydra.sweeper.n_trials", n_trials, *POSITIVE_INT)
        require("hydra.sweeper.batch", batch, *POSITIVE_INT)
        self.n_trials, self.batch, self.seed = n_trials, batch, seed

    def batches(self) -> Iterator[Sequence[Point]]:
        optuna = import_extra("optuna", "hydra/sweeper=optuna", "optuna")
        states = optuna.trial.TrialState
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self.seed, multivariate=True))
        tries, reason = 0, ""
        while len(self.points) < self.n_trials:
            trials: list[Any] = []
            size = min(self.batch, self.n_trials - len(self.points))
            while len(trials) < size and tries < MAX_TRIES_PER_TRIAL * self.n_trials:
                trial = study.ask()
                tries += 1
                point = self.check({key: _suggest(trial, key, override) for key, override in self.axes.items()})
                if point.status == SKIPPED:
                    reason = point.reason
                    study.tell(trial, state=states.PRUNED)
                else:
                    self.points.append(point)
                    trials.append(trial)
            if not trials:
                break
            yield (batch := self.points[-len(trials) :])
            for trial, point in zip(trials, map(refresh, batch), strict=True):
                # Bits per byte compare over all tokenizers and corpora; over one they order runs as the loss does.
                loss = point.loss(BITS) if point.status == COMPLETED else None
                study.tell(trial, loss, state=states.FAIL if loss is None else states.COMPLETE)
        if not self.points:
            raise UserError(f"no point of the search is possible: {reason}")
        if len(self.points) < self.n_trials:
            warn(f"the search ends after {len(self.points)} runs: {tries} tries found no other possible point")


def _suggest(trial: Any, key: str, override: Override) -> str:
    value: Any = override.value()
    if override.is_interval_sweep():
        return f"{trial.suggest_float(key, value.start, value.end, log='log' in value.tags):.4g}"
    choices = list(override.sweep_string_iterator())
    if override.is_range_sweep():  # an ordered distribution, in which neighbors are similar
        return choices[trial.suggest_int(key, 0, len(choices) - 1)]
    return str(trial.suggest_categorical(key, choices))
