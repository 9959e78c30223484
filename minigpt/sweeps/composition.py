"""Compose the points of a sweep.

Hydra takes 0.2 s for a configuration, nearly all of it for its files, which the choices of groups
alone determine. So it composes each combination of choices once, and values act on a copy.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hydra._internal.config_loader_impl import get_overrides_dirname
from hydra._internal.defaults_list import Overrides
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf, open_dict

from minigpt.runs.overrides import complete_overrides
from minigpt.runs.run_config import flat, normalize, use_outside_values
from minigpt.sweeps.results import Point
from minigpt.utils.errors import UserError


class Composer:
    """Compose the configurations of the points of one sweep.

    Args:
        loader: Hydra's.
        cfg: configuration of the sweep.
    """

    def __init__(self, loader: Any, cfg: DictConfig) -> None:
        self.loader = loader
        self.cfg = cfg
        self.hydra = _hydra_settings(cfg)  # all points must have these
        self.given: dict[str, Override] = {}  # the command line of the sweep, by name
        self.results: dict[str, Any] = {}  # those of `once`

    def overrides(self, values: Mapping[str, str]) -> list[str]:
        """Return the command line of a point: that of the sweep, with one value per axis."""
        line = [
            f"{override.get_key_element()}={values[name]}"
            if name in values
            else override.input_line
            for name, override in self.given.items()
        ]
        # Links are resolved once, because they may move.
        return self.once(complete_overrides, line)

    def compose(self, values: Mapping[str, str]) -> tuple[DictConfig, DictConfig]:
        """Compose the configuration of a point, as its job will, and the node of Hydra."""
        cfg, hydra = self.compose_line(self.overrides(values))
        normalize(cfg)
        return cfg, hydra

    def compose_line(self, line: Sequence[str]) -> tuple[DictConfig, DictConfig]:
        """Return what `loader.load_sweep_config` composes, without Hydra's own node, and that node.

        Args:
            line: overrides, complete.
        """
        # Parse the line.
        parse = OverridesParser.create().parse_overrides
        parsed = [self.once(parse, [text])[0] for text in line]
        # Separate values from choices of groups.
        _, groups = self.once(
            self.loader._parse_overrides_and_create_caching_repo,
            self.cfg.hydra.job.config_name,
            [*self.cfg.hydra.overrides.hydra],
        )
        values = Overrides(groups, parsed).config_overrides
        choices = [override.input_line for override in parsed if override not in values]
        # Let the values act on a copy of what Hydra composes for the choices.
        cfg: DictConfig = pickle.loads(self.once(self._pickled, *choices))
        self.loader._apply_overrides_to_config(values, cfg)
        # Remove the node of Hydra; resolvers remember what they returned to the sweep.
        with open_dict(cfg):
            hydra = cfg.pop("hydra")
        OmegaConf.copy_cache(self.cfg, cfg)
        return cfg, hydra

    def job_cfg(self, point: Point, overrides: Sequence[str]) -> DictConfig:
        """Return what a point was checked with, what its job adds, and the node of Hydra.

        Args:
            overrides: those of the point, and then those that its job adds.
        """
        cfg, hydra = self.compose(point.overrides)
        use_outside_values(cfg)
        OmegaConf.update(cfg, "hydra", self.cfg.hydra, force_add=True)
        # The node of the sweep has the choices and the overrides of all points; put in the job's.
        parsed = OverridesParser.create().parse_overrides([*overrides])
        task = [override for override in parsed if not override.is_hydra_override()]
        cfg.hydra.runtime.choices = hydra.runtime.choices
        cfg.hydra.overrides.task = [override.input_line for override in task]
        cfg.hydra.job.override_dirname = get_overrides_dirname(
            task, **hydra.job.config.override_dirname
        )
        # Apply what the job adds.
        self.loader._apply_overrides_to_config(parsed[len(self.overrides(point.overrides)) :], cfg)
        return cfg

    def once(self, load: Callable[..., Any], *args: object) -> Any:
        """Call a function once for the same arguments, such as those of a corpus."""
        key = f"{load.__name__} {args}"
        if key not in self.results:
            try:
                self.results[key] = load(*args)
            except (UserError, ConfigCompositionException) as error:
                self.results[key] = error
        if isinstance(self.results[key], Exception):
            raise self.results[key].with_traceback(None)  # it would grow with each point
        return self.results[key]

    def _pickled(self, *choices: str) -> bytes:
        cfg = self.loader.load_sweep_config(self.cfg, [*choices])
        own = _hydra_settings(cfg)
        for key in {**self.hydra, **own}:
            if own.get(key) != self.hydra.get(key):
                raise UserError(
                    f"{key} must be the same at all points of a sweep; set it on the command line"
                )
        return pickle.dumps(cfg)


def values_of(override: Override) -> Iterator[str]:
    """Return the values of a setting: one, or those over which it is swept."""
    if override.is_sweep_override():
        return override.sweep_string_iterator()
    return iter([override.get_value_string()])


def _hydra_settings(cfg: DictConfig) -> dict[str, object]:
    # Those of Hydra itself, not resolved, but for what it records of a composition.
    return {
        key: value
        for key, value in flat({"hydra": OmegaConf.to_container(cfg.hydra)})
        if not key.startswith(("hydra.runtime.", "hydra.overrides.", "hydra.job.override_dirname"))
    }
