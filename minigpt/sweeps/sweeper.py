"""Which runs a sweep is made of: every point composed and checked before the first starts, and what came of all.

Hydra asks a sweeper for its jobs and hands them to a launcher, and finds both through `hydra_plugins`.
"""

import copy
import hashlib
import importlib.util
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.errors import ConfigCompositionException
from hydra.plugins import sweeper as hydra_sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from minigpt.runs.run_dir import PLAN, read_summary, update_latest_link, write_failure
from minigpt.sweeps.launcher import Joblib, visible_gpus
from minigpt.sweeps.results import (
    BITS,
    COMPLETED,
    IRRELEVANT,
    SKIPPED,
    Point,
    read_plan,
    refresh,
    short_names,
    write_plan,
)
from minigpt.utils.cli import explain
from minigpt.utils.errors import RunError, UserError
from minigpt.utils.overrides import quote_override
from minigpt.utils.signals import Interrupted
from minigpt.utils.terminal import sanitize_line, warn

if TYPE_CHECKING:
    from minigpt.config import GPTConfig
    from minigpt.data.token_files import Corpus

_LONGEST_NAME = 120
_DISPATCH = 1e-3  # seconds of a batch that no matrix is large enough to hide, for each layer
_SHARE = 0.35  # of a large product's speed that training reaches
_DEFERRED = "deferred"  # tags a setting of all points that the defaults lack
_PATIENCE = 20  # tries of a search for each run, of which the impossible ones count too


