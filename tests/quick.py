"""What makes small runs quick: short samples at their end, and a configuration that is read once.

Half of the time of a small run goes into the files of the configuration, which the choices of
groups alone determine. Hydra composes each choice once per process here, and values act on a copy,
by Hydra itself. Importing this module is enough.
"""

import pickle
from collections.abc import Callable
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides
from small_runs import CONFIGS, composed

from minigpt.runs.code_version import code_in_place
from minigpt.runs.lightning_workarounds import fast_imports

with fast_imports():
    import minigpt.runs.fit

_load = ConfigRepository.load_config
_list_defaults = config_loader_impl.create_defaults_list
_compose = ConfigLoaderImpl._compose_config_from_defaults_list
_known: dict[str, bytes] = {}  # what these returned, pickled


def _once(repo: Any, key: object, make: Callable[[], Any]) -> Any:
    """Return what `make` does, from the files of the project only once: no test changes them."""
    sources = [source.path for source in repo.get_sources()]
    if not {*sources} <= {"hydra.conf", str(CONFIGS), ""}:
        return make()
    key = f"{sources} {key}"
    if key not in _known:
        _known[key] = pickle.dumps(make())
    return pickle.loads(_known[key])


def _load_once(self: Any, config_path: str) -> Any:
    return _once(self, config_path, lambda: _load(self, config_path))


def _list_defaults_once(
    repo: Any, config_name: Any, overrides_list: Any, **options: Any
) -> DefaultsList:
    values = Overrides(repo, overrides_list).config_overrides
    choices = [each for each in overrides_list if each not in values]
    lines = [each.input_line for each in choices]
    found: DefaultsList = _once(
        repo,
        (config_name, lines, options),
        lambda: _list_defaults(repo, config_name, choices, **options),
    )
    found.config_overrides = values
    return found


def _compose_once(self: Any, defaults: Any, repo: Any) -> Any:
    return _once(repo, defaults, lambda: _compose(self, defaults, repo))


minigpt.runs.fit.FINAL_TOKENS = 20
ConfigRepository.load_config = _load_once  # type: ignore[method-assign]
config_loader_impl.create_defaults_list = _list_defaults_once
ConfigLoaderImpl._compose_config_from_defaults_list = _compose_once  # type: ignore[method-assign]
composed("trainer=cpu")  # the choice of most runs, also for processes that are forked from one
code_in_place()  # takes git several processes
