"""The models that a server offers: their names, and their engines, which are loaded on first
use.
"""

import asyncio
import time
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from minigpt.checkpoints.find import (
    BEST,
    find_checkpoint,
    find_snapshots,
    follow_latest,
    run_folder,
)
from minigpt.utils.errors import UserError
from minigpt.utils.files import file_version

if TYPE_CHECKING:
    from minigpt.extras.playground.engine import Engine


class UnknownModel(UserError):
    """There is no model or snapshot of this name."""


class LoadError(UserError):
    """A model cannot be loaded."""


def find_models(sources: Sequence[str]) -> dict[str, str]:
    """Return the source of every model by a unique name, that of its run folder; torch is imported
    for the Hub only.

    Sources are run folders, checkpoints, folders or ids of Hugging Face; if there are none, all
    runs, the newest first.
    Raises UserError if a source does not exist, or there is no run.
    """
    if not sources:
        newest_first = sorted(
            Path("runs").rglob(BEST), key=lambda file: file.stat().st_mtime, reverse=True
        )
        sources = [str(file.parents[1]) for file in newest_first] or [str(find_checkpoint(None))]
    found: dict[str, str] = {}
    for source in sources:
        path = Path(follow_latest(source)).expanduser()
        if path.exists():
            if (path / "sweep.json").exists():
                path = run_folder(find_checkpoint(path))
            source = str(path.resolve())
            path = (
                path.resolve()
                if (path / "config.json").is_file()
                else named_path(find_checkpoint(path))
            )
        else:
            from minigpt.checkpoints.init_from import find_pretrained

            find_pretrained(source)
        if source not in found.values():
            name, with_parent = path.name, "/".join(path.parts[-2:])  # a run of a sweep is a number
            names = chain(
                [with_parent if name.isdigit() else name, with_parent],
                map(f"{name}-{{}}".format, count(2)),
            )
            found[next(name for name in names if name not in found)] = source
    return found


def named_path(checkpoint: Path) -> Path:
    """Return the absolute path that names a checkpoint file.

    It is its run folder, or the file without its suffix.
    """
    path = checkpoint.resolve()
    return path.with_suffix("") if run_folder(path) == path.parent else run_folder(path)


class Models:
    """Engines by the names of their models. All methods are for one asyncio event loop.

    The name of a run may end in `@` and the step of one of its snapshots. The snapshots of one run
    are kept at a time.

    Args:
        sources: the result of `find_models`.
        device: "auto" or a device of torch.
    """

    def __init__(self, sources: dict[str, str], *, device: str) -> None:
        self.sources, self.device, self.created = sources, device, int(time.time())
        # That run or succeeded, by the version of the file.
        self._loads: dict[str, tuple[str, asyncio.Task[Engine]]] = {}

    def names(self) -> list[str]:
        """Return the names of the models that are loaded, of the Hub, or still on the disk."""
        # An id of the Hub is relative
        paths = {name: Path(source) for name, source in self.sources.items()}
        return [
            name
            for name, path in paths.items()
            if name in self._loads or path.exists() or not path.is_absolute()
        ]

    def find(self, name: str) -> tuple[str, int | None]:
        """Return the name of a model and the step of its snapshot, which is None without one; or
        raise UnknownModel.
        """
        names, (base, _, step) = self.names(), name.rpartition("@")
        if name in names:
            return name, None
        if base not in names or not step.isdecimal():
            raise UnknownModel(f"the model {name!r} does not exist; GET /v1/models lists all")
        # int() refuses 4,301 digits
        if step not in map(str, found := find_snapshots(self.sources[base])):
            steps = ", ".join(map(str, found)) or "none"
            raise UnknownModel(f"{base} has no snapshot of step {step}; it has those of {steps}")
        return base, int(step)

    async def engine(self, name: str) -> "Engine":
        """Return the engine of a model, loaded on the first call; raise UnknownModel or
        LoadError.
        """
        base, step = self.find(name)
        loaded, load = self._loads.get(name, ("", None))
        version = self._version(base, step) or loaded
        # Load the model again if the run has written another one
        if load is None or (version != loaded and load.done() and not load.result().busy):
            load = asyncio.create_task(self._load(name, base, step))
            self._loads[name] = version, load
        if step is not None:
            self._forget_snapshots(but=base)
        return await asyncio.shield(load)  # a cancelled request leaves it to the next one

    async def close(self) -> None:
        """Close all engines."""
        loaded = (load.result() for _, load in self._loads.values() if load.done())
        await asyncio.gather(*(engine.close() for engine in loaded))

    def _version(self, base: str, step: int | None) -> str:
        """Return the version of the checkpoint of a run; empty for other models, and for a run that
        is gone.
        """
        source = Path(self.sources[base])
        try:
            return file_version(find_checkpoint(source, step=step)) if source.is_absolute() else ""
        except (OSError, UserError):
            return ""

    async def _load(self, name: str, base: str, step: int | None) -> "Engine":
        from minigpt.checkpoints.init_from import find_pretrained
        from minigpt.extras.playground.engine import Engine
        from minigpt.training.precision import find_device

        try:
            found = await asyncio.to_thread(find_pretrained, self.sources[base], step=step)
            model = await asyncio.to_thread(lambda: found.load().to(find_device(self.device)))
            return Engine(model, found.tokenizer)
        except BaseException as error:
            del self._loads[name]  # the next request tries again
            if isinstance(error, UserError):
                raise LoadError(f"{name} cannot be loaded: {error}") from error
            raise

    def _forget_snapshots(self, *, but: str) -> None:
        for name in [
            name
            for name in self._loads
            if name not in self.sources and name.rpartition("@")[0] != but
        ]:
            _, load = self._loads[name]
            if load.done() and not load.result().busy:
                del self._loads[name]
