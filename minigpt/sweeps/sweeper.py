"""Choose the runs of a sweep: compose and check every point before the first run starts, launch, and report.

Hydra calls the sweeper, which hands its jobs to a launcher; Hydra finds both in `hydra_plugins`.
"""

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from hydra._internal.config_loader_impl import get_overrides_dirname
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import env_override
from hydra.errors import ConfigCompositionException
from hydra.plugins import sweeper as hydra_sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from minigpt.runs.overrides import complete_overrides, literal, quote_override, quote_path
from minigpt.runs.run import load_parts
from minigpt.runs.run_config import RunConfig, check_hydra, normalize, use_outside_values
from minigpt.runs.run_dir import (
    LOCK,
    PLAN,
    lock_sweep_dir,
    make_folder,
    update_latest_link,
    write_failure,
)
from minigpt.sweeps.composition import announced, compose, values_of
from minigpt.sweeps.point_settings import (
    by_name,
    folder_name,
    hydra_settings,
    is_relevant,
    relevant_settings,
)
from minigpt.sweeps.pruning import RUNGS, continuing, has_reached, loss_at, rung_steps
from minigpt.sweeps.results import (
    CRASHED,
    NATS,
    PAUSED,
    SKIPPED,
    WAITING,
    Point,
    origin,
    read_plan,
    refresh,
    write_plan,
)
from minigpt.utils.checks import BOOLEAN, POSITIVE_INT, as_integer
from minigpt.utils.cli import error_text
from minigpt.utils.errors import RunError, UserError, require
from minigpt.utils.extras import from_extras
from minigpt.utils.signals import Interrupted
from minigpt.utils.terminal import log

SAME = "same configuration as another point"
ANOTHER_FOLDER = "choose another folder with hydra.sweep.dir=…"