class _Sweeper(hydra_sweeper.Sweeper):
    """What all have in common: the folder, the check of a point, the launch, and the end.

    Args:
        params: settings and their values, for a file in `configs/sweep/`; the command line comes after them.
    """

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        self.params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.loader, self.cfg, self.folder = hydra_context.config_loader, config, Path(str(config.hydra.sweep.dir))
        self.engine = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)
        self.parser = OverridesParser.create(config_loader=self.loader)
        self.points: list[Point] = []
        self.launched = 0
        self.composed: dict[tuple[str, ...], DictConfig | ConfigCompositionException] = {}
        self.parts: dict[str, Corpus] = {}

    def sweep(self, arguments: list[str]) -> None:
        """Check the points, run those that have not ended, and report.

        Raises:
            UserError: nothing has several values, no point is possible, or the folder is of another sweep.
            RunError: a run failed; all others have ended.
        """
        given = self.parser.parse_overrides([*(f"{key}={value}" for key, value in self.params.items()), *arguments])
        overrides = {override.get_key_element(): override for override in given}  # the last word counts
        swept = {key: override for key, override in overrides.items() if override.is_sweep_override()}
        self.axes = {key: override for key, override in swept.items() if not _is_deferred(override)}
        if not self.axes:
            raise UserError("a sweep needs a setting with several values, such as model.n_head=2,4,8")
        shared = {key: override for key, override in overrides.items() if key not in self.axes}
        self.shared = [_written(override) for override in shared.values()]
        self.fixed = [_written(override) for key, override in shared.items() if _group(key) not in IRRELEVANT]
        self.before = self.take()
        self.plan()
        try:
            self.run()
        except Interrupted:
            print(
                sanitize_line(f"go on with the same command, hydra.sweep.dir={self.folder} and resume=auto"),
                file=sys.stderr,
            )
            raise
        finally:
            self.points[:] = map(refresh, self.points)
            if self.points and (self.folder / PLAN).exists():
                from minigpt.sweeps.report import report

                report([self.folder])
                self.publish()
        failed = [point for point in self.points if point.status not in (COMPLETED, SKIPPED)]
        if failed:
            raise RunError(f"{len(failed)} of {len(self.points)} runs failed; the table says why")

    def plan(self) -> None:
        """Say what will run, where that is known before."""

    def run(self) -> None:
        raise NotImplementedError

    def take(self) -> dict[str, Point]:
        """The points that the sweep's folder holds already, by what they are.

        Raises:
            UserError: it holds something else, or its sweep is not to go on.
        """
        there = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise UserError(f"{there} is a file; choose another folder with hydra.sweep.dir=…")
        if there != self.folder or not any(self.folder.iterdir()):
            return {}
        if not (self.folder / PLAN).exists():
            raise UserError(f"{self.folder} is not empty and holds no sweep; choose another with hydra.sweep.dir=…")
        if self.cfg.resume != "auto":
            raise UserError(
                f"{self.folder} holds a sweep already; go on with it by resume=auto, or choose another folder with "
                f"hydra.sweep.dir=…"
            )
        plan = read_plan(self.folder)
        other = {key for point in plan["points"] for key in point.overrides} ^ set(self.axes)
        other |= set(plan["fixed"]) ^ set(self.fixed)
        if other:
            raise UserError(
                f"{self.folder} holds another sweep, which differs in {', '.join(sorted(other))}; give the settings "
                f"that it was begun with, or choose another folder with hydra.sweep.dir=…"
            )
        return {point.identity: point for point in plan["points"] if point.identity}

    def check(self, values: Mapping[str, str]) -> Point:
        """A point, composed and found possible; else skipped, with the reason.

        Raises:
            ConfigCompositionException: a setting does not exist, and no group is swept that may have it.
        """
        from minigpt.runs.config_checks import build_corpus_and_config

        point = Point(folder=self.folder / self.name(values), overrides=dict(values))
        try:
            config = self.compose(values)
            identity = _identity(config)
            corpus, model = build_corpus_and_config(config, self.corpus)
        except (UserError, ConfigCompositionException, OmegaConfBaseException) as error:
            if isinstance(error, ConfigCompositionException) and not any(map(self.loader.get_group_options, self.axes)):
                raise
            return replace(point, status=SKIPPED, reason=explain(error)[0].removeprefix("error: "))
        if any(other.identity == identity for other in self.points):
            return replace(point, status=SKIPPED, reason="the same run as another")
        folder = self.before[identity].folder if identity in self.before else point.folder
        point = replace(
            point,
            folder=folder,
            identity=identity,
            params=model.num_params(),
            max_steps=config.max_steps,
            seconds_expected=expected(config, model, corpus.val.tokens),
        )
        return refresh(point)

    def name(self, values: Mapping[str, str]) -> str:
        """What a point's folder is called: by its values, so that it tells itself."""
        short = short_names(list(values))
        name = re.sub(r"[^\w.,=+-]+", "-", ",".join(f"{short[key]}={value}" for key, value in values.items()))
        taken = {point.folder.name for point in (*self.points, *self.before.values())}
        if len(name) > _LONGEST_NAME or name in taken:
            name = f"{name[:_LONGEST_NAME]}-{hashlib.sha256(repr(values).encode()).hexdigest()[:8]}"
        return name

    def compose(self, values: Mapping[str, str]) -> DictConfig:
        """The configuration of a point. Hydra takes a tenth of a second; what only sets a value is set here.

        Raises:
            ConfigCompositionException: a group has no such choice, or the groups of the point no such setting.
        """
        sets = [key for key, value in values.items() if self.only_sets(key, value)]
        rest = tuple(f"{key}={value}" for key, value in values.items() if key not in sets)
        if rest not in self.composed:
            overrides = [*self.shared, *(f"{key}={value}" for key, value in values.items())]
            try:
                self.composed[rest] = composed = self.loader.load_sweep_config(self.cfg, overrides)
                with open_dict(composed):
                    del composed["hydra"]
            except ConfigCompositionException as error:  # of every point with these groups
                self.composed[rest] = error
        if isinstance(known := self.composed[rest], ConfigCompositionException):
            raise known
        config = copy.deepcopy(known)
        for key in sets:
            OmegaConf.update(config, key, self.parser.parse_override(f"{key}={values[key]}").value())
        return config

    def only_sets(self, key: str, value: str) -> bool:
        """Whether it is a setting that takes this value, not a group, not one that is added, not merged into."""
        sets = self.axes[key].type == OverrideType.CHANGE and "@" not in key and "{" not in value
        return sets and not self.loader.get_group_options(key)

    def corpus(self, data: Any, tokenizer: Any) -> "Corpus":
        """The corpus of a point: made, or looked up, once for all that share it."""
        from minigpt.data.prepare import load_corpus

        key = json.dumps([dict(data), dict(tokenizer)], default=str)
        if key not in self.parts:
            self.parts[key] = load_corpus(data, tokenizer)
        return self.parts[key]

    def launch(self, points: Sequence[Point]) -> list[Point]:
        """Run points, and look at what came of them."""
        from minigpt.sweeps.live import live_progress

        self.folder.mkdir(parents=True, exist_ok=True)
        update_latest_link(self.folder)
        write_plan(self.folder, self.fixed, self.points)
        overrides = [
            [
                *self.shared,
                *(f"{key}={value}" for key, value in point.overrides.items()),
                *self.logging(point),
                f"hydra.sweep.dir={quote_override(self.folder)}",
                f"hydra.sweep.subdir={quote_override(point.folder.relative_to(self.folder))}",
            ]
            for point in points
        ]
        with live_progress(self.points):
            returned = self.engine.launch(overrides, initial_job_idx=self.launched)
            for point, job in zip(points, returned, strict=True):
                if job.status == JobStatus.FAILED and not read_summary(point.folder):  # its process had no time to
                    write_failure(point.folder, str(job._return_value))
        self.launched += len(points)
        return [refresh(point) for point in points]

    def show(self, points: Sequence[Point]) -> None:
        """Say what is about to run."""
        from minigpt.sweeps.live import print_points

        todo = sum(point.status not in (COMPLETED, SKIPPED) for point in points)
        workers = self.engine.workers(todo) if isinstance(self.engine, Joblib) else []
        print_points(points, workers=len(workers), threads=int(workers[0]["OMP_NUM_THREADS"]) if workers else 1)

    def logging(self, point: Point) -> list[str]:
        """What names a run in Weights & Biases, where nothing else was asked for."""
        wandb = OmegaConf.select(self.cfg, "logger.wandb")
        if wandb is None:
            return []
        tags = ",".join(map(quote_override, [*wandb.tags, "sweep"]))
        names = {"name": point.folder.name, "group": self.folder.name}
        return [
            f"logger.wandb.tags=[{tags}]",
            *(f"logger.wandb.{key}={quote_override(name)}" for key, name in names.items() if wandb[key] is None),
        ]

    def publish(self) -> None:
        """Send the table and the picture to Weights & Biases, where the runs went."""
        wandb = OmegaConf.select(self.cfg, "logger.wandb")
        if wandb is not None:
            from minigpt.sweeps.publish import publish_sweep

            options = {key: wandb[key] for key in ("project", "entity", "timeout")}
            group = wandb.group or self.folder.name
            publish_sweep(self.folder, group=group, tags=[*wandb.tags, "sweep", "summary"], **options)


