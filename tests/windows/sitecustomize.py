"""Imitate Windows on Linux in every Python process whose PYTHONPATH begins with the folder of this
file.

- minigpt and its scripts see the standard library without the names that typeshed has for other
systems only, and
  `sys.platform` as "win32". All other packages see the real one, because Python's own modules need
  these names here.
- No file below the folder IMITATED_FOLDER can be replaced, renamed or removed while a process of
this session has it
  open or mapped, or emptied while it is mapped. There are no symbolic links, and no names that NTFS
  forbids.
"""

import ast
import builtins
import errno
import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

FOLDER = os.environ.get("IMITATED_FOLDER", "")
SCRIPTS = str(Path(__file__).resolve().parents[2] / "scripts")
SIGBREAK = 21  # Ctrl-Break; on Linux the number of SIGTTIN
ADDED: dict[str, dict[str, Any]] = {"sys": {"platform": "win32"}, "signal": {"SIGBREAK": SIGBREAK}}
_import = builtins.__import__
_rename = os.rename
_views: dict[str, ModuleType] = {}


class View(ModuleType):
    """A module of the standard library as it is on Windows."""

    def __init__(self, real: ModuleType, missing: Iterable[str]) -> None:
        vars(self).update(ADDED.get(real.__name__, {}), _real=real, _missing=frozenset(missing))

    def __getattr__(self, name: str) -> Any:
        if name in self._missing:
            raise AttributeError(
                f"module {self._real.__name__!r} has no attribute {name!r} on Windows"
            )
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._real, name, value)


def names(body: Iterable[ast.stmt], platform: str) -> set[str]:
    found = set()
    for node in body:
        if isinstance(node, ast.If):
            test = compile(ast.Expression(node.test), "stub", "eval")
            holds = eval(
                test, {"sys": SimpleNamespace(platform=platform, version_info=sys.version_info)}
            )
            found |= names(node.body if holds else node.orelse, platform)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def view(real: ModuleType) -> ModuleType:
    """Return a module of the standard library as minigpt sees it; ImportError without it."""
    name = real.__name__
    if name not in _views:
        stubs = Path(find_spec("mypy").submodule_search_locations[0], "typeshed/stdlib")
        files = [
            file for file in (stubs / f"{name}.pyi", stubs / name / "__init__.pyi") if file.exists()
        ]
        body = ast.parse(files[0].read_text(encoding="utf-8")).body if files else []
        here = names(body, "linux")
        there = names(body, "win32")
        if here and not there:
            raise ModuleNotFoundError(f"No module named {name!r} on Windows")
        _views[name] = View(real, here - there) if here - there or name in ADDED else real
    return _views[name]


def import_view(
    name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
) -> ModuleType:
    module = _import(name, globals, locals, fromlist, level)
    caller = globals or {}
    package = str(caller.get("__name__", "")).partition(".")[0]
    imitated = package in ("minigpt", "hydra_plugins") or str(
        caller.get("__file__", "")
    ).startswith(SCRIPTS)
    return view(module) if imitated and module.__name__ in sys.stdlib_module_names else module


def in_use(path: str, *, by_maps_alone: bool = False) -> bool:
    """Return whether a process of this session has a file at or below a path open or mapped."""
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getsid(int(process)) != os.getsid(0):
                continue
            used = {
                line.split(maxsplit=5)[-1]
                for line in Path("/proc", process, "maps").read_bytes().decode().splitlines()
            }
            if not by_maps_alone:
                used |= {os.readlink(entry) for entry in os.scandir(f"/proc/{process}/fd")}
        except OSError:  # the process or the descriptor has gone
            continue
        if any(file == path or file.startswith(f"{path}/") for file in used):
            return True
    return False


def full(path: Any, folder: int = -1) -> str:
    """Return an absolute path of one that may be relative to an open folder; it may be a link."""
    base = os.getcwd() if folder == -1 else os.readlink(f"/proc/self/fd/{folder}")
    head, tail = os.path.split(os.path.join(base, os.fsdecode(path)))
    return os.path.join(os.path.realpath(head), tail)


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise what Windows raises for an operation on files; a hook of `sys.addaudithook`."""
    if event == "os.symlink":
        raise OSError(errno.EPERM, "A required privilege is not held by the client", arguments[1])
    changed: list[str] = []
    created: list[str] = []
    if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        created = [full(arguments[0])] if arguments[2] & os.O_CREAT else []
        changed = [full(arguments[0])] if arguments[2] & os.O_TRUNC else []
    elif event == "os.mkdir":
        created = [full(arguments[0], arguments[2])]
    elif event == "os.rename":
        changed = [full(arguments[0], arguments[2]), full(arguments[1], arguments[3])]
        created = changed[1:]
    elif event in ("os.remove", "os.rmdir"):
        changed = [full(*arguments)]
    for path in created:
        if path.startswith(FOLDER) and (set(path) & set('<>:"|?*\\') or path.endswith((" ", "."))):
            raise OSError(
                errno.EINVAL,
                "The filename, directory name, or volume label syntax is incorrect",
                path,
            )
    for path in changed:
        if (
            path.startswith(FOLDER)
            and os.path.lexists(path)
            and in_use(path, by_maps_alone=event == "open")
        ):
            raise PermissionError(
                errno.EACCES, "The process cannot access the file: another process uses it", path
            )


def rename(source: Any, target: Any, **options: Any) -> None:
    if os.path.lexists(target):
        raise FileExistsError(
            errno.EEXIST, "Cannot create a file when that file already exists", str(target)
        )
    _rename(source, target, **options)


if FOLDER:
    builtins.__import__ = import_view  # type: ignore[assignment]
    os.rename = rename
    sys.addaudithook(refuse)
