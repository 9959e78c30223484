"""Choose the runs of a sweep: compose and check every point before the first run starts.

`Grid.sweep` is the life of a sweep: it reads the points, checks them, launches their runs, and
reports. Hydra calls the sweeper, which hands its jobs to a launcher; Hydra finds both in
`hydra_plugins`.
"""

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import env_override
from hydra.errors import ConfigCompositionException
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from minigpt.runs.code_version import Version, code_in_place, code_label, is_other_code
from minigpt.runs.overrides import is_planned, literal, quote_override, quote_path
from minigpt.runs.run import load_parts
from minigpt.runs.run_config import RunConfig, check_hydra
from minigpt.runs.run_dir import (
    LOCK,
    PLAN,
    lock_sweep_dir,
    make_folder,
    update_latest_link,
    write_failure,
)
from minigpt.sweeps.composition import Composer, values_of
from minigpt.sweeps.point_settings import by_name, folder_name, is_relevant, relevant_settings
from minigpt.sweeps.results import (
    CRASHED,
    NATS,
    PAUSED,
    SKIPPED,
    WAITING,
    Point,
    provenance_checksum,
    read_looks,
    read_plan,
    refresh,
    write_plan,
)
from minigpt.utils.checks import BOOLEAN, POSITIVE, POSITIVE_INT, as_integer, or_null
from minigpt.utils.cli import error_text
from minigpt.utils.errors import RunError, UserError, require
from minigpt.utils.extras import from_extras
from minigpt.utils.signals import Interrupted
from minigpt.utils.terminal import log

SAME = "same configuration as another point"
ANOTHER_FOLDER = "choose another folder with hydra.sweep.dir=…"


