"""Choose the runs of a sweep: compose and check every point before the first run starts, launch, and report.

Hydra calls the sweeper, which hands its jobs to a launcher; Hydra finds both in `hydra_plugins`.
"""

import copy
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import ConfigCompositionException
from hydra.plugins import sweeper as hydra_sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from minigpt.runs.processes import quote_override
from minigpt.runs.run_dir import PLAN, update_latest_link, write_failure
from minigpt.sweeps.launcher import Joblib, Launcher
from minigpt.sweeps.ranking import short_names
from minigpt.sweeps.results import (
    COMPLETED,
    CRASHED,
    IRRELEVANT_GROUPS,
    SKIPPED,
    WAITING,
    Point,
    read_plan,
    refresh,
    write_plan,
)
from minigpt.utils.cli import error_text
from minigpt.utils.errors import RunError, UserError
from minigpt.utils.signals import Interrupted
from minigpt.utils.terminal import sanitize_line

if TYPE_CHECKING:
    from minigpt.data.token_files import Corpus

MAX_NAME_CHARS = 120
_DEFERRED = "deferred"  # tag of a setting that the default groups lack


class Sweeper(hydra_sweeper.Sweeper):
    """The base of all sweepers: folder, checks, launch and report.

    Args:
        params: settings with several values, from a file in `configs/sweep/`; the command line overrides them.
    """

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        self.params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.loader, self.cfg, self.folder = hydra_context.config_loader, config, Path(str(config.hydra.sweep.dir))
        self.engine = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)
        self.parser = OverridesParser.create(config_loader=self.loader)
        self.points: list[Point] = []
        self.composed: dict[tuple[str, ...], DictConfig] = {}
        self.launched = 0
        self.corpora: dict[str, Corpus] = {}

    def sweep(self, arguments: list[str]) -> None:
        """Check the points, run those that are not completed, and report.

        Raises:
            UserError: no setting has several values, no point is possible, or the folder holds something else.
            RunError: a run failed; all others have ended.
        """
        given = [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
        # The last of equal keys wins.
        overrides = {override.get_key_element(): override for override in self.parser.parse_overrides(given)}
        self.axes = {k: v for k, v in overrides.items() if v.is_sweep_override() and not _is_deferred(v)}
        if not self.axes:
            raise UserError("a sweep needs a setting with several values, such as model.n_head=2,4,8")
        shared = {key: _to_text(override) for key, override in overrides.items() if key not in self.axes}
        self.shared = list(shared.values())
        self.fixed = [text for key, text in shared.items() if _group(key) not in IRRELEVANT_GROUPS]
        self.existing = self._read_existing()
        self.check_all()
        try:
            self.run()
        except Interrupted:
            line = f"to resume, run the same command with hydra.sweep.dir={self.folder} resume=auto"
            print(sanitize_line(line), file=sys.stderr)
            raise
        finally:
            self.points[:] = map(refresh, self.points)
            if self.points and (self.folder / PLAN).exists():
                from minigpt.sweeps.report import report

                report([self.folder])
                self.publish()
        failed = [point for point in self.points if point.status not in (COMPLETED, SKIPPED)]
        if failed:
            raise RunError(f"{len(failed)} of {len(self.points)} runs failed; the table has the reasons")

    def check_all(self) -> None:
        """Check the points, if they are known before the first run."""

    def run(self) -> None:
        """Launch the points."""
        raise NotImplementedError

    def check(self, values: Mapping[str, str]) -> Point:
        """Compose and check a point; return it with its status, skipped with a reason if it is impossible.

        Raises:
            ConfigCompositionException: a setting does not exist, and no swept group could have it.
        """
        from minigpt.runs.config_checks import build_corpus_and_config

        point = Point(folder=self.folder / self._folder_name(values), overrides=dict(values))
        try:
            config = self.compose(values)
            identity = _identity(config)
            _, model = build_corpus_and_config(config, self._corpus)
        except (UserError, ConfigCompositionException, OmegaConfBaseException) as error:
            if isinstance(error, ConfigCompositionException) and not any(map(self.loader.get_group_options, self.axes)):
                raise
            return replace(point, status=SKIPPED, reason=error_text(error))
        if any(other.identity == identity for other in self.points):
            return replace(point, status=SKIPPED, reason="same configuration as another point")
        folder = self.existing[identity].folder if identity in self.existing else point.folder
        batches = config.max_steps * config.trainer.accumulate_grad_batches
        flops = batches * config.data.batch_size * model.block_size * model.flops_per_token()
        known = {"params": model.num_params(), "max_steps": config.max_steps, "planned_flops": flops}
        return refresh(replace(point, folder=folder, identity=identity, **known))

    def compose(self, values: Mapping[str, str]) -> DictConfig:
        """Compose the configuration of a point, as its job will.

        Hydra takes 0.1 s, so points that differ only in plain values share one composition.
        """
        plain = [key for key, value in values.items() if self._is_plain(key, value)]
        rest = tuple(f"{key}={value}" for key, value in values.items() if key not in plain)
        if rest not in self.composed:
            overrides = [*self.shared, *(f"{key}={value}" for key, value in values.items())]
            self.composed[rest] = self.loader.load_sweep_config(self.cfg, overrides)
            with open_dict(self.composed[rest]):
                del self.composed[rest]["hydra"]
        config = copy.deepcopy(self.composed[rest])
        for key in plain:
            OmegaConf.update(config, key, self.parser.parse_override(f"{key}={values[key]}").value())
        return config

    def _is_plain(self, key: str, value: str) -> bool:
        """Whether an override only replaces the value of an existing setting."""
        changes = self.axes[key].type == OverrideType.CHANGE and "@" not in key and "{" not in value
        return changes and not self.loader.get_group_options(key)

    def launch(self, points: Sequence[Point]) -> None:
        """Run points, and print a line as each of them ends."""
        from minigpt.sweeps.live import run_progress

        self.folder.mkdir(parents=True, exist_ok=True)
        update_latest_link(self.folder)
        write_plan(self.folder, self.fixed, self.points)
        overrides = [
            [
                *self.shared,
                *(f"{key}={value}" for key, value in point.overrides.items()),
                *self._wandb_overrides(point),
                f"hydra.sweep.dir={quote_override(self.folder)}",
                f"hydra.sweep.subdir={quote_override(point.folder.name)}",
            ]
            for point in points
        ]
        ours = isinstance(self.engine, Launcher)  # Hydra's own runs jobs in this terminal, for a debugger
        with run_progress(len(points), show_bar=ours) as print_end:

            def on_end(index: int, job: JobReturn) -> None:
                point = refresh(points[index])
                if job.status == JobStatus.FAILED and point.status in (CRASHED, WAITING):  # its process died
                    write_failure(point.folder, str(job._return_value))
                    point = refresh(point)
                print_end(point)

            if isinstance(self.engine, Launcher):
                self.engine.on_end = on_end
            self.engine.launch(overrides, initial_job_idx=self.launched)
        self.launched += len(points)

    def print_plan(self, points: Sequence[Point]) -> None:
        """Print which points are skipped, and how many run."""
        from minigpt.sweeps.live import print_plan

        pending = sum(point.status not in (COMPLETED, SKIPPED) for point in points)
        print_plan(points, self.engine.worker_envs(pending) if isinstance(self.engine, Joblib) else [])

    def publish(self) -> None:
        """Log the table and the plot to Weights & Biases, if the runs are logged there."""
        wandb = OmegaConf.select(self.cfg, "logger.wandb")
        if wandb is not None:
            from minigpt.sweeps.publish import publish_sweep

            options = {key: wandb[key] for key in ("project", "entity", "timeout")}
            group = wandb.group or self.folder.name
            publish_sweep(self.folder, group=group, tags=[*wandb.tags, "sweep", "summary"], **options)

    def _read_existing(self) -> dict[str, Point]:
        """Return the points that the sweep's folder holds already, by identity.

        Raises:
            UserError: the folder holds something else, or resume=auto is missing.
        """
        parent = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        if not parent.is_dir():
            raise UserError(f"{parent} is a file; choose another folder with hydra.sweep.dir=…")
        if parent != self.folder or not any(self.folder.iterdir()):
            return {}
        if not (self.folder / PLAN).exists():
            raise UserError(f"{self.folder} is not empty and holds no sweep; choose another with hydra.sweep.dir=…")
        if self.cfg.resume != "auto":
            raise UserError(
                f"{self.folder} holds a sweep already; resume it with resume=auto, or choose another folder with "
                f"hydra.sweep.dir=…"
            )
        fixed, points = read_plan(self.folder)
        changed = {key for point in points for key in point.overrides} ^ set(self.axes) | set(fixed) ^ set(self.fixed)
        if changed:
            raise UserError(
                f"{self.folder} holds another sweep, which differs in {', '.join(sorted(changed))}; use the settings "
                f"that it was started with, or choose another folder with hydra.sweep.dir=…"
            )
        return {point.identity: point for point in points if point.identity}

    def _folder_name(self, values: Mapping[str, str]) -> str:
        short = short_names(list(values))
        name = re.sub(r"[^\w.,=+-]+", "-", ",".join(f"{short[key]}={value}" for key, value in values.items()))
        used = {point.folder.name for point in (*self.points, *self.existing.values())}
        if len(name) > MAX_NAME_CHARS or name in used:
            name = f"{name[:MAX_NAME_CHARS]}-{hashlib.sha256(repr(values).encode()).hexdigest()[:8]}"
        return name

    def _corpus(self, data: Any, tokenizer: Any) -> "Corpus":
        """Load a corpus once for all points that share it."""
        from minigpt.data.prepare import load_corpus

        key = json.dumps([dict(data), dict(tokenizer)], default=str)
        if key not in self.corpora:
            self.corpora[key] = load_corpus(data, tokenizer)
        return self.corpora[key]

    def _wandb_overrides(self, point: Point) -> list[str]:
        """Name, group and tag a run in Weights & Biases, unless the user did."""
        wandb = OmegaConf.select(self.cfg, "logger.wandb")
        if wandb is None:
            return []
        tags = ",".join(map(quote_override, [*wandb.tags, "sweep"]))
        names = {"name": point.folder.name, "group": self.folder.name}
        named = [f"logger.wandb.{key}={quote_override(name)}" for key, name in names.items() if wandb[key] is None]
        return [f"logger.wandb.tags=[{tags}]", *named]


class Grid(Sweeper):
    """Every combination of the values of all swept settings, in any of Hydra's notations."""

    def check_all(self) -> None:
        choices = [list(override.sweep_string_iterator()) for override in self.axes.values()]
        for values in itertools.product(*choices):
            self.points.append(self.check(dict(zip(self.axes, values, strict=True))))
        if not self.points:
            raise UserError("the sweep is empty: " + ", ".join(self.axes) + " has no values")
        if all(point.status == SKIPPED for point in self.points):
            raise UserError(f"no point of the sweep is possible: {self.points[0].reason}")
        self.print_plan(self.points)

    def run(self) -> None:
        pending = [point for point in self.points if point.status not in (COMPLETED, SKIPPED)]
        if pending:  # the longest first, so that all workers end at about the same time
            self.launch(sorted(pending, key=lambda point: -point.planned_flops))


def with_deferred(main: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap a Hydra program so that a sweep may set what only some of the swept groups have.

    Hydra composes the defaults before it calls the sweeper, and fails at a setting that they lack. Such a setting
    becomes an axis with one value, which Hydra leaves to the sweeper.
    """

    @wraps(main)
    def program() -> Any:
        while True:
            try:
                return main()
            except ConfigCompositionException as error:
                missing = re.search(r"Could not override '([^']+)'", str(error))
                parser = OverridesParser.create()
                given = {arg: parser.parse_override(arg) for arg in sys.argv[1:] if "=" in arg and arg[0] != "-"}
                deferred = {
                    arg: f"{override.get_key_element()}=tag({_DEFERRED},choice({override.get_value_element_as_str()}))"
                    for arg, override in given.items()
                    if missing and override.key_or_group == missing[1] and not override.is_sweep_override()
                }
                if not deferred or not any(override.is_sweep_override() for override in given.values()):
                    raise
                sys.argv[1:] = [deferred.get(arg, arg) for arg in sys.argv[1:]]

    return program


def _is_deferred(override: Override) -> bool:
    return _DEFERRED in getattr(override.value(), "tags", ())


def _to_text(override: Override) -> str:
    key = override.get_key_element()
    if _is_deferred(override):
        return f"{key}={next(override.sweep_string_iterator())}"
    return key if override.type == OverrideType.DEL else f"{key}={override.get_value_element_as_str()}"


def _group(key: str) -> str:
    return key.lstrip("+~").partition(".")[0].partition("@")[0]


def _identity(config: DictConfig) -> str:
    """Hash a configuration without what does not change the run."""
    values = OmegaConf.to_container(config, resolve=False)
    assert isinstance(values, dict)
    relevant = {key: value for key, value in values.items() if key not in IRRELEVANT_GROUPS}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True, default=str).encode()).hexdigest()[:16]