class Grid(_Sweeper):
    """Every combination of the values that settings are given, in any of Hydra's notations."""

    def plan(self) -> None:
        choices = [list(override.sweep_string_iterator()) for override in self.axes.values()]
        for values in itertools.product(*choices):
            self.points.append(self.check(dict(zip(self.axes, values, strict=True))))
        if not self.points:
            raise UserError("the sweep is empty: " + ", ".join(self.axes) + " has no values")
        if all(point.status == SKIPPED for point in self.points):
            raise UserError(f"no point of the sweep is possible: {self.points[0].reason}")
        self.show(self.points)

    def run(self) -> None:
        todo = [point for point in self.points if point.status not in (COMPLETED, SKIPPED)]
        if todo:  # the longest first, so that all workers end at about the same time
            self.launch(sorted(todo, key=lambda point: point.seconds_expected or 0.0, reverse=True))


class Search(_Sweeper):
    """Optuna's search, in memory: each batch of points is chosen by what came of those before.

    Settings are given as Hydra's `interval(1e-4,1e-2)`, with `tag(log,…)` for an even choice of magnitudes, as
    `range(2,9)` or as a choice. With the same seed and folder it goes on where it was broken off.

    Args:
        n_trials: runs in all. batch: at a time. seed: of the choice.
    """

    def __init__(self, n_trials: int, batch: int, seed: int, params: Mapping[str, Any] | None = None) -> None:
        super().__init__(params)
        for name, value in (("n_trials", n_trials), ("batch", batch)):
            if not (isinstance(value, int) and value >= 1):
                raise UserError(f"hydra.sweeper.{name}={value} is not possible; it takes a whole number of at least 1")
        self.n_trials, self.batch, self.seed = n_trials, batch, seed

    def plan(self) -> None:
        if importlib.util.find_spec("optuna") is None:
            raise UserError('hydra/sweeper=optuna needs: pip install -e ".[optuna]" -c constraints.txt')

    def run(self) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self.seed, multivariate=True))
        done, asked, reason = 0, 0, ""
        while done < self.n_trials and asked < _PATIENCE * self.n_trials:
            trials: dict[Path, Any] = {}
            while len(trials) < min(self.batch, self.n_trials - done) and asked < _PATIENCE * self.n_trials:
                trial = study.ask()
                asked += 1
                point = self.check({key: _suggest(trial, key, override) for key, override in self.axes.items()})
                if point.status == SKIPPED:  # another will be
                    reason = point.reason
                    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                    continue
                self.points.append(point)
                trials[point.folder] = trial
            if not trials:
                break
            self.show(self.points[-len(trials) :])
            new = [point for point in self.points[-len(trials) :] if point.status != COMPLETED]
            if new:
                self.launch(new)
            for point in map(refresh, self.points[-len(trials) :]):
                # Bits per byte, which compare over all tokenizers and corpora; over one it is the order of the losses.
                loss = point.loss(BITS) if point.status == COMPLETED else None
                state = optuna.trial.TrialState.FAIL if loss is None else optuna.trial.TrialState.COMPLETE
                study.tell(trials[point.folder], loss, state=state)
            done += len(trials)
        if self.points and done < self.n_trials:
            warn(
                f"of {asked} points that were tried only {done} are possible, and none twice: the search ends with them"
            )
        if not self.points:
            raise UserError(f"none of the points that were tried is possible: {reason}")