class Sweeper(hydra_sweeper.Sweeper):
    """The base of all sweepers: folder, checks, launch and report.

    Args:
        params: settings with several values, from a file in `configs/sweep/`; the command line overrides them.
        prune: pause the worse points at each rung.
        max_points: most points of a grid, each of which is checked and listed in `sweep.json`.
    """

    compares_batches = False  # whether the points depend on the losses of earlier ones

    def __init__(self, params: Mapping[str, Any], prune: bool, max_points: int = 1) -> None:
        require("hydra.sweeper.prune", prune, *BOOLEAN)
        self.params, self.prune, self.max_points = params, prune, as_integer(max_points)
        require("hydra.sweeper.max_points", self.max_points, *POSITIVE_INT)

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra = hydra_settings(config)
        self.in_job: Any = env_override(
            config.hydra.job.env_set
        )  # decorates what reads `${oc.env:…}` as a job does
        self.loader: Any = hydra_context.config_loader
        self.cfg = config
        self.folder = make_folder(config.hydra.sweep)
        self.engine: Any = Plugins.instance().instantiate_launcher(
            hydra_context, task_function, config
        )
        self.points: list[Point] = []
        self.checked: dict[
            str, Mapping[str, str]
        ] = {}  # values of the possible points, by identity
        self.loaded: dict[str, Any] = {}
        self.wandb: Any = OmegaConf.select(config, "logger.wandb")
        check_hydra(config.hydra)
        require(
            "hydra.sweep.subdir",
            self.hydra["hydra.sweep.subdir"],
            "${hydra.job.num}".__eq__,
            "left out, because folders of runs are named by their settings",
        )
        exported = config.hydra.job.env_set.get("WANDB_RUN_ID") or os.environ.get("WANDB_RUN_ID")
        require(
            "logger.wandb.id or WANDB_RUN_ID",
            self.wandb and (self.wandb.get("id") or exported),
            lambda value: not value,
            "null in a sweep, whose runs have one each",
        )

    def sweep(self, arguments: list[str]) -> None:
        """Check the points, run those that are not completed, and report.

        Raises:
            UserError: no setting has several values, no point is possible, another sweep uses the folder, or it holds
                something else.
            RunError: a run failed; all others have ended.
        """
        with lock_sweep_dir(self.folder):
            self._sweep(arguments)

    def _sweep(self, arguments: list[str]) -> None:
        # resume=auto is of the sweep: runs that have begun resume, the others start as the rest of the command says.
        given = (argument for argument in arguments if argument != "resume=auto")
        named = by_name(
            [*(literal(f"{key}={value}", True) for key, value in self.params.items()), *given]
        )
        typed, keys = list(named), {name.lstrip("+") for name in named}
        if "minutes" in keys and "eval_batches" not in keys and self.cfg.eval_batches is None:
            named["eval_batches"] = (
                "eval_batches=null"  # each plan would choose another part of the validation split
            )
        parsed = OverridesParser.create(config_loader=self.loader).parse_overrides(
            [*named.values()]
        )
        self.given = dict(zip(named, parsed, strict=True))
        existing = [point for point in self._read_existing() if point.status != SKIPPED]
        swept = {name for point in existing for name in point.overrides}
        self.axes = {
            name: each
            for name, each in self.given.items()
            if each.is_sweep_override() or name in swept
        }
        if not self.axes:
            raise UserError(
                "a sweep needs a setting with several values, such as model.n_head=2,4,8"
            )
        self.fixed = [
            named[name] for name in typed if name not in self.axes and is_relevant(named[name])
        ]
        if existing and (axes := (swept ^ self.axes.keys()) - {"seed"}):
            raise UserError(
                f"{self.folder} holds a sweep that differs in {', '.join(sorted(axes))}; {ANOTHER_FOLDER}"
            )
        self.existing: dict[str, Point] = {}
        for point in announced(existing, len(existing)):
            self.existing[point.identity] = self.in_job(self._check_unchanged)(point)
        self.names = {point.folder.name for point in existing}
        for batch in self.batches():
            self._run(batch)
        self._report()
        if paused := sum(point.status == PAUSED for point in self.points):
            log(
                f"{paused} of {len(self.points)} runs paused; to complete them, "
                f"run the same command with hydra.sweep.dir={quote_path(self.folder)} "
                "resume=auto hydra.sweeper.prune=false pause_at=null"
            )
        if failed := sum(point.pending for point in self.points) - paused:
            raise RunError(f"{failed} of {len(self.points)} runs failed; the table has the reasons")

    def batches(self) -> Iterator[Sequence[Point]]:
        """Yield checked points, which run before the next batch is requested."""
        raise NotImplementedError

    def check(self, values: Mapping[str, str]) -> Point:
        """Compose and check a point; return it with its status, skipped with a reason if it is impossible."""
        name = folder_name(values, self.names)
        self.names.add(name)
        point = Point(self.folder / name, values)
        try:
            config, _ = self.compose(values)
            point = replace(point, settings=relevant_settings(config))
            checked = (
                config
                if config.minutes is None
                else from_extras("with_possible_sizes")(config, self._overrides(values))
            )
            corpus, model, pretrained = load_parts(
                RunConfig.from_hydra(checked, in_job=False), self._once
            )
        except (UserError, ConfigCompositionException, OmegaConfBaseException) as error:
            if isinstance(error, ConfigCompositionException) and not any(
                map(self.loader.get_group_options, self.axes)
            ):
                raise  # a setting does not exist at any point
            return replace(point, status=SKIPPED, reason=error_text(error))
        if self.checked.setdefault(point.identity, values) is not values:
            return replace(point, status=SKIPPED, reason=SAME)
        sequences = (
            config.max_steps * config.trainer.accumulate_grad_batches * config.data.batch_size
        )
        point = refresh(
            replace(
                point,
                folder=self.existing.get(point.identity, point).folder,
                rungs=rung_steps(config) if self.prune else (),
                planned_flops=sequences * model.block_size * model.flops_per_token(),
                totals={"params": model.num_params()},
                validated=corpus.validated_part(
                    model.block_size,
                    config.data.eval_batch_size,
                    config.eval_batches,
                ),
            )
        )
        weights = pretrained.provenance(config.data.folder)["sha256"] if pretrained else None
        if config.resume is None and point.origin not in ("", origin(corpus.sha256, weights)):
            raise UserError(
                f"{point.folder} was trained on another text or from other weights; {ANOTHER_FOLDER}"
            )
        return point

    def _check_unchanged(self, point: Point) -> Point:
        """Return a point of the folder with its rungs.

        Raise UserError if its overrides mean other settings now.
        """
        values = {
            name: point.overrides.get(name, point.seed) for name in self.axes
        }  # only the seed may be missing
        config, _ = self.compose(values)
        before, now = point.settings, relevant_settings(config)
        pairs = {key: (before.get(key), now.get(key)) for key in {**before, **now} if key != "seed"}
        changed = [
            f"{key} ({was} there, {new} now)"
            for key, (was, new) in pairs.items()
            if repr(was) != repr(new)
        ]
        if changed:
            raise UserError(
                f"{self.folder} holds a sweep that differs in {', '.join(changed)}; {ANOTHER_FOLDER}"
            )
        return replace(point, rungs=rung_steps(config) if self.prune else ())

    def _once(self, load: Callable[..., Any], *args: Any) -> Any:
        """Call a function once for the same arguments, such as those of a corpus that points share."""
        key = f"{load.__name__} {args}"
        if key not in self.loaded:
            try:
                self.loaded[key] = load(*args)
            except (UserError, ConfigCompositionException) as error:
                self.loaded[key] = error
        if isinstance(self.loaded[key], Exception):
            raise self.loaded[key].with_traceback(None)  # it would grow with each point
        return self.loaded[key]

    def compose(self, values: Mapping[str, str]) -> tuple[DictConfig, DictConfig]:
        """Compose the configuration of a point, as its job will, and the node of Hydra."""
        config, hydra = compose(
            self.loader, self.cfg, self.hydra, self._overrides(values), self._once
        )
        normalize(config)
        return config, hydra

    def _overrides(self, values: Mapping[str, str]) -> list[str]:
        """Return the command line of a point: that of the sweep, with one value per axis in its place."""
        line = [
            f"{each.get_key_element()}={values[name]}" if name in values else str(each.input_line)
            for name, each in self.given.items()
        ]
        return self._once(
            complete_overrides, line
        )  # links are resolved once, because they may move

    def _run(self, batch: Sequence[Point]) -> None:
        """Print which points are skipped, and run the others: with `prune` to each rung, and the best of them on."""
        for point in batch:
            if point.status == SKIPPED:
                log(f"{point.folder.name}  skipped: {point.reason}")
        # A search that resumes chooses its later points again, after the earlier ones have paused.
        others = [] if self.compares_batches else self._other_points()
        texts = sorted({point.validated for point in self.points + others if point.validated})
        if len(texts) > 1 and (self.prune or self.compares_batches):
            raise UserError(
                f"pruning and searches need one validation text for all points, got {'; '.join(texts)}"
            )
        rungs = {
            tuple(Fraction(step, point.settings["max_steps"]) for step in point.rungs)
            for point in self.points + others
        }
        if len(rungs - {()}) > 1:
            raise UserError(
                "eval_every must let all points validate at the same fractions of max_steps "
                "with hydra.sweeper.prune=true; use one that divides max_steps / 8"
            )
        self.engine.most_jobs = sum(point.status != SKIPPED for point in batch)
        for rung in range(len(RUNGS) if self.prune else 0):
            self._launch(batch, rung)
            own = {point.folder for point in batch if point.status != SKIPPED}
            reached = [
                point
                for point in self.points
                if point.folder in own and loss_at(point, rung) is not None
            ]
            batch = [
                point
                for point in continuing(
                    # Others that are not at the rung stay behind: their rows do not wait for them.
                    self.points + [other for other in others if loss_at(other, rung) is not None],
                    rung,
                )
                if point.folder in own
            ]
            steps = ", ".join(map(str, sorted({point.rungs[rung] for point in reached})))
            log(f"rung at step {steps}: {len(batch)} of {len(reached)} continue")
        self._launch(batch)

    def _launch(self, batch: Sequence[Point], rung: int | None = None) -> None:
        """Run points to a rung or to their end, the longest first, and print as each ends."""
        # All workers end at about the same time.
        pending = [
            point
            for point in batch
            if point.pending and (rung is None or not has_reached(point, rung))
        ]
        pending.sort(key=lambda point: -point.planned_flops)
        log(f"{len(pending)} of {len(batch)} to run")
        if not pending:
            return
        update_latest_link(self.folder)
        write_plan(self.folder, self.fixed, [*self.points, *self._other_points()])
        ended = itertools.count(1)

        def on_end(point: Point, failure: str) -> None:
            point = refresh(point)
            if failure and point.status in (CRASHED, WAITING, PAUSED):  # before it wrote why
                write_failure(point.folder, failure)
                point = refresh(point)
            seconds = point.totals.get("seconds", 0)
            loss = (
                f", val loss {point.loss(NATS):.4f} after {seconds:,.0f} s of training"
                if point.loss(NATS)
                else ""
            )
            problem = point.reason or (
                failure if point.pending else ""
            )  # not if another command completed it
            reason = f": {problem}" if problem else ""
            log(
                f"{next(ended)}/{len(pending)} {point.folder.name} {point.status_text}{loss}{reason}"
            )

        # Only launchers of minigpt use these.
        self.engine.points = pending
        self.engine.on_end = on_end
        self.engine.configure = self.in_job(self._job_config)
        try:
            self.engine.launch(
                [self._job_overrides(point, rung) for point in pending], initial_job_idx=0
            )
        except (Interrupted, KeyboardInterrupt):
            self._report()
            log(
                f"to resume, run the same command with hydra.sweep.dir={quote_path(self.folder)} resume=auto"
            )
            raise
        self.points[:] = map(refresh, self.points)

    def _job_overrides(self, point: Point, rung: int | None) -> list[str]:
        names = {
            "hydra.run.dir": point.folder,
            "hydra.sweep.dir": self.folder,
            "hydra.sweep.subdir": point.folder.name,
            "hydra.runtime.output_dir": point.folder.absolute(),
        }
        can_resume = "resume" not in point.settings or any(
            point.folder.glob("checkpoints/*.safetensors")
        )
        resumes = can_resume and (self.prune or self.cfg.resume == "auto")
        return [
            *self._overrides(point.overrides),
            *(["resume=auto"] if resumes else []),
            *([] if rung is None else [f"pause_at={point.rungs[rung]}"]),
            *(f"{key}={quote_override(name)}" for key, name in names.items()),
        ]

    def _job_config(self, point: Point, overrides: Sequence[str]) -> DictConfig:
        """Return what a point was checked with, with what its job adds, and with the node of Hydra."""
        config, hydra = self.compose(point.overrides)
        use_outside_values(config)
        OmegaConf.update(config, "hydra", self.cfg.hydra, force_add=True)
        parsed = OverridesParser.create().parse_overrides([*overrides])
        given = [override for override in parsed if not override.is_hydra_override()]
        # Of these the node of the sweep has those of all points.
        config.hydra.runtime.choices = hydra.runtime.choices
        config.hydra.overrides.task = [override.input_line for override in given]
        config.hydra.job.override_dirname = get_overrides_dirname(
            given, **hydra.job.config.override_dirname
        )
        added = parsed[len(self._overrides(point.overrides)) :]
        self.loader._apply_overrides_to_config(added, config)
        return config

    def _report(self) -> None:
        from minigpt.sweeps.report import publish, report  # imports numpy

        self.points[:] = map(refresh, self.points)
        write_plan(self.folder, self.fixed, [*self.points, *self._other_points()])
        sentences = report([self.folder])
        if self.wandb:
            publish(self.folder, sentences, self.wandb)

    def _read_existing(self) -> list[Point]:
        """Read the points of the sweep that the folder holds, if any; raise UserError if it holds something else."""
        names = {file.name for file in self.folder.iterdir()} - {LOCK}
        if not names:
            return []
        if PLAN not in names:
            raise UserError(f"{self.folder} is not empty and holds no sweep; {ANOTHER_FOLDER}")
        if self.cfg.resume != "auto":
            raise UserError(
                f"{self.folder} holds a sweep already; resume it with resume=auto, or {ANOTHER_FOLDER}"
            )
        return read_plan(self.folder)[1]

    def _other_points(self) -> list[Point]:
        """Return the points that the folder holds besides those of this command."""
        ours = {point.identity for point in self.points}
        return [
            refresh(self.existing[identity]) for identity in self.existing if identity not in ours
        ]


