"""The sweepers, launchers, search path and callback of minigpt, where Hydra searches for plugins.

Hydra imports this file at every start; the code of a plugin is imported when a sweep instantiates
it. How Hydra reads configuration files is corrected for those that some editors write.
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from hydra._internal.core_plugins import file_config_source
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.plugins import config_source
from hydra.plugins.launcher import Launcher
from hydra.plugins.plugin import Plugin
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from omegaconf import ListConfig, OmegaConf


def _plugin(base: type[Plugin], target: str) -> Any:
    """Return a class whose call instantiates `target`.

    To Hydra it is a plugin without abstract methods.
    """

    def new(cls: type, **options: object) -> object:
        return resolve_name(target)(**options)

    created = type(target.rpartition(":")[2], (base,), {"__module__": __name__})
    created.__new__ = new  # type: ignore[assignment]
    created.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return created


class OwnFilesFirst(SearchPathPlugin):
    """Search folders of the user before `configs/`, whose files would hide theirs of one name."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for main in [element for element in search_path.get_path() if element.provider == "main"]:
            # minigpt.utils.scripts.search_path has added the arguments of the script.
            main.path, *arguments = str(main.path).rstrip("\0").split("\0")
            for folder in _own_folders(arguments):
                search_path.prepend("command-line", folder, anchor=SearchPathQuery(provider="main"))


def _own_folders(arguments: Sequence[str]) -> list[str]:
    """Return the folders of `--config-dir` and of `hydra.searchpath`.

    The primary file may set the second, too.
    """
    args = get_args_parser().parse_args(arguments)
    folders = [os.path.abspath(args.config_dir)] if args.config_dir else []
    name = (args.config_name or "train").removesuffix(".yaml")
    primary = Path(*folders, f"{name}.yaml")
    given = [each for each in args.overrides if each.lstrip("+").startswith("hydra.searchpath=")]
    parsed = OverridesParser.create().parse_overrides(given)
    searched: list[object] = [override.value() for override in parsed]
    if folders and not given and primary.is_file():
        with suppress(UnicodeDecodeError):  # Hydra reads the file, too, and names it
            searched = [OmegaConf.select(OmegaConf.load(primary), "hydra.searchpath")]
    for names in searched:
        if isinstance(names, list | ListConfig):  # Hydra refuses others
            folders += map(str, names)
    return folders


def _find_package_lines() -> None:
    """Make Hydra find a `# @package` line behind a byte-order mark or a comment.

    It would merge such a file elsewhere, without a warning. Also make it name a file that is not
    UTF-8.
    """
    read_header = config_source.ConfigSource._get_header_dict
    load_config = file_config_source.FileConfigSource.load_config

    def load_utf8(self: Any, config_path: str) -> Any:
        try:
            return load_config(self, config_path)
        except UnicodeDecodeError:
            file = os.path.join(self.path, self._normalize_file_name(config_path))
            raise config_source.ConfigLoadError(f"{file} is not UTF-8; save it as UTF-8") from None

    def header_of_file(text: str) -> Any:
        lines = text.removeprefix("\ufeff").splitlines()
        comments = takewhile(lambda line: line.strip()[:1] in ("", "#"), lines)
        packages = [line for line in comments if re.match(r"\s*#\s*@package\b", line)]
        return read_header("\n".join(packages))

    header = staticmethod(header_of_file)
    config_source.ConfigSource._get_header_dict = header  # type: ignore[assignment,method-assign]
    file_config_source.FileConfigSource.load_config = load_utf8  # type: ignore[method-assign]


_find_package_lines()


class MakeRunDir(Callback):
    """Choose the run folder before Hydra makes it."""

    def on_run_start(self, config: Any, **_: Any) -> None:
        resolve_name("minigpt.runs.run_dir:make_folder")(config.hydra.run)


Grid = _plugin(Sweeper, "minigpt.sweeps.sweeper:Grid")
Search = _plugin(Sweeper, "minigpt.extras.search.search:Search")
Joblib = _plugin(Launcher, "minigpt.sweeps.launcher:Joblib")
Submitit = _plugin(Launcher, "minigpt.extras.search.submitit_launcher:Submitit")
