"""Compose the points of a sweep: Hydra composes each combination of group choices once, and values act on a copy.

Hydra takes 0.2 s for a configuration, nearly all of it for its files, which the choices alone determine.
"""

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hydra._internal.defaults_list import Overrides
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from minigpt.sweeps.point_settings import hydra_settings
from minigpt.utils.errors import UserError
from minigpt.utils.terminal import log


def compose(
    loader: Any,
    master: DictConfig,
    hydra: Mapping[str, Any],
    line: Sequence[str],
    once: Callable[..., Any],
) -> tuple[DictConfig, DictConfig]:
    """Return what `loader.load_sweep_config` composes for a command line without Hydra's own node, and that node.

    Args:
        master: configuration of the sweep.
        hydra: `hydra_settings` of the sweep, which all points must have.
        once: calls a function once for the same arguments.
    """
    parse = OverridesParser.create().parse_overrides
    parsed = [override for text in line for override in once(parse, [text])]
    _, groups = once(
        loader._parse_overrides_and_create_caching_repo,
        master.hydra.job.config_name,
        [*master.hydra.overrides.hydra],
    )

    def by_hydra(*overrides: str) -> bytes:
        config = loader.load_sweep_config(master, [*overrides])
        own = hydra_settings(config)
        if changed := [key for key in {**hydra, **own} if own.get(key) != hydra.get(key)]:
            raise UserError(
                f"{changed[0]} must be the same at all points of a sweep; set it on the command line"
            )
        return pickle.dumps(config)

    # Several values in one setting are refused by Hydra.
    several = any(override.is_sweep_override() for override in parsed)
    values = [] if several else Overrides(groups, parsed).config_overrides
    config: DictConfig = pickle.loads(
        once(by_hydra, *(each.input_line for each in parsed if each not in values))
    )
    loader._apply_overrides_to_config(values, config)
    with open_dict(config):
        own = config.pop("hydra")
    OmegaConf.copy_cache(master, config)
    return config, own


def values_of(override: Override) -> Iterator[str]:
    """Return the values of a setting: one, or those over which it is swept."""
    return (
        override.sweep_string_iterator()
        if override.is_sweep_override()
        else iter([override.get_value_string()])
    )


def announced(points: Iterable[Any], n_points: int) -> Iterator[Any]:
    """Yield points that are checked; print before how many there are, and every few seconds how many are left."""
    for done, point in enumerate(points):
        left = n_points - done
        if n_points > 20 and done % 250 == 0:  # 20 ms each
            log(f"{left:,} points to check, about {left // 50 + 1} s")
        yield point