class Grid(Sweeper):
    """Every combination of the values of all swept settings, in any of Hydra's notations."""

    def batches(self) -> Iterator[Sequence[Point]]:
        for override in self.axes.values():
            if override.is_interval_sweep():
                raise UserError(
                    f"{override.input_line} is for a search; add hydra/sweeper=optuna, or list values"
                )
        axes = [
            [*itertools.islice(values_of(axis), self.max_points + 1)] for axis in self.axes.values()
        ]
        n_points = math.prod(map(len, axes))
        more = (
            " or more" if max(map(len, axes)) > self.max_points else ""
        )  # values that were not counted
        require(
            "hydra.sweeper.max_points",
            self.max_points,
            lambda most: most >= n_points,
            f"at least {n_points}{more}, the points of the grid",
            "set it, give fewer values, or search with hydra/sweeper=optuna",
        )
        for values in announced(itertools.product(*axes), n_points):
            self.points.append(self.in_job(self.check)(dict(zip(self.axes, values, strict=True))))
        if not self.points:
            raise UserError("the sweep is empty: " + ", ".join(self.axes) + " has no values")
        for name in filter(is_relevant, self.axes):
            acting = {point.overrides[name] for point in self.points if point.reason != SAME}
            if len({point.overrides[name] for point in self.points}) > len(acting) == 1:
                raise UserError(
                    f"{name} has the same effect with all its values; give it one value"
                )
        if all(point.status == SKIPPED for point in self.points):
            raise UserError(f"no point of the sweep is possible: {self.points[0].reason}")
        yield self.points
