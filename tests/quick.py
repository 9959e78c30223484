"""What makes small runs quick: short samples at their end, and a configuration that is read once.

Half of the time of a small run goes into the files of the configuration, which the choices of
groups alone determine. Hydra composes each choice once per process here, and values act on a copy,
by Hydra itself. Importing this module is enough.
"""

import pickle
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import DefaultsList, Overrides
from small_runs import CONFIGS, composed

from minigpt.runs.lightning_workarounds import fast_imports

with fast_imports():
    import minigpt.runs.fit

_list_defaults = config_loader_impl.create_defaults_list
_compose = ConfigLoaderImpl._compose_config_from_defaults_list
_known: dict[str, bytes] = {}  # what these returned, pickled


def _list_defaults_once(
    repo: Any, config_name: Any, overrides_list: Any, **options: Any
) -> DefaultsList:
    if not _is_of_project(repo):
        return _list_defaults(repo, config_name, overrides_list, **options)
    values = Overrides(repo, overrides_list).config_overrides
    choices = [each.input_line for each in overrides_list if each not in values]
    key = f"{_sources(repo)} {config_name} {choices} {options}"
    if key not in _known:
        found = _list_defaults(repo, config_name, overrides_list, **options)
        found.config_overrides = []
        _known[key] = pickle.dumps(found)
    found = pickle.loads(_known[key])
    found.config_overrides = values
    return found


def _compose_once(self: Any, defaults: Any, repo: Any) -> Any:
    if not _is_of_project(repo):
        return _compose(self, defaults, repo)
    key = f"{_sources(repo)} {defaults}"
    if key not in _known:
        _known[key] = pickle.dumps(_compose(self, defaults, repo))
    return pickle.loads(_known[key])


def _sources(repo: Any) -> list[str]:
    return [source.path for source in repo.get_sources()]


def _is_of_project(repo: Any) -> bool:
    """Whether all files are those of the project, which no test changes."""
    return {*_sources(repo)} <= {"hydra.conf", str(CONFIGS), ""}


minigpt.runs.fit.FINAL_TOKENS = 20
config_loader_impl.create_defaults_list = _list_defaults_once
ConfigLoaderImpl._compose_config_from_defaults_list = _compose_once  # type: ignore[method-assign]
composed("trainer=cpu")  # the choice of most runs, also for processes that are forked from one
