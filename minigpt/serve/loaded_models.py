"""The models that a server offers: their names, and their engines, which are loaded on first use."""

import asyncio
import time
from collections.abc import Collection, Sequence
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from minigpt.checkpoints.find import BEST, find_checkpoint, named_path
from minigpt.utils.errors import require

if TYPE_CHECKING:
    from minigpt.serve.engine import Engine

MAX_SILENCED = 2  # engines per model


def find_models(sources: Sequence[str], runs: Path = Path("runs")) -> dict[str, str]:
    """Return the source of every model by a unique name, that of its run folder; torch is imported for the Hub only.

    Sources are run folders, checkpoints, folders or ids of Hugging Face; if there are none, all runs, the newest first.
    Raises UserError if a source does not exist, or there is no run.
    """
    if not sources:
        newest_first = sorted(runs.rglob(BEST), key=lambda file: file.stat().st_mtime, reverse=True)
        sources = [str(file.parents[1]) for file in newest_first] or [str(find_checkpoint(None, runs=runs))]
    found: dict[str, str] = {}
    for source in sources:
        path = Path(source).expanduser()
        if path.exists():
            source = str(path.resolve())
            path = path.resolve() if (path / "config.json").is_file() else named_path(find_checkpoint(path))
        else:
            from minigpt.checkpoints.init_from import find_pretrained

            find_pretrained(source)
        if source not in found.values():
            name, with_parent = path.name, "/".join(path.parts[-2:])  # a run of a sweep is a number
            names = chain([with_parent if name.isdigit() else name, with_parent], map(f"{name}-{{}}".format, count(2)))
            found[next(name for name in names if name not in found)] = source
    return found


class Models:
    """Engines by the names of their models. All methods are for one asyncio event loop.

    Args:
        sources: the result of `find_models`.
        device: "auto" or a device of torch.
    """

    def __init__(self, sources: dict[str, str], *, device: str) -> None:
        self.sources, self.device, self.created = sources, device, int(time.time())
        self._loads: dict[str, asyncio.Task[Engine]] = {}  # that run or succeeded
        self._silenced: dict[str, dict[frozenset[tuple[int, int]], Engine]] = {name: {} for name in sources}

    def names(self) -> list[str]:
        """Return the names of the models that are loaded, of the Hub, or still on the disk."""
        paths = {name: Path(source) for name, source in self.sources.items()}  # an id of the Hub is relative
        return [name for name, path in paths.items() if name in self._loads or path.exists() or not path.is_absolute()]

    async def engine(self, name: str) -> "Engine":
        """Return the engine of a model, loaded on the first call; raise UserError if it cannot be loaded."""
        if name not in self._loads:
            self._loads[name] = asyncio.create_task(self._load(name))
        return await asyncio.shield(self._loads[name])  # a cancelled request leaves it to the next one

    def silenced(self, name: str, heads: "Collection[Sequence[int]]") -> "Engine":
        """Return an engine of a loaded model whose heads (layer, head) have the output zero.

        Raises UserError if there is no such head, and QueueFull if `MAX_SILENCED` engines are in use.
        """
        from minigpt.interpret.heads import without_heads
        from minigpt.serve.engine import Engine, QueueFull

        original, kept = self._loads[name].result(), self._silenced[name]
        key = frozenset((layer, head) for layer, head in heads)
        L, H = original.model.config.n_layer, original.model.config.n_head
        expected = f"pairs of a layer below {L} and a head below {H}, from 0"
        require("silenced", heads, lambda _: all(0 <= i < L and 0 <= j < H for i, j in key), expected)
        if key not in kept:
            kept = self._silenced[name] = {other: engine for other, engine in kept.items() if engine.busy}
            if len(kept) == MAX_SILENCED:
                raise QueueFull("other heads are silenced")
            kept[key] = Engine(without_heads(original.model, key), original.tokenizer)
        return kept[key]

    async def close(self) -> None:
        """Close all engines."""
        loaded = [load.result() for load in self._loads.values() if load.done()]
        silenced = (engine for engines in self._silenced.values() for engine in engines.values())
        await asyncio.gather(*(engine.close() for engine in (*loaded, *silenced)))

    async def _load(self, name: str) -> "Engine":
        from minigpt.checkpoints.init_from import find_pretrained
        from minigpt.device import move_model
        from minigpt.serve.engine import Engine

        try:
            found = await asyncio.to_thread(find_pretrained, self.sources[name])
            model = await asyncio.to_thread(lambda: move_model(found.load(), self.device, "float32"))
            return Engine(model, found.tokenizer)
        except BaseException:
            del self._loads[name]  # the next request tries again
            raise
