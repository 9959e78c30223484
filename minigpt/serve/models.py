"""The models that a server offers: their names, and their engines, which are loaded on first use."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minigpt.checkpoints.find import BEST, find_checkpoint, run_folder

if TYPE_CHECKING:
    from minigpt.data.tokenizer import Tokenizer
    from minigpt.model import GPT
    from minigpt.serve.engine import Engine


def find_models(sources: Sequence[str], runs: Path = Path("runs")) -> dict[str, str]:
    """Return the source of every model by a unique name, that of its run folder; torch is imported for the Hub only.

    Args:
        sources: run folders, checkpoints, folders or ids of Hugging Face; if empty, all runs, the newest first.

    Raises:
        UserError: a source does not exist, or there is no run.
    """
    if not sources:
        newest_first = sorted(runs.rglob(BEST), key=lambda file: file.stat().st_mtime, reverse=True)
        sources = [str(file.parents[1]) for file in newest_first] or [str(run_folder(find_checkpoint(None, runs=runs)))]
    found: dict[str, str] = {}
    for source in sources:
        path = Path(source).expanduser()
        if path.exists():
            path = path.resolve()
            if not (path / "config.json").is_file():
                find_checkpoint(path)
            source = str(path)
            if path.is_file():
                path = path.with_suffix("") if run_folder(path) == path.parent else run_folder(path)
        else:
            from minigpt.checkpoints.pretrained import find_pretrained

            find_pretrained(source)
        if source not in found.values():
            name, with_parent = path.name, "/".join(path.parts[-2:])  # a run of a sweep is a number
            numbered = (f"{name}-{i}" for i in range(2, len(found) + 3))
            candidates = [*([] if name.isdigit() else [name]), with_parent, *numbered]
            found[next(candidate for candidate in candidates if candidate not in found)] = source
    return found


class Models:
    """Engines by the names of their models. All methods are for one asyncio event loop.

    Args:
        sources: the result of `find_models`.
        device: "auto" or a device of torch.
        engine: builds the engine of a model.
    """

    def __init__(
        self, sources: dict[str, str], *, device: str, engine: "Callable[[GPT, Tokenizer], Engine] | None" = None
    ) -> None:
        self.sources, self.device, self.created = sources, device, int(time.time())
        self._build = engine
        self._locks = {name: asyncio.Lock() for name in sources}
        self._engines: dict[str, Engine] = {}

    async def engine(self, name: str) -> "Engine":
        """Return the engine of a model, loaded on the first call.

        Raises:
            KeyError: there is no such model.
            UserError: it cannot be loaded.
        """
        async with self._locks[name]:
            if name not in self._engines:
                from minigpt.serve.engine import Engine

                self._engines[name] = (self._build or Engine)(*await asyncio.to_thread(self._load, name))
        return self._engines[name]

    async def close(self) -> None:
        """Close all engines."""
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))

    def _load(self, name: str) -> "tuple[GPT, Tokenizer]":
        from minigpt.checkpoints.pretrained import find_pretrained
        from minigpt.console import move_model

        found = find_pretrained(self.sources[name])
        return move_model(found.load(), self.device, "float32"), found.tokenizer