def expected(config: DictConfig, model: "GPTConfig", val_tokens: int) -> float | None:
    """Seconds that a run takes on one thread of this CPU, to about a factor of two; None on another device."""
    if config.trainer.accelerator != "cpu" and visible_gpus():
        return None
    batches = config.max_steps * config.trainer.accumulate_grad_batches
    tokens = batches * config.data.batch_size * model.block_size
    tokens += (-(-config.max_steps // config.eval_every) + 1) * val_tokens / 3  # a third: forward alone
    return batches * _DISPATCH * (1 + model.n_layer) + tokens * model.flops_per_token() / (_SHARE * _peak())


@cache
def _peak() -> float:
    """Floating-point operations of a large matrix product in a second of one core."""
    import numpy as np

    size, seconds = 768, []
    a = np.ones((size, size), np.float32)
    for _ in range(4):
        start = time.process_time()  # of all threads
        a @ a
        seconds.append(time.process_time() - start)
    return 2 * size**3 / min(seconds)


def _suggest(trial: Any, key: str, override: Override) -> str:
    value: Any = override.value()
    if override.is_interval_sweep():
        return f"{trial.suggest_float(key, value.start, value.end, log='log' in value.tags):.4g}"
    choices = list(override.sweep_string_iterator())
    if override.is_range_sweep():  # in order, so that neighbors are known to be near
        return choices[trial.suggest_int(key, 0, len(choices) - 1)]
    return str(trial.suggest_categorical(key, choices))


def _identity(config: DictConfig) -> str:
    """What a run is, whatever it is called and wherever it lies."""
    values = OmegaConf.to_container(config, resolve=False)
    assert isinstance(values, dict)
    relevant = {key: value for key, value in values.items() if key not in IRRELEVANT}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True, default=str).encode()).hexdigest()[:16]


def with_deferred(main: Callable[[], Any]) -> Callable[[], Any]:
    """A Hydra program whose sweeps may set what not all of the swept groups have.

    Hydra composes the defaults before it asks the sweeper for points, and a setting that they lack would end the
    program. Such a setting becomes an axis of one value, which Hydra leaves to the sweeper.
    """

    @wraps(main)
    def program() -> Any:
        while True:
            try:
                return main()
            except ConfigCompositionException as error:
                missing = re.search(r"Could not override '([^']+)'", str(error))
                given = [arg for arg in sys.argv[1:] if "=" in arg and not arg.startswith("-")]
                parsed = {arg: OverridesParser.create().parse_override(arg) for arg in given}
                late = [
                    arg
                    for arg, override in parsed.items()
                    if missing and override.key_or_group == missing[1] and not override.is_sweep_override()
                ]
                if not late or not any(override.is_sweep_override() for override in parsed.values()):
                    raise
                sys.argv[1:] = [_deferred(parsed[arg]) if arg in late else arg for arg in sys.argv[1:]]

    return program


def _deferred(override: Override) -> str:
    return f"{override.get_key_element()}=tag({_DEFERRED},choice({override.get_value_element_as_str()}))"


def _is_deferred(override: Override) -> bool:
    return _DEFERRED in getattr(override.value(), "tags", ())


def _written(override: Override) -> str:
    key = override.get_key_element()
    if _is_deferred(override):
        return f"{key}={next(override.sweep_string_iterator())}"
    return key if override.type == OverrideType.DEL else f"{key}={override.get_value_element_as_str()}"


def _group(key: str) -> str:
    return key.lstrip("+~").partition(".")[0].partition("@")[0]
