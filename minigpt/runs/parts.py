"""The parts of a run that its settings name: corpus, architecture, the model to start from, functions."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from minigpt.config import GPTConfig
from minigpt.run_config import RunConfig
from minigpt.runs.overrides import SETTABLE
from minigpt.utils.checks import integer
from minigpt.utils.cli import IMPORTED_FROM
from minigpt.utils.errors import UserError, require

if TYPE_CHECKING:
    from minigpt.checkpoints.init_from import Pretrained
    from minigpt.data.token_files import Corpus


def load_parts(
    run: RunConfig,
    once: Callable[..., Any] = lambda load, *args: load(*args),
    *,
    folder: Path | None = None,
    corpus: "Corpus | None" = None,
) -> "tuple[Corpus, GPTConfig, Pretrained | None]":
    """Return the corpus of a run, its architecture, and the model of `init_from`, if any.

    Args:
        once: calls a function; a sweep replaces it to call each once.
        folder: of the run. A run that resumes has its architecture and tokenizer from its own checkpoint, so that the
            source of its weights may be gone.
        corpus: if it is loaded.

    Raises:
        UserError: the text or the model is missing, or they do not fit each other or the settings.
    """
    from minigpt.data.prepare import load_corpus  # imports numpy

    if run.init_from is None:
        corpus = corpus or once(load_corpus, run.data, run.tokenizer)
        n, given = corpus.tokenizer.vocab_size, run.model["vocab_size"]
        expected = f"at least the tokenizer's {n}"
        require("model.vocab_size", given, lambda size: size is None or size >= n, expected, "use null")
        config, pretrained = GPTConfig(**{**run.model, "vocab_size": given or n}), None
    else:
        from minigpt.checkpoints.init_from import find_start

        pretrained = once(find_start, run.init_from, run.resume, folder)
        config = _finetuned(run, pretrained.config)
        corpus = once(load_corpus, run.data, pretrained.tokenizer.to_dict())
    corpus.check_length(config.block_size)
    return corpus, config, pretrained


def _finetuned(run: RunConfig, config: GPTConfig) -> GPTConfig:
    """Return the architecture of `init_from` with the values of `model` that may differ from it."""
    given = {name: value for name, value in run.model.items() if value is not None}
    wanted = GPTConfig.from_dict({**config.to_dict(), **given})
    longest = integer(1, config.block_size)
    require("model.block_size", wanted.block_size, *longest, f"init_from={run.init_from} has no more")
    for name, value in given.items():
        if name not in SETTABLE:
            expected = getattr(config, name)
            phrase = f"{expected}, as in init_from={run.init_from}"
            require(f"model.{name}", value, [expected].__contains__, phrase, "remove it")
    return wanted


def partial_from_config(name: str, node: Mapping[str, Any]) -> Callable[..., Any]:
    """Bind the values of a config group to its `_target_`; a call of Hydra's own partial takes 0.5 ms."""
    values = dict(node)
    target = values.pop("_target_")
    try:
        return partial(resolve_name(target), **values)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{name}._target_={target}: {error}; {IMPORTED_FROM}") from error
