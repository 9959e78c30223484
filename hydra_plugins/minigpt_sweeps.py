"""The sweepers, the launchers and the callback of minigpt, in the package that Hydra searches for plugins.

Hydra imports this file at every start; the code of a plugin is imported when a sweep instantiates it.
"""

from pkgutil import resolve_name
from typing import Any

from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.plugins.plugin import Plugin
from hydra.plugins.sweeper import Sweeper


def _plugin(base: type[Plugin], target: str) -> Any:
    """Return a class whose call instantiates `target`; to Hydra it is a plugin without abstract methods."""
    created = type(target.rpartition(":")[2], (base,), {"__module__": __name__})
    created.__new__ = lambda cls, **options: resolve_name(target)(**options)  # type: ignore[assignment]
    created.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return created


class MakeRunDir(Callback):
    """Choose the run folder before Hydra makes it."""

    def on_run_start(self, config: Any, **_: Any) -> None:
        resolve_name("minigpt.runs.run_dir:make_folder")(config.hydra.run)


Grid = _plugin(Sweeper, "minigpt.sweeps.sweeper:Grid")
Search = _plugin(Sweeper, "minigpt.extras.search.search:Search")
Joblib = _plugin(Launcher, "minigpt.sweeps.launcher:Joblib")
Submitit = _plugin(Launcher, "minigpt.sweeps.launcher:Submitit")