class Grid(Sweeper):
    """Sweep over every combination of the values of all swept settings, in any notation of Hydra.

    Other sweepers derive from it, and choose their points in `batches`.

    Args:
        params: settings with several values, from a file in `configs/sweep/`; the command line
            overrides them.
        prune: pause the worse points at each rung.
        max_points: most points of a grid, each of which is checked and listed in `sweep.json`.
        seeds_until: add seeds until the intervals of all differences from the first row exclude 0,
            or their halves are below this number; None runs all seeds.
    """

    compares_batches = False  # whether the points depend on the losses of earlier ones
    looks = 1  # how often the sweep may look at its losses before it ends
    most_jobs = 0  # of any batch, if that is known

    def __init__(
        self,
        params: Mapping[str, object],
        prune: bool,
        max_points: int = 1,
        seeds_until: float | None = None,
    ) -> None:
        require("hydra.sweeper.prune", prune, *BOOLEAN)
        require("hydra.sweeper.seeds_until", seeds_until, *or_null(POSITIVE))
        require(
            "hydra.sweeper.seeds_until",
            seeds_until,
            lambda width: width is None or not (prune or self.compares_batches),
            "null in a search and with hydra.sweeper.prune=true",
        )
        self.params = params
        self.prune = prune
        self.seeds_until = seeds_until
        self.max_points = as_integer(max_points)
        require("hydra.sweeper.max_points", self.max_points, *POSITIVE_INT)

    def setup(
        self,
        *,
        hydra_context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
    ) -> None:
        self.cfg = config
        self.composer = Composer(hydra_context.config_loader, config)
        # Decorates what reads `${oc.env:…}` as a job does.
        self.in_job = env_override(config.hydra.job.env_set)
        self.folder = make_folder(config.hydra.sweep)
        self.engine: Any = Plugins.instance().instantiate_launcher(
            hydra_context, task_function, config
        )
        self.points: list[Point] = []
        self.checked: dict[str, Mapping[str, str]] = {}  # values of possible points, by identity
        self.texts: dict[Path, str] = {}  # that points will be validated on, by folder
        self.wandb: DictConfig | None = OmegaConf.select(config, "logger.wandb")
        # Refuse settings of Hydra and of W&B that would mislead.
        check_hydra(config.hydra)
        require(
            "hydra.sweep.subdir",
            self.composer.hydra["hydra.sweep.subdir"],
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
            UserError: no setting has several values, no point is possible, another sweep uses the
                folder, or it holds something else.
            RunError: a run failed; all others have ended.
        """
        with lock_sweep_dir(self.folder):
            self._read_line_and_folder(arguments)
            for batch in self.batches():
                self.run(batch)
            from_extras("append_to_ledger")(self.folder, self._report())
            # Print the command that completes paused runs, and fail if a run failed.
            paused = sum(point.status == PAUSED for point in self.points)
            failed = sum(point.pending for point in self.points) - paused
            if paused:
                log(
                    f"{paused} of {len(self.points)} runs paused; to complete them, "
                    f"run the same command with hydra.sweep.dir={quote_path(self.folder)} "
                    "resume=auto hydra.sweeper.prune=false pause_at=null"
                )
            if failed:
                raise RunError(
                    f"{failed} of {len(self.points)} runs failed; the table has the reasons"
                )

    def batches(self) -> Iterator[Sequence[Point]]:
        """Yield checked points, which run before the next batch is requested; here all at once."""
        # Count the points, without listing more values than a grid may have.
        for override in self.axes.values():
            if override.is_interval_sweep():
                raise UserError(
                    f"{override.input_line} is for a search; add hydra/sweeper=optuna, or list "
                    "values"
                )
        axes = [
            list(itertools.islice(values_of(override), self.max_points + 1))
            for override in self.axes.values()
        ]
        n_points = math.prod(map(len, axes))
        more = " or more" if max(map(len, axes)) > self.max_points else ""
        require(
            "hydra.sweeper.max_points",
            self.max_points,
            lambda most: most >= n_points,
            f"at least {n_points}{more}, the points of the grid",
            "set it, give fewer values, or search with hydra/sweeper=optuna",
        )
        # Check each.
        self.points += [
            self.in_job(self.check)(dict(zip(self.axes, values, strict=True)))
            for values in announced(itertools.product(*axes), n_points)
        ]
        if not self.points:
            raise UserError("the sweep is empty: " + ", ".join(self.axes) + " has no values")
        # Refuse an axis without an effect, and a sweep without a possible point.
        for name in filter(is_relevant, self.axes):
            given = {point.overrides[name] for point in self.points}
            acting = {point.overrides[name] for point in self.points if point.reason != SAME}
            if len(given) > len(acting) == 1:
                raise UserError(
                    f"{name} has the same effect with all its values; give it one value"
                )
        if all(point.status == SKIPPED for point in self.points):
            raise UserError(f"no point of the sweep is possible: {self.points[0].reason}")
        if self.seeds_until is None:
            yield self.points
        else:
            yield from from_extras("seed_batches")(self, self.seeds_until)

    def _read_line_and_folder(self, arguments: Sequence[str]) -> None:
        # Parse the command line. resume=auto is of the sweep: runs that have begun resume, the
        # others start as the rest of the command says.
        params = [literal(f"{key}={value}", True) for key, value in self.params.items()]
        named = by_name([*params, *filter("resume=auto".__ne__, arguments)])
        planned = is_planned({name.lstrip("+"): override for name, override in named.items()})
        complete = from_extras("swept_overrides")(named, self.cfg) if planned else named
        parsed = OverridesParser.create(config_loader=self.composer.loader).parse_overrides(
            [*complete.values()]
        )
        self.composer.given = dict(zip(complete, parsed, strict=True))
        # Read the points of the sweep that the folder holds, if any.
        files = {file.name for file in self.folder.iterdir()} - {LOCK}
        if files and PLAN not in files:
            raise UserError(f"{self.folder} is not empty and holds no sweep; {ANOTHER_FOLDER}")
        if files and self.cfg.resume != "auto":
            raise UserError(
                f"{self.folder} holds a sweep already; resume it with resume=auto, or "
                f"{ANOTHER_FOLDER}"
            )
        listed = read_plan(self.folder)[1] if files else []
        self.looks = read_looks(self.folder)
        existing = [point for point in listed if point.status != SKIPPED]
        # Separate the settings that this command or the sweep in the folder sweeps from the others.
        swept = set[str]().union(*[point.overrides for point in existing])
        self.axes = {
            name: override
            for name, override in self.composer.given.items()
            if override.is_sweep_override() or name in swept
        }
        if not self.axes:
            raise UserError(
                "a sweep needs a setting with several values, such as model.n_head=2,4,8"
            )
        self.fixed = [
            override
            for name, override in named.items()
            if name not in self.axes and is_relevant(override)
        ]
        # Check that the points of the folder are still what this command line means.
        differing = (swept ^ self.axes.keys()) - {"seed"}
        if existing and differing:
            raise UserError(
                f"{self.folder} holds a sweep that differs in {', '.join(sorted(differing))}; "
                f"{ANOTHER_FOLDER}"
            )
        self.existing: dict[str, Point] = {}
        for point in map(self.in_job(self._check_unchanged), announced(existing, len(existing))):
            self.existing[point.identity] = point
        self.names = {point.folder.name for point in existing}

    def _check_unchanged(self, point: Point) -> Point:
        # Of the overrides only the seed may be missing.
        cfg, _ = self.composer.compose(
            {name: point.overrides.get(name, point.seed) for name in self.axes}
        )
        point = replace(point, settings={**point.settings, "code": point.settings.get("code")})
        version = self._version(cfg)
        began = point.code.get("code_sha256")
        # Code that is named and code in place may be one; that of runs of older versions is unknown
        if began in (None, version["code_sha256"]) or point.status == WAITING:
            if None in (point.settings["code"], version["code"]):
                point = replace(point, settings={**point.settings, "code": version["code"]})
        elif None in (point.settings["code"], version["code"]):
            commit = f", or resume with code={point.code['commit']}"
            advice = commit if point.code.get("commit") and not point.code["dirty"] else ""
            raise UserError(
                f"{self.folder} holds runs of other code: {code_label(point.code)} there, "
                f"{code_label(version)} now; {ANOTHER_FOLDER}{advice}"
            )
        before = {**point.settings, "seed": None}
        now = {**relevant_settings(cfg), "seed": None}
        changed = [
            f"{key} ({before.get(key)} there, {now.get(key)} now)"
            for key in {**before, **now}
            if repr(before.get(key)) != repr(now.get(key))
        ]
        if changed:
            raise UserError(
                f"{self.folder} holds a sweep that differs in {', '.join(changed)}; "
                f"{ANOTHER_FOLDER}"
            )
        return replace(point, rungs=self._rungs(cfg), code=version)

    def _version(self, cfg: DictConfig) -> Version:
        # Of the code of a point, which is written into the folder of the sweep.
        code = cfg.get("code")
        if not is_other_code(code):
            return code_in_place()[0]
        version: Version = self.composer.once(from_extras("written_version"), code, self.folder)
        return version

    def _rungs(self, cfg: DictConfig) -> Sequence[int]:
        return from_extras("rung_steps")(cfg) if self.prune else ()

    def check(self, values: Mapping[str, str]) -> Point:
        """Compose and check a point.

        Returns:
            The point with its status: skipped, with a reason, if it is impossible.
        """
        # Choose its folder.
        point = Point(self.folder / folder_name(values, self.names), values)
        self.names.add(point.folder.name)
        # Compose it, and load its text and its architecture; skip it if that is impossible.
        try:
            cfg, _ = self.composer.compose(values)
            point = replace(point, settings=relevant_settings(cfg))
            line = self.composer.overrides(values)
            sized = from_extras("with_possible_sizes")(cfg, line) if is_planned(cfg) else cfg
            corpus, config, pretrained = load_parts(
                RunConfig.from_hydra(sized, in_job=False),
                self.composer.once,
            )
        except (UserError, ConfigCompositionException, OmegaConfBaseException) as error:
            groups = map(self.composer.loader.get_group_options, self.axes)
            if isinstance(error, ConfigCompositionException) and not any(groups):
                raise  # a setting does not exist at any point
            return replace(point, status=SKIPPED, reason=error_text(error))
        point = replace(point, code=self._version(cfg))
        # Skip it if its configuration is that of an earlier point.
        if self.checked.setdefault(point.identity, values) is not values:
            return replace(point, status=SKIPPED, reason=SAME)
        # Read its status, in the folder that it had in an earlier command.
        sequences = cfg.max_steps * cfg.trainer.accumulate_grad_batches * cfg.data.batch_size
        point = refresh(
            replace(
                point,
                folder=self.existing.get(point.identity, point).folder,
                rungs=self._rungs(cfg),
                planned_flops=sequences * config.block_size * config.flops_per_token(),
                totals={"params": config.num_params()},
            )
        )
        self.texts[point.folder] = corpus.validated_part(
            config.block_size,
            cfg.data.eval_batch_size,
            cfg.eval_batches,
        )
        # Refuse a run that was trained on something else.
        weights = pretrained.provenance(cfg.data.folder)["sha256"] if pretrained else None
        checksum = provenance_checksum(corpus.sha256, weights)
        if cfg.resume is None and point.provenance_checksum not in ("", checksum):
            raise UserError(
                f"{point.folder} was trained on another text or from other weights; "
                f"{ANOTHER_FOLDER}"
            )
        return point

    def run(self, batch: Sequence[Point]) -> None:
        """Run checked points: with `prune` to each rung, and the best of them on."""
        # Print which points are skipped.
        for point in batch:
            if point.status == SKIPPED:
                log(f"{point.folder.name}  skipped: {point.reason}")
        # Run them to their end; with pruning, those that continue after each rung.
        jobs = sum(point.status != SKIPPED for point in batch)
        self.engine.most_jobs = max(jobs, self.most_jobs)
        if self.prune:
            batch = from_extras("prune")(self, batch)
        self.launch(batch)

    def launch(self, batch: Sequence[Point], steps: Mapping[Path, int] | None = None) -> None:
        """Run points to their end, or some to steps at which they pause; print as each ends.

        Args:
            steps: where points pause, by their folder; others do not run.
        """
        # Select those that are not there yet, the longest first: workers end at about one time. Of
        # equal minutes, seed by seed: what slows the machine meanwhile slows all rows.
        seeds = [point.seed for point in batch]
        ordered = sorted(
            batch,
            key=lambda point: (
                is_planned(point.settings) and seeds.index(point.seed),
                -point.planned_flops,
            ),
        )
        pending = [
            point for point in ordered if point.pending and (steps is None or point.folder in steps)
        ]
        log(f"{len(pending)} of {len(batch)} to run")
        if not pending:
            return
        # List all points in the folder before the first run writes into it.
        update_latest_link(self.folder)
        self._write_plan()
        # Hand them to the launcher. Only launchers of minigpt use these attributes.
        ended = itertools.count(1)

        def on_end(point: Point, failure: str) -> None:
            # A job that crashed did not write why.
            if failure and refresh(point).status in (CRASHED, WAITING, PAUSED):
                write_failure(point.folder, failure)
            point = refresh(point)
            loss = point.loss(NATS)
            seconds = point.totals.get("seconds", 0)
            result = f", val loss {loss:.4f} after {seconds:,.0f} s of training" if loss else ""
            # Another command may have completed the run, which then did not fail.
            problem = point.reason or (failure if point.pending else "")
            reason = f": {problem}" if problem else ""
            log(
                f"{next(ended)}/{len(pending)} {point.folder.name} {point.status_text}"
                f"{result}{reason}"
            )

        self.engine.points = pending
        self.engine.on_end = on_end
        self.engine.configure = self.in_job(self.composer.job_cfg)
        jobs = [self._job_overrides(point, (steps or {}).get(point.folder)) for point in pending]
        try:
            self.engine.launch(jobs, initial_job_idx=0)
        except (Interrupted, KeyboardInterrupt):
            self.points[:] = map(refresh, self.points)
            self._report()
            log(
                "to resume, run the same command with "
                f"hydra.sweep.dir={quote_path(self.folder)} resume=auto"
            )
            raise
        self.points[:] = map(refresh, self.points)

    def _job_overrides(self, point: Point, pause_at: int | None) -> list[str]:
        has_begun = any(point.folder.glob("checkpoints/*.safetensors"))
        can_resume = has_begun or "resume" not in point.settings
        resume = ["resume=auto"] if can_resume and (self.prune or self.cfg.resume == "auto") else []
        pause = [] if pause_at is None else [f"pause_at={pause_at}"]
        folders = {
            "hydra.run.dir": point.folder,
            "hydra.sweep.dir": self.folder,
            "hydra.sweep.subdir": point.folder.name,
            "hydra.runtime.output_dir": point.folder.absolute(),
        }
        return [
            *self.composer.overrides(point.overrides),
            *resume,
            *pause,
            *(f"{key}={quote_override(folder)}" for key, folder in folders.items()),
        ]

    def _report(self) -> Any:
        from minigpt.sweeps.report import publish, report  # imports numpy
        from minigpt.sweeps.verdicts import verdicts

        self._write_plan()
        table = report([self.folder])
        self._write_plan(verdicts(table))
        if self.wandb:
            publish(self.folder, table, self.wandb)
        return table

    def _write_plan(self, answer: Sequence[Mapping[str, object]] | None = None) -> None:
        points = [*self.points, *self.other_points()]
        write_plan(self.folder, self.fixed, points, self.looks, answer)

    def other_points(self) -> list[Point]:
        """Return the points that the folder holds besides those of this command."""
        own = {point.folder for point in self.points}
        return [refresh(point) for point in self.existing.values() if point.folder not in own]


def announced(points: Iterable[Any], n_points: int) -> Iterator[Any]:
    """Yield points that are checked; print how many are left, at first and every few seconds."""
    for done, point in enumerate(points):
        if n_points > 20 and done % 250 == 0:  # 20 ms each
            log(f"{n_points - done:,} points to check, about {(n_points - done) // 50 + 1} s")
        yield point
